"""Admission control: a bounded number of slots for submitted requests, granted in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from panscan.core import QueueFullError

__all__ = ["Admission"]


class Admission:
    """Places for submitted requests. Any thread and any event loop may take one or give one back.

    Args:
        places: how many there are.
        full: the message of :class:`QueueFullError`.
    """

    def __init__(self, places: int, full: str) -> None:
        self._free, self._full = places, full
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Take a place now.

        Raises:
            QueueFullError: there is none.
        """
        with self._lock:
            if not self._free:
                raise QueueFullError(self._full)
            self._free -= 1

    async def wait(self) -> None:
        """Take a place as soon as there is one. Those that wait come first, in their order."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                given = turn not in self._waiting
                if not given:
                    self._waiting.remove(turn)
            if given:  # in the same moment: it goes to the next
                self.give()
            raise

    def give(self) -> None:
        """Release a slot, or pass it to the request that has waited longest."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                turn = self._waiting.popleft()
            try:
                turn.get_loop().call_soon_threadsafe(_wake, turn)
                return
            except RuntimeError:  # its event loop is closed: it waits no more
                continue


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
