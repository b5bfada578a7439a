"""Triton kernels of paged attention, and what launches them. Imported only where Triton is installed.

Every query row sees one interval of its sequence's keys; all keys and values are read from the cache's pages. A page is
a block of the engine's: "block" is Triton's word for something else. Scores are kept in units of log2(e), for exp2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem

from panscan.model.jit import kernel

__all__ = ["Sizes", "choose_splits", "decode", "decode_sizes", "prefill", "prefill_sizes", "write"]

_FEWEST_ROWS = 16  # of a tensor core's product
_MOST_SPLITS = 16
_THREE_STAGES = 160_000  # bytes of shared memory: sm80 has 166,912, sm90 232,448


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one kernel: query rows and keys of a product, warps of a program, and stages of its loop over keys."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_sizes(head_size: int, itemsize: int, shared_bytes: int) -> Sizes:
    """Those of the prefill kernel.

    Head size 128 in 16 bits: the fastest of those that were measured on an H200. The others were not measured. They
    stay in the registers, and in 99 KiB of shared memory, all that sm86, sm89 and sm120 have, by one stage less there.

    Args:
        head_size: one of ``HEAD_SIZES``.
        itemsize: bytes of a value.
        shared_bytes: that one program may use of a multiprocessor's shared memory.
    """
    stages = 3 if shared_bytes >= _THREE_STAGES else 2
    if itemsize == 4:
        return Sizes(64, 32, 8, stages) if head_size < 256 else Sizes(32, 16, 8, stages)
    return Sizes(64, 64, 4, stages) if head_size < 256 else Sizes(64, 32, 8, stages)


def decode_sizes(head_size: int, itemsize: int, group: int) -> Sizes:
    """Those of the decode kernel, as :func:`prefill_sizes`. ``group``: query heads of a kv head, which are its rows.

    Head sizes 128 and 256 in 16 bits: the fastest of those that were measured on an H200.
    """
    rows = max(_FEWEST_ROWS, 1 << (group - 1).bit_length())
    if itemsize == 4:
        return Sizes(rows, 32 if head_size < 256 else 16, 4, 4)
    return Sizes(rows, 64 if head_size < 256 else 32, 2, 4)


def choose_splits(programs: int, wanted: int) -> int:
    """Parts that the keys of each program are cut into, each a program of its own: a power of two, at most 16, the
    least that makes as many programs as wanted.

    Whatever the lengths: so a captured graph stays right as they grow.
    """
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < wanted:
        splits *= 2
    return splits


_LOG2E = 1.4426950408889634
_EVERYTHING = 1 << 30  # a window that no sequence fills


def write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Copy rows ``[1, kv heads, T, D]`` to slots (int64 ``[T]``) of contiguous caches ``[slots, kv heads, D]``."""
    _, kv_heads, rows, size = key.shape
    if rows:
        _write[(rows,)](
            key, value, k_cache, v_cache, slots, key.stride(2), key.stride(1), value.stride(2), value.stride(1),
            kv_heads=kv_heads, kv_heads_padded=triton.next_power_of_2(kv_heads), head_size=size,
        )  # fmt: skip


