"""KV cache blocks: allocation, prefix sharing and release. Numbers only; the tensors are in ``engine.attention``."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict, abc
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from itertools import takewhile

from panscan.engine.scheduling.batch import Sequence


class BlockPool:
    """Blocks ``0 .. count - 1``. Each is free, held (by one or more sequences), or evictable: not held, content kept.

    Methods that a prompt needs for each of its blocks take many at once: it has hundreds, and a call per block would
    delay its first token.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = array("i", bytes(count * array("i").itemsize))  # small: there may be millions of blocks
        self._fresh = 0  # blocks from here on were never allocated
        self._free: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._hashes: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`allocate` can return."""
        return self.count - self._fresh + len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Number of held blocks."""
        return self.count - self.available

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks for one holder: free ones first. Then the least recently released evictable ones are evicted.

        Raises:
            RuntimeError: fewer are available, or the number is negative.
        """
        if not 0 <= count <= self.available:
            raise RuntimeError(f"{count} cache blocks were asked for, and {self.available} are available")
        start = max(0, len(self._free) - count)
        blocks = self._free[start:]
        del self._free[start:]
        fresh = min(count - len(blocks), self.count - self._fresh)
        blocks += range(self._fresh, self._fresh + fresh)
        self._fresh += fresh
        while len(blocks) < count:
            block, _ = self._evictable.popitem(last=False)
            self._evict(block)
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def held_count(self, blocks: abc.Sequence[int]) -> int:
        """Return how many of the blocks a sequence holds."""
        return len(blocks) - list(map(self._references.__getitem__, blocks)).count(0)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to held or evictable blocks.

        Raises:
            RuntimeError: a block is free, so its content is undefined.
        """
        references, evictable = self._references, self._evictable
        for block in blocks:
            if not references[block]:
                if block not in evictable:
                    raise RuntimeError(f"cache block {block} is free and cannot be shared")
                del evictable[block]
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block. Blocks that become evictable are evicted in this order.

        Raises:
            RuntimeError: a block is not held.
        """
        references, hashes, evictable, free = self._references, self._hashes, self._evictable, self._free
        for block in blocks:
            if not references[block]:
                raise RuntimeError(f"cache block {block} is released more often than it was acquired")
            references[block] -= 1
            if references[block]:
                continue
            if block in hashes:
                evictable[block] = None
            else:
                free.append(block)

    def register(self, blocks: Iterable[int], content_hashes: Iterable[bytes]) -> None:
        """Let :meth:`find` return each block for its hash. Has no effect if another block is registered for it.

        Raises:
            RuntimeError: a block is not held, or is registered with another hash.
        """
        references, hashes, known = self._references, self._hashes, self._blocks
        for block, content_hash in zip(blocks, content_hashes, strict=True):
            if not references[block] or hashes.get(block, content_hash) != content_hash:
                raise RuntimeError(f"cache block {block} is not held, or is registered with another hash")
            if content_hash not in known:
                known[content_hash] = block
                hashes[block] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """Return the held or evictable block with this hash, or None."""
        return self._blocks.get(content_hash)

    def find_all(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that :meth:`find` returns for these hashes, without None."""
        return [block for block in map(self._blocks.get, hashes) if block is not None]

    def leading(self, hashes: Iterable[bytes]) -> int:
        """Return how many hashes have a block before the first that has none."""
        return len(list(takewhile(self._blocks.__contains__, hashes)))

    def reset(self) -> None:
        """Evict all evictable blocks."""
        while self._evictable:
            block, _ = self._evictable.popitem()
            self._evict(block)
            self._free.append(block)

    def _evict(self, block: int) -> None:
        del self._blocks[self._hashes.pop(block)]


_HASH_BYTES = 32


