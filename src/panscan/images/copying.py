"""Copies of large arrays by several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

WORTH_THREADS = 1 << 20
"""Bytes from which several threads copy an array faster than one."""
_THREADS = min(8, os.cpu_count() or 1)
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
    height = max(1, -(-rows // _THREADS))
    pieces: list[Future[object]] = []
    try:
        for top in range(0, rows, height):
            pieces.append(_threads().submit(copy, slice(top, min(top + height, rows))))
    except RuntimeError:  # the main thread has ended: pools take no more work
        copy(slice(rows))
    finally:
        wait(pieces)  # all of them, before the caller reuses its memory
        _pool_in_use.release()
    for piece in pieces:
        piece.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="panscan-copy")


def _reset() -> None:
    global _pool_in_use
    _pool_in_use = threading.Lock()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_reset)  # a child has the pool without its threads, and would wait for them
