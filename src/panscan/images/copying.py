"""Copies of large arrays by several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

__all__ = ["copy_in_pieces"]

_THREADS = 8
_pool_in_use = threading.Lock()


def copy_in_pieces(copy: Callable[[slice], object], rows: int) -> None:
    """Call a function with slices that together cover all rows, in several threads.

    One array at a time is shared among threads. Others are copied in the caller's thread: threads that wait for each
    other, and for Python's lock, would take longer than one thread.

    Args:
        copy: copies a slice of rows, in any thread. It should release Python's lock.
        rows: number of rows.
    """
    if not _pool_in_use.acquire(blocking=False):
        copy(slice(rows))
        return
    try:
        height = -(-rows // _THREADS)
        list(_threads().map(copy, [slice(top, min(top + height, rows)) for top in range(0, rows, max(1, height))]))
    finally:
        _pool_in_use.release()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="panscan-copy")


def _reset() -> None:
    global _pool_in_use
    _pool_in_use = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):  # a child has the pool without its threads, and would wait for them
    os.register_at_fork(after_in_child=_reset)