def block_hash(parent: bytes, ids: abc.Sequence[int], images: abc.Sequence[tuple[int, bytes]]) -> bytes:
    """Return the SHA-256 of a block's content and its whole prefix.

    Every part is hashed with its length, so that different arguments never form the same message.

    Args:
        parent: hash of the previous block; empty for the first.
        ids: the block's token ids.
        images: (offset in this block, image key) of each image span that starts in it. Keys and values of an image
            token depend on the whole image. Later blocks of the image inherit this through ``parent``.
    """
    message = [struct.pack("<I", len(parent)), parent, struct.pack(f"<I{len(ids)}q", len(ids), *ids)]
    for offset, key in images:
        message += [struct.pack("<qI", offset, len(key)), key]
    return hashlib.sha256(b"".join(message)).digest()


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Extend ``sequence.hashes`` to all full blocks of the known ids.

    A block that starts inside an image span and does not extend past it is not hashed: hashing hundreds of them takes a
    millisecond. It gets the last computed hash and a counter.
    """
    hashes, ids = sequence.hashes, sequence.ids
    known = len(ids) - sequence.pending
    while len(hashes) < known // block_size:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else b""
        inside = sequence.layout.around(start)
        if inside is None or start + block_size > inside.end:
            images = [
                (span.start - start, ((span.end - span.start).to_bytes(4, "little") + span.key))
                for span in sequence.layout.within(start, start + block_size)
            ]
            hashes.append(block_hash(parent, ids[start : start + block_size], images))
            continue
        stem, first = parent[:_HASH_BYTES], int.from_bytes(parent[_HASH_BYTES:], "little") + 1
        blocks = min(inside.end, known) // block_size - len(hashes)
        hashes.extend(stem + number.to_bytes(4, "little") for number in range(first, first + blocks))


_WORTH_WAITING = 128  # tokens: computing them takes about as long as a step takes to read the weights


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that keep the same positions: all (``window`` None), or the last ``window``."""

    index: int
    pool: BlockPool
    window: int | None
    block_size: int

    def first(self, position: int) -> int:
        """Return the index of the first block that a row at ``position`` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def peak(self, computed: int, tokens: int, chunk: int, shared: int = 0) -> int:
        """Return the most blocks held at once from ``computed`` to ``tokens``, without ``shared`` leading ones."""
        every = -(-tokens // self.block_size) - self.first(computed) - shared
        bound = self.bound(chunk)
        return every if bound is None else min(every, bound)

    def bound(self, chunk: int) -> int | None:
        """Return the most blocks held at once for any number of tokens; None: no bound without a window.

        A chunk needs blocks for its own tokens and for the window of its first row.
        """
        if self.window is None:
            return None
        positions = self.window - 1 + chunk
        return (positions + self.block_size - 2) // self.block_size + 1  # they may start anywhere in a block

    def table(self, sequence: Sequence) -> MutableSequence[int]:
        return sequence.tables[self.index]

    def cached(self, sequence: Sequence, hit: int) -> list[int]:
        """Return the cached blocks that a sequence reuses if it starts with a hit of this length."""
        return self.pool.find_all(sequence.hashes[self.first(hit) : hit // self.block_size])


class KVBlocks:
    """The blocks of global and of local layers, and the block tables of the sequences that hold them.

    Args:
        block_size: tokens per block.
        global_blocks: number of blocks for layers with full attention; 0: the model has no such layer.
        local_blocks: number of blocks for layers with a sliding window.
        window: positions that a local layer attends to, the row's own included; None: the model has no such layer.
        prefix_caching: reuse blocks with the same content.
        worth_waiting: number of additional cached tokens for which a sequence waits (:meth:`prefix_in_progress`).
    """

    def __init__(
        self,
        *,
        block_size: int,
        global_blocks: int,
        local_blocks: int,
        window: int | None,
        prefix_caching: bool,
        worth_waiting: int = _WORTH_WAITING,
    ) -> None:
        self.block_size, self._worth = block_size, worth_waiting
        self.prefix_caching = prefix_caching
        self.pools = (BlockPool(global_blocks), BlockPool(0 if window is None else local_blocks))
        self._groups: list[_Group] = []
        if global_blocks:
            self._groups.append(_Group(0, self.pools[0], None, block_size))
        if window is not None:
            self._groups.append(_Group(1, self.pools[1], window, block_size))

    def needed(self, tokens: int, chunk: int) -> tuple[int, int]:
        """Return the most global and local blocks that one sequence of ``tokens`` holds at any time, computed in chunks
        of at most ``chunk``."""
        counts = [0, 0]
        for group in self._groups:
            counts[group.index] = group.peak(0, tokens, chunk)
        return counts[0], counts[1]

    def fits(self, tokens: int, chunk: int) -> bool:
        """Return whether a sequence of ``tokens`` can run alone, computed in chunks of at most ``chunk``."""
        return all(count <= pool.count for count, pool in zip(self.needed(tokens, chunk), self.pools, strict=True))

    def longest(self, chunk: int) -> int | None:
        """Return the length of the longest sequence that fits, in chunks of at most ``chunk``; None: no limit."""
        full = []
        for group in self._groups:
            bound = group.bound(chunk)
            if bound is None or bound > group.pool.count:
                full.append(group.pool.count * self.block_size)
        return min(full, default=None)

    def claim(self, sequence: Sequence, chunk: int) -> tuple[int, int]:
        """Return the global and local blocks that a running or waiting sequence will soon need in addition to those it
        holds: for the tokens it has, plus one block of output. Ignores the cached prefix of a waiting one."""
        counts = [0, 0]
        for group in self._groups:
            holds = len(group.table(sequence)) - group.first(sequence.computed)
            counts[group.index] = max(0, group.peak(sequence.computed, self._tokens_soon(sequence), chunk) - holds)
        return counts[0], counts[1]

    def hit(self, sequence: Sequence) -> int:
        """Return the length in tokens of the longest cached prefix that the sequence can reuse.

        The prefix ends on a block boundary outside image spans, leaves at least one token to compute, and has all
        global blocks and the local blocks that the next token reads.
        """
        if not (self.prefix_caching and sequence.reuse):
            return 0
        extend_hashes(sequence, self.block_size)
        hit = len(sequence.ids) - 1
        for group in self._groups:
            if group.window is None:
                hit = min(hit, self.pools[0].leading(sequence.hashes) * self.block_size)
        while True:
            while (shorter := sequence.layout.cut_back(hit) // self.block_size * self.block_size) != hit:
                hit = shorter
            missing = self._missing(sequence, hit)
            if missing is None:
                return hit
            hit = missing * self.block_size  # longer hits read that block too

    def may_hit(self, sequence: Sequence, tokens: int) -> bool:
        """Return False if a cached prefix of at least this many tokens is impossible. Much faster than :meth:`hit`."""
        if tokens <= 0:
            return True
        if not (self.prefix_caching and sequence.reuse):
            return False
        extend_hashes(sequence, self.block_size)
        last = -(-tokens // self.block_size) - 1
        if not self.pools[0].count:  # local layers release blocks that left the window
            return last < len(sequence.hashes)
        return last < len(sequence.hashes) and self.pools[0].find(sequence.hashes[last]) is not None

    def can_begin(self, sequence: Sequence, hit: int, chunk: int, claimed: tuple[int, int]) -> bool:
        """Return whether the blocks that a waiting sequence will soon need are available, without ``claimed`` ones."""
        for group in self._groups:
            shared = group.pool.held_count(group.cached(sequence, hit))
            needed = group.peak(hit, self._tokens_soon(sequence), chunk, shared)
            if needed + claimed[group.index] > group.pool.available:
                return False
        return True

    def prefix_in_progress(self, sequence: Sequence, hit: int, others: Iterable[Sequence]) -> bool:
        """Return whether the sequence should wait because a running one is computing a longer prefix of its prompt.

        Args:
            sequence: a waiting sequence.
            hit: length of its cached prefix.
            others: running sequences.
        """
        if not (self.prefix_caching and sequence.reuse):
            return False
        blocks = (hit + self._worth) // self.block_size
        if not 0 < blocks <= len(sequence.hashes):
            return False
        content_hash = sequence.hashes[blocks - 1]
        return any(
            other.computed < blocks * self.block_size and other.hashes[blocks - 1 : blocks] == [content_hash]
            for other in others
        )

    def begin(self, sequence: Sequence, hit: int) -> None:
        """Put the cached blocks of a prefix into the block tables of a sequence that holds none.

        Sets ``computed``, ``registered`` and, on the first call, ``cached``.

        Args:
            sequence: a waiting sequence.
            hit: current result of :meth:`hit`.
        """
        for group in self._groups:
            table = group.table(sequence)
            table.extend([-1] * group.first(hit))
            cached = group.cached(sequence, hit)
            group.pool.share(cached)
            table.extend(cached)
        sequence.computed = hit
        sequence.registered = hit // self.block_size
        if sequence.cached is None:
            sequence.cached = hit

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the positions before ``end``; if too few are available, return False without changes.

        The sequence may already have more: if a step could not be launched, its chunk in the next one may be shorter.
        """
        blocks = -(-end // self.block_size)
        counts = [max(0, blocks - len(group.table(sequence))) for group in self._groups]
        if not any(counts):
            return True
        if any(count > group.pool.available for group, count in zip(self._groups, counts, strict=True)):
            return False
        for group, count in zip(self._groups, counts, strict=True):
            group.table(sequence).extend(group.pool.allocate(count))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Register full blocks for reuse and release blocks that left the window, after ``computed`` advanced."""
        if self.prefix_caching:
            extend_hashes(sequence, self.block_size)
            full = sequence.computed // self.block_size
            new, sequence.registered = slice(sequence.registered, full), full
            for group in self._groups:
                group.pool.register(group.table(sequence)[new], sequence.hashes[new])
        for group in self._groups:
            table, left = group.table(sequence), []
            for index in reversed(range(group.first(sequence.computed))):
                if table[index] == -1:
                    break
                left.append(table[index])
                table[index] = -1
            group.pool.release(left)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence and reset ``computed``.

        The last blocks are released, and thus evicted, first: a prefix is useless without its beginning.
        """
        for group in self._groups:
            table = group.table(sequence)
            group.pool.release(block for block in reversed(table) if block != -1)
            del table[:]
        sequence.computed = sequence.registered = 0

    def reset(self) -> None:
        """Evict all blocks that no sequence holds."""
        for pool in self.pools:
            pool.reset()

    def usage(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (held blocks, all blocks) of global and of local layers."""
        first, second = self.pools
        return (first.used, first.count), (second.used, second.count)

    def _tokens_soon(self, sequence: Sequence) -> int:
        return min(sequence.limit, len(sequence.ids) + self.block_size)

    def _missing(self, sequence: Sequence, hit: int) -> int | None:
        """Return the index of the last uncached block that a local layer reads after a hit of this length, or None."""
        for group in self._groups:
            if group.window is not None:
                first, last = group.first(hit), hit // self.block_size
                known = group.pool.leading(reversed(sequence.hashes[first:last]))
                if known < last - first:
                    return last - known - 1
        return None
