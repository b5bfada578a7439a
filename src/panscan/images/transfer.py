"""Host arrays on their way to a device, without making the host wait."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

__all__ = ["upload"]


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on a device, in the order of the present stream. The host may reuse the array at once."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)  # PyTorch keeps the pinned copy until it was read
