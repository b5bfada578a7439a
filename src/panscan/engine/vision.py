"""Vision cache bookkeeping: slots of encoded views, and keys of views and files. Integers only; the features are in
``engine.views``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:  # it imports PyTorch, which panscan plan does without
    from panscan.images.pixels import PixelSpec


def view_key(image: bytes, box: tuple[int, int, int, int], preprocess: str, spec: PixelSpec) -> bytes:
    """Return a digest of all that a view's pixels depend on: image digest, box, and how it is resized and scaled."""
    return blake3(image + repr((box, preprocess, spec)).encode()).digest()


class VisionCache:
    """Slots for encoded views; the least recently used view is evicted first.

    A pass has no more views than there are slots. It uses those that it finds before it adds others, so none of its own
    is evicted. ``encoded``: number of views encoded so far. ``reused``: number of cache hits.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.encoded = self.reused = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(count))

    def __len__(self) -> int:
        return len(self._slots)

    def holds(self, key: bytes) -> bool:
        """Return whether a view has a slot. Any thread may ask."""
        return key in self._slots

    def use(self, key: bytes) -> int | None:
        """Mark a view as used; return its slot, or None if it has none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
        return slot

    def add(self, key: bytes) -> int:
        """Assign a slot to a new view, evicting the least recently used one if necessary."""
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[key] = slot
        return slot

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove views whose features were not computed."""
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                self._free.append(slot)

    def clear(self) -> None:
        """Evict all views."""
        self.forget([*self._slots])
