"""Attention of the vision tower on Hopper GPUs: bidirectional, unmasked, for head sizes that are not a power of two.

A Gluon kernel: one warp loads tiles, three warpgroups compute. Imported only where Triton 3.6 or later is installed.

Triton's tiles have power-of-two sides, and the head size of SigLIP is 72. The kernel splits the head dimension into a
main part (64 columns) and a rest (8 columns, padded to 16 with zeros by the bounds check of the tensor descriptor)
instead of padding 72 to 128. Scores are kept in units of log2(e), for exp2.

The kernel runs at the power limit of the GPU, so every instruction less per score makes it faster. In bfloat16, weights
are therefore taken relative to the highest score of the first tile of keys, not of all tiles so far ("settled"
softmax): the offset cancels in the quotient, and bfloat16 rounds all magnitudes alike. If a later score is so much
higher that the sum of weights exceeds 2^60, the program computes its tiles again with the usual running maximum.

ptxas serialises all matrix products (warning C7512) if the three warpgroups need more than their 160 registers per
thread. Look for that warning after any change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

from panscan.core.gpu_features import SHARED_BYTES
from panscan.core.jit import INTERPRETED, gpu_has

_LOG2E = 1.4426950408889634
_ROWS = 64  # query rows of a warpgroup: the fixed height of a Hopper matrix product
_KEYS = 128
_LIMIT = gl.constexpr(2.0**60)  # of a sum of weights; leaves room for values up to 2^67
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

_gluon: Callable[[Callable[..., Any]], Any] = gluon.jit


class _Split(NamedTuple):
    """Columns of a head: ``main`` and ``rest`` are loaded, ``tail`` columns of the rest are needed in the output."""

    main: int
    rest: int
    tail: int


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Return softmax(query · keyᵀ · scale) · value for each view and head.

    Args:
        query: ``[views, heads, patches, head_size]``; any strides with a contiguous last dimension. Head sizes 16 to
            128. A tensor whose address or strides are not multiples of 16 bytes is copied first.
        key: same shape, type and device.
        value: same shape, type and device.
        scale: factor of the scores, not negative; None: 1 / sqrt(head_size).

    Returns:
        Contiguous ``[views, patches, heads, head_size]``, in the type of the query.

    Raises:
        ValueError: shapes differ, or the device, precision, head size or scale is not supported.
    """
    if not supported(query.device, query.dtype):
        raise ValueError(f"{query.dtype} on {query.device} is not supported: expected 16 bits on a Hopper GPU")
    if query.ndim != 4 or query.shape != key.shape or query.shape != value.shape:
        raise ValueError(f"query, key and value must have one shape: {query.shape}, {key.shape}, {value.shape}")
    views, heads, patches, size = query.shape
    if not 16 <= size <= 128:
        raise ValueError(f"head size {size} is not supported: expected 16 to 128")
    if scale is not None and scale < 0:
        raise ValueError(f"scale {scale} is negative")
    output = torch.empty(views, patches, heads, size, dtype=query.dtype, device=query.device)
    if output.numel():
        factor = (size**-0.5 if scale is None else scale) * _LOG2E
        with torch.cuda.device(query.device):  # Triton launches on the present device
            _launch(_aligned(query), _aligned(key), _aligned(value), output, factor)
    return output


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether :func:`attend` runs on this device in this precision."""
    return dtype in _ELEMENTS and not INTERPRETED and gpu_has("warpgroup_products", device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if the copy engine cannot address it."""
    step = 16 // part.element_size()
    if part.stride(3) == 1 and part.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in part.stride()[:3]):
        return part
    *shape, size = part.shape
    return part.new_empty(*shape, triton.cdiv(size, step) * step)[..., :size].copy_(part)


def _head_split(size: int) -> _Split:
    main = 1 << (size.bit_length() - 1)
    more = triton.next_power_of_2(size - main) if size > main else 0
    return _Split(main, max(more, 16) if more else 0, max(more, 8) if more else 0)


