"""KV cache blocks: allocated, shared by prefix, and freed. Numbers only; the tensors are in ``engine.kv_memory``."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile

from panscan.engine.scheduling.sequence import PromptLayout, Sequence, Span

__all__ = ["BlockPool", "KVBlocks", "block_hash", "extend_hashes"]


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


_NAME = 32  # bytes of a hash


def block_hash(parent: bytes, ids: Rows[int], images: Rows[tuple[int, bytes]]) -> bytes:
    """The name of a block's content, and of all that stands before it: 32 bytes of SHA-256.

    Every part goes in with its length, so that different arguments never make the same message.

    Args:
        parent: name of the block before; empty for the first.
        ids: the block's token ids.
        images: of each image block that starts here, where it does, relative to this block, and what tells it: keys
            and values of an image token depend on the whole image. Later blocks of it have this one as an ancestor.
    """
    message = [struct.pack("<I", len(parent)), parent, struct.pack(f"<I{len(ids)}q", len(ids), *ids)]
    for offset, key in images:
        message += [struct.pack("<qI", offset, len(key)), key]
    return hashlib.sha256(b"".join(message)).digest()


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Append to ``sequence.hashes`` the hash of every full block of known ids.

    A block inside an image block is identified by the view and its distance from the image's start: its hash is that of
    the last block that is not inside, followed by a number. Hashing hundreds of them takes a millisecond.
    """
    hashes, ids = sequence.hashes, sequence.ids
    known = len(ids) - sequence.pending
    while len(hashes) < known // block_size:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else b""
        inside = sequence.layout.around(start)
        if inside is None or start + block_size > inside.end:
            images = [
                (span.start - start, _span_key(span)) for span in sequence.layout.within(start, start + block_size)
            ]  # fmt: skip
            hashes.append(block_hash(parent, ids[start : start + block_size], images))
            continue
        stem, first = parent[:_NAME], int.from_bytes(parent[_NAME:], "little") + 1
        blocks = min(inside.end, known) // block_size - len(hashes)
        hashes.extend(stem + number.to_bytes(4, "little") for number in range(first, first + blocks))


def _span_key(span: Span) -> bytes:
    """Return the length of a span's image block and the key of its view, as bytes."""
    return (span.end - span.start).to_bytes(4, "little") + span.key


