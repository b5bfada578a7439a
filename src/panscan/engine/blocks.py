"""A pool of cache blocks: who holds how many, and which contents may be found again. No tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks ``0 .. count - 1``. Each is free, held (by one or more), or evictable: held by nobody, its content kept.

    All operations take constant time, but for :meth:`reset`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = array("i", bytes(count * array("i").itemsize))  # small: there may be millions of blocks
        self._fresh = 0  # blocks from here on were never taken
        self._free: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the least recently released first
        self._hashes: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can give."""
        return self.count - self._fresh + len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.available

    def held(self, block: int) -> bool:
        """Whether somebody holds the block."""
        return self._holders[block] > 0

    def allocate(self) -> int | None:
        """A block for one holder: a free one, else the least recently released evictable one, whose content is
        forgotten. None if all are held."""
        if self._free:
            block = self._free.pop()
        elif self._fresh < self.count:
            block = self._fresh
            self._fresh += 1
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block whose content is known.

        Raises:
            RuntimeError: the block is free: its content is nobody's.
        """
        if not self.held(block):
            if block not in self._evictable:
                raise RuntimeError(f"cache block {block} is free and cannot be shared")
            del self._evictable[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less.

        Raises:
            RuntimeError: nobody holds the block.
        """
        if not self.held(block):
            raise RuntimeError(f"cache block {block} is released more often than it was taken")
        self._holders[block] -= 1
        if self.held(block):
            return
        if block in self._hashes:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def register(self, block: int, name: bytes) -> None:
        """Let :meth:`find` give the block for this content's name; nothing happens if it gives another one already.

        Raises:
            RuntimeError: nobody holds the block, or it has another name.
        """
        if not self.held(block) or self._hashes.get(block, name) != name:
            raise RuntimeError(f"cache block {block} is not held or has another content")
        if name not in self._blocks:
            self._blocks[name] = block
            self._hashes[block] = name

    def find(self, name: bytes) -> int | None:
        """The block with this content, held or evictable."""
        return self._blocks.get(name)

    def reset(self) -> None:
        """Forget the contents that nobody holds."""
        while self._evictable:
            block, _ = self._evictable.popitem()
            self._forget(block)
            self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._hashes.pop(block)]
