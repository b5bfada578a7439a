"""The one time line, processes that panscan starts, and where and how it keeps files."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from panscan.core.errors import SettingError

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process, with the resolution of ``perf_counter``.

    Anchored to the wall clock once, so that stamps of several processes of one host can be merged.
    """
    return from_perf_counter(time.perf_counter())


def time_line() -> float:
    """Return the origin of this process's time line, for :func:`join_time_line` in a child process."""
    return _EPOCH


def join_time_line(origin: float) -> None:
    """Use the time line of another process of this host: ``perf_counter`` is the same clock in both."""
    global _EPOCH
    _EPOCH = origin


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
def hold_lock(lock: threading.Lock) -> Iterator[None]:
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
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


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


def cache_directory() -> Path:
    """Return the cache directory: ``PANSCAN_CACHE``, or the user's cache directory. Does not create it."""
    return Path(os.environ.get("PANSCAN_CACHE") or platformdirs.user_cache_path("panscan"))


def fallback_directory() -> Path:
    """Return a fixed temporary directory for this user, used if the cache is not writable.

    Other users of the machine can create files there first, so it must be a directory that only this user can write.

    Raises:
        SettingError: other users can write to the directory, or it cannot be created.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"panscan-{user}"
    fix = "remove it, or set PANSCAN_CACHE to a directory that can be written"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        found = path.lstat()
    except OSError as error:
        raise SettingError(f"{path} cannot be created ({error.strerror}): {fix}") from error
    others = os.name == "posix" and (found.st_uid != user or found.st_mode & 0o077)
    if others or not stat.S_ISDIR(found.st_mode):
        raise SettingError(f"{path} is not a private directory that you own: {fix}")
    return path


def create_file(path: Path) -> BinaryIO:
    """Create a file to write, replacing a leftover file of that name, and never following a link.

    The user's umask applies; besides, others than the owner and its group can never write it.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o664), "wb")


def sync_directory(directory: Path) -> None:
    """Sync the entries of a directory to disk. Only POSIX systems support and need this."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
