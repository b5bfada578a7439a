"""The KV cache, the interface of paged attention backends, and the reference backend: PyTorch's SDPA by segments.

The reference runs everywhere. It computes decode rows in padded groups and prefill segment by segment, and uses a mask
only where the rows of a group attend to different keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

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


Array = TypeVar("Array")


class KernelInputs(NamedTuple, Generic[Array]):
    """What the kernels read in one pass, on the host or on a device: the first B rows decode, the others prefill.

    Args:
        slots: int64 ``[T]``: KV cache slot of each row.
        lengths: int32 ``[B]``: number of keys of each decode row's sequence, the row's own included; at least 1.
        groups: int32 ``[B, 3]``: decode rows whose sequences share a prefix: index of the first row in ``members``,
            number of rows (at most ``DECODE_MEMBERS``; 0: nothing to do), and the number of keys in the common prefix.
            The first sequence of a group is its shortest.
        members: int32 ``[B]``: the decode rows of all groups, each once.
        ends: int32 ``[T - B]``: end of the key interval of each prefill row.
        tiles: int32 ``[n, 4]``: groups of consecutive prefill rows of one chunk, each by its first row in the pass, its
            number of rows (0: nothing to do), the position of its first row, and its chunk's index in
            ``prefill_tables``.
        decode_tables: int32 ``[B, W]``: blocks of each decode row's sequence by position // block size. Blocks outside
            the row's key interval are not read.
        prefill_tables: int32 ``[chunks, W]``: the same for each other chunk.
    """

    slots: Array
    lengths: Array
    groups: Array
    members: Array
    ends: Array
    tiles: Array
    decode_tables: Array
    prefill_tables: Array


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What the kernels read in one pass, in all layers of one kind.

    Args:
        inputs: tensors on the device, read whenever the plan attends.
        block_size: tokens per KV cache block.
        window: positions that a row attends to, its own included; 0 for all.
        shared: whether decode rows are expected to share prefixes, which only affects the speed.
    """

    inputs: KernelInputs[torch.Tensor]
    block_size: int
    window: int
    shared: bool = False


_TEXT_ROWS = 256  # per group: one mask for a long prompt would be large, and half of its scores wasted
_SHORTEST = 0.75  # minimum keys in a group, relative to the most: padding costs more than another group
_SHORTEST_ON_GPU = 0.25  # lower, because the kernel launches of another group cost more than the padding


class SegmentsBackend:
    """The reference for other backends: exact, in any precision, on any device."""

    name = "sdpa"

    def plan(self, batch: FlatBatch, *, local: bool, device: torch.device) -> SegmentsPlan:
        """Compute what all layers of one kind share in a pass."""
        counts, lows = np.diff(batch.offsets), batch.first_keys(local=local)
        single = batch.offsets[:-1][counts == 1]
        lengths = batch.ends[single] - lows[single]
        shortest = _SHORTEST if device.type == "cpu" else _SHORTEST_ON_GPU
        groups = []
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            similar = np.count_nonzero(lengths[order] >= shortest * lengths[order[0]])
            groups.append(single[np.sort(order[:similar]), None])
            order = order[similar:]
        for chunk in np.flatnonzero(counts > 1).tolist():
            start, end = batch.offsets[chunk : chunk + 2].tolist()
            parts = _query_parts(batch.positions[start:end], batch.ends[start:end])
            groups += [np.arange(start + first, start + last)[None] for first, last in parts]
        slots = upload(batch.slots(local=local), device)
        return SegmentsPlan(slots, [_group(batch, rows, local, device) for rows in groups])


