"""Limits on the memory of images and pixels in preparation, shared by all requests."""

from __future__ import annotations

import threading
from collections import deque

from panscan.core import recorded_wait

DECODED_BYTES = 10
"""Peak bytes per pixel of decoding: four in Pillow, four in the copy, and what decoders need in addition."""


class Share:
    """The bytes of an :class:`ImageMemory` that one request holds."""

    def __init__(self, memory: ImageMemory, size: int) -> None:
        self._memory, self._size = memory, size

    def free(self) -> None:
        """Release the bytes. Has no effect if called again."""
        self._memory.release(self._size)
        self._size = 0


class ImageMemory:
    """A byte budget for threads that prepare requests.

    Threads acquire bytes in order of arrival, so that large requests do not starve; no bytes, at once. A request that
    exceeds the whole budget runs alone. ``taken``: bytes that requests hold.

    Args:
        size: total bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.taken = 0
        self._closed = False
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, size: int) -> Share:
        """Wait until ``size`` bytes are free, and acquire them.

        Cannot deadlock: holders finish their preparation and are then computed by the engine, without this thread.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            if not self._available(turn, size):
                with recorded_wait():
                    self._changed.wait_for(lambda: self._available(turn, size))
            self._waiting.remove(turn)
            self.taken += size
            self._changed.notify_all()
        return Share(self, size)

    def release(self, size: int) -> None:
        """Release bytes of a share."""
        with self._changed:
            self.taken -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads and let them proceed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _available(self, turn: object, size: int) -> bool:
        if self._closed or not size:
            return True
        return self._waiting[0] is turn and (self.taken == 0 or self.taken + size <= self._size)
