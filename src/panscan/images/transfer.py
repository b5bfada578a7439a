"""Host arrays on their way to a device, without making the host wait."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["upload"]

_LARGE = 1 << 20  # bytes: copied by several threads
_THREADS = 8
_pool_in_use = threading.Lock()


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array, which may be read-only, as a tensor on a device, in the order of the present stream. The host may reuse
    the array at once."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy()).to(device)
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=kind, pin_memory=True)
    _copy(array, host.numpy())
    return host.to(device, non_blocking=True)  # PyTorch keeps the pinned copy until it was read


def _copy(array: NDArray[Any], to: NDArray[Any]) -> None:
    """Copy a large array by several threads, but one array at a time: threads that wait for each other, and for
    Python's lock, would take longer than one thread."""
    if array.nbytes < _LARGE or not _pool_in_use.acquire(blocking=False):
        to[...] = array
        return
    try:
        pieces = zip(np.array_split(to, _THREADS), np.array_split(array, _THREADS), strict=True)
        list(_threads().map(lambda piece: np.copyto(*piece), pieces))
    finally:
        _pool_in_use.release()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="panscan-upload")


def _reset() -> None:
    global _pool_in_use
    _pool_in_use = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):  # a child has the pool without its threads, and would wait for them
    os.register_at_fork(after_in_child=_reset)