@dataclass(frozen=True, slots=True)
class _Group:
    """Single rows of B sequences, or Q consecutive rows of one, which attend to at most K keys each.

    Args:
        rows: which rows of the pass.
        sequences: B.
        slots: int64 ``[B x K]``: slots of the keys; a sequence with fewer repeats its last one.
        mask: bool ``[B, 1, Q, K]``; None if every row attends to all K keys.
    """

    rows: torch.Tensor | slice
    sequences: int
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """Return ``[rows, heads, D]`` for queries of this shape."""
        (count, _, size), batch = query.shape, self.sequences
        parts = _gathered(cache, self.slots, query.dtype)
        key, value = (part.view(batch, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        if count == batch:  # the query heads that share a kv head become rows, so that its keys are read once
            rows = query.reshape(batch, key.shape[1], -1, size)
            return scaled_dot_product_attention(rows, key, value, self.mask, scale=scaling).reshape(query.shape)
        # The kv heads are the batch, so that their query heads share keys and mask; on a CPU without copies.
        rows = query.view(count, key.shape[1], -1, size).permute(1, 2, 0, 3)
        key, value = (part.transpose(0, 1).expand(-1, rows.shape[1], -1, -1) for part in (key, value))
        if key.device.type != "cpu":
            # With a mask, and rows one more than a multiple of 64, PyTorch's memory-efficient kernel (2.11) reads
            # beyond keys that heads share by a stride of 0: wrong results, or an illegal access.
            key, value = key.contiguous(), value.contiguous()
        attended = scaled_dot_product_attention(rows, key, value, self.mask, scale=scaling)
        return attended.permute(2, 0, 1, 3).reshape(query.shape)


@dataclass(frozen=True, slots=True)
class SegmentsPlan:
    """The attention of one pass as calls of PyTorch's SDPA. See :class:`panscan.model.layers.AttentionPlan`.

    Args:
        slots: int64 ``[T]``: KV cache slot of each row.
        groups: groups of rows that cover the pass once.
    """

    slots: torch.Tensor
    groups: list[_Group]

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """Return the attention of ``query`` ``[T, heads, D]`` over the cache, contiguous in the same shape."""
        # Without cuDNN, which builds a plan for every new number of keys, and the number changes in each decode step:
        # on an H200, a decode step of the 4B model took 89 ms instead of 36.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels) if query.device.type == "cuda" else nullcontext():
            if len(self.groups) == 1:
                return self.groups[0].attend(query, cache, scaling).contiguous()
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            for group in self.groups:
                output[group.rows] = group.attend(query[group.rows], cache, scaling)
            return output


def _group(batch: FlatBatch, rows: NDArray[np.int64], local: bool, device: torch.device) -> _Group:
    """Return the group of these rows, int ``[B, Q]``."""
    lows, ends, size = batch.first_keys(local=local)[rows], batch.ends[rows], batch.block_size
    first, lengths = lows[:, :1], ends[:, -1:] - lows[:, :1]  # both bounds ascend with the position
    most = int(lengths.max())
    positions = first + np.minimum(np.arange(most), lengths - 1)
    blocks = batch.tables[local][batch.chunk_of_row[rows[:, :1]], positions // size].astype(np.int64)
    mask = None
    if (lows > first).any() or (ends - first < most).any():
        low, high = upload(np.stack([lows - first, ends - first])[:, :, None, :, None], device)
        keys = torch.arange(most, device=device)
        mask = keys < high
        if rows.shape[1] > 1:
            mask &= keys >= low
    run = slice(int(rows[0, 0]), int(rows[0, -1]) + 1)
    indices = run if len(rows) == 1 else upload(rows[:, 0].astype(np.int64), device)
    slots = blocks * size + positions % size
    return _Group(indices, len(rows), upload(slots.ravel(), device), mask)


def _gathered(cache: LayerCache, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of these slots, ``[n, kv_heads, D]`` of this type."""
    kind = cache.keys.dtype
    bits = torch.uint8 if kind == torch.float8_e4m3fn else kind  # index_select does not take float8 on every device
    keys, values = (part.view(bits).index_select(0, slots).view(kind) for part in cache[:2])
    if cache.scales is not None:
        key_scales, value_scales = cache.scales.index_select(2, slots).transpose(1, 2)[..., None]
        keys, values = keys * key_scales, values * value_scales
    return keys.to(dtype), values.to(dtype)


def _query_parts(positions: NDArray[np.int64], ends: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yield ``(first, last + 1)`` of the rows of a chunk: image spans whole, text at most ``_TEXT_ROWS`` at once."""
    image = ends > positions + 1
    image[1:] |= ends[1:] == ends[:-1]
    cuts = np.flatnonzero(np.diff(np.where(image, ends, 0))) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(ends)]):
        rows = end - start if image[start] else _TEXT_ROWS
        for first in range(start, end, rows):
            yield first, min(first + rows, end)
