"""Host arrays on their way to a device, without making the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.images.copying import WORTH_THREADS, copy_in_pieces


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array, which may be read-only, as a tensor on a device, in the order of the present stream. The host may reuse
    the array at once."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy()).to(device)
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=kind, pin_memory=True)
    to = host.numpy()
    if array.nbytes < WORTH_THREADS:
        to[...] = array
    else:
        copy_in_pieces(lambda rows: np.copyto(to[rows], array[rows]), len(array))
    return host.to(device, non_blocking=True)  # PyTorch keeps the pinned copy until it was read
