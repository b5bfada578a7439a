"""Daemon threads for work that may hang, such as a download."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["DaemonThreads"]


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
        """Run a function as soon as a thread is free. The function must not raise. Only one thread may submit."""
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
