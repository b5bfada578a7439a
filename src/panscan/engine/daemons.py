"""Threads for work that may hang, such as a download: they never hold up the end of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["DaemonThreads"]


class DaemonThreads:
    """Runs functions, a few at once. Python joins the threads of ``concurrent.futures`` when it exits, so one that is
    stuck there keeps the process alive; these are left behind.

    Args:
        count: functions that run at once.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count, self._name = count, name
        self._started = 0

    def submit(self, function: Callable[[], object]) -> None:
        """Run a function, which raises nothing, as soon as a thread is free. Only one thread may submit."""
        if self._started < self._count:
            threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
            self._started += 1
        self._todo.put(function)

    def shutdown(self) -> None:
        """Forget what has not begun, and let each thread end after what it runs. Does not wait."""
        try:
            while True:
                self._todo.get_nowait()
        except Empty:
            for _ in range(self._started):
                self._todo.put(None)

    def _run(self) -> None:
        while (function := self._todo.get()) is not None:
            function()
            del function  # or the thread keeps a request until the next
