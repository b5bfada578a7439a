"""Paged attention by kernels of our own: decode rows in one launch, prefill rows of all chunks in another.

What a plan holds for them are tensors whose shapes alone decide what is launched, so that a CUDA graph may keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.engine.scheduling.sequence import AttentionRows, ChunkRows
from panscan.images.transfer import upload

__all__ = [
    "HEAD_SIZES",
    "DecodeRows",
    "PrefillRows",
    "TritonBackend",
    "TritonPlan",
    "leading_singles",
    "unsupported_reason",
]

HEAD_SIZES = (16, 32, 64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITY = (8, 0)  # the first with bfloat16


def unsupported_reason(head_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot run there, or None if they can. On a CPU they can where Triton interprets them."""
    if head_size not in HEAD_SIZES:
        return f"heads of size {head_size}: the Triton kernels take {', '.join(map(str, HEAD_SIZES))}"
    if dtype not in _DTYPES:
        return f"{dtype}: the Triton kernels take {', '.join(map(str, _DTYPES))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        from panscan.model.jit import INTERPRETED

        return None if device.type == "cpu" and INTERPRETED else f"the Triton kernels need an NVIDIA GPU, not {device}"
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        return "the Triton kernels need compute capability {}.{}; {} has {}.{}".format(*_CAPABILITY, device, *found)
    return None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows ``[0, B)`` of a pass, each the last of its sequence.

    Args:
        tables: int32 ``[B, W]``: blocks by position // block size. Those that the row does not see are not read.
        lengths: int32 ``[B]``: keys of each sequence, the row's own included; at least 1.
        window: positions that a row sees, its own included; 0: all.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    window: int


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of a pass from ``start`` on, in tiles of consecutive positions of one chunk.

    Args:
        start: the first of them.
        tiles: int32 ``[n, 4]``: first row in the pass, rows (0: nothing to do), position of the first, chunk.
        tile_rows: that a tile has at most; a power of two, at least 16.
        ends: int32 ``[rows]``: end of the keys that each row sees.
        tables: int32 ``[chunks, W]``, as for decode.
        window: as for decode.
    """

    start: int
    tiles: torch.Tensor
    tile_rows: int
    ends: torch.Tensor
    tables: torch.Tensor
    window: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One pass: slots of all rows, int64 ``[T]``, and how they attend."""

    block_size: int
    slots: torch.Tensor
    decode: DecodeRows | None
    prefill: PrefillRows | None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`panscan.engine.attention.AttentionPlan`. All are contiguous in D, the caches as a whole."""
        _, heads, rows, size = query.shape
        output = query.new_empty(1, rows, heads, size)
        with torch.cuda.device(query.get_device()):  # Triton launches on the present device; nothing on a CPU
            self._launch(query, key, value, k_cache, v_cache, output, scaling)
        return output

    def _launch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, output: torch.Tensor, scaling: float,
    ) -> None:  # fmt: skip
        from panscan.engine import kernels

        kernels.write(key, value, k_cache, v_cache, self.slots)
        if (decode := self.decode) is not None:
            kernels.decode(
                query, k_cache, v_cache, output, tables=decode.tables, lengths=decode.lengths,
                window=decode.window, page_size=self.block_size, scaling=scaling,
            )  # fmt: skip
        if (prefill := self.prefill) is not None:
            kernels.prefill(
                query, k_cache, v_cache, output, start=prefill.start, tiles=prefill.tiles,
                tile_rows=prefill.tile_rows, ends=prefill.ends, tables=prefill.tables,
                window=prefill.window, page_size=self.block_size, scaling=scaling,
            )  # fmt: skip


class TritonBackend:
    """Plans for layers of one kind of heads.

    Args:
        head_size: of their keys; see :func:`unsupported_reason`.
        dtype: of queries, keys and values.
    """

    def __init__(self, head_size: int, dtype: torch.dtype) -> None:
        from panscan.engine.kernels import prefill_sizes

        self._tile_rows = prefill_sizes(head_size, dtype.itemsize, shared_bytes=0).rows  # the same for any

    def plan(self, rows: AttentionRows, *, local: bool, device: torch.device) -> TritonPlan:
        """Slots, tables, ends and tiles of one pass. Its leading single rows decode."""
        placed, size, window = _Placed.of(rows.chunks), rows.block_size, rows.window if local else 0
        host_tables, host_ends = _tables(rows, local), _ends(rows.chunks, placed)
        blocks = host_tables[placed.chunks, placed.positions // size].astype(np.int64)
        slots = upload(blocks * size + placed.positions % size, device)
        tables, ends = upload(host_tables, device), upload(host_ends, device)
        single = leading_singles(rows.chunks)
        first = prefill = None
        if single:
            first = DecodeRows(tables[:single], ends[:single], window)
        if single < len(rows.chunks):
            tiles = upload(_tiles(placed, host_ends, single, self._tile_rows, window), device)
            prefill = PrefillRows(single, tiles, self._tile_rows, ends[single:], tables[single:], window)
        return TritonPlan(size, slots, first, prefill)


def leading_singles(chunks: Sequence[ChunkRows]) -> int:
    """How many chunks of one row a pass begins with."""
    return next((at for at, chunk in enumerate(chunks) if chunk.end - chunk.start > 1), len(chunks))


_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where the rows of a pass stand.

    Args:
        starts: position of each chunk's first row.
        counts: rows of each chunk.
        firsts: number of each chunk's first row in the pass.
        chunks: of each row.
        positions: of each row.
    """

    starts: _Ints
    counts: _Ints
    firsts: _Ints
    chunks: _Ints
    positions: _Ints

    @classmethod
    def of(cls, chunks: Sequence[ChunkRows]) -> _Placed:
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([chunk.end for chunk in chunks], np.int32) - starts
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        of_rows = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
        positions = np.arange(len(of_rows), dtype=np.int32) + (starts - firsts)[of_rows]
        return cls(starts, counts, firsts, of_rows, positions)


