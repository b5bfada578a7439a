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
from dataclasses import dataclass
from functools import cache
from typing import Any

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
_LIMIT = gl.constexpr(2.0**60)  # of a sum of weights; leaves room for values up to 2^67
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

_gluon: Callable[[Callable[..., Any]], Any] = gluon.jit


@dataclass(frozen=True)
class _Tiling:
    """Constants of a launch.

    Args:
        size: head size.
        main: columns of a head in the first load.
        rest: columns in the second load; 0: none.
        tail: columns of the rest that the output needs.
        groups: warpgroups that compute.
        stages: tiles of keys and of values in shared memory.
        registers: registers of a thread that computes.
        ragged: whether the last tile of keys is shorter.
        settled: whether weights are relative to the first tile of keys.
        rows: query rows of a warpgroup: the fixed height of a Hopper matrix product.
        keys: keys of a tile.
    """

    size: int
    main: int
    rest: int
    tail: int
    groups: int
    stages: int
    registers: int
    ragged: bool
    settled: bool
    rows: int = 64
    keys: int = 128


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
        ValueError: the device, precision or head size is not supported.
    """
    if not supported(query.device, query.dtype):
        raise ValueError(f"{query.dtype} on {query.device} is not supported: expected 16 bits on a Hopper GPU")
    views, heads, patches, size = query.shape
    if not 16 <= size <= 128:
        raise ValueError(f"head size {size} is not supported: expected 16 to 128")
    output = torch.empty(views, patches, heads, size, dtype=query.dtype, device=query.device)
    if output.numel():
        factor = (size**-0.5 if scale is None else scale) * _LOG2E
        with torch.cuda.device(query.device):  # Triton launches on the present device
            _launch(_aligned(query), _aligned(key), _aligned(value), output, factor)
    return output


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether :func:`attend` runs on this device in this precision."""
    return dtype in _ELEMENTS and not INTERPRETED and gpu_has("warpgroup_products", device)


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if the copy engine cannot address it."""
    step = 16 // part.element_size()
    if part.stride(3) == 1 and part.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in part.stride()[:3]):
        return part
    *shape, size = part.shape
    return part.new_empty(*shape, triton.cdiv(size, step) * step)[..., :size].copy_(part)


def _launch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, factor: float) -> None:
    views, heads, patches, size = query.shape
    tiling = _tiling(patches, size, query.dtype)
    row_tiles = triton.cdiv(patches, tiling.rows * tiling.groups)
    tiles = row_tiles * heads * views
    _attend[(min(tiles, _multiprocessors(query.device)),)](
        *_descriptors(query, tiling.rows, tiling),
        *_descriptors(key, tiling.keys, tiling),
        *_descriptors(value, tiling.keys, tiling),
        output,
        factor,
        patches,
        heads,
        row_tiles,
        tiles,
        tiling=tiling,
        num_warps=4,
    )


@cache
def _tiling(patches: int, size: int, dtype: torch.dtype) -> _Tiling:
    """Return the constants for views of so many patches and heads of this size."""
    main = 1 << (size.bit_length() - 1)
    more = triton.next_power_of_2(size - main) if size > main else 0
    rest, tail = (max(more, 16), max(more, 8)) if more else (0, 0)
    groups = 3 if main + tail <= 72 else 2  # three have 160 registers per thread, two 240
    width = (main + rest) * dtype.itemsize
    stages = min(4, (SHARED_BYTES[9, 0] - 1024 - groups * _Tiling.rows * width) // (2 * _Tiling.keys * width))
    ragged, settled = patches % _Tiling.keys != 0, dtype == torch.bfloat16  # float16 has too few exponents
    return _Tiling(size, main, rest, tail, groups, stages, 160 if groups == 3 else 240, ragged, settled)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptors(part: torch.Tensor, rows: int, tiling: _Tiling) -> list[HopperDescriptor]:
    """Return descriptors of the main columns and of the rest; the first twice if there is no rest."""
    return [
        HopperDescriptor(part, part.shape, part.stride(), *_block(rows, columns, part.dtype))
        for columns in (tiling.main, tiling.rest or tiling.main)
    ]


@cache
def _block(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    shape = [1, 1, rows, columns]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, _ELEMENTS[dtype])


# In the kernel, ``sizes`` are (patches, heads, row tiles, tiles). ``buffers`` are those of queries, keys and values,
# each (main, rest, full, empty): shared memory of the main columns and of the rest, and the barriers of both.
# ``flags`` are (overflows, finished): whether a warpgroup's sums overflowed, and the barrier for that.


@_gluon
def _position(tile, sizes):
    """Return view, head and tile of rows. Programs that run together share keys and values in the L2 cache."""
    _, heads, row_tiles, _ = sizes
    return tile // (row_tiles * heads), tile // row_tiles % heads, tile % row_tiles


@_gluon
def _load(source, buffers, index, phase, view, head, row, rows: gl.constexpr, tiling: gl.constexpr):
    """Load rows of a head into a buffer once its readers have released it."""
    main, rest, full, empty = buffers
    mbarrier.wait(empty.index(index), phase)
    barrier = full.index(index)
    mbarrier.expect(barrier, rows * (tiling.main + tiling.rest) * 2)
    tma.async_copy_global_to_shared(source[0], [view, head, row, 0], barrier, main.index(index))
    if tiling.rest > 0:
        tma.async_copy_global_to_shared(source[1], [view, head, row, tiling.main], barrier, rest.index(index))


@_gluon
def _producer(sources, buffers, flags, sizes, tiling: gl.constexpr):
    """Load tiles in the order in which the warpgroups need them, into buffers that all of them have released."""
    patches, _, _, tiles = sizes
    groups: gl.constexpr = tiling.groups
    loaded, done, first = 0, 0, gl.program_id(0)
    for attempt in gl.static_range(2 if tiling.settled else 1):
        if attempt == 1:
            first = _first_again(flags, tiles, groups, 1)
        for tile in range(first, tiles, gl.num_programs(0)):
            view, head, row_tile = _position(tile, sizes)
            for group in gl.static_range(groups):
                row = (row_tile * groups + group) * tiling.rows
                _load(sources[0], buffers[0], group, (done & 1) ^ 1, view, head, row, tiling.rows, tiling)
            for begin in range(0, patches, tiling.keys):
                stage = loaded % tiling.stages
                phase = (loaded // tiling.stages & 1) ^ 1
                _load(sources[1], buffers[1], stage, phase, view, head, begin, tiling.keys, tiling)
                _load(sources[2], buffers[2], stage, phase, view, head, begin, tiling.keys, tiling)
                loaded += 1
            done += 1  # Gluon has no enumerate


@_gluon
def _first_again(flags, tiles, groups: gl.constexpr, warps: gl.constexpr):
    """Return the first tile of the second attempt: this program's first if a sum overflowed, else one past the last."""
    overflows, finished = flags
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    mbarrier.wait(finished, 0)
    overflowed = gl.max(overflows.index(0).load(layout), 0)
    for group in gl.static_range(1, groups):
        overflowed = gl.maximum(overflowed, gl.max(overflows.index(group).load(layout), 0))
    return gl.program_id(0) + (1 - overflowed) * tiles


