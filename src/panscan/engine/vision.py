"""Vision cache bookkeeping: slots of encoded views, and keys of views and files. Integers only; the features are in
``engine.views``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from blake3 import blake3

from panscan.core import SettingError

if TYPE_CHECKING:  # it imports PyTorch, which panscan plan does without
    from panscan.images.pixels import PixelSpec


def view_key(image: bytes, box: tuple[int, int, int, int], preprocess: str, spec: PixelSpec) -> bytes:
    """Return a digest of all that a view's pixels depend on: image digest, box, and how it is resized and scaled."""
    return blake3(image + repr((box, preprocess, spec)).encode()).digest()


class VisionCache:
    """Slots for encoded views; the least recently used view is evicted first.

    ``encoded``: number of views encoded so far. ``reused``: number of cache hits.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.encoded = self.reused = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(count))
        self._pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def holds(self, key: bytes) -> bool:
        """Return whether a view has a slot. Any thread may ask."""
        return key in self._slots

    def pin(self, key: bytes) -> int | None:
        """Keep a view until :meth:`release` and mark it as used; return its slot, or None if it has none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
            self._pinned.add(key)
        return slot

    def place(self, key: bytes) -> int:
        """Assign a pinned slot to a new view, evicting the least recently used unpinned view if necessary.

        Raises:
            SettingError: pinned views hold all slots.
        """
        if self._free:
            slot = self._free.pop()
        else:
            dropped = next((key for key in self._slots if key not in self._pinned), None)
            if dropped is None:
                raise SettingError(f"--vision-cache-gb holds {self.count} encoded views; a pass needs more: raise it")
            slot = self._slots.pop(dropped)
        self._slots[key] = slot
        self._pinned.add(key)
        return slot

    def release(self) -> None:
        """Unpin all views."""
        self._pinned.clear()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove views whose features were not computed."""
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                self._free.append(slot)
                self._pinned.discard(key)

    def clear(self) -> None:
        """Evict all unpinned views."""
        self.forget(self._slots.keys() - self._pinned)
