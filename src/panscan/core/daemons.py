"""Daemon threads for work that may hang, such as a download, and sections of them that the exit waits for."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

_EXIT_SECONDS = 10.0  # longest wait at exit for native work, which takes a fraction of a second

T = TypeVar("T")


def run_in_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a daemon thread of this name, which Ctrl-C and the end of the process do not wait for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


class DaemonThreads:
    """A pool of daemon threads, which do not keep the process alive.

    Python joins the threads of ``concurrent.futures`` at exit, so one that hangs there blocks the exit.

    Args:
        count: maximum number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count, self._name = count, name
        self._started = 0

    def submit(self, function: Callable[[], object]) -> None:
        """Run a function as soon as a thread is free. The function must not raise. One thread may submit at a time."""
        if self._started < self._count:
            threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
            self._started += 1
        self._todo.put(function)

    def shutdown(self) -> None:
        """Discard queued functions and let each thread end after its current one. Does not wait."""
        try:
            while True:
                self._todo.get_nowait()
        except Empty:
            for _ in range(self._started):
                self._todo.put(None)

    def _run(self) -> None:
        while (function := self._todo.get()) is not None:
            function()
            del function  # otherwise an idle thread keeps its last request alive


class _NativeWork:
    """Counts the daemon threads in native work; see :func:`native_work`."""

    def __init__(self) -> None:
        self.forget_threads()

    def forget_threads(self) -> None:
        """Start over in a forked child: none of its parent's threads exist there, and one may have held the lock."""
        self.changed = threading.Condition()
        self.active = 0
        self.exiting = False

    def finish(self) -> None:
        """Admit no more work, and wait for what is in progress."""
        with self.changed:
            self.exiting = True
            self.changed.wait_for(lambda: not self.active, _EXIT_SECONDS)


_work = _NativeWork()
atexit.register(_work.finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_work.forget_threads)


@contextmanager
def native_work(*, wait: bool = True) -> Iterator[None]:
    """Mark short work of a daemon thread in C++ or Rust, such as PyTorch and tokenizers: Python's exit waits for it.

    At exit, Python ends a daemon thread as soon as it takes the global lock. If C++ or Rust functions are on its stack,
    that aborts the process ("terminate called without an active exception"). PyTorch also takes the lock when it frees
    a tensor, so tensors must be freed inside.

    Args:
        wait: whether the thread stops here for good if the interpreter is exiting: not if others wait for its result.

    Raises:
        RuntimeError: the interpreter is exiting, and the thread is not to stop here.
    """
    with _work.changed:
        while _work.exiting:
            if not wait:
                raise RuntimeError("the interpreter is exiting")
            _work.changed.wait()  # forever
        _work.active += 1
    try:
        yield
    finally:
        with _work.changed:
            _work.active -= 1
            _work.changed.notify_all()