@_gluon
def _scores(q_main, q_rest, k, used, tiling: gl.constexpr, layout: gl.constexpr):
    """Issue query · keyᵀ for the next tile of keys."""
    main, rest, full, _ = k
    rows: gl.constexpr = tiling.rows
    keys: gl.constexpr = tiling.keys
    columns: gl.constexpr = tiling.main
    rest_columns: gl.constexpr = tiling.rest
    stage = used % tiling.stages
    mbarrier.wait(full.index(stage), used // tiling.stages & 1)
    scores = gl.zeros([rows, keys], gl.float32, layout)
    part = main.index(stage).reshape([keys, columns]).permute([1, 0])
    scores = warpgroup_mma(q_main, part, scores, use_acc=False, is_async=True)
    if rest_columns > 0:
        part = rest.index(stage).reshape([keys, rest_columns]).permute([1, 0])
        scores = warpgroup_mma(q_rest, part, scores, is_async=True)
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
def _add_values(weights, v, used, sums, rest_sums, tiling: gl.constexpr):
    """Issue weights · values for the next tile of keys."""
    main, rest, full, _ = v
    keys: gl.constexpr = tiling.keys
    columns: gl.constexpr = tiling.main
    rest_columns: gl.constexpr = tiling.rest
    stage = used % tiling.stages
    mbarrier.wait(full.index(stage), used // tiling.stages & 1)
    values = main.index(stage).reshape([keys, columns])
    layout: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    sums = warpgroup_mma(gl.convert_layout(weights, layout), values, sums, is_async=True)
    if rest_columns > 0:
        values = _narrow(rest.index(stage).reshape([keys, rest_columns]), tiling.tail)
        rest_layout: gl.constexpr = gl.DotOperandLayout(0, rest_sums.type.layout, 2)
        rest_sums = warpgroup_mma(gl.convert_layout(weights, rest_layout), values, rest_sums, is_async=True)
    return sums, rest_sums


@_gluon
def _consumer(group: gl.constexpr, output, buffers, flags, scale, sizes, tiling: gl.constexpr):
    """Compute 64 query rows per tile with one warpgroup, a second time if sums of weights overflowed."""
    overflows, finished = flags
    rows: gl.constexpr = tiling.rows
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiling.keys, 16])
    used, done, first = 0, 0, gl.program_id(0)
    overflowed = gl.zeros([rows], gl.int32, gl.SliceLayout(1, s_layout))
    for attempt in gl.static_range(2 if tiling.settled else 1):
        if attempt == 1:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            overflows.index(group).store(gl.full([32], gl.max(overflowed, 0), gl.int32, layout))
            mbarrier.arrive(finished)
            first = _first_again(flags, sizes[3], tiling.groups, 4)
        progress = first, used, done, overflowed
        used, done, overflowed = _consume(
            group, output, buffers, scale, sizes, progress, tiling, tiling.settled and attempt == 0, s_layout
        )


