"""Triton kernels that multiply by quantised weights. Imported only with Triton.

Multiplying a few rows (decode) is memory-bound, multiplying many rows (prefill) compute-bound. cuBLAS is fast for both
with float8; for int8, and for a few rows with 4-bit weights, these kernels are faster (``benchmarks/products.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from panscan.core.gpu_features import SHARED_BYTES
from panscan.core.jit import INTERPRETED, kernel, launch
from panscan.model.linear.rows import LARGEST, LEAST_SCALE, QuantizedRows

_INTERPRETED = tl.constexpr(INTERPRETED)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_COLUMNS = 1024  # per program, where several programs share a row


class Tiles(NamedTuple):
    """Tile sizes and launch parameters of a kernel. ``tma``: copy tiles with the Tensor Memory Accelerator (Hopper)."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int
    tma: bool = False


class FixedPoint(NamedTuple):
    """Rows as ``scale * (256 high + low)``, with a scale for each group of channels.

    ``high``, ``low``: int8 ``[T, inputs]``. ``scale``, ``sum``: float32 ``[T, groups]``; ``sum``: each group's sum.
    """

    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor
    sum: torch.Tensor


def launch_rows(
    program: Any, values: torch.Tensor, dtype: torch.dtype, *arguments: torch.Tensor | float | None, **options: bool
) -> QuantizedRows:
    """Return rows like ``values`` that a kernel computes, one per program; their scales count if they are quantised.

    Args:
        program: the kernel. It takes the values, the rows, their scales, the other arguments, the largest value of the
            type or 0 (``most``), and the width.
        values: contiguous ``[..., width]``.
        dtype: type of the rows.
        arguments: the other arguments.
        options: launch options.
    """
    width = values.shape[-1]
    padded = triton.next_power_of_2(width)
    rows = torch.empty_like(values, dtype=dtype)
    scale = values.new_empty(*values.shape[:-1], 1, dtype=torch.float32)
    launch(
        program,
        (values.numel() // width,),
        values,
        rows,
        scale,
        *arguments,
        most=LARGEST.get(dtype, 0.0),
        width=width,
        padded=padded,
        num_warps=min(16, max(4, padded // 512)),  # at most 16 values per thread
        **options,
    )
    return QuantizedRows(rows, scale)


def quantize(values: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Quantise rows by their largest absolute values.

    Args:
        values: contiguous ``[..., inputs]``.
        dtype: int8 or float8_e4m3fn.
    """
    return launch_rows(_quantize, values, dtype)


def quantize_chunks(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Quantise rows, given the largest absolute value of each chunk, with one program per chunk.

    Args:
        values: contiguous ``[T, inputs]``.
        largest: float32 ``[T, chunks]``: largest absolute value of each 1024 columns.
        dtype: int8 or float8_e4m3fn.
    """
    rows, width = values.shape
    chunks = largest.shape[1]
    quantized = torch.empty_like(values, dtype=dtype)
    scales = values.new_empty(rows, 1, dtype=torch.float32)
    launch(
        _quantize_chunk,
        (rows, chunks),
        values,
        largest,
        quantized,
        scales,
        LARGEST[dtype],
        chunks,
        width=width,
        columns=_COLUMNS,
        padded=triton.next_power_of_2(chunks),
    )
    return QuantizedRows(quantized, scales)


def scale_sums(
    sums: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``sums * row_scale * column_scale + bias``, rounded once to ``dtype``.

    Args:
        sums: contiguous ``[T, outputs]`` of any type.
        row_scale: float32 ``[T, 1]``.
        column_scale: float32 ``[outputs]``.
        dtype: type of the result.
        bias: ``[outputs]`` of any type, or None.
    """
    rows, outputs = sums.shape
    scaled = torch.empty_like(sums, dtype=dtype)
    launch(
        _scale_sums,
        (rows, triton.cdiv(outputs, _COLUMNS)),
        sums,
        row_scale,
        column_scale,
        bias,
        scaled,
        outputs,
        columns=_COLUMNS,
    )
    return scaled


def int8_tiles(rows: int, shared_bytes: int, *, tma: bool) -> Tiles:
    """Return the fastest tile sizes for a number of rows, as measured on an H200; shared memory limits the stages.

    Args:
        rows: number of input rows.
        shared_bytes: shared memory per program.
        tma: whether the GPU has a Tensor Memory Accelerator.
    """
    few = {16: Tiles(16, 32, 256, 2, 6), 32: Tiles(32, 32, 256, 2, 5), 64: Tiles(64, 32, 256, 4, 4)}
    most = next((most for most in few if rows <= most), None)
    if most is not None:
        tiles = few[most]
    elif rows <= 128:
        tiles = Tiles(128, 64, 128, 4, 4)
    elif rows <= 512 or shared_bytes < 2 * (128 + 256) * 128:
        tiles = Tiles(128, 128, 128, 8, 4, tma)
    else:
        tiles = Tiles(128, 256, 128, 8, 4, tma)
    return tiles._replace(stages=min(tiles.stages, shared_bytes // ((tiles.rows + tiles.columns) * tiles.inputs)))


def product_int8(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    column_scale: torch.Tensor,
    dtype: torch.dtype,
    tiles: Tiles,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``(rows @ weight.T) * row_scale * column_scale + bias`` ``[T, outputs]``, rounded once to ``dtype``.

    The sums of the products are exact.

    Args:
        rows: contiguous int8 ``[T, inputs]``.
        row_scale: float32 ``[T, 1]``.
        weight: contiguous int8 ``[outputs, inputs]``.
        column_scale: float32 ``[outputs]``.
        dtype: type of the result.
        tiles: see :func:`int8_tiles`.
        bias: ``[outputs]`` of any type, or None.
    """
    count, inputs = rows.shape
    outputs = len(weight)
    product = rows.new_empty(count, outputs, dtype=dtype)
    left, right = rows, weight
    if tiles.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        left = TensorDescriptor.from_tensor(rows, [tiles.rows, tiles.inputs])
        right = TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.inputs])
    grid = (triton.cdiv(count, tiles.rows) * triton.cdiv(outputs, tiles.columns),)
    launch(
        _product_int8,
        grid,
        row_scale,
        left,
        column_scale,
        right,
        bias,
        product,
        count,
        outputs,
        inputs,
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=tiles.inputs,
        group=8,
        tma=tiles.tma,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return product


def fixed_point(values: torch.Tensor, group_size: int) -> FixedPoint:
    """Convert contiguous rows ``[T, inputs]`` to fixed point with 16 bits per value.

    bfloat16 has 8 significant bits, so a value in [1/256, 1] of its group's largest is converted without loss.
    """
    rows, width = values.shape
    groups = width // group_size
    high, low = torch.empty_like(values, dtype=torch.int8), torch.empty_like(values, dtype=torch.int8)
    scale, total = values.new_empty(2, rows, groups, dtype=torch.float32)
    padded = triton.next_power_of_2(groups)
    launch(
        _fixed_point,
        (rows,),
        values,
        high,
        low,
        scale,
        total,
        width,
        groups,
        padded=padded,
        group=group_size,
        num_warps=min(16, max(4, padded * group_size // 512)),
    )
    return FixedPoint(high, low, scale, total)


def vector_int4(
    rows: FixedPoint, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply one or two rows without tensor cores; return ``[T, outputs]``.

    Args:
        rows: inputs, in groups like the weights.
        weight: packed (:func:`panscan.model.linear.quantized.pack_int4`).
        scale: ``[groups, outputs]``.
        zero: ``[groups, outputs]`` of any type, or None for 8.
        dtype: type of the result.
    """
    blocks, outputs, _ = weight.shape
    count, groups = rows.scale.shape
    group_size = rows.high.shape[1] // groups
    product = weight.new_empty(count, outputs, dtype=dtype)
    block_n = 16
    launch(
        _vector_int4,
        (triton.cdiv(outputs, block_n), count),
        rows.high.view(torch.int32),
        rows.low.view(torch.int32),
        rows.scale,
        rows.sum,
        weight.view(torch.int32),
        scale,
        zero,
        product,
        outputs,
        groups,
        blocks,
        weight.stride(0) // 4,
        scale.stride(0),
        block_n=block_n,
        side=4,
        group=group_size,
        num_warps=1,
    )
    return product


def product_int4(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    shared_bytes: int,
) -> torch.Tensor:
    """Multiply a few rows (up to about 64); return ``[T, outputs]`` in the type of the rows.

    Args:
        rows: contiguous ``[T, inputs]``.
        weight: packed (:func:`panscan.model.linear.quantized.pack_int4`).
        scale: ``[groups, outputs]``.
        zero: ``[groups, outputs]`` of any type, or None for 8.
        group_size: input channels per group.
        shared_bytes: shared memory that one program may have.
    """
    count, inputs = rows.shape
    outputs = weight.shape[1]
    product = rows.new_empty(count, outputs)
    # Three stages of 64 float32 rows would not fit into the shared memory of any GPU but Hopper's.
    block_m = 16 if count <= 16 else 32 if rows.dtype == torch.float32 else 64
    launch(
        _product_int4,
        (triton.cdiv(outputs, 64), triton.cdiv(count, block_m)),
        rows,
        weight,
        scale,
        zero,
        product,
        count,
        outputs,
        inputs,
        weight.stride(0),
        scale.stride(0),
        block_m=block_m,
        block_n=64,
        slice_k=min(group_size, 128),
        group=group_size,
        precision="ieee" if rows.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if block_m == 16 or shared_bytes >= SHARED_BYTES[8, 0] else 2,  # as measured on an H200
    )
    return product


def dequantize_int4(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    inputs: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantise packed 4-bit weights to dense values ``[outputs, inputs]``.

    Args:
        weight: packed (:func:`panscan.model.linear.quantized.pack_int4`); may be a slice of the outputs.
        scale: ``[groups, outputs]``, sliced likewise.
        zero: ``[groups, outputs]`` of any type, sliced likewise, or None for 8.
        group_size: input channels per group.
        inputs: input channels.
        dtype: type of the result.
    """
    blocks, outputs, _ = weight.shape
    dense = weight.new_empty(outputs, inputs, dtype=dtype)
    launch(
        _dequantize_int4,
        (blocks, triton.cdiv(outputs, 16)),
        weight,
        scale,
        zero,
        dense,
        outputs,
        inputs,
        weight.stride(0),
        scale.stride(0),
        block_n=16,
        slice_k=min(group_size, 128),
        group=group_size,
        num_warps=4,
    )
    return dense


@kernel()
def _quantize(values, quantized, scales, most, width: tl.constexpr, padded: tl.constexpr):
    """Quantise one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    valid = column < width
    x = load_float(values + row * width + column, valid)
    scale = tl.maximum(tl.max(tl.abs(x), 0), _LEAST_SCALE) / most
    store_quantized(quantized + row * width + column, x / scale, valid)
    tl.store(scales + row, scale)


@kernel()
def store_quantized(at, values, valid):
    """Store values rounded to the type at the pointer: int8 or float8."""
    tl.store(at, rounded(values, at.dtype.element_ty == tl.int8).to(at.dtype.element_ty), mask=valid)


@kernel()
def _quantize_chunk(
    values,
    largest,
    quantized,
    scales,
    most,
    chunks,
    width: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
):
    """Quantise ``columns`` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, padded)
    top = tl.max(load_float(largest + row * chunks + chunk, chunk < chunks), 0)
    scale = tl.maximum(top, _LEAST_SCALE) / most
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    valid = column < width
    x = load_float(values + row * width + column, valid)
    store_quantized(quantized + row * width + column, x / scale, valid)
    if tl.program_id(1) == 0:
        tl.store(scales + row, scale)


@kernel()
def load_float(at, valid):
    """Load values as float32; 0 where they are not valid."""
    return tl.load(at, mask=valid, other=0).to(tl.float32)


@kernel()
def rounded(x, whole: tl.constexpr):
    """Round to the nearest even integer if ``whole``: adding 1.5 * 2^23 leaves no fraction bits."""
    if whole:
        x = (x + 12582912.0) - 12582912.0
    return x


@kernel()
def _product_int8(
    x_scale,
    x,
    w_scale,
    w,
    bias,
    out,
    rows,
    outputs,
    inputs,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    tma: tl.constexpr,
):
    """Compute one tile of the output. ``group`` row blocks run consecutively, to share their weights in the L2 cache.

    With ``tma``, ``x`` and ``w`` are tensor descriptors, else pointers.
    """
    pid = tl.program_id(0)
    m_blocks, n_blocks = tl.cdiv(rows, block_m), tl.cdiv(outputs, block_n)
    in_group = group * n_blocks
    first = pid // in_group * group
    size = min(m_blocks - first, group)
    first_m = (first + pid % in_group % size) * block_m
    first_n = pid % in_group // size * block_n
    m, n, k = first_m + tl.arange(0, block_m), first_n + tl.arange(0, block_n), tl.arange(0, block_k)
    total = tl.zeros((block_m, block_n), tl.int32)
    for start in range(0, inputs, block_k):
        if tma:
            left, right = x.load([first_m, start]), w.load([first_n, start]).T
        else:
            there = start + k < inputs
            x_at = x + m[:, None].to(tl.int64) * inputs + start + k[None, :]
            w_at = w + n[None, :].to(tl.int64) * inputs + start + k[:, None]
            left = tl.load(x_at, mask=(m[:, None] < rows) & there[None, :], other=0)
            right = tl.load(w_at, mask=(n[None, :] < outputs) & there[:, None], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    scale = load_float(x_scale + m, m < rows)[:, None] * load_float(w_scale + n, n < outputs)
    at = out + m[:, None].to(tl.int64) * outputs + n[None, :]
    values = total.to(tl.float32) * scale
    if bias is not None:
        values += load_float(bias + n, n < outputs)[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outputs))


@kernel()
def _scale_sums(sums, x_scale, w_scale, bias, out, outputs, columns: tl.constexpr):
    """Scale ``columns`` sums of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    valid = n < outputs
    total = load_float(sums + row * outputs + n, valid)
    total = total * (tl.load(x_scale + row) * load_float(w_scale + n, valid))
    if bias is not None:
        total += load_float(bias + n, valid)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=valid)


@kernel()
def _fixed_point(x, high, low, scales, sums, width, groups, padded: tl.constexpr, group: tl.constexpr):
    """Write one row as ``scale * (256 high + low)`` with a scale for each group of channels, and the groups' sums."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, padded)
    column = place[:, None] * group + tl.arange(0, group)[None, :]
    valid = column < width
    values = load_float(x + row * width + column, valid)
    scale = tl.maximum(tl.max(tl.abs(values), 1), _LEAST_SCALE) / 32512.0
    fixed = rounded(values / scale[:, None], True).to(tl.int32)
    upper = (fixed + 128) >> 8
    tl.store(high + row * width + column, upper.to(tl.int8), mask=valid)
    tl.store(low + row * width + column, (fixed - upper * 256).to(tl.int8), mask=valid)
    tl.store(scales + row * groups + place, scale, mask=place < groups)
    tl.store(sums + row * groups + place, tl.sum(fixed, 1).to(tl.float32) * scale, mask=place < groups)


@kernel()
def dot_bytes(a, b, total):
    """Add the products of four signed bytes in each of two int32."""
    if _INTERPRETED:
        for shift in tl.static_range(0, 32, 8):
            total += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return total


@kernel()
def _vector_int4(
    high,
    low,
    x_scale,
    x_sum,
    w,
    scale,
    zero,
    out,
    outputs,
    groups,
    blocks,
    w_block,
    scale_row,
    block_n: tl.constexpr,
    side: tl.constexpr,
    group: tl.constexpr,
):
    """Compute ``block_n`` outputs of one row, ``side`` packed blocks at a time, with exact sums of integers."""
    row = tl.program_id(1)
    per_group: tl.constexpr = group // 4  # int32 words
    parts: tl.constexpr = 32 // per_group
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    part = tl.arange(0, side * parts)  # groups of the low halves of ``side`` blocks
    word = tl.arange(0, per_group)
    there = n < outputs
    total = tl.zeros((side * parts, block_n, per_group), tl.float32)
    offset = tl.zeros((side * parts, block_n), tl.float32)
    for first in tl.range(0, blocks, side, num_stages=3):
        block = first + part // parts
        inside = block < blocks
        at = block[:, None, None].to(tl.int64) * w_block + n[None, :, None] * 32
        at += (part % parts * per_group)[:, None, None] + word[None, None, :]
        packed = tl.load(w + at, mask=inside[:, None, None] & there[None, :, None], other=0)
        for half in tl.static_range(2):
            levels = (packed >> (4 * half)) & 0x0F0F0F0F
            which = block * (2 * parts) + half * parts + part % parts
            valid = inside & (which < groups)
            x_group = row * groups + which
            x_at = (x_group * per_group)[:, None] + word[None, :]
            upper = tl.load(high + x_at, mask=valid[:, None], other=0)[:, None, :]
            lower = tl.load(low + x_at, mask=valid[:, None], other=0)[:, None, :]
            blank = tl.zeros((side * parts, block_n, per_group), tl.int32)
            dots = dot_bytes(levels, upper + blank, blank) * 256
            dots = dot_bytes(levels, lower + blank, dots)
            # Values are below 2^22: adding the bits of 1.5 * 2^23 and subtracting that number converts int to float
            # without a conversion instruction.
            product = (dots + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
            place = which[:, None] * scale_row + n[None, :]
            mask = valid[:, None] & there[None, :]
            factor = load_float(scale + place, mask)
            total += product * (factor * load_float(x_scale + x_group, valid)[:, None])[:, :, None]
            seen = factor * load_float(x_sum + x_group, valid)[:, None]
            if zero is not None:
                offset += seen * load_float(zero + place, mask)
            else:
                offset += seen * 8.0
    sums = tl.sum(tl.sum(total, 2) - offset, 0)
    tl.store(out + row * outputs + n, sums.to(out.dtype.element_ty), mask=there)


@kernel()
def _product_int4(
    x,
    w,
    scale,
    zero,
    out,
    rows,
    outputs,
    inputs,
    w_block,
    scale_row,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    slice_k: tl.constexpr,
    group: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute one tile of the output, transposed: the weights are the left operand, which may stay in registers."""
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, slice_k)
    there = n < outputs
    x_at = x + m[None, :].to(tl.int64) * inputs + k[:, None]
    total = tl.zeros((block_n, block_m), tl.float32)
    slices: tl.constexpr = 128 // slice_k
    for step in range(tl.cdiv(inputs, 256) * slices):
        block = step // slices
        first = step % slices * slice_k
        w_at = w + block.to(tl.int64) * w_block + n[:, None] * 128 + first + k[None, :]
        packed = tl.load(w_at, mask=there[:, None], other=0)
        for half in tl.static_range(2):
            at = block * 256 + half * 128 + first
            right = tl.load(x_at + at, mask=(m[None, :] < rows) & (at + k < inputs)[:, None], other=0.0)
            bits = (packed >> (4 * half)) & 15
            if right.dtype == tl.bfloat16:
                # The level becomes the low mantissa bits of 128.0, which is exact and needs no conversion instruction.
                level = (bits.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
            else:
                level = bits.to(right.dtype)
            place = (at // group) * scale_row + n
            inside = there & (at < inputs)
            if zero is not None:
                lowest = load_float(zero + place, inside)  # may lie between two levels
                level = (level.to(tl.float32) - lowest[:, None]).to(right.dtype)
            else:
                level = level - 8.0
            factor = load_float(scale + place, inside)
            total += tl.dot(level, right, input_precision=precision) * factor[:, None]
    at_out = out + m[None, :].to(tl.int64) * outputs + n[:, None]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=(m[None, :] < rows) & there[:, None])


@kernel()
def _dequantize_int4(
    w,
    scale,
    zero,
    out,
    outputs,
    inputs,
    w_block,
    scale_row,
    block_n: tl.constexpr,
    slice_k: tl.constexpr,
    group: tl.constexpr,
):
    """Dequantise ``block_n`` output channels of one block of inputs."""
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    block = tl.program_id(0)
    k = tl.arange(0, slice_k)
    there = n < outputs
    for start in tl.static_range(0, 128, slice_k):
        w_at = w + block.to(tl.int64) * w_block + n[:, None] * 128 + start + k[None, :]
        packed = tl.load(w_at, mask=there[:, None], other=0)
        for half in tl.static_range(2):
            at = block * 256 + half * 128 + start
            inside = there & (at < inputs)
            factor = load_float(scale + (at // group) * scale_row + n, inside)
            level = ((packed >> (4 * half)) & 15).to(tl.float32)
            if zero is not None:
                lowest = load_float(zero + (at // group) * scale_row + n, inside)
                level = level - lowest[:, None]
            else:
                level = level - 8.0
            valid = there[:, None] & (at + k < inputs)[None, :]
            to = out + n[:, None].to(tl.int64) * inputs + at + k[None, :]
            tl.store(to, (level * factor[:, None]).to(out.dtype.element_ty), mask=valid)
