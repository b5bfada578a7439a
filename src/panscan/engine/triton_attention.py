"""Paged attention with our own kernels: decode rows in one launch, the prefill rows of all chunks in another.

The kernels' inputs are tensors whose shapes alone decide what is launched, so a CUDA graph can record the launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core.gpu_features import refusal
from panscan.engine.attention import KernelInputs, KernelPlan
from panscan.engine.scheduling.batch import FlatBatch
from panscan.images.transfer import upload
from panscan.model.layers import LayerCache

HEAD_SIZES = (16, 32, 64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_SHARED = 128  # keys: sequences with a shorter common prefix are not grouped
_ALIGNMENT = 16  # bytes: Triton compiles a kernel again for pointers that are not multiples of this


def unsupported_reason(head_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot run there, or None if they can. On a CPU they need Triton's interpreter."""
    if head_size not in HEAD_SIZES:
        return f"heads of size {head_size}: the Triton kernels take {', '.join(map(str, HEAD_SIZES))}"
    if dtype not in _DTYPES:
        return f"{dtype}: the Triton kernels take {', '.join(map(str, _DTYPES))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        from panscan.core.jit import INTERPRETED

        return None if device.type == "cpu" and INTERPRETED else f"the Triton kernels need an NVIDIA GPU, not {device}"
    return refusal("the Triton kernels need", "triton", torch.cuda.get_device_capability(device), str(device))


class TritonPlan(KernelPlan):
    """The attention of one pass as kernel launches. See :class:`panscan.model.layers.AttentionPlan`."""

    __slots__ = ()

    @property
    def slots(self) -> torch.Tensor:
        """int64 ``[T]``: KV cache slot of each row."""
        return self.inputs.slots

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """Return the attention of ``query`` ``[T, heads, D]`` over the cache, contiguous in the same shape."""
        from panscan.engine import kernels

        output = query.new_empty(query.shape)
        with torch.cuda.device(query.get_device()):  # Triton launches on the current device; no effect on a CPU
            kernels.decode(query, cache, output, self, scaling)
            kernels.prefill(query, cache, output, self, scaling)
        return output


class TritonBackend:
    """Paged attention with Triton kernels, for layers that share one head size.

    Args:
        head_size: size of the attention heads; see :func:`unsupported_reason`.
        dtype: dtype of queries, keys and values.
        units: number of decode rows that keep the device busy (:func:`panscan.engine.kernels.decode_units`). With
            fewer, rows that share a prefix are not grouped.
    """

    name = "triton"

    def __init__(self, head_size: int, dtype: torch.dtype, units: int = 1) -> None:
        from panscan.engine.kernels import DECODE_MEMBERS, prefill_sizes

        self._members, self.units = DECODE_MEMBERS, units
        self.tile_rows = prefill_sizes(head_size, dtype.itemsize, 0).rows  # with any shared memory

    def plan(self, batch: FlatBatch, *, local: bool, device: torch.device) -> TritonPlan:
        """Compute what all layers of one kind share in a pass."""
        inputs = self.inputs(batch, local=local)
        tensors = KernelInputs(*unpack(upload(pack(inputs), device), inputs))
        window = batch.window if local else 0
        return TritonPlan(tensors, batch.block_size, window, shares_prefix(inputs))

    def inputs(self, batch: FlatBatch, *, local: bool) -> KernelInputs[NDArray[Any]]:
        """Return the kernels' inputs for one pass. Its leading single rows decode."""
        single, tables = batch.decode_rows, batch.tables[local]
        groups, members = prefix_groups(batch, local=local, most=self._members, units=self.units)
        tiles = [
            (row, min(end - row, self.tile_rows), chunk)
            for chunk, (first, end) in enumerate(pairwise(batch.offsets[single:].tolist()))
            for row in range(first, end, self.tile_rows)
        ]
        first_rows, rows, chunks = np.array(tiles, np.int64).reshape(-1, 3).T
        keys = batch.ends[first_rows + rows - 1] - batch.first_keys(local=local)[first_rows]
        # Most keys first: programs start in this order, and the last should be short.
        order = np.argsort(-keys, kind="stable")
        return KernelInputs(
            batch.slots(local=local),
            batch.ends[:single],
            groups,
            members,
            batch.ends[single:],
            np.stack([first_rows, rows, batch.positions[first_rows], chunks], axis=1)[order].astype(np.int32),
            tables[:single],
            tables[single:],
        )


