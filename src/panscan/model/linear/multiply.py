"""Multiplication by quantised weights on any device: choose the kernel or library for a number of rows.

With quantised inputs the result is ``(inputs / row_scale) @ (weights / scale) * row_scale * scale``, where both
quotients are rounded to the kind's values.

Our kernels multiply up to :func:`kernel_rows` rows, a library more than that. The defaults are the fastest on
an H200; :mod:`panscan.model.linear.tuning` measures others at engine startup. int8 results are bit-identical either
way, int4 results differ in rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn import functional

from panscan.core.gpu_features import Capability, refusal, supports
from panscan.core.weight_formats import FORMATS
from panscan.model.linear.rows import LARGEST, LEAST_SCALE, QuantizedRows, UnscaledProduct

ANY_ROWS = sys.maxsize
"""For :func:`use_kernels_up_to`: our kernels multiply any number of rows."""
_H200_ROWS = {"int8": ANY_ROWS, "int4": 64}  # int4: the cost of dequantising does not depend on the number of rows
_LIBRARY_INT8_ROWS, _LIBRARY_INT8_STEP = 17, 8  # cuBLAS: least rows; divisor of inputs and outputs
_SCALED_FP8_ROWS = 512  # with fewer rows, float8 products with scales per row are slow (benchmarks/products.py)
_VECTOR_ROWS = 2  # int4: up to this many rows are multiplied without tensor cores
_DENSE_BYTES = 192 << 20  # maximum size of weights that are dequantised at once
_ALIGNED = 1024  # outputs: cuBLAS's fast kernels need aligned slices of the result
_tuned: dict[tuple[str, torch.device], int] = {}  # written at engine startup, before graphs are recorded


def kernel_rows(kind: str, device: torch.device) -> int:
    """Return the maximum number of rows that our kernels multiply by ``int8`` or ``int4`` weights."""
    return _tuned.get((kind, device), _H200_ROWS[kind])


def use_kernels_up_to(rows: int, kind: str, device: torch.device) -> None:
    """Set :func:`kernel_rows` for a kind of weights on a device. Recorded CUDA graphs do not change."""
    _tuned[kind, device] = rows


def quantize_rows(values: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Quantise each row of ``[..., inputs]`` symmetrically by its largest absolute value.

    Args:
        values: inputs of any floating-point type.
        dtype: int8 or float8_e4m3fn.
    """
    if has_kernels(values.device):
        from panscan.model.linear import kernels

        return kernels.quantize(values.contiguous(), dtype)
    values = values.float()
    scale = values.abs().amax(-1, keepdim=True).clamp_min(LEAST_SCALE) / LARGEST[dtype]
    quotient = values / scale
    return QuantizedRows((torch.round(quotient) if dtype == torch.int8 else quotient).to(dtype), scale)