def _tables(rows: AttentionRows, local: bool) -> _Ints:
    """``[chunks, W]``: blocks by position // block size; -1 where no row of the chunk sees one."""
    size = rows.block_size
    tables = np.full((len(rows.chunks), max(-(-chunk.end // size) for chunk in rows.chunks)), -1, np.int32)
    for table, chunk in zip(tables, rows.chunks, strict=True):
        first, last = rows.first_key(chunk.start, local=local) // size, -(-chunk.end // size)
        table[first:last] = chunk.tables[local][first:last]
    return tables


def _ends(chunks: Sequence[ChunkRows], placed: _Placed) -> _Ints:
    """End of the keys that each row sees."""
    ends = placed.positions + np.int32(1)
    for first, chunk in zip(placed.firsts - placed.starts, chunks, strict=True):
        for segment in chunk.segments:
            if segment.image:
                ends[first + segment.start : first + segment.end] = segment.end
    return ends


def _tiles(placed: _Placed, ends: _Ints, skipped: int, tile_rows: int, window: int) -> _Ints:
    """As :class:`PrefillRows` has them, of all chunks but the ``skipped`` first ones. Tiles with most keys come first:
    programs begin in this order, and those that run last should be short."""
    counts, firsts = placed.counts[skipped:], placed.firsts[skipped:]
    tiles = -(-counts // tile_rows)
    chunks = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
    offsets = (np.arange(len(chunks), dtype=np.int32) - (np.cumsum(tiles, dtype=np.int32) - tiles)[chunks]) * tile_rows
    rows = np.minimum(counts[chunks] - offsets, tile_rows)
    first_rows = firsts[chunks] + offsets
    positions = placed.positions[first_rows]
    first_keys = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
    longest = np.argsort(first_keys - ends[first_rows + rows - 1], kind="stable")
    return np.stack([first_rows, rows, positions, chunks], axis=1)[longest]
