"""The one time line, and processes that panscan starts."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process, with the resolution of ``perf_counter``.

    Anchored to the wall clock once, so that stamps of several processes of one host can be merged.
    """
    return from_perf_counter(time.perf_counter())


def join_time_line(origin: float) -> None:
    """Use the time line of another process of this host: ``perf_counter`` is the same clock in both.

    Args:
        origin: its ``from_perf_counter(0)``.
    """
    global _EPOCH
    _EPOCH = origin


def usable_cores() -> int:
    """Return the number of cores that this process may use; where the system does not limit it, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def from_perf_counter(seconds: float) -> float:
    """Convert a reading of this process's ``time.perf_counter()`` to the clock of :func:`now`."""
    return _EPOCH + seconds


_WAITS: ContextVar[list[tuple[float, float]] | None] = ContextVar("waits", default=None)


@contextmanager
def record_waits(waits: list[tuple[float, float]]) -> Iterator[None]:
    """Append (start, end) of each :func:`recorded_wait` of this thread to ``waits``."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def recorded_wait() -> Iterator[None]:
    """Record the body's duration as a wait (see :func:`record_waits`)."""
    start = now()
    yield
    if (waits := _WAITS.get()) is not None:
        waits.append((start, now()))


@contextmanager
def hold_lock(lock: threading.Lock | threading.Semaphore) -> Iterator[None]:
    """Hold a lock that other requests may hold for long, and record the wait for it, if any."""
    if not lock.acquire(blocking=False):
        with recorded_wait():
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def import_uncollected(name: str) -> Any:
    """Import a module without garbage collections, and exempt what exists afterwards from them. Return the module.

    For processes that run nothing but panscan. PyTorch and Transformers create 400,000 objects. Visiting them takes a
    tenth of the time of their import; later, every full collection stops all threads for a tenth of a second, and the
    process takes almost a second to exit.
    """
    if name in sys.modules:  # all that exists by now may include garbage
        return sys.modules[name]
    atexit.register(_end_errors)  # before those of the libraries, which therefore run earlier
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _end_errors() -> None:
    """Discard later errors: nanobind reports Triton's uncollected objects as leaks when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def worker_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a new process that runs ``main()`` of one of panscan's modules.

    Unlike after ``-m``, pickled messages name the module's classes as they are named elsewhere.
    """
    program = f"from panscan.core.process import run_worker; run_worker({module!r})"
    # -P: a module in the working directory must not shadow a library.
    return [sys.executable, "-P", "-c", program, *arguments]


def run_worker(module: str) -> None:
    """Import a module and run its ``main()`` (see :func:`worker_command`)."""
    import_uncollected(module).main()
    gc.freeze()  # else the exit visits all objects