def _launch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, factor: float) -> None:
    views, heads, patches, size = query.shape
    split = _head_split(size)
    groups = 3 if split.main + split.tail <= 72 else 2  # three have 160 registers per thread, two 240
    width = (split.main + split.rest) * query.element_size()
    stages = min(4, (SHARED_BYTES[9, 0] - 1024 - groups * _ROWS * width) // (2 * _KEYS * width))
    row_tiles = triton.cdiv(patches, _ROWS * groups)
    tiles = row_tiles * heads * views
    _attend[(min(tiles, _multiprocessors(query.device)),)](
        *_descriptors(query, _ROWS, split),
        *_descriptors(key, _KEYS, split),
        *_descriptors(value, _KEYS, split),
        output,
        factor,
        patches,
        heads,
        row_tiles,
        tiles,
        size=size,
        main=split.main,
        rest=split.rest,
        tail=split.tail,
        rows=_ROWS,
        keys=_KEYS,
        stages=stages,
        groups=groups,
        ragged=patches % _KEYS != 0,
        registers=160 if groups == 3 else 240,
        settled=query.dtype == torch.bfloat16,  # float16 has too few exponents
        num_warps=4,
    )


def _descriptors(part: torch.Tensor, rows: int, split: _Split) -> tuple[HopperDescriptor, HopperDescriptor]:
    """Return descriptors of the main columns and of the rest; the first twice if there is no rest."""
    main = HopperDescriptor(part, part.shape, part.stride(), *_block(rows, split.main, part.dtype))
    if not split.rest:
        return main, main
    return main, HopperDescriptor(part, part.shape, part.stride(), *_block(rows, split.rest, part.dtype))


@cache
def _block(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    shape = [1, 1, rows, columns]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, _ELEMENTS[dtype])


@_gluon
def _position(tile, row_tiles, heads):
    """Return view, head and tile of rows. Programs that run together share keys and values in the L2 cache."""
    return tile // (row_tiles * heads), tile // row_tiles % heads, tile % row_tiles


@_gluon
def _load(
    main_desc,
    rest_desc,
    main_shared,
    rest_shared,
    barrier,
    view,
    head,
    row,
    rows: gl.constexpr,
    main: gl.constexpr,
    rest: gl.constexpr,
):
    mbarrier.expect(barrier, rows * (main + rest) * 2)
    tma.async_copy_global_to_shared(main_desc, [view, head, row, 0], barrier, main_shared)
    if rest > 0:
        tma.async_copy_global_to_shared(rest_desc, [view, head, row, main], barrier, rest_shared)


@_gluon
def _producer(
    q_main,
    q_rest,
    k_main,
    k_rest,
    v_main,
    v_rest,
    sq_main,
    sq_rest,
    sk_main,
    sk_rest,
    sv_main,
    sv_rest,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    overflows,
    finished,
    patches,
    heads,
    row_tiles,
    tiles,
    main: gl.constexpr,
    rest: gl.constexpr,
    rows: gl.constexpr,
    keys: gl.constexpr,
    stages: gl.constexpr,
    groups: gl.constexpr,
    settled: gl.constexpr,
):
    """Load tiles in the order in which the warpgroups need them, into buffers that all of them have released."""
    loaded, done, first = 0, 0, gl.program_id(0)
    for attempt in gl.static_range(2 if settled else 1):
        if attempt == 1:
            first = _first_again(overflows, finished, tiles, groups, 1)
        for tile in range(first, tiles, gl.num_programs(0)):
            view, head, row_tile = _position(tile, row_tiles, heads)
            for group in gl.static_range(groups):
                mbarrier.wait(q_empty.index(group), (done & 1) ^ 1)
                _load(
                    q_main,
                    q_rest,
                    sq_main.index(group),
                    sq_rest.index(group),
                    q_full.index(group),
                    view,
                    head,
                    (row_tile * groups + group) * rows,
                    rows,
                    main,
                    rest,
                )
            for begin in range(0, patches, keys):
                stage = loaded % stages
                phase = (loaded // stages & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                _load(
                    k_main,
                    k_rest,
                    sk_main.index(stage),
                    sk_rest.index(stage),
                    k_full.index(stage),
                    view,
                    head,
                    begin,
                    keys,
                    main,
                    rest,
                )
                mbarrier.wait(v_empty.index(stage), phase)
                _load(
                    v_main,
                    v_rest,
                    sv_main.index(stage),
                    sv_rest.index(stage),
                    v_full.index(stage),
                    view,
                    head,
                    begin,
                    keys,
                    main,
                    rest,
                )
                loaded += 1
            done += 1  # Gluon has no enumerate


@_gluon
def _first_again(overflows, finished, tiles, groups: gl.constexpr, warps: gl.constexpr):
    """Return the first tile of the second attempt: this program's first if a sum overflowed, else one past the last."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    mbarrier.wait(finished, 0)
    overflowed = gl.max(overflows.index(0).load(layout), 0)
    for group in gl.static_range(1, groups):
        overflowed = gl.maximum(overflowed, gl.max(overflows.index(group).load(layout), 0))
    return gl.program_id(0) + (1 - overflowed) * tiles


@_gluon
def _scores(
    q_main,
    q_rest,
    sk_main,
    sk_rest,
    k_full,
    used,
    main: gl.constexpr,
    rest: gl.constexpr,
    rows: gl.constexpr,
    keys: gl.constexpr,
    stages: gl.constexpr,
    layout: gl.constexpr,
):
    """Issue query · keyᵀ for the next tile of keys."""
    stage = used % stages
    mbarrier.wait(k_full.index(stage), used // stages & 1)
    scores = gl.zeros([rows, keys], gl.float32, layout)
    k = sk_main.index(stage).reshape([keys, main]).permute([1, 0])
    scores = warpgroup_mma(q_main, k, scores, use_acc=False, is_async=True)
    if rest > 0:
        k = sk_rest.index(stage).reshape([keys, rest]).permute([1, 0])
        scores = warpgroup_mma(q_rest, k, scores, is_async=True)
    return scores


@_gluon
def _weigh(scores, top, total, sums, rest_sums, scale, dtype: gl.constexpr, settled: gl.constexpr):
    """Return the weights of a tile of keys, and the running softmax of the rows with them: the offset of the scores,
    the sum of weights, and the sums of values rescaled to a new offset."""
    if not settled:
        higher = gl.maximum(top, gl.max(scores, 1) * scale)
        fade = gl.exp2(top - higher)
        top, total = higher, total * fade
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
        rest_sums = rest_sums * gl.convert_layout(fade, gl.SliceLayout(1, rest_sums.type.layout))[:, None]
    weights = gl.exp2(scores * scale - top[:, None])
    return weights.to(dtype), top, total + gl.sum(weights, 1), sums, rest_sums


@_gluon
def _narrow(shared, columns: gl.constexpr):
    """Return the first columns: a product over 8 columns costs half of one over 16."""
    if columns == shared.shape[1]:
        return shared
    else:  # noqa: RET505  # only an else is dropped at compile time
        return shared.slice(0, columns, dim=1)


@_gluon
def _consumer(
    group: gl.constexpr,
    output,
    sq_main,
    sq_rest,
    sk_main,
    sk_rest,
    sv_main,
    sv_rest,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    overflows,
    finished,
    scale,
    patches,
    heads,
    row_tiles,
    tiles,
    size: gl.constexpr,
    main: gl.constexpr,
    rest: gl.constexpr,
    tail: gl.constexpr,
    rows: gl.constexpr,
    keys: gl.constexpr,
    stages: gl.constexpr,
    groups: gl.constexpr,
    ragged: gl.constexpr,
    settled: gl.constexpr,
):
    """Compute 64 query rows per tile with one warpgroup, a second time if sums of weights overflowed."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    used, done, first = 0, 0, gl.program_id(0)
    overflowed = gl.zeros([rows], gl.int32, gl.SliceLayout(1, s_layout))
    for attempt in gl.static_range(2 if settled else 1):
        if attempt == 1:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            overflows.index(group).store(gl.full([32], gl.max(overflowed, 0), gl.int32, layout))
            mbarrier.arrive(finished)
            first = _first_again(overflows, finished, tiles, groups, 4)
        used, done, overflowed = _consume(
            group,
            output,
            sq_main,
            sq_rest,
            sk_main,
            sk_rest,
            sv_main,
            sv_rest,
            q_full,
            q_empty,
            k_full,
            k_empty,
            v_full,
            v_empty,
            scale,
            patches,
            heads,
            row_tiles,
            tiles,
            first,
            used,
            done,
            overflowed,
            size,
            main,
            rest,
            tail,
            rows,
            keys,
            stages,
            groups,
            ragged,
            settled and attempt == 0,
            s_layout,
        )


@_gluon
def _consume(
    group: gl.constexpr,
    output,
    sq_main,
    sq_rest,
    sk_main,
    sk_rest,
    sv_main,
    sv_rest,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    scale,
    patches,
    heads,
    row_tiles,
    tiles,
    first,
    used,
    done,
    overflowed,
    size: gl.constexpr,
    main: gl.constexpr,
    rest: gl.constexpr,
    tail: gl.constexpr,
    rows: gl.constexpr,
    keys: gl.constexpr,
    stages: gl.constexpr,
    groups: gl.constexpr,
    ragged: gl.constexpr,
    settled: gl.constexpr,
    s_layout: gl.constexpr,
):
    """Compute the tiles from ``first`` on. Return how many tiles of keys and of rows were used so far, and whether the
    weights of any row overflowed.

    The product with the values of one tile of keys and the scores of the next are issued as one burst. Softmax runs
    between bursts, while the tensor cores work for the other warpgroups.
    """
    # Without a rest, its tensors are unused; they only need a valid shape.
    wide: gl.constexpr = rest if rest > 0 else main
    narrow: gl.constexpr = tail if rest > 0 else 8
    m_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, main, 16])
    r_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, narrow, 16])
    m_weights: gl.constexpr = gl.DotOperandLayout(0, m_layout, 2)
    r_weights: gl.constexpr = gl.DotOperandLayout(0, r_layout, 2)
    dtype: gl.constexpr = output.dtype.element_ty
    key_tiles = gl.cdiv(patches, keys)
    for tile in range(first, tiles, gl.num_programs(0)):
        view, head, row_tile = _position(tile, row_tiles, heads)
        mbarrier.wait(q_full.index(group), done & 1)
        q_main = sq_main.index(group).reshape([rows, main])
        q_rest = sq_rest.index(group).reshape([rows, wide])
        total = gl.zeros([rows], gl.float32, gl.SliceLayout(1, s_layout))
        sums = gl.zeros([rows, main], gl.float32, m_layout)
        rest_sums = gl.zeros([rows, narrow], gl.float32, r_layout)
        scores = _scores(q_main, q_rest, sk_main, sk_rest, k_full, used, main, rest, rows, keys, stages, s_layout)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_empty.index(used % stages))
        if settled:
            if ragged:
                scores = _masked(scores, 0, patches, s_layout)
            top = gl.max(scores, 1) * scale
        else:
            top = gl.full([rows], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        for _ in range(key_tiles - 1):
            weights, top, total, sums, rest_sums = _weigh(scores, top, total, sums, rest_sums, scale, dtype, settled)
            stage = used % stages
            mbarrier.wait(v_full.index(stage), used // stages & 1)
            v = sv_main.index(stage).reshape([keys, main])
            sums = warpgroup_mma(gl.convert_layout(weights, m_weights), v, sums, is_async=True)
            if rest > 0:
                v = _narrow(sv_rest.index(stage).reshape([keys, rest]), tail)
                rest_sums = warpgroup_mma(gl.convert_layout(weights, r_weights), v, rest_sums, is_async=True)
            used += 1
            scores = _scores(q_main, q_rest, sk_main, sk_rest, k_full, used, main, rest, rows, keys, stages, s_layout)
            if rest > 0:
                sums, rest_sums, scores = warpgroup_mma_wait(0, [sums, rest_sums, scores])
            else:
                sums, scores = warpgroup_mma_wait(0, [sums, scores])
            mbarrier.arrive(v_empty.index(stage))
            mbarrier.arrive(k_empty.index(used % stages))
        mbarrier.arrive(q_empty.index(group))
        if ragged:
            scores = _masked(scores, (key_tiles - 1) * keys, patches, s_layout)
        weights, top, total, sums, rest_sums = _weigh(scores, top, total, sums, rest_sums, scale, dtype, settled)
        stage = used % stages
        mbarrier.wait(v_full.index(stage), used // stages & 1)
        v = sv_main.index(stage).reshape([keys, main])
        sums = warpgroup_mma(gl.convert_layout(weights, m_weights), v, sums, is_async=True)
        if rest > 0:
            v = _narrow(sv_rest.index(stage).reshape([keys, rest]), tail)
            rest_sums = warpgroup_mma(gl.convert_layout(weights, r_weights), v, rest_sums, is_async=True)
        if rest > 0:
            sums, rest_sums = warpgroup_mma_wait(0, [sums, rest_sums])
        else:
            sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(v_empty.index(stage))
        used += 1
        done += 1
        if settled:  # a sum that is not a number counts too
            overflowed = gl.maximum(overflowed, gl.where(total < _LIMIT, 0, 1))
        row = (row_tile * groups + group) * rows
        at = output + view.to(gl.int64) * patches * heads * size + head * size
        _store(at, row, sums, total, 0, patches, heads, size, rows, main)
        if rest > 0:
            _store(at, row, rest_sums, total, main, patches, heads, size, rows, narrow)
    return used, done, overflowed


@_gluon
def _masked(scores, first, patches, s_layout: gl.constexpr):
    """Return the scores without keys past the end, which score 0 because the copy engine fills them with zeros."""
    key = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, s_layout))
    return gl.where((key < patches)[None, :], scores, float("-inf"))


@_gluon
def _store(
    at,
    row,
    sums,
    total,
    first: gl.constexpr,
    patches,
    heads,
    size: gl.constexpr,
    rows: gl.constexpr,
    columns: gl.constexpr,
):
    layout: gl.constexpr = sums.type.layout
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, layout))[:, None]
    row += gl.arange(0, rows, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, columns, gl.SliceLayout(0, layout))
    there = (row < patches)[:, None] & (column < size)[None, :]
    place = row.to(gl.int64)[:, None] * (heads * size) + column[None, :]
    gl.store(at + place, (sums * inverse).to(at.dtype.element_ty), mask=there)