@_gluon
def _consume(
    group: gl.constexpr,
    output,
    buffers,
    scale,
    sizes,
    progress,
    tiling: gl.constexpr,
    settled: gl.constexpr,
    s_layout: gl.constexpr,
):
    """Compute the tiles from the first of ``progress`` on. Return how many tiles of keys and of rows were used so far,
    and whether the weights of any row overflowed.

    The product with the values of one tile of keys and the scores of the next are issued as one burst. Softmax runs
    between bursts, while the tensor cores work for the other warpgroups.
    """
    q, k, v = buffers
    patches, heads, _, tiles = sizes
    first, used, done, overflowed = progress
    rows: gl.constexpr = tiling.rows
    main: gl.constexpr = tiling.main
    rest: gl.constexpr = tiling.rest
    stages: gl.constexpr = tiling.stages
    # Without a rest, its tensors are unused; they only need a valid shape.
    wide: gl.constexpr = rest if rest > 0 else main
    narrow: gl.constexpr = tiling.tail if rest > 0 else 8
    m_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, main, 16])
    r_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, narrow, 16])
    dtype: gl.constexpr = output.dtype.element_ty
    key_tiles = gl.cdiv(patches, tiling.keys)
    for tile in range(first, tiles, gl.num_programs(0)):
        view, head, row_tile = _position(tile, sizes)
        mbarrier.wait(q[2].index(group), done & 1)
        q_main = q[0].index(group).reshape([rows, main])
        q_rest = q[1].index(group).reshape([rows, wide])
        total = gl.zeros([rows], gl.float32, gl.SliceLayout(1, s_layout))
        sums = gl.zeros([rows, main], gl.float32, m_layout)
        rest_sums = gl.zeros([rows, narrow], gl.float32, r_layout)
        scores = _scores(q_main, q_rest, k, used, tiling, s_layout)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k[3].index(used % stages))
        if settled:
            if tiling.ragged:
                scores = _masked(scores, 0, patches, s_layout)
            top = gl.max(scores, 1) * scale
        else:
            top = gl.full([rows], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        for _ in range(key_tiles - 1):
            weights, top, total, sums, rest_sums = _weigh(scores, top, total, sums, rest_sums, scale, dtype, settled)
            stage = used % stages
            sums, rest_sums = _add_values(weights, v, used, sums, rest_sums, tiling)
            used += 1
            scores = _scores(q_main, q_rest, k, used, tiling, s_layout)
            if rest > 0:
                sums, rest_sums, scores = warpgroup_mma_wait(0, [sums, rest_sums, scores])
            else:
                sums, scores = warpgroup_mma_wait(0, [sums, scores])
            mbarrier.arrive(v[3].index(stage))
            mbarrier.arrive(k[3].index(used % stages))
        mbarrier.arrive(q[3].index(group))
        if tiling.ragged:
            scores = _masked(scores, (key_tiles - 1) * tiling.keys, patches, s_layout)
        weights, top, total, sums, rest_sums = _weigh(scores, top, total, sums, rest_sums, scale, dtype, settled)
        sums, rest_sums = _add_values(weights, v, used, sums, rest_sums, tiling)
        if rest > 0:
            sums, rest_sums = warpgroup_mma_wait(0, [sums, rest_sums])
        else:
            sums = warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(v[3].index(used % stages))
        used += 1
        done += 1
        if settled:  # a sum that is not a number counts too
            overflowed = gl.maximum(overflowed, gl.where(total < _LIMIT, 0, 1))
        row = (row_tile * tiling.groups + group) * rows
        at = output + view.to(gl.int64) * patches * heads * tiling.size + head * tiling.size
        _store(at, row, sums, total, 0, patches, heads, tiling.size)
        if rest > 0:
            _store(at, row, rest_sums, total, main, patches, heads, tiling.size)
    return used, done, overflowed


@_gluon
def _masked(scores, first, patches, s_layout: gl.constexpr):
    """Return the scores without keys past the end, which score 0 because the copy engine fills them with zeros."""
    key = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, s_layout))
    return gl.where((key < patches)[None, :], scores, float("-inf"))