def multiply_int8(
    rows: QuantizedRows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    most: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product ``[T, outputs]``: exact sums of integers, scaled and rounded once, together with the bias.

    Args:
        rows: int8 ``[T, inputs]``.
        weight: int8 ``[outputs, inputs]``.
        scale: float32 ``[outputs]``.
        dtype: type of the result.
        most: maximum number of rows for our kernel; None: :func:`kernel_rows`.
        bias: ``[outputs]`` or None.
    """
    count = len(rows.values)
    library = count >= _LIBRARY_INT8_ROWS and all(size % _LIBRARY_INT8_STEP == 0 for size in weight.shape)  # cuBLAS
    library = library and count > (kernel_rows("int8", weight.device) if most is None else most)
    if library or not has_kernels(weight.device):
        sums = UnscaledProduct(torch._int_mm(rows.values, weight.T), rows.scale, scale)
        return apply_scales(sums, dtype, bias)
    from panscan.model.linear import kernels

    shared, tma = _gpu(weight.device)
    tiles = kernels.int8_tiles(count, shared, tma=tma)
    return kernels.product_int8(rows.values, rows.scale, weight, scale, dtype, tiles, bias)


def multiply_fp8(rows: QuantizedRows, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> UnscaledProduct:
    """Return the unscaled product of float8_e4m3fn values, with sums in ``dtype`` (float16: in float32).

    The next kernel applies the scales, because cuBLAS is slower with per-row scales, especially for few rows.

    Args:
        rows: float8_e4m3fn ``[T, inputs]``.
        weight: float8_e4m3fn ``[outputs, inputs]``; both dimensions are multiples of 16 on a GPU.
        scale: float32 ``[outputs]``.
        dtype: type of the model.
    """
    if dtype == torch.float16:  # the sums would overflow
        dtype = torch.float32
    if weight.device.type == "cuda":
        one = _one(weight.device)
        sums = torch._scaled_mm(rows.values, weight.T, one, one, out_dtype=dtype, use_fast_accum=True)
    else:
        sums = (rows.values.float() @ weight.float().T).to(dtype)
    return UnscaledProduct(sums, rows.scale, scale)


def multiply_fp8_scaled(
    rows: QuantizedRows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product ``[T, outputs]`` of float8_e4m3fn values with its scales and bias, rounded to ``dtype``.

    Where the next kernel applies no scales. For many rows in bfloat16, cuBLAS and CUTLASS apply them and the bias.

    Args:
        rows: as for :func:`multiply_fp8`, like the others.
        weight: float8_e4m3fn ``[outputs, inputs]``.
        scale: float32 ``[outputs]``.
        bias: ``[outputs]`` in ``dtype``, or None.
        dtype: type of the model.
    """
    if weight.device.type == "cuda" and dtype == torch.bfloat16 and len(rows.values) >= _SCALED_FP8_ROWS:
        return torch._scaled_mm(
            rows.values,
            weight.T,
            rows.scale,
            scale[None],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return apply_scales(multiply_fp8(rows, weight, scale, dtype), dtype, bias)


def multiply_int4(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    most: int | None = None,
) -> torch.Tensor:
    """Return the product ``[T, outputs]`` in the type of the rows.

    Args:
        rows: ``[T, inputs]``.
        weight: packed (:func:`panscan.model.linear.quantized.pack_int4`).
        scale: ``[groups, outputs]``.
        zero: uint8 ``[groups, outputs]``, or None for 8.
        group_size: input channels per group.
        most: maximum number of rows for our kernels, which read the packed weights; None: :func:`kernel_rows`.
    """
    from panscan.model.linear import kernels

    rows = rows.contiguous()
    if len(rows) <= _VECTOR_ROWS and rows.dtype != torch.float32:  # fixed point has 16 bits
        return kernels.vector_int4(kernels.fixed_point(rows, group_size), weight, scale, zero, rows.dtype)
    if len(rows) <= (kernel_rows("int4", weight.device) if most is None else most):
        return kernels.product_int4(rows, weight, scale, zero, group_size, _gpu(weight.device)[0])

    def dense(part: slice) -> torch.Tensor:
        zeros = None if zero is None else zero[:, part]
        inputs = rows.shape[1]
        return kernels.dequantize_int4(weight[:, part], scale[:, part], zeros, group_size, inputs, rows.dtype)

    return _in_parts(rows, weight.shape[1], dense, rows.element_size())


def multiply_weight_only(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the product ``[T, outputs]`` of unquantised rows with 8-bit weights, in the type of the rows.

    The weights are dequantised on every call, which is slower than multiplying by dense weights.

    Args:
        rows: ``[T, inputs]``.
        weight: int8 or float8_e4m3fn ``[outputs, inputs]``.
        scale: float32 ``[outputs]``.
    """

    def dense(part: slice) -> torch.Tensor:
        return (weight[part].float() * scale[part, None]).to(rows.dtype)

    return _in_parts(rows, len(weight), dense, 8)  # two float32 copies


def _in_parts(
    rows: torch.Tensor, outputs: int, dense: Callable[[slice], torch.Tensor], weight_bytes: int
) -> torch.Tensor:
    """Multiply rows with weights that ``dense`` returns for slices of the outputs, in slices of limited memory.

    Args:
        rows: ``[T, inputs]``.
        outputs: output channels.
        dense: returns ``[slice, inputs]``.
        weight_bytes: memory that it takes per weight.
    """
    at_once = max(1, _DENSE_BYTES // (rows.shape[1] * weight_bytes * _ALIGNED)) * _ALIGNED
    if outputs <= at_once:
        return functional.linear(rows, dense(slice(None)))
    product = rows.new_empty(len(rows), outputs)
    for first in range(0, outputs, at_once):
        part = slice(first, first + at_once)
        torch.mm(rows, dense(part).T, out=product[:, part])
    return product


def apply_scales(
    sums: torch.Tensor | UnscaledProduct, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a product ``[T, outputs]`` whose scales are applied; one without scales is returned unchanged.

    Args:
        sums: the product.
        dtype: type of the result, which is rounded once.
        bias: ``[outputs]``, which is added to a product with scales; None: nothing.
    """
    if isinstance(sums, torch.Tensor):
        return sums
    if has_kernels(sums.values.device):
        from panscan.model.linear import kernels

        return kernels.scale_sums(*sums, dtype, bias)
    product = sums.values.float() * sums.row_scale * sums.column_scale
    return (product if bias is None else product + bias.float()).to(dtype)


def describe(kind: str, device: torch.device) -> str:
    """Return how weights of a kind are multiplied on a device, for the log."""
    if not has_kernels(device):
        return "PyTorch"
    if kind not in _H200_ROWS:
        return "cuBLAS, with scales applied by the next kernel"
    rows = kernel_rows(kind, device)
    if FORMATS[kind].grouped:
        return f"dp4a up to {_VECTOR_ROWS} rows, Triton up to {rows}, cuBLAS on dequantised weights above"
    name = "Triton" + (" with TMA for prefill" if _gpu(device)[1] else "")
    return name if rows == ANY_ROWS else f"{name} up to {rows} rows, cuBLAS above"


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_reason(kind: str, device: torch.device, feature: str | None = None) -> str | None:
    """Return why a device does not support a kind of weights, and what to use instead; None if it does.

    On a CPU, float8 is converted to float32 on every call: correct, but slower than float32 weights.

    Args:
        kind: one of :data:`panscan.core.weight_formats.WEIGHT_KINDS`.
        device: where it would run.
        feature: name in :data:`panscan.core.gpu_features.FEATURES`; None: ``kind``.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{kind} weights need an NVIDIA GPU or a CPU; use --device cpu, or the unquantised model"
    if (reason := refusal(f"{kind} weights need", feature or kind, capability_of(device))) is not None:
        return reason
    return None if find_spec("triton") else f"{kind} weights need Triton, which PyTorch includes on Linux"


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def _gpu(device: torch.device) -> tuple[int, bool]:
    """Return the shared memory per program in bytes, and whether the GPU has a Tensor Memory Accelerator."""
    facts = torch.cuda.get_device_properties(device)
    tma = supports("tensor_memory_accelerator", (facts.major, facts.minor))
    return int(facts.shared_memory_per_block_optin), tma  # type: ignore[attr-defined]  # missing in the stubs


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)
