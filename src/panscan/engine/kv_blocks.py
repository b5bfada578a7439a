"""Which cache blocks hold a sequence's keys and values, for layers that keep every position and those with a window."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from itertools import takewhile

from panscan.engine.blocks import BlockPool
from panscan.engine.layout import Layout
from panscan.engine.prefix import extend_hashes
from panscan.engine.sequence import Sequence

__all__ = ["KVBlocks"]

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

    def _aligned(self, layout: Layout, hit: int) -> int:
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