@_gluon
def _store(at, row, sums, total, first: gl.constexpr, patches, heads, size: gl.constexpr):
    layout: gl.constexpr = sums.type.layout
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, layout))[:, None]
    row += gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    column = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    valid = (row < patches)[:, None] & (column < size)[None, :]
    place = row.to(gl.int64)[:, None] * (heads * size) + column[None, :]
    gl.store(at + place, (sums * inverse).to(at.dtype.element_ty), mask=valid)


@_gluon
def _buffers(
    main_desc, rest_desc, count: gl.constexpr, readers: gl.constexpr, rows: gl.constexpr, tiling: gl.constexpr
):
    """Allocate buffers for ``count`` tiles, which ``readers`` warpgroups release."""
    dtype: gl.constexpr = main_desc.dtype
    columns: gl.constexpr = tiling.main
    rest_columns: gl.constexpr = tiling.rest
    main = gl.allocate_shared_memory(dtype, [count, 1, 1, rows, columns], main_desc.layout)
    rest = main
    if rest_columns > 0:
        rest = gl.allocate_shared_memory(dtype, [count, 1, 1, rows, rest_columns], rest_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(count):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=readers)
    return main, rest, full, empty


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
    tiling: gl.constexpr,
):
    """One program per multiprocessor: every ``num_programs``-th tile of ``groups`` times 64 rows of one head."""
    groups: gl.constexpr = tiling.groups
    registers: gl.constexpr = tiling.registers
    q = _buffers(q_main, q_rest, groups, 1, tiling.rows, tiling)
    k = _buffers(k_main, k_rest, tiling.stages, groups, tiling.keys, tiling)
    v = _buffers(v_main, v_rest, tiling.stages, groups, tiling.keys, tiling)
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    overflows = gl.allocate_shared_memory(gl.int32, [groups, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(finished, count=groups)
    fence_async_shared()
    sizes, buffers, flags = (patches, heads, row_tiles, tiles), (q, k, v), (overflows, finished)
    sources = ((q_main, q_rest), (k_main, k_rest), (v_main, v_rest))
    # Gluon takes the partitions as a literal list, and constants only as literal elements of their tuples.
    if groups == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, output, buffers, flags, scale, sizes, tiling)),
                (_consumer, (1, output, buffers, flags, scale, sizes, tiling)),
                (_producer, (sources, buffers, flags, sizes, tiling)),
            ],
            [4, 1],
            [registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, output, buffers, flags, scale, sizes, tiling)),
                (_consumer, (1, output, buffers, flags, scale, sizes, tiling)),
                (_consumer, (2, output, buffers, flags, scale, sizes, tiling)),
                (_producer, (sources, buffers, flags, sizes, tiling)),
            ],
            [4, 4, 1],
            [registers, registers, 24],
        )