def shares_prefix(inputs: KernelInputs[NDArray[Any]]) -> bool:
    """Return whether any decode rows share a prefix."""
    return bool(inputs.groups[:, 2].any())


def pack(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """Return the bytes of all arrays in one buffer, so that one copy takes them to a device."""
    *offsets, total = _offsets(arrays)
    packed = np.zeros(max(total, _ALIGNMENT), np.uint8)  # PyTorch cannot change the dtype of views of an empty array
    for array, offset in zip(arrays, offsets, strict=True):
        packed[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Return views into a packed buffer (see :func:`pack`) with the shapes and dtypes of the arrays."""
    return [
        packed[offset : offset + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, offset in zip(arrays, _offsets(arrays)[:-1], strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, dtype.name)
    return torch_dtype


def _offsets(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the byte offset of each array in the packed buffer, and the size of the buffer."""
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return list(accumulate(sizes, initial=0))


def prefix_groups(
    batch: FlatBatch, *, local: bool, most: int, units: int = 1
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return groups int32 ``[B, 3]`` and members int32 ``[B]`` of the B decode rows of a pass.

    Rows whose sequences share a prefix form a group, so that its keys and values are read once. A group has the index
    of its first row in ``members``, its number of rows, and the number of leading keys that all of them share; its
    shortest sequence comes first. Groups with most keys come first, and zeros fill the array. Keys below the windows
    of all rows count as shared.

    Args:
        batch: the pass.
        local: for layers with a sliding window.
        most: maximum rows per group.
        units: rows that keep the device busy. With fewer, each row is alone.
    """
    count = batch.decode_rows
    candidates = _candidates(batch, most) if count >= max(units, 2) else ()
    groups = [(rows.tolist(), shared) for rows in candidates if (shared := _shared_keys(batch, rows, local))]
    table = np.zeros((count, 3), np.int32)
    if not groups:
        table[:, 0] = np.arange(count)
        table[:, 1] = 1
        return table, np.argsort(-batch.ends[:count], kind="stable").astype(np.int32)
    lengths = batch.ends[:count].tolist()
    grouped = {row for rows, _ in groups for row in rows}
    groups += [([row], 0) for row in range(count) if row not in grouped]
    groups.sort(key=lambda group: group[1] * (len(group[0]) - 1) - sum(lengths[row] for row in group[0]))
    starts = accumulate((len(rows) for rows, _ in groups), initial=0)
    table[: len(groups)] = [(start, len(rows), shared) for start, (rows, shared) in zip(starts, groups, strict=False)]
    return table, np.array([row for rows, _ in groups for row in rows], np.int32)


def _candidates(batch: FlatBatch, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield disjoint sets of at least two rows, the shortest sequence of each first, that may share a prefix.

    They have a common block at one of a few positions, the last positions first: among many questions after one system
    prompt, those about the same document belong together.
    """
    count = batch.decode_rows
    table, lengths = batch.tables[False][:count], batch.ends[:count]
    remaining = np.argsort(lengths, kind="stable")
    probes = (int(lengths.max(initial=1)) - 1) // _MIN_SHARED  # at 1, 2, 4 ... times the shortest prefix
    for power in reversed(range(probes.bit_length())):
        probe = _MIN_SHARED << power
        blocks = np.where(lengths[remaining] > probe, table[remaining, (probe - 1) // batch.block_size], -1)
        common, counts = np.unique(blocks, return_counts=True)
        common = common[(counts > 1) & (common >= 0)]
        for block in common:
            run = remaining[blocks == block]
            yield from (part for part in np.array_split(run, -(-len(run) // most)) if len(part) > 1)
        remaining = remaining[~np.isin(blocks, common)]


def _shared_keys(batch: FlatBatch, rows: NDArray[np.int64], local: bool) -> int:
    """Return how many leading keys the rows share, or 0 if too few of them are inside all windows."""
    size, lengths = batch.block_size, batch.ends[rows]
    begin = max(int(lengths.max()) - batch.window, 0) // size if local else 0
    end = (int(lengths.min()) - 1) // size  # without the block that the shortest sequence writes to
    blocks = batch.tables[local][rows, begin:end]
    different = ((blocks != blocks[0]) | (blocks < 0)).any(0)
    shared = int(different.argmax()) if different.any() else different.size
    return (begin + shared) * size if shared * size >= _MIN_SHARED else 0