def prefill(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, output: torch.Tensor, *,
    start: int, tiles: torch.Tensor, tile_rows: int, ends: torch.Tensor, tables: torch.Tensor,
    window: int, page_size: int, scaling: float,
) -> None:  # fmt: skip
    """Attend with the rows of the tiles. Every row from ``start`` on is in one.

    Where few rows have many keys, which would leave most of a GPU idle, the keys are cut into parts.

    Args:
        query: ``[1, heads, T, D]``, contiguous in D.
        k_cache: contiguous ``[slots, kv heads, D]``; so is ``v_cache``. All keys that a row sees are there.
        v_cache: values.
        output: contiguous ``[1, T, heads, D]``, to be filled.
        start: row of the pass that ``ends`` begins with.
        tiles: int32 ``[n, 4]``: first row in the pass, rows (0: nothing to do), position of the first, chunk.
        tile_rows: that a tile has at most; a power of two.
        ends: int32 ``[rows from start]``: end of the keys that each row sees.
        tables: int32 ``[chunks, W]``: pages by position // page size. Entries that no row sees are not read.
        window: positions that a row sees, its own included; 0: all.
        page_size: tokens of a page.
        scaling: of the scores.
    """
    (_, heads, _, size), count = query.shape, len(ends)
    if not count:
        return
    splits = choose_splits(-(-count // tile_rows) * heads, 3 * _multiprocessors(query.device) // 4)
    sizes = prefill_sizes(size, query.element_size(), _shared_bytes(query.device))
    parts, sums = _partial(splits, count, heads, size, output[:, start:])
    _prefill[(len(tiles), heads, splits)](
        query, k_cache, v_cache, parts, sums, tiles, ends, tables, scaling * _LOG2E,
        query.stride(2), query.stride(1), tables.stride(0), start, count, window or _EVERYTHING,
        page_size=page_size, heads=heads, kv_heads=k_cache.shape[1], head_size=size, rows=tile_rows, keys=sizes.keys,
        splits=splits, precision=_precision(query), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    _merged(parts, sums, output[:, start:], splits, count * heads)


def decode(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, output: torch.Tensor, *,
    tables: torch.Tensor, lengths: torch.Tensor, window: int, page_size: int, scaling: float, splits: int | None = None,
) -> None:  # fmt: skip
    """Attend with rows ``[0, B)``, each the last of its sequence.

    Args:
        query: ``[1, heads, T, D]``, contiguous in D; T is at least B.
        k_cache: as :func:`prefill` has it; so are ``v_cache``, ``output``, ``window``, ``page_size`` and ``scaling``.
        v_cache: values.
        output: to be filled in its first B rows.
        tables: int32 ``[B, W]``: pages by position // page size.
        lengths: int32 ``[B]``: keys of each sequence, its own included; at least 1.
        window: positions that a row sees.
        page_size: tokens of a page.
        scaling: of the scores.
        splits: parts of the keys; None chooses.
    """
    (_, heads, _, size), kv_heads, sequences = query.shape, k_cache.shape[1], len(lengths)
    if not sequences:
        return
    splits = splits or choose_splits(sequences * kv_heads, 3 * _multiprocessors(query.device))
    sizes = decode_sizes(size, query.element_size(), heads // kv_heads)
    parts, sums = _partial(splits, sequences, heads, size, output)
    _decode[(sequences, kv_heads, splits)](
        query, k_cache, v_cache, parts, sums, tables, lengths, scaling * _LOG2E,
        query.stride(2), query.stride(1), tables.stride(0), window or _EVERYTHING,
        page_size=page_size, heads=heads, kv_heads=kv_heads, head_size=size, rows=sizes.rows, keys=sizes.keys,
        splits=splits, precision=_precision(query), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    _merged(parts, sums, output, splits, sequences * heads)


def _partial(
    splits: int, rows: int, heads: int, size: int, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Where programs put weighted sums of values, float32 ``[splits, rows, heads, D]``, and the highest scores and sums
    of weights, ``[2, splits, rows, heads]``. One part is the output itself."""
    if splits == 1:
        return output, output
    parts = torch.empty(splits, rows, heads, size, dtype=torch.float32, device=output.device)
    return parts, torch.empty(2, splits, rows, heads, dtype=torch.float32, device=output.device)


def _merged(parts: torch.Tensor, sums: torch.Tensor, output: torch.Tensor, splits: int, programs: int) -> None:
    if splits > 1:
        _merge[(programs,)](
            parts, sums, output, splits=splits, splits_padded=triton.next_power_of_2(splits),
            head_size=output.shape[-1], num_warps=1,
        )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _shared_bytes(device: torch.device) -> int:
    """What Triton lets a program take of a GPU's shared memory; the interpreter has none to run out of."""
    return max_shared_mem(device.index) if device.type == "cuda" else 1 << 30


def _precision(query: torch.Tensor) -> str:
    """Of products; it only matters in float32, which tensor cores would round to 10 bits."""
    return "ieee" if query.dtype == torch.float32 else "tf32"


@kernel()
def _write(
    k, v, k_cache, v_cache, slots, k_row, k_head, v_row, v_head,
    kv_heads: tl.constexpr, kv_heads_padded: tl.constexpr, head_size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, kv_heads_padded).to(tl.int64)[:, None]
    d = tl.arange(0, head_size)[None, :]
    to = tl.load(slots + row) * (kv_heads * head_size) + head * head_size + d
    there = head < kv_heads
    tl.store(k_cache + to, tl.load(k + row * k_row + head * k_head + d, mask=there), mask=there)
    tl.store(v_cache + to, tl.load(v + row * v_row + head * v_head + d, mask=there), mask=there)


@kernel()
def _absorb(
    top, total, sums, query, k_cache, v_cache, page, at_key, held, seen, kv_head, scale,
    page_size: tl.constexpr, kv_heads: tl.constexpr, head_size: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """The running softmax of rows (highest score, sum of weights, weighted sum of values) with some more keys.

    ``page`` and ``at_key``: of the keys; ``held``: those that may be read; ``seen``: by which row.
    """
    d = tl.arange(0, head_size)
    place = (page.to(tl.int64) * page_size + at_key % page_size) * (kv_heads * head_size) + kv_head * head_size
    key = tl.load(k_cache + place[None, :] + d[:, None], mask=held[None, :], other=0.0)
    score = tl.where(seen, tl.dot(query, key, input_precision=precision) * scale, float("-inf"))
    # "top" begins finite: infinite less infinite would be NaN in a row that has not seen a key yet.
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    before = tl.exp2(top - higher)
    # Masked too: pages hold anything where nobody wrote, and the product of a weight of 0 and NaN is NaN.
    value = tl.load(v_cache + place[:, None] + d[None, :], mask=held[:, None], other=0.0)
    sums = tl.dot(weight.to(value.dtype), value, sums * before[:, None], input_precision=precision)
    return higher, total * before + tl.sum(weight, 1), sums


@kernel(any_value=["table_row", "start", "row_count"])
def _prefill(
    q, k_cache, v_cache, parts, part_sums, tiles, ends, tables, scale, q_row, q_head, table_row, start, row_count,
    window, page_size: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_size: tl.constexpr,
    rows: tl.constexpr, keys: tl.constexpr, splits: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One program: one tile, one query head, one part of the keys."""
    tile = tiles + tl.program_id(0) * 4
    count = tl.load(tile + 1)
    if count == 0:
        return
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    at = tl.arange(0, rows)
    there = at < count
    row = tl.load(tile) + at
    position = tl.load(tile + 2) + at
    low = tl.maximum(position - window + 1, 0)
    high = tl.load(ends + row - start, mask=there, other=0)
    # What rows of consecutive positions see has no hole, so these bound what some row sees.
    first, last = tl.min(low, 0), tl.max(high, 0)
    table = tables + tl.load(tile + 3).to(tl.int64) * table_row
    d = tl.arange(0, head_size)
    row = row.to(tl.int64)
    query = tl.load(q + row[:, None] * q_row + head.to(tl.int64) * q_head + d[None, :], mask=there[:, None], other=0.0)
    top = tl.full([rows], -1e30, tl.float32)
    total = tl.full([rows], 0.0, tl.float32)
    sums = tl.full([rows, head_size], 0.0, tl.float32)
    begin_at = first // keys * keys
    share = tl.cdiv(tl.cdiv(last - begin_at, keys), splits) * keys
    begin_at += tl.program_id(2) * share
    end = tl.minimum(begin_at + share, last)
    at_key = begin_at + tl.arange(0, keys)
    # One turn ahead: loads whose addresses are loaded in the same turn get no buffers of their own from Triton.
    page = tl.load(table + at_key // page_size, mask=(at_key >= first) & (at_key < last), other=0)
    for begin in range(begin_at, end, keys):
        at_key = begin + tl.arange(0, keys)
        held = (at_key >= first) & (at_key < last)
        seen = (at_key[None, :] >= low[:, None]) & (at_key[None, :] < high[:, None])
        ahead = tl.load(table + (at_key + keys) // page_size, mask=at_key + keys < last, other=0)
        top, total, sums = _absorb(
            top, total, sums, query, k_cache, v_cache, page, at_key, held, seen, kv_head, scale,
            page_size, kv_heads, head_size, precision,
        )  # fmt: skip
        page = ahead
    to = (row - start) * heads + head
    if splits > 1:
        # As in _decode: what a row sees of a part may be nothing.
        all_rows = row_count.to(tl.int64) * heads
        to += tl.program_id(2) * all_rows
        tl.store(part_sums + to, top, mask=there)
        tl.store(part_sums + splits * all_rows + to, total, mask=there)
    else:
        sums = sums / tl.where(there, total, 1.0)[:, None]
    tl.store(parts + to[:, None] * head_size + d[None, :], sums.to(parts.dtype.element_ty), mask=there[:, None])


@kernel(any_value=["table_row"])
def _decode(
    q, k_cache, v_cache, parts, part_sums, tables, lengths, scale, q_row, q_head, table_row, window,
    page_size: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_size: tl.constexpr,
    rows: tl.constexpr, keys: tl.constexpr, splits: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, one kv head, one part of the keys. The query heads of the kv head are the rows."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence)
    low = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - low, splits), keys) * keys
    first = low + split * share
    last = tl.minimum(first + share, length)
    at = tl.arange(0, rows)
    there = at < heads // kv_heads
    head = (kv_head * (heads // kv_heads) + at).to(tl.int64)
    d = tl.arange(0, head_size)
    table = tables + sequence * table_row
    query = tl.load(q + sequence * q_row + head[:, None] * q_head + d[None, :], mask=there[:, None], other=0.0)
    top = tl.full([rows], -1e30, tl.float32)
    total = tl.full([rows], 0.0, tl.float32)
    sums = tl.full([rows, head_size], 0.0, tl.float32)
    for begin in range(first, last, keys):
        at_key = begin + tl.arange(0, keys)
        held = at_key < last
        page = tl.load(table + at_key // page_size, mask=held, other=0)
        top, total, sums = _absorb(
            top, total, sums, query, k_cache, v_cache, page, at_key, held, held[None, :], kv_head, scale,
            page_size, kv_heads, head_size, precision,
        )  # fmt: skip
    to = sequence * heads + head
    if splits > 1:
        # A part without keys leaves -1e30 and zeros here, which weigh nothing in the end.
        all_rows = tl.num_programs(0).to(tl.int64) * heads
        to += split * all_rows
        tl.store(part_sums + to, top, mask=there)
        tl.store(part_sums + splits * all_rows + to, total, mask=there)
    else:
        sums = sums / total[:, None]
    tl.store(parts + to[:, None] * head_size + d[None, :], sums.to(parts.dtype.element_ty), mask=there[:, None])


@kernel()
def _merge(
    parts, part_sums, output, splits: tl.constexpr, splits_padded: tl.constexpr, head_size: tl.constexpr
):  # fmt: skip
    """One program: one query head of one sequence."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, splits_padded)
    there = split < splits
    d = tl.arange(0, head_size)
    place = split * rows + row
    top = tl.load(part_sums + place, mask=there, other=-1e30)
    total = tl.load(part_sums + splits * rows + place, mask=there, other=0.0)
    sums = tl.load(parts + place[:, None] * head_size + d[None, :], mask=there[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    found = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(output + row * head_size + d, found.to(output.dtype.element_ty))
