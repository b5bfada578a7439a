"""The KV cache, the interface of paged attention backends, and the reference backend: PyTorch's SDPA by segments.

The reference runs everywhere. It computes decode rows in padded groups and prefill segment by segment. It gathers the
keys of a sequence once per layer, and uses a mask only where the rows of a segment attend to different keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from panscan.engine.scheduling.batch import FlatBatch
from panscan.engine.scheduling.kv_sizes import KVShape, lane_cells
from panscan.images.transfer import upload
from panscan.model.layers import LayerCache, LayerFacts


class KVCache:
    """Keys and values of every layer, ``layers[layer]``, with a slot for each token of each block.

    Layers share memory, and differ in where theirs begins. A cell is ``block size`` rows, and a lane is one cell of
    every slab (:class:`panscan.engine.scheduling.kv_sizes.KVShape`): block b of the n-th layer of a kind is the cell n
    lanes behind cell b. ``spare`` is a block in a slab more than requested; rows that only pad a pass use it.

    Args:
        layers: shape, dtype and device of each layer's keys and values, which are the same in all.
        slabs: number of slabs.
        block_size: tokens per block.
    """

    def __init__(self, layers: Sequence[LayerFacts], slabs: int, block_size: int) -> None:
        shape, layer, self.spare = KVShape.of(layers), layers[0], slabs
        lane = lane_cells(slabs) * block_size
        rows, heads = shape.cells * lane, layer.kv_heads
        # CPU pages are committed on first write.
        keys, values = (
            torch.empty(rows, heads, layer.head_size, dtype=layer.kv_dtype, device=layer.device) for _ in "kv"
        )
        scales = torch.empty(2, heads, rows, device=layer.device) if layer.scaled else None
        counts = [0, 0]
        self.layers = []
        for layer in layers:
            start = counts[layer.local] * lane
            end = start + lane * (1 + (shape.slab_blocks[layer.local] - 1) * shape[1 + layer.local])
            part = None if scales is None else scales[:, :, start:end]
            self.layers.append(LayerCache(keys[start:end], values[start:end], part))
            counts[layer.local] += 1


_TEXT_ROWS = 256  # per part: one mask for a long prompt would be large, and half of its scores wasted
_SHORTEST = 0.75  # minimum length in a decode group, relative to the longest: padding costs more than another group
_SHORTEST_ON_GPU = 0.25  # lower, because the kernel launches of another group cost more than the padding


class SegmentsBackend:
    """The reference for other backends: exact, in any precision, on any device."""

    def plan(self, batch: FlatBatch, *, local: bool, device: torch.device) -> SegmentsPlan:
        """Compute what all layers of one kind share in a pass."""
        counts = np.diff(batch.offsets)
        single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        rows = batch.offsets[single]
        lengths = batch.ends[rows] - batch.first_keys(local=local)[rows]
        shortest = _SHORTEST if device.type == "cpu" else _SHORTEST_ON_GPU
        decode = []
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            similar = np.count_nonzero(lengths[order] >= shortest * lengths[order[0]])
            chunks, order = single[np.sort(order[:similar])], order[similar:]
            slots, keys = _key_slots(batch, chunks, local)
            mask = None
            if keys.min() < keys.max():
                mask = upload((np.arange(slots.shape[1]) < keys[:, None])[:, None, None], device)
            members = upload(batch.offsets[chunks].astype(np.int64), device)
            decode.append(_Decode(members, upload(slots.ravel(), device), mask))
        return SegmentsPlan(
            upload(batch.slots(local=local), device),
            decode,
            _prefill(batch, several.tolist(), local, device) if len(several) else [],
        )


@dataclass(frozen=True, slots=True)
class _Decode:
    """Single rows of B different sequences.

    Args:
        rows: int64 ``[B]``: their rows in the pass.
        slots: int64 ``[B x K]``: slots of their keys, row by row; a shorter row repeats its last one.
        mask: bool ``[B, 1, 1, K]``; None if every row has K keys.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """Return ``[B, heads, D]`` for queries ``[B, heads, D]``."""
        batch, heads, size = query.shape
        parts = _gathered(cache, self.slots, query.dtype)
        key, value = (part.view(batch, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        # The query heads that share a kv head become rows, so that its keys are read once.
        grouped = query.reshape(batch, key.shape[1], -1, size)
        return scaled_dot_product_attention(grouped, key, value, self.mask, scale=scaling).reshape(batch, heads, size)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``[start, end)`` of a pass and the keys ``[first, last)`` among those that their chunk gathered.

    Args:
        mask: bool ``[rows, keys]``; None if every row attends to all of the keys.
    """

    start: int
    end: int
    first: int
    last: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A chunk of several rows.

    Args:
        slots: int64 ``[K]``: slots of all keys that any of the rows attends to, in order.
        pieces: cover the rows once.
    """

    slots: torch.Tensor
    pieces: list[_Piece]

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float, output: torch.Tensor) -> None:
        """Fill the chunk's rows of ``output [T, heads, D]`` from those of ``query [T, heads, D]``."""
        # The kv heads are the batch, so that their query heads share keys and mask; on a CPU without copies.
        key, value = (part.transpose(0, 1)[:, None] for part in _gathered(cache, self.slots, query.dtype))
        kv_heads, (_, heads, size) = key.shape[0], query.shape
        for piece in self.pieces:
            rows = query[piece.start : piece.end].view(-1, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
            k, v = (part[:, :, piece.first : piece.last].expand(-1, rows.shape[1], -1, -1) for part in (key, value))
            if k.device.type != "cpu":
                # With a mask, and rows one more than a multiple of 64, PyTorch's memory-efficient kernel (2.11) reads
                # beyond keys that heads share by a stride of 0: wrong results, or an illegal access.
                k, v = k.contiguous(), v.contiguous()
            attended = scaled_dot_product_attention(rows, k, v, piece.mask, scale=scaling)
            output[piece.start : piece.end] = attended.permute(2, 0, 1, 3).reshape(-1, heads, size)


@dataclass(frozen=True, slots=True)
class SegmentsPlan:
    """The attention of one pass as calls of PyTorch's SDPA. See :class:`panscan.model.layers.AttentionPlan`.

    Args:
        slots: int64 ``[T]``: KV cache slot of each row.
        decode: groups of single rows.
        prefill: the other chunks.
    """

    slots: torch.Tensor
    decode: list[_Decode]
    prefill: list[_Prefill]

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """See :class:`panscan.model.layers.AttentionPlan`."""
        # Without cuDNN, which builds a plan for every new number of keys, and the number changes in each decode step:
        # on an H200, a decode step of the 4B model took 89 ms instead of 36.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels) if query.device.type == "cuda" else nullcontext():
            if len(self.decode) == 1 and not self.prefill:
                return self.decode[0].attend(query, cache, scaling).contiguous()
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            for group in self.decode:
                output[group.rows] = group.attend(query[group.rows], cache, scaling)
            for chunk in self.prefill:
                chunk.attend(query, cache, scaling, output)
            return output


def _gathered(cache: LayerCache, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of these slots, ``[n, kv_heads, D]`` of this type."""
    if cache.keys.dtype == torch.float8_e4m3fn:  # index_select does not support float8 on every device
        keys, values = (part.view(torch.uint8).index_select(0, slots).view(part.dtype) for part in cache[:2])
        return keys.to(dtype), values.to(dtype)
    keys, values = cache.keys.index_select(0, slots), cache.values.index_select(0, slots)
    if cache.scales is None:
        return keys, values
    key_scales, value_scales = cache.scales.index_select(2, slots).transpose(1, 2)[..., None]
    return (keys * key_scales).to(dtype), (values * value_scales).to(dtype)


def _prefill(batch: FlatBatch, chunks: Sequence[int], local: bool, device: torch.device) -> list[_Prefill]:
    lows = batch.first_keys(local=local)
    bounds = upload(np.stack([lows, batch.ends]), device)
    plans = []
    for chunk in chunks:
        start, end = batch.offsets[chunk : chunk + 2].tolist()
        slots, _ = _key_slots(batch, np.array([chunk]), local)
        pieces, ends = [], batch.ends[start:end]
        for begin, stop in _query_parts(batch.positions[start:end], ends):
            rows = slice(start + begin, start + stop)
            first, last = int(lows[rows.start]), int(ends[stop - 1])
            keys = torch.arange(first, last, device=device)
            mask = None
            if ends[begin] < last:
                mask = keys < bounds[1, rows, None]
            if first < lows[rows.stop - 1]:
                inside = keys >= bounds[0, rows, None]
                mask = inside if mask is None else mask & inside
            gathered = int(lows[start])
            pieces.append(_Piece(rows.start, rows.stop, first - gathered, last - gathered, mask))
        plans.append(_Prefill(upload(slots[0], device), pieces))
    return plans


def _query_parts(positions: NDArray[np.int64], ends: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yield ``(first, last + 1)`` of the rows of a chunk: image spans whole, text at most ``_TEXT_ROWS`` at once."""
    image = ends > positions + 1
    image[1:] |= ends[1:] == ends[:-1]
    cuts = np.flatnonzero(np.diff(np.where(image, ends, 0))) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(ends)]):
        rows = end - start if image[start] else _TEXT_ROWS
        for first in range(start, end, rows):
            yield first, min(first + rows, end)


def _key_slots(batch: FlatBatch, chunks: NDArray[np.int64], local: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots of all keys that the chunks attend to, int64 ``[chunks, K]`` (a shorter chunk repeats its last
    one), and how many keys each has, int64 ``[chunks]``."""
    size = batch.block_size
    lows = batch.first_keys(local=local)[batch.offsets[chunks]]
    lengths = batch.ends[batch.offsets[chunks + 1] - 1] - lows
    positions = lows[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    blocks = batch.tables[local][chunks[:, None], positions // size].astype(np.int64)
    return blocks * size + positions % size, lengths
