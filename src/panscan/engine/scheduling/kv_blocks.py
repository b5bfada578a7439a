"""Slabs and blocks of the KV cache: allocation, prefix sharing and release. Numbers only; the tensors are in
``engine.attention``."""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict, abc
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from itertools import takewhile

from panscan.engine.scheduling.batch import Sequence
from panscan.engine.scheduling.kv_sizes import KVShape, lane_cells


class BlockIndex(dict[bytes, int]):
    """Cached blocks of one kind of layers by the hash of their content, and ``hashes`` by block.

    Args:
        offsets: from the first block of a slab to each of its blocks.
    """

    def __init__(self, offsets: Iterable[int]) -> None:
        super().__init__()
        self.offsets = tuple(offsets)
        self.hashes: dict[int, bytes] = {}


class SlabPool:
    """Slabs ``0 .. count - 1``. Each is free, held (by one or more sequences), or evictable: not held, content kept.

    A slab has one or more blocks, named by their first cell, and is held as long as any of them is. Slab n consists of
    the cells n, n + ``lane``, n + 2 x ``lane`` and so on. Methods that a prompt needs for each of its blocks take many
    at once: it has hundreds, and a call per block would delay its first token.
    """

    def __init__(self, count: int) -> None:
        self.count, self.lane = count, lane_cells(count)
        self._holders = array("i", bytes(count * array("i").itemsize))  # small: there may be millions of slabs
        self._fresh = 0  # slabs from here on were never allocated
        self._free: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        # By slab: where its blocks are registered. A container for each block would let Python collect garbage often.
        self._indices: dict[int, BlockIndex] = {}

    @property
    def available(self) -> int:
        """Number of slabs that :meth:`allocate` can return."""
        return self.count - self._fresh + len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Number of held slabs."""
        return self.count - self.available

    def allocate(self, count: int, blocks: int = 1) -> list[int]:
        """Allocate slabs with a holder of each of their ``blocks`` blocks; return the first block of each.

        Free slabs are taken first. Then the least recently released evictable ones are evicted.

        Raises:
            RuntimeError: fewer are available, or the number is negative.
        """
        if not 0 <= count <= self.available:
            raise RuntimeError(f"{count} cache slabs were asked for, and {self.available} are available")
        start = max(0, len(self._free) - count)
        slabs = self._free[start:]
        del self._free[start:]
        fresh = min(count - len(slabs), self.count - self._fresh)
        slabs += range(self._fresh, self._fresh + fresh)
        self._fresh += fresh
        while len(slabs) < count:
            slabs.append(self._evicted(last=False))
        for slab in slabs:
            self._holders[slab] = blocks
        return slabs

    def unheld(self, blocks: Iterable[int]) -> int:
        """Return how many slabs of these blocks no sequence holds."""
        return len({block % self.lane for block in blocks} & self._evictable.keys())

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks of held or evictable slabs.

        Raises:
            RuntimeError: a slab is free, so its content is undefined.
        """
        holders, evictable, lane = self._holders, self._evictable, self.lane
        for block in blocks:
            slab = block % lane
            if not holders[slab]:
                if slab not in evictable:
                    raise RuntimeError(f"cache slab {slab} is free and cannot be shared")
                del evictable[slab]
            holders[slab] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block. Slabs that become evictable are evicted in this order.

        Raises:
            RuntimeError: a slab is not held.
        """
        holders, lane = self._holders, self.lane
        for block in blocks:
            slab = block % lane
            if not holders[slab]:
                raise RuntimeError(f"cache slab {slab} is released more often than it was acquired")
            holders[slab] -= 1
            if not holders[slab]:
                if slab in self._indices:
                    self._evictable[slab] = None
                else:
                    self._free.append(slab)

    def register(self, index: BlockIndex, blocks: Iterable[int], content_hashes: Iterable[bytes]) -> None:
        """Add each block to an index by the hash of its content, until its slab is evicted. Has no effect if another
        block has the hash. A slab has blocks in one index only.

        Raises:
            RuntimeError: a block is not held, or has another hash.
        """
        for block, content_hash in zip(blocks, content_hashes, strict=True):
            slab = block % self.lane
            if not self._holders[slab] or index.hashes.get(block, content_hash) != content_hash:
                raise RuntimeError(f"cache slab {slab} is not held, or its block {block} has another hash")
            if content_hash not in index:
                index[content_hash] = block
                index.hashes[block] = content_hash
                self._indices[slab] = index

    def reset(self) -> None:
        """Evict all evictable slabs."""
        while self._evictable:
            self._free.append(self._evicted(last=True))

    def _evicted(self, *, last: bool) -> int:
        """Evict the last or first evictable slab, and return it."""
        slab, _ = self._evictable.popitem(last)
        index = self._indices.pop(slab)
        for offset in index.offsets:
            if (content_hash := index.hashes.pop(slab + offset, None)) is not None:
                del index[content_hash]
        return slab


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
    millisecond. It gets the last computed hash and its index.
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
        blocks = range(len(hashes), min(inside.end, known) // block_size)
        hashes.extend(parent[:_HASH_BYTES] + index.to_bytes(4, "little") for index in blocks)


_WORTH_WAITING = 128  # tokens: computing them takes about as long as a step takes to read the weights


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that keep the same positions: all (``window`` None), or the last ``window``.

    Args:
        kind: index among the tables of a sequence.
        pool: slabs of all groups.
        window: positions that the layers attend to.
        block_size: tokens per block.
        slab_blocks: blocks per slab.
        index: cached blocks.
    """

    kind: int
    pool: SlabPool
    window: int | None
    block_size: int
    slab_blocks: int
    index: BlockIndex

    def first(self, position: int) -> int:
        """Return the index of the first block that a row at ``position`` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def peak(self, start: int, tokens: int, chunk: int) -> int:
        """Return the most slabs held at once by the blocks from index ``start``, the first of a slab, to ``tokens``."""
        slabs = self._slabs(-(-tokens // self.block_size) - start)
        if self.window is None:
            return slabs
        # A chunk needs blocks for its own tokens and for the window of its first row. They may start anywhere in a
        # block, and the blocks anywhere in a slab.
        blocks = (self.window - 1 + chunk + self.block_size - 2) // self.block_size + 1
        return min(slabs, (blocks + self.slab_blocks - 2) // self.slab_blocks + 1)

    def claim(self, sequence: Sequence, tokens: int, chunk: int) -> int:
        """Return the slabs that a sequence will need up to ``tokens`` in addition to those it holds."""
        released = max(0, self.first(sequence.computed) - sequence.shared) // self.slab_blocks
        start = sequence.shared + released * self.slab_blocks
        return max(0, self.peak(start, tokens, chunk) - self._slabs(len(self.table(sequence)) - start))

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Return the slabs to allocate for the positions before ``tokens``."""
        return max(0, self._slabs(-(-tokens // self.block_size) - len(self.table(sequence))))

    def extend(self, sequence: Sequence, slabs: list[int]) -> None:
        """Append all blocks of new slabs to a table."""
        self.table(sequence).extend(slab + offset for slab in slabs for offset in self.index.offsets)

    def table(self, sequence: Sequence) -> MutableSequence[int]:
        return sequence.tables[self.kind]

    def cached(self, sequence: Sequence, hit: int) -> list[int]:
        """Return the cached blocks that a sequence reuses if it starts with a hit of this length."""
        hashes = sequence.hashes[self.first(hit) : hit // self.block_size]
        return [block for block in map(self.index.get, hashes) if block is not None]

    def leading(self, hashes: Iterable[bytes]) -> int:
        """Return how many hashes have a cached block before the first that has none."""
        return len(list(takewhile(self.index.__contains__, hashes)))

    def _slabs(self, blocks: int) -> int:
        return -(-blocks // self.slab_blocks)


class KVBlocks:
    """The blocks of global and of local layers in one pool of slabs, and the block tables of sequences that hold them.

    Global layers keep all positions, local ones a window. A slab serves either kind, so that requests of any length
    fill the memory. Its blocks belong to consecutive positions of the sequence that allocated it.

    Args:
        shape: layers of each kind.
        slabs: number of slabs.
        block_size: tokens per block.
        window: positions that a local layer attends to, the row's own included; None: only without local layers.
        prefix_caching: reuse blocks with the same content.
        worth_waiting: number of additional cached tokens for which a sequence waits (:meth:`prefix_in_progress`).
    """

    def __init__(
        self,
        shape: KVShape,
        slabs: int,
        *,
        block_size: int,
        window: int | None,
        prefix_caching: bool = False,
        worth_waiting: int = _WORTH_WAITING,
    ) -> None:
        self.block_size, self._worth = block_size, worth_waiting
        self.prefix_caching = prefix_caching
        self.pool = SlabPool(slabs)
        self.groups: list[_Group] = []
        for kind, reach in enumerate([None] if window is None else [None, window]):
            if layers := shape[1 + kind]:
                step = layers * self.pool.lane
                count = shape.slab_blocks[kind]
                index = BlockIndex(range(0, step * count, step))
                self.groups.append(_Group(kind, self.pool, reach, block_size, count, index))

    def needed(self, tokens: int, chunk: int) -> int:
        """Return the most slabs that one sequence of ``tokens`` holds, computed in chunks of at most ``chunk``."""
        return sum(group.peak(0, tokens, chunk) for group in self.groups)

    def fits(self, tokens: int, chunk: int) -> bool:
        """Return whether a sequence of ``tokens`` can run alone, computed in chunks of at most ``chunk``."""
        return self.needed(tokens, chunk) <= self.pool.count

    def longest(self, chunk: int, most: int) -> int:
        """Return the length, at most ``most``, of the longest sequence that fits, in chunks of at most ``chunk``."""
        if self.fits(most, chunk):
            return most
        return bisect_right(range(most), self.pool.count, key=lambda tokens: self.needed(tokens, chunk)) - 1

    def concurrent(self, tokens: int, chunk: int) -> int:
        """Return how many sequences of ``tokens`` compute at once: one in chunks of ``chunk``, the others decode."""
        first = self.needed(tokens, min(chunk, tokens))
        return max(0, 1 + (self.pool.count - first) // self.needed(tokens, 1))

    def claim(self, sequence: Sequence, chunk: int) -> int:
        """Return the slabs that a running or waiting sequence will soon need in addition to those it holds: for the
        tokens it has, plus one block of output. Ignores the cached prefix of a waiting one."""
        tokens = self._tokens_soon(sequence)
        return sum(group.claim(sequence, tokens, chunk) for group in self.groups)

    def hit(self, sequence: Sequence) -> int:
        """Return the length in tokens of the longest cached prefix that the sequence can reuse.

        The prefix ends on a block boundary outside image spans, leaves at least one token to compute, and has all
        global blocks and the local blocks that the next token reads.
        """
        if not (self.prefix_caching and sequence.reuse):
            return 0
        extend_hashes(sequence, self.block_size)
        hit = len(sequence.ids) - 1
        for group in self.groups:
            if group.window is None:
                hit = min(hit, group.leading(sequence.hashes) * self.block_size)
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
        last, group = -(-tokens // self.block_size) - 1, self.groups[0]
        if group.window is not None:  # local layers release blocks that left the window
            return last < len(sequence.hashes)
        return last < len(sequence.hashes) and sequence.hashes[last] in group.index

    def can_begin(self, sequence: Sequence, hit: int, chunk: int, claimed: int) -> bool:
        """Return whether the slabs that a waiting sequence will soon need are available, without ``claimed`` ones."""
        tokens, start = self._tokens_soon(sequence), hit // self.block_size
        needed = sum(
            group.peak(start, tokens, chunk) + self.pool.unheld(group.cached(sequence, hit)) for group in self.groups
        )
        return needed + claimed <= self.pool.available

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

        Sets ``computed``, ``registered``, ``shared`` and, on the first call, ``cached``.

        Args:
            sequence: a waiting sequence.
            hit: current result of :meth:`hit`.
        """
        for group in self.groups:
            table = group.table(sequence)
            table.extend([-1] * group.first(hit))
            cached = group.cached(sequence, hit)
            self.pool.share(cached)
            table.extend(cached)
        sequence.computed = hit
        sequence.registered = sequence.shared = hit // self.block_size
        if sequence.cached is None:
            sequence.cached = hit

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the positions before ``end``; if too few are available, return False without changes.

        The sequence may already have more: if a step could not be launched, its chunk in the next one may be shorter.
        """
        counts = [group.missing(sequence, end) for group in self.groups]
        if not any(counts):
            return True
        if sum(counts) > self.pool.available:
            return False
        for group, count in zip(self.groups, counts, strict=True):
            group.extend(sequence, self.pool.allocate(count, group.slab_blocks))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Register full blocks for reuse and release blocks that left the window, after ``computed`` advanced."""
        if self.prefix_caching:
            extend_hashes(sequence, self.block_size)
            full = sequence.computed // self.block_size
            new, sequence.registered = slice(sequence.registered, full), full
            for group in self.groups:
                self.pool.register(group.index, group.table(sequence)[new], sequence.hashes[new])
        for group in self.groups:
            table, left = group.table(sequence), []
            for index in reversed(range(group.first(sequence.computed))):
                if table[index] == -1:
                    break
                left.append(table[index])
                table[index] = -1
            if left:
                self.pool.release(left)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence and reset ``computed``.

        The last blocks are released, and thus evicted, first: a prefix is useless without its beginning.
        """
        for group in self.groups:
            table = group.table(sequence)
            self.pool.release(block for block in reversed(table) if block != -1)
            del table[:]
        sequence.computed = sequence.registered = sequence.shared = 0

    def reset(self) -> None:
        """Evict all slabs that no sequence holds."""
        self.pool.reset()

    def _tokens_soon(self, sequence: Sequence) -> int:
        return min(sequence.limit, len(sequence.ids) + self.block_size)

    def _missing(self, sequence: Sequence, hit: int) -> int | None:
        """Return the index of the last uncached block that a local layer reads after a hit of this length, or None."""
        for group in self.groups:
            if group.window is not None:
                first, last = group.first(hit), hit // self.block_size
                known = group.leading(reversed(sequence.hashes[first:last]))
                if known < last - first:
                    return last - known - 1
        return None