_WORTH_WAITING = 128  # tokens: a pass takes about as long as these for its weights alone


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that keep the same positions: all of them (``window`` None), or those of the last ``window``."""

    index: int
    pool: BlockPool
    window: int | None
    block_size: int

    def first(self, position: int) -> int:
        """Index of the first block that a row at ``position`` reads: keys ``max(0, position - window + 1)`` and on."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def peak(self, computed: int, tokens: int, chunk: int, shared: int = 0) -> int:
        """Most blocks held at once from ``computed`` to ``tokens``, less the first ``shared`` ones while they are."""
        every = -(-tokens // self.block_size) - self.first(computed) - shared
        bound = self.bound(chunk)
        return every if bound is None else min(every, bound)

    def bound(self, chunk: int) -> int | None:
        """Most blocks held at once for any number of tokens: a chunk, and the window of its first row."""
        if self.window is None:
            return None
        positions = self.window - 1 + chunk
        return (positions + self.block_size - 2) // self.block_size + 1  # they may begin anywhere in a block

    def table(self, sequence: Sequence) -> MutableSequence[int]:
        return sequence.tables[self.index]

    def cached(self, sequence: Sequence, hit: int) -> list[int]:
        """The cached blocks that a sequence which begins with a hit of this length takes over."""
        names = sequence.hashes[self.first(hit) : hit // self.block_size]
        return [block for name in names if (block := self.pool.find(name)) is not None]


class KVBlocks:
    """The blocks of both groups of layers, global and local, and the tables of the sequences that hold them.

    Args:
        block_size: tokens of one block.
        global_blocks: blocks of the layers with full attention; 0: the model has no such layer.
        local_blocks: blocks of the layers with a window.
        window: keys that a row of a local layer sees, itself included; None: the model has no such layer.
        prefix_caching: blocks are found again by content.
        worth_waiting: tokens that are worth a pass's time (:meth:`in_the_making`).
    """

    def __init__(
        self, *, block_size: int, global_blocks: int, local_blocks: int, window: int | None, prefix_caching: bool,
        worth_waiting: int = _WORTH_WAITING,
    ) -> None:  # fmt: skip
        self.block_size, self._worth = block_size, worth_waiting
        self.prefix_caching = prefix_caching
        self.pools = (BlockPool(global_blocks), BlockPool(0 if window is None else local_blocks))
        self._groups: list[_Group] = []
        if global_blocks:
            self._groups.append(_Group(0, self.pools[0], None, block_size))
        if window is not None:
            self._groups.append(_Group(1, self.pools[1], window, block_size))

    def needed(self, tokens: int, chunk: int) -> tuple[int, int]:
        """Most blocks, global and local, that one sequence of ``tokens`` holds at any time, if no pass computes more
        than ``chunk`` of them."""
        counts = [0, 0]
        for group in self._groups:
            counts[group.index] = group.peak(0, tokens, chunk)
        return counts[0], counts[1]

    def fits(self, tokens: int, chunk: int) -> bool:
        """Whether a sequence of ``tokens`` can be computed in chunks of at most ``chunk`` when it is alone."""
        return all(count <= pool.count for count, pool in zip(self.needed(tokens, chunk), self.pools, strict=True))

    def longest(self, chunk: int) -> int | None:
        """Tokens of the longest sequence that fits, computed in chunks of at most ``chunk``; None: any number."""
        full = []
        for group in self._groups:
            bound = group.bound(chunk)
            if bound is None or bound > group.pool.count:
                full.append(group.pool.count * self.block_size)
        return min(full, default=None)

    def claim(self, sequence: Sequence, chunk: int) -> tuple[int, int]:
        """Blocks that a sequence which has begun will take before long, on top of those it holds: for the rest of its
        tokens, and for as many outputs as one block holds."""
        counts = [0, 0]
        for group in self._groups:
            holds = len(group.table(sequence)) - group.first(sequence.computed)
            counts[group.index] = max(0, group.peak(sequence.computed, self._soon(sequence), chunk) - holds)
        return counts[0], counts[1]

    def hit(self, sequence: Sequence) -> int:
        """Length in tokens of the longest prefix that the sequence may take over. It ends at a block's end and inside
        no image block, leaves at least one token to compute, and has every global block and every local one that its
        next token reads."""
        if not (self.prefix_caching and sequence.reuse):
            return 0
        extend_hashes(sequence, self.block_size)
        hit = len(sequence.ids) - 1
        for group in self._groups:
            if group.window is None:
                known = takewhile(lambda name: self.pools[0].find(name) is not None, sequence.hashes)
                hit = min(hit, sum(self.block_size for _ in known))
        while True:
            hit = self._aligned(sequence.layout, hit)
            missing = self._missing(sequence, hit)
            if missing is None:
                return hit
            hit = missing * self.block_size  # every longer hit reads that block too

    def can_begin(self, sequence: Sequence, hit: int, chunk: int, claimed: tuple[int, int]) -> bool:
        """Whether all that a sequence which holds nothing will take before long is available beside what is claimed."""
        for group in self._groups:
            shared = sum(group.pool.held(block) for block in group.cached(sequence, hit))
            takes = group.peak(hit, self._soon(sequence), chunk, shared)
            if takes + claimed[group.index] > group.pool.available:
                return False
        return True

    def in_the_making(self, sequence: Sequence, hit: int, others: Iterable[Sequence]) -> bool:
        """Whether one of the others, which hold blocks, will have computed so much more of the sequence's prompt before
        long that it should wait and take that over."""
        if not (self.prefix_caching and sequence.reuse):
            return False
        blocks = (hit + self._worth) // self.block_size
        if not 0 < blocks <= len(sequence.hashes):
            return False
        name = sequence.hashes[blocks - 1]
        return any(
            other.computed < blocks * self.block_size and other.hashes[blocks - 1 : blocks] == [name]
            for other in others
        )  # fmt: skip

    def begin(self, sequence: Sequence, hit: int) -> None:
        """Let a sequence that holds nothing take over the cached blocks of a prefix of this length (:meth:`hit`, called
        just before).

        Sets ``computed``, ``registered`` and, the first time, ``cached``.
        """
        for group in self._groups:
            table = group.table(sequence)
            table.extend([-1] * group.first(hit))
            for block in group.cached(sequence, hit):
                group.pool.share(block)
                table.append(block)
        sequence.computed = hit
        sequence.registered = hit // self.block_size
        if sequence.cached is None:
            sequence.cached = hit

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Blocks of all groups for the positions before ``end``; False, and nothing changed, if they do not suffice."""
        blocks = -(-end // self.block_size)
        counts = [blocks - len(group.table(sequence)) for group in self._groups]
        if not any(counts):  # as in most decode steps
            return True
        if any(count > group.pool.available for group, count in zip(self._groups, counts, strict=True)):
            return False
        for group, count in zip(self._groups, counts, strict=True):
            taken = (group.pool.allocate() for _ in range(count))
            group.table(sequence).extend(block for block in taken if block is not None)
        return True

    def commit(self, sequence: Sequence) -> None:
        """After ``computed`` advanced: let others find the blocks that became full, give back those that no later row
        of the sequence reads."""
        if self.prefix_caching:
            self._register(sequence)
        for group in self._groups:
            table = group.table(sequence)
            for index in reversed(range(group.first(sequence.computed))):
                if table[index] == -1:
                    break
                group.pool.release(table[index])
                table[index] = -1

    def release(self, sequence: Sequence) -> None:
        """Give back all that the sequence holds; it has nothing computed then. Last blocks first: as a prefix is of no
        use without its beginning, that is evicted last."""
        for group in self._groups:
            table = group.table(sequence)
            for block in reversed(table):
                if block != -1:
                    group.pool.release(block)
            del table[:]
        sequence.computed = sequence.registered = 0

    def reset(self) -> None:
        """Forget the contents that no sequence holds."""
        for pool in self.pools:
            pool.reset()

    def usage(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(held blocks, all blocks) of the global and of the local group."""
        first, second = self.pools
        return (first.used, first.count), (second.used, second.count)

    def _soon(self, sequence: Sequence) -> int:
        return min(sequence.limit, len(sequence.ids) + self.block_size)

    def _register(self, sequence: Sequence) -> None:
        extend_hashes(sequence, self.block_size)
        full = sequence.computed // self.block_size
        for group in self._groups:
            table = group.table(sequence)
            for index in range(sequence.registered, full):
                group.pool.register(table[index], sequence.hashes[index])
        sequence.registered = full

    def _aligned(self, layout: PromptLayout, hit: int) -> int:
        """The longest prefix up to ``hit`` that ends at a block's end and inside no image block."""
        while (shorter := layout.cut_back(hit) // self.block_size * self.block_size) != hit:
            hit = shorter
        return hit

    def _missing(self, sequence: Sequence, hit: int) -> int | None:
        """The last block that a local layer reads behind a hit of this length and that is not cached."""
        for group in self._groups:
            if group.window is not None:
                for index in reversed(range(group.first(hit), hit // self.block_size)):
                    if group.pool.find(sequence.hashes[index]) is None:
                        return index
        return None
