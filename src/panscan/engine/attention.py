"""The interface of paged attention backends, and the reference backend: PyTorch's SDPA, segment by segment.

The reference runs everywhere. It attends decode rows in padded groups and prefill segment by segment. It gathers a
sequence's keys once per layer, and uses a mask only where an interval of keys is not enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from panscan.engine.scheduling.sequence import AttentionRows, ChunkRows, Segment

__all__ = ["AttentionPlan", "Backend", "SegmentsBackend"]


class AttentionPlan(Protocol):
    """What a backend made of one pass, for the layers of one kind on one device."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """Write the rows' keys and values to their slots of the cache, then attend to what is there.

        Args:
            query: ``[1, heads, T, D]``.
            key: ``[1, kv heads, T, D]``; so is ``value``.
            value: of the rows.
            k_cache: ``[slots, kv heads, D]`` of this layer; so is ``v_cache``. Rows of nobody's blocks are not read.
            v_cache: values.
            scaling: of the scores.

        Returns:
            ``[1, T, heads, D]``.
        """
        ...


class Backend(Protocol):
    """One way to compute paged attention."""

    def plan(self, rows: AttentionRows, *, local: bool, device: torch.device) -> AttentionPlan:
        """Whatever is the same for all layers of a kind, computed once per pass."""
        ...


_TEXT_ROWS = 256  # of text at once: a mask of all of a long prompt would be large, and half of its work in vain
_SHORTEST = 0.75  # of the keys of the longest row in a group of decode rows: more than a quarter of padding is no gain
_SHORTEST_ON_GPU = 0.25  # where another group's kernel launches cost more than the padding


class SegmentsBackend:
    """The reference of the other backends: exact, in any precision, on any device."""

    def plan(self, rows: AttentionRows, *, local: bool, device: torch.device) -> SegmentsPlan:
        """Slots and masks of one pass."""
        starts, at = [], 0
        for chunk in rows.chunks:
            starts.append(at)
            at += chunk.end - chunk.start
        placed = list(zip(starts, rows.chunks, strict=True))
        single = [(start, chunk) for start, chunk in placed if chunk.end - chunk.start == 1]
        several = [(start, chunk) for start, chunk in placed if chunk.end - chunk.start > 1]
        return SegmentsPlan(
            torch.tensor(rows.slots(local=local), device=device),
            [_decode(rows, group, local, device) for group in _groups(rows, single, local, device)],
            [_prefill(rows, start, chunk, local, device) for start, chunk in several],
        )


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one position each, every one of another sequence.

    ``rows``: int64 ``[B]``. ``slots``: of their keys, int64 ``[B, K]``, a shorter row's last one repeated. ``mask``:
    bool ``[B, 1, 1, K]``, None if they all have K keys.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float) -> torch.Tensor:
        """``[B, heads, D]`` of queries ``[B, heads, D]``. The query heads of a kv head are rows against its keys."""
        batch, heads, size = query.shape
        key, value = (
            cache.index_select(0, self.slots.flatten()).view(*self.slots.shape, *cache.shape[1:]).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        grouped = query.reshape(batch, key.shape[1], -1, size)
        return scaled_dot_product_attention(grouped, key, value, self.mask, scale=scaling).reshape(batch, heads, size)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``[start, end)`` of a pass against keys ``[first, last)`` of what their chunk gathered.

    ``mask``: bool ``[rows, keys]``, None if every row sees them all.
    """

    start: int
    end: int
    first: int
    last: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A chunk of several rows. ``slots``: of all keys that any of them sees, int64 ``[K]``, in order."""

    slots: torch.Tensor
    pieces: list[_Piece]

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float, output: torch.Tensor
    ) -> None:
        """Fill this chunk's rows of ``output [T, heads, D]`` from those of ``query``, of the same shape."""
        # The kv heads are the batch, so that their query heads share keys and mask; on a CPU without copies.
        key, value = (cache.index_select(0, self.slots).transpose(0, 1)[:, None] for cache in (k_cache, v_cache))
        kv_heads, (_, heads, size) = key.shape[0], query.shape
        for piece in self.pieces:
            rows = query[piece.start : piece.end].view(-1, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
            k, v = (part[:, :, piece.first : piece.last].expand(-1, rows.shape[1], -1, -1) for part in (key, value))
            if k.device.type != "cpu":
                # With a mask, and rows one more than a multiple of 64, PyTorch's memory-efficient kernel (2.11) reads
                # beyond keys that heads share by a stride of 0: wrong results, or an illegal access.
                k, v = k.contiguous(), v.contiguous()
            found = scaled_dot_product_attention(rows, k, v, piece.mask, scale=scaling)
            output[piece.start : piece.end] = found.permute(2, 0, 1, 3).reshape(-1, heads, size)


@dataclass(frozen=True, slots=True)
class SegmentsPlan:
    """One pass: slots of all rows, int64 ``[T]``, and how they attend."""

    slots: torch.Tensor
    decode: list[_Decode]
    prefill: list[_Prefill]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`panscan.engine.attention.AttentionPlan`."""
        k_cache.index_copy_(0, self.slots, key[0].transpose(0, 1))
        v_cache.index_copy_(0, self.slots, value[0].transpose(0, 1))
        with _kernels(query.device):
            return self._read(query[0].transpose(0, 1), k_cache, v_cache, scaling)[None]

    def _read(self, rows: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float) -> torch.Tensor:
        """``[T, heads, D]`` of queries ``[T, heads, D]``."""
        if len(self.decode) == 1 and not self.prefill:
            return self.decode[0].attend(rows, k_cache, v_cache, scaling)
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for group in self.decode:
            output[group.rows] = group.attend(rows[group.rows], k_cache, v_cache, scaling)
        for chunk in self.prefill:
            chunk.attend(rows, k_cache, v_cache, scaling, output)
        return output


def _kernels(device: torch.device) -> AbstractContextManager[None]:
    """On NVIDIA without cuDNN's: it builds a plan for every new number of keys, which is each step's (on an H200 that
    made the 4B model's decode step 89 ms instead of 36)."""
    if device.type != "cuda":
        return nullcontext()
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kinds)


_Placed = tuple[int, ChunkRows]  # with the number of its first row in the pass


def _groups(
    rows: AttentionRows, single: Sequence[_Placed], local: bool, device: torch.device
) -> Iterator[list[_Placed]]:
    """Rows whose numbers of keys are alike, each group in the order of the pass."""
    shortest = _SHORTEST if device.type == "cpu" else _SHORTEST_ON_GPU
    lengths = {start: chunk.end - rows.first_key(chunk.start, local=local) for start, chunk in single}
    group: list[_Placed] = []
    for placed in sorted(single, key=lambda placed: -lengths[placed[0]]):
        if group and lengths[placed[0]] < shortest * lengths[group[0][0]]:
            yield sorted(group, key=lambda placed: placed[0])
            group = []
        group.append(placed)
    if group:
        yield sorted(group, key=lambda placed: placed[0])


def _decode(rows: AttentionRows, group: Sequence[_Placed], local: bool, device: torch.device) -> _Decode:
    chunks = [chunk for _, chunk in group]
    slots, lengths = _key_slots(rows, chunks, local, device)
    mask = None
    if len(set(lengths)) > 1:
        counts = torch.tensor(lengths, device=device)
        mask = (torch.arange(slots.shape[1], device=device) < counts[:, None])[:, None, None]
    return _Decode(torch.tensor([start for start, _ in group], device=device), slots, mask)


def _prefill(rows: AttentionRows, start: int, chunk: ChunkRows, local: bool, device: torch.device) -> _Prefill:
    slots, _ = _key_slots(rows, [chunk], local, device)
    pieces = [
        _piece(rows, part, start - chunk.start, rows.first_key(chunk.start, local=local), local, device)
        for segment in chunk.segments
        for part in _parts(segment)
    ]
    return _Prefill(slots[0], pieces)


def _parts(segment: Segment) -> Iterator[Segment]:
    """An image block whole, long text in parts."""
    if segment.image:
        yield segment
        return
    for start in range(segment.start, segment.end, _TEXT_ROWS):
        yield Segment(start, min(start + _TEXT_ROWS, segment.end), image=False)


def _piece(rows: AttentionRows, part: Segment, shift: int, gathered: int, local: bool, device: torch.device) -> _Piece:
    """``shift``: from a position to its row in the pass; ``gathered``: position of the chunk's first key."""
    first, last = rows.first_key(part.start, local=local), part.end
    causal = not part.image and part.end - part.start > 1
    windowed = rows.first_key(part.end - 1, local=local) > first
    mask = None
    if causal or windowed:
        at = torch.arange(part.start, part.end, device=device)[:, None]
        keys = torch.arange(first, last, device=device)
        mask = keys <= at if causal else torch.ones(len(at), len(keys), dtype=torch.bool, device=device)
        if windowed:
            mask &= keys > at - rows.window
    return _Piece(part.start + shift, part.end + shift, first - gathered, last - gathered, mask)


def _key_slots(
    rows: AttentionRows, chunks: Sequence[ChunkRows], local: bool, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Slots of all keys that chunks see, int64 ``[chunks, longest]`` (a shorter one's last repeated), and how many."""
    size = rows.block_size
    firsts = [rows.first_key(chunk.start, local=local) for chunk in chunks]
    held = [
        chunk.tables[local][first // size : (chunk.end - 1) // size + 1]
        for first, chunk in zip(firsts, chunks, strict=True)
    ]
    width = max(map(len, held))
    flat = [block for blocks in held for block in (*blocks, *[0] * (width - len(blocks)))]
    tables = torch.tensor(flat, device=device).view(len(chunks), width)
    lengths = [chunk.end - first for first, chunk in zip(firsts, chunks, strict=True)]
    at = torch.arange(max(lengths), device=device).expand(len(chunks), -1)
    if len(set(lengths)) > 1:
        at = at.minimum(torch.tensor(lengths, device=device)[:, None] - 1)
    at = at + torch.tensor([first % size for first in firsts], device=device)[:, None]
    return tables.gather(1, at // size) * size + at % size, lengths
