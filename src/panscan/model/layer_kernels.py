"""Triton kernels of our text and vision layers: norms, sums, gated GELU, rotary embedding. Imported only with Triton.

Every kernel computes in float32 and rounds where PyTorch's own operators round, so a layer gives the same result with
and without them, up to the order of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from panscan.core.jit import early_launch, kernel, launch, wait_for_inputs
from panscan.model.layers import LayerCache
from panscan.model.linear.kernels import launch_rows, load_float, quantize_chunks, rounded, store_quantized
from panscan.model.linear.products import Product, Rows
from panscan.model.linear.rows import LEAST_SCALE, QuantizedRows, UnscaledProduct

_GELU_COLUMNS = 1024  # per program
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_MOST_HEADS = 16  # per program of the rotary embedding


def add_layer_norm(
    hidden: torch.Tensor, part: torch.Tensor | None, norm: nn.LayerNorm, input_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, Rows]:
    """Return ``hidden + part`` and its layer norm over the last dimension, both rounded to the type of ``hidden``.

    Args:
        hidden: contiguous ``[..., width]``; returned unchanged without a ``part``.
        part: contiguous, same shape and type; None adds nothing.
        norm: over the width, with weight and bias.
        input_dtype: quantise the rounded norm to this type; None: return it dense.
    """
    total = hidden if part is None else torch.empty_like(hidden)
    others = part, norm.weight, norm.bias, total, norm.eps
    rows = launch_rows(_add_layer_norm, hidden, input_dtype or hidden.dtype, *others, **early_launch(hidden.device))
    return total, rows if input_dtype else rows.values


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, input_dtype: torch.dtype | None = None) -> Rows:
    """Return Gemma's RMS norm, ``x / sqrt(mean(x²) + eps) * (1 + weight)``, rounded once to the type of ``hidden``.

    Args:
        hidden: contiguous ``[T, width]``.
        weight: ``[width]``, of any floating-point type.
        eps: added to the mean square.
        input_dtype: quantise the rounded result to this type; None: return it dense.
    """
    return add_rms_norms(hidden, None, None, weight, eps, input_dtype)[1]


def add_rms_norms(
    hidden: torch.Tensor,
    part: Product | None,
    part_weight: torch.Tensor | None,
    next_weight: torch.Tensor,
    eps: float,
    input_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Rows]:
    """Return ``total = hidden + rms_norm(part, part_weight)`` and ``rms_norm(total, next_weight)``.

    The norm of the part, the sum and the norm of the sum are each rounded to the type of ``hidden``.

    Args:
        hidden: contiguous ``[T, width]``: the residual; returned unchanged without a ``part``.
        part: contiguous, same shape and type: the output of attention or of the MLP; may have pending scales. None adds
            nothing.
        part_weight: ``[width]``: weight of the norm behind that part; None without it.
        next_weight: ``[width]``: weight of the norm in front of the next part.
        eps: of both norms.
        input_dtype: quantise the second result to this type; None: return it dense.
    """
    total = hidden if part is None else torch.empty_like(hidden)
    values = (None, None, None) if part is None else _with_scales(part)
    others = *values, part_weight, next_weight, total, eps
    rows = launch_rows(_add_rms_norms, hidden, input_dtype or hidden.dtype, *others, **early_launch(hidden.device))
    return total, rows if input_dtype else rows.values


def gelu_product(gate_up: Product, dtype: torch.dtype | None = None, input_dtype: torch.dtype | None = None) -> Rows:
    """Return ``gelu(gate) * up`` with the tanh approximation of GELU, ``[T, M]``.

    Args:
        gate_up: contiguous ``[T, 2 * M]``: the gate in the first M columns; may have pending scales.
        dtype: type of the model; None: type of ``gate_up``.
        input_dtype: quantise the rounded result to this type; None: return it dense.
    """
    values, row_scale, column_scale = _with_scales(gate_up)
    count, both = values.shape
    width, dtype = both // 2, dtype or values.dtype
    chunks = triton.cdiv(width, _GELU_COLUMNS)
    product = values.new_empty(count, width, dtype=dtype)
    largest = values.new_empty(count, chunks, dtype=torch.float32)
    launch(
        _gelu_product,
        (count, chunks),
        values,
        row_scale,
        column_scale,
        product,
        largest,
        width=width,
        columns=_GELU_COLUMNS,
        measures=input_dtype is not None,
        **early_launch(values.device),
    )
    return product if input_dtype is None else quantize_chunks(product, largest, input_dtype)


def gelu_rows(values: torch.Tensor, input_dtype: torch.dtype) -> QuantizedRows:
    """Return the tanh approximation of GELU, rounded to the type of ``values`` and quantised per row.

    Args:
        values: contiguous ``[..., width]``.
        input_dtype: int8 or float8_e4m3fn.
    """
    return launch_rows(_gelu_rows, values, input_dtype, **early_launch(values.device))


def rotate_and_store(
    qkv: Product,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: LayerCache,
    heads: int,
) -> torch.Tensor:
    """Norm and rotate queries and keys, store keys and values, and return the queries ``[T, heads, D]``.

    The norm is rounded to the type of ``qkv``; the rotation is computed in float32 and rounded once.

    Args:
        qkv: ``[T, (heads + 2 * kv_heads) * D]``, queries, keys, values; rows may have a stride. D is a power of two.
            May have pending scales.
        q_weight: ``[D]``: weight of the queries' RMS norm (:func:`rms_norm`).
        k_weight: ``[D]``: weight of the keys' RMS norm.
        eps: of both norms.
        cos: contiguous ``[T, D]``.
        sin: contiguous ``[T, D]``.
        slots: contiguous int64 ``[T]``, in ``[0, N)``: cache slot of each row.
        cache: of the type of ``qkv``, float8_e4m3fn, to whose range values saturate, or int8; modified in place.
        heads: number of query heads.
    """
    values, row_scale, column_scale = _with_scales(qkv)
    rows = len(values)
    _, kv_heads, size = cache.keys.shape
    every = heads + 2 * kv_heads
    group = min(_MOST_HEADS, triton.next_power_of_2(every))
    query = values.new_empty(rows, heads, size, dtype=cos.dtype)
    launch(
        _rotate_and_store,
        (rows, triton.cdiv(every, group)),
        values,
        row_scale,
        column_scale,
        q_weight,
        k_weight,
        cos,
        sin,
        slots,
        query,
        cache.keys,
        cache.values,
        *cache.scales_of_parts(),
        cache.scale_stride,
        values.stride(0),
        eps,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        group=group,
        num_warps=8 if group * size >= 4096 else 4,
        **early_launch(values.device),
    )
    return query


def _with_scales(product: Product) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return values, row scales and column scales of a product; None for scales that are applied."""
    return product if isinstance(product, UnscaledProduct) else (product, None, None)


