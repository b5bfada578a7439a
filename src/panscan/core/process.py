"""The one time line, and where panscan keeps files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import platformdirs

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process, with the resolution of ``perf_counter``.

    Anchored to the wall clock once, so that stamps of several processes of one host can be merged.
    """
    return from_perf_counter(time.perf_counter())


def from_perf_counter(seconds: float) -> float:
    """A reading of ``time.perf_counter()`` of this process on the time line of :func:`now`."""
    return _EPOCH + seconds


_WAITS: ContextVar[list[tuple[float, float]] | None] = ContextVar("waits", default=None)


@contextmanager
def waits_noted(waits: list[tuple[float, float]]) -> Iterator[None]:
    """Add (start, end) of this thread's waits for locks to ``waits``, as far as they are entered by :func:`held`."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock that other requests may hold for long, and note how long this thread waited for it, if it had to."""
    if not lock.acquire(blocking=False):
        start = now()
        lock.acquire()
        if (waits := _WAITS.get()) is not None:
            waits.append((start, now()))
    try:
        yield
    finally:
        lock.release()


def cache_directory() -> Path:
    """Where panscan keeps what it can make again: ``PANSCAN_CACHE``, or the user's cache directory. Not created."""
    return Path(os.environ.get("PANSCAN_CACHE") or platformdirs.user_cache_path("panscan"))