@_gluon
def _attend(
    q_main,
    q_rest,
    k_main,
    k_rest,
    v_main,
    v_rest,
    output,
    scale,
    patches,
    heads,
    row_tiles,
    tiles,
    size: gl.constexpr,
    main: gl.constexpr,
    rest: gl.constexpr,
    tail: gl.constexpr,
    rows: gl.constexpr,
    keys: gl.constexpr,
    stages: gl.constexpr,
    groups: gl.constexpr,
    ragged: gl.constexpr,
    registers: gl.constexpr,
    settled: gl.constexpr,
):
    """One program per multiprocessor: every ``num_programs``-th tile of ``groups`` times 64 rows of one head."""
    dtype: gl.constexpr = output.dtype.element_ty
    sq_main = gl.allocate_shared_memory(dtype, [groups, 1, 1, rows, main], q_main.layout)
    sk_main = gl.allocate_shared_memory(dtype, [stages, 1, 1, keys, main], k_main.layout)
    sv_main = gl.allocate_shared_memory(dtype, [stages, 1, 1, keys, main], v_main.layout)
    if rest > 0:
        sq_rest = gl.allocate_shared_memory(dtype, [groups, 1, 1, rows, rest], q_rest.layout)
        sk_rest = gl.allocate_shared_memory(dtype, [stages, 1, 1, keys, rest], k_rest.layout)
        sv_rest = gl.allocate_shared_memory(dtype, [stages, 1, 1, keys, rest], v_rest.layout)
    else:
        sq_rest, sk_rest, sv_rest = sq_main, sk_main, sv_main
    q_full = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    overflows = gl.allocate_shared_memory(gl.int32, [groups, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(finished, count=groups)
    for i in gl.static_range(groups):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=groups)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=groups)
    fence_async_shared()
    # Gluon takes the partitions as a literal list, and constants only as literal elements of their tuples.
    if groups == 2:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        0,
                        output,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        scale,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        size,
                        main,
                        rest,
                        tail,
                        rows,
                        keys,
                        stages,
                        groups,
                        ragged,
                        settled,
                    ),
                ),
                (
                    _consumer,
                    (
                        1,
                        output,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        scale,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        size,
                        main,
                        rest,
                        tail,
                        rows,
                        keys,
                        stages,
                        groups,
                        ragged,
                        settled,
                    ),
                ),
                (
                    _producer,
                    (
                        q_main,
                        q_rest,
                        k_main,
                        k_rest,
                        v_main,
                        v_rest,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        main,
                        rest,
                        rows,
                        keys,
                        stages,
                        groups,
                        settled,
                    ),
                ),
            ],
            [4, 1],
            [registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        0,
                        output,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        scale,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        size,
                        main,
                        rest,
                        tail,
                        rows,
                        keys,
                        stages,
                        groups,
                        ragged,
                        settled,
                    ),
                ),
                (
                    _consumer,
                    (
                        1,
                        output,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        scale,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        size,
                        main,
                        rest,
                        tail,
                        rows,
                        keys,
                        stages,
                        groups,
                        ragged,
                        settled,
                    ),
                ),
                (
                    _consumer,
                    (
                        2,
                        output,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        scale,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        size,
                        main,
                        rest,
                        tail,
                        rows,
                        keys,
                        stages,
                        groups,
                        ragged,
                        settled,
                    ),
                ),
                (
                    _producer,
                    (
                        q_main,
                        q_rest,
                        k_main,
                        k_rest,
                        v_main,
                        v_rest,
                        sq_main,
                        sq_rest,
                        sk_main,
                        sk_rest,
                        sv_main,
                        sv_rest,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        overflows,
                        finished,
                        patches,
                        heads,
                        row_tiles,
                        tiles,
                        main,
                        rest,
                        rows,
                        keys,
                        stages,
                        groups,
                        settled,
                    ),
                ),
            ],
            [4, 4, 1],
            [registers, registers, 24],
        )
