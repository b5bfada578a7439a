"""Triton kernels for paged attention, and their launchers. Imported only where Triton is installed.

Every query row attends to one interval of its sequence's keys. The kernels read all keys and values from the pages of
the KV cache. A page is a block of the engine's block tables: in Triton, "block" means something else. Scores are kept
in units of log2(e), for exp2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem

from panscan.core.gpu_features import SHARED_BYTES
from panscan.core.jit import early_launch, kernel, wait_for_inputs
from panscan.engine.attention import KernelPlan
from panscan.model.layers import LayerCache

DECODE_MEMBERS = 8
"""Maximum sequences that one program of the decode kernel computes. With two query heads per kv head, as in most
published models, their rows fill the smallest tile of a tensor core, so a group costs no more than one sequence."""
_FEWEST_ROWS = 16  # minimum rows of a tensor core product
_MOST_SPLITS = 16
_THREE_STAGES, _LARGE_TILES = SHARED_BYTES[8, 0], SHARED_BYTES[9, 0]  # least shared memory


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tile sizes of one kernel.

    Args:
        rows: query rows per product and query head.
        keys: keys per product.
        warps: warps per program.
        stages: pipeline stages of the loop over keys.
        heads: query heads of one kv head that a prefill program computes together, if that divides their number.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    heads: int = 1


def prefill_sizes(head_size: int, itemsize: int, shared_bytes: int, *, few: bool = False) -> Sizes:
    """Return the tile sizes of the prefill kernel.

    Head sizes 128 and 256 in 16 bits, with 227 KiB of shared memory: the fastest of those measured on an H100, for two
    query heads per kv head, as in all published models except the two smallest. The others were not measured. They fit
    into the registers and, with one stage less, into the 99 KiB of shared memory that sm86, sm89 and sm120 have.

    Args:
        head_size: one of ``HEAD_SIZES``.
        itemsize: bytes per value.
        shared_bytes: shared memory that one program may use.
        few: whether programs of two heads would be too few to keep the GPU busy. Head size 256 computes two heads
            anyway. The number of query rows does not depend on it.
    """
    stages = 3 if shared_bytes >= _THREE_STAGES else 2
    if itemsize == 4:
        return Sizes(64, 32, 8, stages) if head_size < 256 else Sizes(32, 16, 8, stages)
    if shared_bytes >= _LARGE_TILES and head_size == 256:
        return Sizes(64, 64, 8, 2, heads=2)
    if head_size == 256:
        return Sizes(64, 32, 8, stages)
    return Sizes(64, 64, 4, stages) if few or shared_bytes < _LARGE_TILES else Sizes(64, 64, 8, stages, heads=2)


def decode_sizes(head_size: int, itemsize: int, group: int, *, shared: bool = False) -> Sizes:
    """Return the tile sizes of the decode kernel.

    Head sizes 128 and 256 in 16 bits: the fastest of those measured on an H200.

    Args:
        head_size: one of ``HEAD_SIZES``.
        itemsize: bytes per value.
        group: query heads per kv head.
        shared: whether sequences share prefixes. Fewer programs run then, so each loads more keys at once.
    """
    rows = max(_FEWEST_ROWS, 1 << (DECODE_MEMBERS * group - 1).bit_length())
    if itemsize == 4:
        return Sizes(rows, 32 if head_size < 256 else 16, 4, 4)
    if shared and rows == _FEWEST_ROWS:
        return Sizes(rows, 128 if head_size < 256 else 64, 4, 3)
    return Sizes(rows, 64 if head_size < 256 else 32, 2, 4)


def decode_units(kv_heads: int, device: torch.device) -> int:
    """Return how many sequences keep a device busy. With as many, :func:`decode` splits no keys."""
    return -(-_busy(device) // kv_heads)


def choose_splits(programs: int, wanted: int) -> int:
    """Return the number of splits of the keys: the smallest power of two, at most 16, that gives the wanted number of
    programs.

    It does not depend on the number of keys, so a captured graph stays valid as sequences grow.
    """
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < wanted:
        splits *= 2
    return splits


_LOG2E = 1.4426950408889634
_EVERYTHING = 1 << 30  # a window longer than any sequence


def prefill(query: torch.Tensor, cache: LayerCache, output: torch.Tensor, plan: KernelPlan, scaling: float) -> None:
    """Compute attention for the prefill rows of a pass.

    Where few rows have many keys, which would leave most of a GPU idle, the keys are split between programs.

    Args:
        query: ``[T, heads, D]``, contiguous in D.
        cache: keys and values by slot.
        output: contiguous ``[T, heads, D]``: the prefill rows are written.
        plan: rows and pages. Every prefill row is in one tile.
        scaling: factor of the attention scores.
    """
    inputs, (_, heads, size), multiprocessors = plan.inputs, query.shape, _multiprocessors(query.device)
    start, count, group = len(inputs.lengths), len(inputs.ends), heads // cache.keys.shape[1]
    if not count:
        return
    choose = partial(prefill_sizes, size, query.element_size(), shared_bytes(query.device))
    programs = -(-count // choose().rows) * heads
    sizes = choose(few=group % 2 == 1 or programs // 2 < multiprocessors)
    together = sizes.heads if group % sizes.heads == 0 else 1
    splits = choose_splits(programs, 3 * multiprocessors // 4)
    # The first index varies fastest: programs for all heads of the longest tile start before any of the next tile.
    kernel = _prefill[(heads // together, len(inputs.tiles), splits)]
    further = inputs.tiles, inputs.ends, start, count
    tables = inputs.prefill_tables
    _launch(kernel, query, cache, output[start:], tables, further, sizes, splits, plan, scaling, together=together)


def decode(
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
    plan: KernelPlan,
    scaling: float,
    splits: int | None = None,
) -> None:
    """Compute attention for the decode rows of a pass, each the last of its sequence.

    Sequences of one group share the pages of a common prefix. Its keys and values are read once per group, which
    saves memory bandwidth when several questions are asked about one document.

    Args:
        query: ``[T, heads, D]``, contiguous in D.
        cache: keys and values by slot.
        output: contiguous ``[T, heads, D]``: the decode rows are written.
        plan: rows and pages.
        scaling: factor of the attention scores.
        splits: parts to split the keys into; None to choose by the size of the GPU.
    """
    inputs, (_, heads, size), kv_heads = plan.inputs, query.shape, cache.keys.shape[1]
    if not (count := len(inputs.lengths)):
        return
    splits = splits or choose_splits(count * kv_heads, _busy(query.device))
    sizes = decode_sizes(size, query.element_size(), heads // kv_heads, shared=plan.shared)
    further = inputs.lengths, inputs.groups, inputs.members
    kernel = _decode[(count, kv_heads, splits)]
    _launch(kernel, query, cache, output[:count], inputs.decode_tables, further, sizes, splits, plan, scaling)


def _launch(
    kernel: Any,
    query: torch.Tensor,
    cache: LayerCache,
    output: torch.Tensor,
    tables: torch.Tensor,
    further: tuple[torch.Tensor | int, ...],
    sizes: Sizes,
    splits: int,
    plan: KernelPlan,
    scaling: float,
    **constants: int,
) -> None:
    """Launch an attention kernel, and merge its splits.

    The programs of several splits write weighted sums of values, float32 ``[splits, rows, heads, D]``, and their
    highest scores and sums of weights, float32 ``[2, splits, rows, heads]``. A single split writes to the output.

    Args:
        kernel: kernel with its grid.
        query: queries of all rows.
        cache: keys and values.
        output: the kernel's rows of the output.
        tables: block tables.
        further: arguments of this kernel only.
        sizes: tile sizes.
        splits: parts that the keys are split into.
        plan: of the pass.
        scaling: factor of the attention scores.
        constants: of this kernel only.
    """
    (rows, heads, size), device = output.shape, output.device
    parts = sums = output
    if splits > 1:
        parts = torch.empty(splits, rows, heads, size, dtype=torch.float32, device=device)
        sums = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=device)
    early = early_launch(device)
    kernel(
        query,
        cache.keys,
        cache.values,
        *cache.scales_of_parts(),
        cache.scale_stride,
        parts,
        sums,
        tables,
        tables.stride(0),
        scaling * _LOG2E,
        *query.stride()[:2],
        plan.window or _EVERYTHING,
        *further,
        page_size=plan.block_size,
        heads=heads,
        kv_heads=cache.keys.shape[1],
        head_size=size,
        rows=sizes.rows,
        keys=sizes.keys,
        splits=splits,
        # Only matters in float32, which tensor cores would round to 10 bits.
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **constants,
        **early,
    )
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _merge[(rows * heads,)](
            parts, sums, output, splits=splits, splits_padded=padded, head_size=size, num_warps=1, **early
        )


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 1 for the interpreter, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that Triton lets one program use on a GPU; no limit applies to the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    return int(max_shared_mem(torch.cuda.current_device() if device.index is None else device.index))


def _busy(device: torch.device) -> int:
    """Return the number of decode programs that keep a device busy."""
    return 3 * _multiprocessors(device)


@kernel()
def _absorb(
    top,
    total,
    sums,
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,
    page,
    at_key,
    valid,
    low,
    high,
    whole,
    kv_head,
    scale,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    precision: tl.constexpr,
):
    """Update the running softmax of rows (highest score, sum of weights, weighted sum of values) with more keys.

    ``page`` and ``at_key``: page and position of each key. ``valid``: keys that may be read. ``low`` and ``high``: each
    row's interval of positions. ``whole``: whether it is known to contain all these keys, for every row. ``k_scale``
    and ``v_scale``: factors ``[kv heads, slots]`` of an int8 cache, else None. Its tiles stay int8 until the dot
    products: the scores get the factors of keys, the weights those of values.
    """
    d = tl.arange(0, head_size)
    slot = page * page_size + at_key % page_size  # the number of slots fits into 32 bits, that of their values does not
    offset = slot.to(tl.int64) * (kv_heads * head_size) + kv_head * head_size
    key = tl.load(k_cache + offset[:, None] + d[None, :], mask=valid[:, None], other=0.0).to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision=precision) * scale
    scale_at = kv_head.to(tl.int64) * slots + slot
    if k_scale is not None:
        score *= tl.load(k_scale + scale_at, mask=valid, other=0.0)[None, :]
    if not whole:  # all threads take the same branch, and most keys of a long prompt need no mask
        score = tl.where((at_key[None, :] >= low[:, None]) & (at_key[None, :] < high[:, None]), score, float("-inf"))
    # "top" starts finite: the difference of infinities would be NaN in a row that has not had a key yet.
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    before = tl.exp2(top - higher)
    # Masked too: unwritten slots hold arbitrary values, and the product of a weight of 0 and NaN is NaN.
    value = tl.load(v_cache + offset[:, None] + d[None, :], mask=valid[:, None], other=0.0).to(query.dtype)
    total = total * before + tl.sum(weight, 1)
    if v_scale is not None:
        weight *= tl.load(v_scale + scale_at, mask=valid, other=0.0)[None, :]
    sums = tl.dot(weight.to(value.dtype), value, sums * before[:, None], input_precision=precision)
    return higher, total, sums


@kernel(any_value=["table_row", "start", "row_count"])
def _prefill(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,
    parts,
    part_sums,
    tables,
    table_row,
    scale,
    q_row,
    q_head,
    window,
    tiles,
    ends,
    start,
    row_count,
    page_size: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    rows: tl.constexpr,
    together: tl.constexpr,
    keys: tl.constexpr,
    splits: tl.constexpr,
    precision: tl.constexpr,
    early: tl.constexpr,
):
    """One program: one tile, ``together`` query heads of one kv head, one split of the keys."""
    wait_for_inputs(early)
    tile = tiles + tl.program_id(1) * 4
    count = tl.load(tile + 1)
    if count == 0:
        return
    pair = tl.arange(0, rows * together)
    head = tl.program_id(0) * together + pair // rows
    kv_head = tl.program_id(0) * together // (heads // kv_heads)
    at = pair % rows
    there = at < count
    row = tl.load(tile) + at
    position = tl.load(tile + 2) + at
    low = tl.maximum(position - window + 1, 0)
    high = tl.load(ends + row - start, mask=there, other=0)
    # The intervals of consecutive positions overlap or touch, so every key between these bounds belongs to some row.
    first, last = tl.min(low, 0), tl.max(high, 0)
    table = tables + tl.load(tile + 3).to(tl.int64) * table_row
    d = tl.arange(0, head_size)
    row = row.to(tl.int64)
    at_query = row * q_row + head.to(tl.int64) * q_head
    query = tl.load(q + at_query[:, None] + d[None, :], mask=there[:, None], other=0.0)
    top = tl.full([rows * together], -1e30, tl.float32)
    total = tl.full([rows * together], 0.0, tl.float32)
    sums = tl.full([rows * together, head_size], 0.0, tl.float32)
    begin_at = first // keys * keys
    share = tl.cdiv(tl.cdiv(last - begin_at, keys), splits) * keys
    begin_at += tl.program_id(2) * share
    end = tl.minimum(begin_at + share, last)
    # Keys that all rows attend to.
    whole_from, whole_to = tl.max(tl.where(there, low, 0), 0), tl.min(tl.where(there, high, last), 0)
    at_key = begin_at + tl.arange(0, keys)
    # One iteration ahead: Triton does not pipeline loads whose addresses are loaded in the same iteration.
    page = tl.load(table + at_key // page_size, mask=(at_key >= first) & (at_key < last), other=0)
    for begin in range(begin_at, end, keys):
        at_key = begin + tl.arange(0, keys)
        valid = (at_key >= first) & (at_key < last)
        whole = (begin >= whole_from) & (begin + keys <= whole_to)
        ahead = tl.load(table + (at_key + keys) // page_size, mask=at_key + keys < last, other=0)
        top, total, sums = _absorb(
            top,
            total,
            sums,
            query,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            slots,
            page,
            at_key,
            valid,
            low,
            high,
            whole,
            kv_head,
            scale,
            page_size,
            kv_heads,
            head_size,
            precision,
        )
        page = ahead
    to = (row - start) * heads + head
    _store_rows(parts, part_sums, to, row_count.to(tl.int64) * heads, top, total, sums, there, splits, head_size)


@kernel(any_value=["table_row"])
def _decode(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,
    parts,
    part_sums,
    tables,
    table_row,
    scale,
    q_row,
    q_head,
    window,
    lengths,
    groups,
    members,
    page_size: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    splits: tl.constexpr,
    precision: tl.constexpr,
    early: tl.constexpr,
):
    """One program: one group of sequences, one kv head, one split of the keys.

    The rows are the query heads of the kv head, sequence after sequence. The keys of the common prefix come first,
    for all rows; then those of each sequence, for its rows.
    """
    wait_for_inputs(early)
    group = groups + tl.program_id(0) * 3
    count = tl.load(group + 1)
    if count == 0:
        return
    members += tl.load(group)
    prefix = tl.load(group + 2)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    at = tl.arange(0, rows)
    member = at // (heads // kv_heads)
    there = member < count
    sequence = tl.load(members + member, mask=there, other=0).to(tl.int64)
    low = tl.load(lengths + sequence, mask=there, other=0) - window
    head = (kv_head * (heads // kv_heads) + at % (heads // kv_heads)).to(tl.int64)
    d = tl.arange(0, head_size)
    query = tl.load(q + sequence[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=there[:, None], other=0.0)
    top = tl.full([rows], -1e30, tl.float32)
    total = tl.full([rows], 0.0, tl.float32)
    sums = tl.full([rows, head_size], 0.0, tl.float32)
    for part in range(tl.where(prefix > 0, -1, 0), count):
        # The prefix is read through the table of the first sequence, whose window begins first.
        one = tl.load(members + tl.maximum(part, 0)).to(tl.int64)
        length = tl.load(lengths + one)
        low_key = tl.maximum(tl.maximum(length - window, 0), tl.where(part < 0, 0, prefix))
        end = tl.where(part < 0, prefix, length)
        share = tl.cdiv(tl.cdiv(tl.maximum(end - low_key, 0), splits), keys) * keys
        first = low_key + split * share
        last = tl.minimum(first + share, end)
        table = tables + one * table_row
        high = tl.where(there & ((part < 0) | (member == part)), last, 0)
        for begin in range(first, last, keys):
            at_key = begin + tl.arange(0, keys)
            valid = at_key < last
            page = tl.load(table + at_key // page_size, mask=valid, other=0)
            top, total, sums = _absorb(
                top,
                total,
                sums,
                query,
                k_cache,
                v_cache,
                k_scale,
                v_scale,
                slots,
                page,
                at_key,
                valid,
                low,
                high,
                False,
                kv_head,
                scale,
                page_size,
                kv_heads,
                head_size,
                precision,
            )
    to = sequence * heads + head
    _store_rows(
        parts, part_sums, to, tl.num_programs(0).to(tl.int64) * heads, top, total, sums, there, splits, head_size
    )


@kernel()
def _store_rows(parts, part_sums, to, all_rows, top, total, sums, there, splits: tl.constexpr, head_size: tl.constexpr):
    """Store the attention of rows ``to`` of ``all_rows``, or of one split of their keys.

    A split without keys of a row stores -1e30 and zeros, which have no weight in :func:`_merge`.
    """
    if splits > 1:
        to += tl.program_id(2) * all_rows
        tl.store(part_sums + to, top, mask=there)
        tl.store(part_sums + splits * all_rows + to, total, mask=there)
    else:
        sums = sums / tl.where(there, total, 1.0)[:, None]
    d = tl.arange(0, head_size)
    tl.store(parts + to[:, None] * head_size + d[None, :], sums.to(parts.dtype.element_ty), mask=there[:, None])


@kernel()
def _merge(
    parts,
    part_sums,
    output,
    splits: tl.constexpr,
    splits_padded: tl.constexpr,
    head_size: tl.constexpr,
    early: tl.constexpr,
):
    """One program: one query head of one sequence."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    split = tl.arange(0, splits_padded)
    there = split < splits
    d = tl.arange(0, head_size)
    place = split * rows + row
    wait_for_inputs(early)
    top = tl.load(part_sums + place, mask=there, other=-1e30)
    total = tl.load(part_sums + splits * rows + place, mask=there, other=0.0)
    sums = tl.load(parts + place[:, None] * head_size + d[None, :], mask=there[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    merged = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(output + row * head_size + d, merged.to(output.dtype.element_ty))
