"""How much memory requests in preparation may take for their images, whatever their number."""

from __future__ import annotations

import threading
from collections import deque

from panscan.core import recorded_wait

__all__ = ["DECODED_BYTES", "ImageMemory", "Share"]

DECODED_BYTES = 10
"""Per pixel while an image is decoded: Pillow keeps RGB in four bytes and packs it into three, twice for a moment."""


class Share:
    """What one request holds of an :class:`ImageMemory`."""

    def __init__(self, memory: ImageMemory, size: int) -> None:
        self._memory, self._size = memory, size

    def shrink(self, size: int) -> None:
        """Give back all but ``size`` bytes."""
        given, self._size = self._size - size, size
        self._memory.give(given)

    def free(self) -> None:
        """Give everything back. Any number of times."""
        self.shrink(0)


class ImageMemory:
    """Bytes shared by threads that decode images. Each waits for its turn, so that a large request is not overtaken
    for ever; one that is larger than everything passes alone.

    Args:
        size: bytes in all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._closed = False
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Bytes that requests hold now."""
        return self._taken

    def take(self, size: int) -> Share:
        """Wait until ``size`` bytes are free, and hold them.

        Cannot deadlock: other requests finish their preparation, or the engine computes them.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            if not self._free(turn, size):
                with recorded_wait():
                    self._changed.wait_for(lambda: self._free(turn, size))
            self._waiting.remove(turn)
            self._taken += size
            self._changed.notify_all()
        return Share(self, size)

    def give(self, size: int) -> None:
        """Release bytes of a share."""
        with self._changed:
            self._taken -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Close: wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _free(self, turn: object, size: int) -> bool:
        return self._closed or (self._waiting[0] is turn and self._fits(size))

    def _fits(self, size: int) -> bool:
        return self._taken == 0 or self._taken + size <= self._size
