"""Work on a page's rows in several threads, strip by strip."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

__all__ = ["map_strips"]

_STRIPS = 8  # threads; a page of several megabytes has as many strips
_STRIP_BYTES = 1 << 18  # of a strip at least; a smaller one is not worth a thread
T = TypeVar("T")


def map_strips(function: Callable[[int, int], T], rows: int, row_bytes: int, most_bytes: int) -> list[T]:
    """Return what a function returns for each strip of a page, from top to bottom.

    The strips depend on the arguments alone, and so does a digest over them.

    Args:
        function: called with the first row of a strip and the row after its last one, in a thread. It should release
            Python's lock.
        rows: of the page.
        row_bytes: bytes per row.
        most_bytes: per strip, unless a row has more.
    """
    least = _STRIP_BYTES // row_bytes
    height = max(1, min(max(least, -(-rows // _STRIPS)), most_bytes // row_bytes))
    return list(_threads().map(lambda top: function(top, min(top + height, rows)), range(0, rows, height)))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_STRIPS, thread_name_prefix="panscan-pages")


if hasattr(os, "register_at_fork"):  # a child has the pool without its threads, and would wait for them
    os.register_at_fork(after_in_child=_threads.cache_clear)