@kernel()
def _add_layer_norm(
    hidden,
    normed,
    row_scale,
    part,
    weight,
    bias,
    total,
    epsilon,
    most: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    early: tl.constexpr,
):
    """Process one row. The variance is computed from differences to the mean: a large mean would cancel it."""
    column = tl.arange(0, padded)
    valid = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + column
    wait_for_inputs(early)
    values = load_float(hidden + at, valid)
    if part is not None:
        values += load_float(part + at, valid)
        sums = values.to(total.dtype.element_ty)
        tl.store(total + at, sums, mask=valid)
        values = sums.to(tl.float32)
    centered = tl.where(valid, values - tl.sum(values, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / width + epsilon)
    factor = load_float(weight + column, valid)
    shift = load_float(bias + column, valid)
    result = (centered * scale * factor + shift).to(hidden.dtype.element_ty).to(tl.float32)
    _store_rows(normed + at, result, row_scale, row, valid, most)


@kernel()
def _load_product(at, row_scale, column_scale, row, column, valid):
    """Load a product, and apply its scales unless they are applied already."""
    values = load_float(at, valid)
    if row_scale is not None:
        values *= tl.load(row_scale + row) * load_float(column_scale + column, valid)
    return values


@kernel()
def _store_rows(to, values, scale, row, valid, most: tl.constexpr):
    """Store one row of already rounded values, quantised by its largest absolute value if ``most`` is not 0."""
    if most == 0.0:
        tl.store(to, values.to(to.dtype.element_ty), mask=valid)
    else:
        factor = tl.maximum(tl.max(tl.abs(tl.where(valid, values, 0.0)), 0), _LEAST_SCALE) / most
        tl.store(scale + row, factor)
        store_quantized(to, values / factor, valid)


@kernel()
def _add_rms_norms(
    hidden,
    normed,
    scale,
    part,
    row_scale,
    column_scale,
    part_weight,
    next_weight,
    total,
    epsilon,
    most: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    early: tl.constexpr,
):
    """Process one row."""
    column = tl.arange(0, padded)
    valid = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + column
    wait_for_inputs(early)
    values = load_float(hidden + at, valid)
    if part is not None:
        added = _load_product(part + at, row_scale, column_scale, row, column, valid)
        weight = load_float(part_weight + column, valid)
        values += _row_rms_norm(added, weight, epsilon, width).to(total.dtype.element_ty).to(tl.float32)
        sums = values.to(total.dtype.element_ty)
        tl.store(total + at, sums, mask=valid)
        values = sums.to(tl.float32)
    weight = load_float(next_weight + column, valid)
    result = _row_rms_norm(values, weight, epsilon, width).to(hidden.dtype.element_ty).to(tl.float32)
    _store_rows(normed + at, result, scale, row, valid, most)


@kernel()
def _row_rms_norm(values, weight, epsilon, width: tl.constexpr):
    """Norm one row whose values beyond the width are 0."""
    return values * tl.rsqrt(tl.sum(values * values, 0) / width + epsilon) * (1.0 + weight)


@kernel()
def _gelu_product(
    gate_up,
    row_scale,
    column_scale,
    product,
    largest,
    width: tl.constexpr,
    columns: tl.constexpr,
    measures: tl.constexpr,
    early: tl.constexpr,
):
    """Process ``columns`` columns of one row; ``measures``: store their largest absolute value."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    valid = column < width
    at = gate_up + row * (2 * width) + column
    wait_for_inputs(early)
    gate = _load_product(at, row_scale, column_scale, row, column, valid)
    up = _load_product(at + width, row_scale, column_scale, row, column + width, valid)
    activated = _gelu(gate).to(product.dtype.element_ty).to(tl.float32)
    result = (activated * up).to(product.dtype.element_ty)
    tl.store(product + row * width + column, result, mask=valid)
    if measures:
        most = tl.max(tl.abs(tl.where(valid, result.to(tl.float32), 0.0)), 0)
        tl.store(largest + row * tl.num_programs(1) + tl.program_id(1), most)


@kernel()
def _gelu(x):
    """Return the tanh approximation of GELU.

    With u = sqrt(2 / pi) (x + 0.044715 x³), ``0.5 x (1 + tanh(u))`` is ``x sigmoid(2 u)``, which neither overflows nor
    cancels for any finite x.
    """
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)


@kernel()
def _gelu_rows(
    values, quantized, scale, most: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, early: tl.constexpr
):
    """Process one row."""
    column = tl.arange(0, padded)
    valid = column < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + column
    wait_for_inputs(early)
    x = load_float(values + at, valid)
    _store_rows(quantized + at, _gelu(x).to(values.dtype.element_ty).to(tl.float32), scale, row, valid, most)


@kernel()
def _rotate_and_store(
    qkv,
    row_scale,
    column_scale,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    cache_slots,
    row_stride,
    epsilon,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    early: tl.constexpr,
):
    """Process ``group`` heads of one row, in two halves of each head; query, key and value heads may share a group."""
    half: tl.constexpr = size // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    column = tl.arange(0, half)[None, :]
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    at = qkv + row * row_stride + head * size + column
    valid = head < heads + 2 * kv_heads
    wait_for_inputs(early)
    first = _load_product(at, row_scale, column_scale, row, head * size + column, valid)
    second = _load_product(at + half, row_scale, column_scale, row, head * size + half + column, valid)

    slot = tl.load(slots + row)
    _store_heads(v_cache, v_scale, cache_slots, slot, head - heads - kv_heads, first, second, is_value, kv_heads, size)

    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / size
    scale = tl.rsqrt(mean + epsilon)[:, None]
    first_weight = tl.where(is_query, tl.load(q_weight + column), tl.load(k_weight + column)).to(tl.float32)
    second_weight = tl.where(is_query, tl.load(q_weight + half + column), tl.load(k_weight + half + column))
    first = (first * scale * (1.0 + first_weight)).to(query.dtype.element_ty).to(tl.float32)
    second = (second * scale * (1.0 + second_weight.to(tl.float32))).to(query.dtype.element_ty).to(tl.float32)

    angle = row * size + column
    turned_first = first * tl.load(cos + angle).to(tl.float32) - second * tl.load(sin + angle).to(tl.float32)
    turned_second = second * tl.load(cos + half + angle).to(tl.float32)
    turned_second += first * tl.load(sin + half + angle).to(tl.float32)
    turned_first, turned_second = turned_first.to(query.dtype.element_ty), turned_second.to(query.dtype.element_ty)

    query_at = query + (row * heads + head) * size + column
    tl.store(query_at, turned_first, mask=is_query)
    tl.store(query_at + half, turned_second, mask=is_query)
    first, second = turned_first.to(tl.float32), turned_second.to(tl.float32)
    _store_heads(k_cache, k_scale, cache_slots, slot, head - heads, first, second, is_key, kv_heads, size)


@kernel()
def _store_heads(
    cache, scale, cache_slots, slot, head, first, second, valid, kv_heads: tl.constexpr, size: tl.constexpr
):
    """Store the two halves of a row's heads, float32 ``[group, D / 2]``, in a slot; with ``scale``, quantised by their
    largest absolute values."""
    half: tl.constexpr = size // 2
    if scale is not None:
        most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
        factor = tl.maximum(most, _LEAST_SCALE) / 127.0
        tl.store(scale + head * cache_slots + slot, factor, mask=valid)
        first, second = rounded(first / factor, True), rounded(second / factor, True)
    at = cache + (slot * kv_heads + head) * size + tl.arange(0, half)[None, :]
    tl.store(at, first.to(cache.dtype.element_ty), mask=valid)
    tl.store(at + half, second.to(cache.dtype.element_ty), mask=valid)
