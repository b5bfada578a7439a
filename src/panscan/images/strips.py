"""Work on a page's rows in several threads, strip by strip."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

__all__ = ["map_strips"]

_STRIPS = 8  # threads; a page of several megabytes has as many strips
_STRIP_BYTES = 1 << 18  # of a strip at least; a smaller one is not worth a thread
_pool_in_use = threading.Lock()
T = TypeVar("T")


def map_strips(function: Callable[[int, int], T], rows: int, row_bytes: int, most_bytes: int) -> list[T]:
    """Return what a function returns for each strip of a page, from top to bottom.

    The strips depend on the arguments alone, and so does a digest over them. One page at a time is shared among
    threads. The caller's thread processes further ones, because passing strips around would take longer.

    Args:
        function: called with the first row of a strip and the row after its last one, in any thread. It should release
            Python's lock.
        rows: of the page.
        row_bytes: bytes per row.
        most_bytes: per strip, unless a row has more.
    """
    least = _STRIP_BYTES // row_bytes
    height = max(1, min(max(least, -(-rows // _STRIPS)), most_bytes // row_bytes))
    tops = range(0, rows, height)

    def strip(top: int) -> T:
        return function(top, min(top + height, rows))

    if len(tops) == 1 or not _pool_in_use.acquire(blocking=False):
        return [strip(top) for top in tops]
    try:
        return list(_threads().map(strip, tops))
    finally:
        _pool_in_use.release()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_STRIPS, thread_name_prefix="panscan-pages")


def _reset() -> None:
    global _pool_in_use
    _pool_in_use = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):  # a child has the pool without its threads, and would wait for them
    os.register_at_fork(after_in_child=_reset)
