"""Host arrays on their way to a device, without making the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["empty_words", "upload"]

_LARGE = 1 << 20  # bytes


def empty_words(shape: tuple[int, int], device: torch.device) -> NDArray[np.uint32]:
    """Return an array to fill and to :func:`upload` once to this device: for an NVIDIA GPU in pinned memory, which it
    reads itself."""
    if device.type != "cuda":
        return np.empty(shape, np.uint32)
    words: NDArray[np.uint32] = torch.empty(shape, dtype=torch.int32, pin_memory=True).numpy().view(np.uint32)
    return words


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array, which may be read-only, as a tensor on a device, in the order of the present stream. The host may reuse
    the array at once, unless it is from :func:`empty_words`."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy()).to(device)
    if array.nbytes >= _LARGE and array.flags.writeable and (pinned := torch.from_numpy(array)).is_pinned():
        return pinned.to(device, non_blocking=True)  # PyTorch finds its pinned memory by address, and keeps it as below
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=kind, pin_memory=True)
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)  # PyTorch keeps the pinned copy until it was read
