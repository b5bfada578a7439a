"""Quantised weights as modules: how each kind stores its values.

Three kinds, all symmetric unless a published checkpoint has zero points:

- ``int8``: weights per output channel, inputs per token, both in [-127, 127]; sums are exact integers.
- ``fp8``: the same in float8_e4m3fn, up to 448.
- ``int4``: weights in groups of input channels, dense inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from panscan.model.linear.multiply import (
    apply_scales,
    has_kernels,
    multiply_fp8,
    multiply_int4,
    multiply_int8,
    multiply_weight_only,
    quantize_rows,
)
from panscan.model.linear.rows import LEAST_SCALE, QuantizedRows, UnscaledProduct, row_type
from panscan.settings import GROUP_SIZES

BLOCK = 256
"""Input channels of one block of packed 4-bit weights."""
_INT4_ZERO = 8  # stored for a weight of 0, without zero points
_INT4_HALF_RANGE = 7.5  # half the range of 16 levels, as in compressed-tensors and vLLM


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Quantisation format of a matrix.

    Args:
        kind: one of :data:`panscan.settings.WEIGHT_KINDS`.
        group_size: input channels that share a scale: 128, 64 or 32; ``int4`` only.
        zero_points: whether each group has a zero point; ``int4`` only.
        ordered: whether input channels are reordered (GPTQ's ``desc_act``); ``int4`` only.
        quantizes_inputs: whether inputs are also quantised; False: weights only.
    """

    kind: str
    group_size: int = 128
    zero_points: bool = False
    ordered: bool = False
    quantizes_inputs: bool = True

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type of quantised inputs; None if inputs stay dense."""
        return row_type(self.kind) if self.quantizes_inputs else None


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with quantised weights. Buffers are named as below, and may be views into fused ones.

    ``weight``: int8 or float8_e4m3fn ``[outputs, inputs]``; for ``int4``, uint8 ``[blocks, outputs, 128]`` as
    :func:`pack_int4` packs it, with padding in the last block.
    ``scale``: float32 ``[outputs]``; for ``int4``, any floating-point type ``[groups, outputs]``.
    ``zero``: uint8 ``[groups, outputs]`` or None: the stored value of a weight of 0; None: 8. float32 for
    formats with fractional zero points (torchao's int4).
    ``order``: int64 ``[inputs]`` or None: stored input channel i multiplies channel ``order[i]`` of the input.

    Args:
        in_features: input channels.
        out_features: output channels.
        weight_format: format of the weights.
        bias: ``[outputs]`` or None.
        scale_type: type of ``int4`` scales.
        device: device of the buffers, which are uninitialised until :meth:`quantize` or a loader sets them.

    Raises:
        ValueError: the group size does not divide the inputs, or the kernels do not support it.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_format: WeightFormat,
        *,
        bias: nn.Parameter | None = None,
        scale_type: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weight_format = in_features, out_features, weight_format
        self.bias = bias
        zero = order = None
        if weight_format.kind == "int4":
            if weight_format.group_size not in GROUP_SIZES:
                raise ValueError(f"groups of {weight_format.group_size} input channels: 128, 64 and 32 are supported")
            if in_features % weight_format.group_size:
                raise ValueError(f"groups of {weight_format.group_size} do not divide {in_features} input channels")
            groups = in_features // weight_format.group_size
            shape = (-(-in_features // BLOCK), out_features, BLOCK // 2)
            weight = torch.empty(shape, dtype=torch.uint8, device=device)
            scale = torch.empty(groups, out_features, dtype=scale_type, device=device)
            if weight_format.zero_points:
                zero = torch.empty(groups, out_features, dtype=torch.uint8, device=device)
            if weight_format.ordered:
                order = torch.empty(in_features, dtype=torch.long, device=device)
        else:
            weight = torch.empty(out_features, in_features, dtype=row_type(weight_format.kind), device=device)
            scale = torch.empty(out_features, dtype=torch.float32, device=device)
        for name, value in (("weight", weight), ("scale", scale), ("zero", zero), ("order", order)):
            self.register_buffer(name, value)

    @torch.no_grad()
    def quantize(self, values: torch.Tensor) -> None:
        """Set the weights to dense ``values`` ``[outputs, inputs]``, rounded to nearest.

        Formats with zero points or reordered channels are not supported.
        """
        assert self.zero is None and self.order is None
        values = values.to(self.weight.device)
        if self.weight_format.kind != "int4":
            rows = quantize_rows(values, self.weight.dtype)
            self.weight.copy_(rows.values)
            self.scale.copy_(rows.scale[:, 0])
            return
        groups = values.float().view(len(values), -1, self.weight_format.group_size)
        scale = (groups.abs().amax(-1) / _INT4_HALF_RANGE).clamp_min(LEAST_SCALE).to(self.scale.dtype)
        levels = torch.round(groups / scale.float()[:, :, None]).clamp_(-8, 7).flatten(1) + _INT4_ZERO
        self.weight.copy_(pack_int4(levels.to(torch.uint8)))
        self.scale.copy_(scale.T)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights as dense values ``[outputs, inputs]``, rounded once."""
        dense = self._stored(dtype)
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., outputs]`` in the type of the input."""
        output = self.product(input.reshape(-1, self.in_features), input.dtype)
        if isinstance(output, UnscaledProduct):
            output = apply_scales(output, input.dtype)
        return output.view(*input.shape[:-1], self.out_features)

    def product(self, input: torch.Tensor | QuantizedRows, dtype: torch.dtype) -> torch.Tensor | UnscaledProduct:
        """Return the product of rows in ``dtype``, or :class:`UnscaledProduct` where applying scales later is faster.

        Args:
            input: ``[T, inputs]`` in ``dtype``, or quantised to the type :attr:`WeightFormat.input_dtype`.
            dtype: type of the model.
        """
        if self.weight_format.input_dtype is None:
            assert isinstance(input, torch.Tensor)  # weight-only formats have no row type
            return self._with_bias(self._dense_product(input))
        rows = quantize_rows(input, self.weight_format.input_dtype) if isinstance(input, torch.Tensor) else input
        if self.weight_format.kind == "int8":
            return self._with_bias(multiply_int8(rows, self.weight, self.scale, dtype))
        sums = multiply_fp8(rows, self.weight, self.scale, dtype)
        return sums if self.bias is None else self._with_bias(apply_scales(sums, dtype))

    def _dense_product(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        if self.weight_format.kind == "int4" and has_kernels(rows.device):
            return multiply_int4(rows, self.weight, self.scale, self.zero, self.weight_format.group_size)
        if self.weight_format.kind != "int4":
            return multiply_weight_only(rows, self.weight, self.scale)
        return functional.linear(rows, self._stored(rows.dtype))

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.bias is None else output + self.bias

    def _stored(self, dtype: torch.dtype) -> torch.Tensor:
        """Return dense weights with input channels in the order of :attr:`order`."""
        if self.weight_format.kind != "int4":
            return (self.weight.float() * self.scale[:, None]).to(dtype)
        levels = (
            unpack_int4(self.weight, self.in_features)
            .float()
            .view(self.out_features, -1, self.weight_format.group_size)
        )
        zero = _INT4_ZERO if self.zero is None else self.zero.T[:, :, None].float()
        dense: torch.Tensor = ((levels - zero) * self.scale.T[:, :, None].float()).flatten(1).to(dtype)
        return dense

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move to other devices, but keep the types of weights and scales, which ``half()`` would change."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return fn(tensor) if tensor is self.bias else tensor.to(fn(tensor).device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_format}"


def fused(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Fuse modules that share an input into one that concatenates their outputs in this order.

    The buffers of the parts become views into the fused ones.

    Args:
        parts: modules of one format on one device, all or none with a bias, and not :attr:`WeightFormat.ordered`.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    whole = copy(first)
    whole._buffers, whole._parameters = dict(first._buffers), dict(first._parameters)
    whole.out_features = sum(part.out_features for part in parts)
    dimensions = (
        {"weight": 1, "scale": 1, "zero": 1} if first.weight_format.kind == "int4" else {"weight": 0, "scale": 0}
    )
    for name, dimension in dimensions.items():
        if getattr(first, name) is not None:
            setattr(whole, name, _joined(parts, name, dimension))
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias for part in parts if part.bias is not None]), False)
    return whole


def _joined(parts: Sequence[QuantizedLinear], name: str, dimension: int) -> torch.Tensor:
    """Concatenate buffers of this name, and replace them by views into the result."""
    buffers = [getattr(part, name) for part in parts]
    joined = torch.cat(buffers, dimension)
    at = 0
    for part, buffer in zip(parts, buffers, strict=True):
        setattr(part, name, joined.narrow(dimension, at, buffer.shape[dimension]))
        at += buffer.shape[dimension]
    return joined


def is_quantized(model: nn.Module) -> bool:
    """Return whether any weights of a model are quantised, by this package or by Transformers."""
    return getattr(model, "hf_quantizer", None) is not None or any(
        isinstance(module, QuantizedLinear) for module in model.modules()
    )


def pack_int4(levels: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values ``[outputs, inputs]``, uint8 in [0, 15], into uint8 ``[blocks, outputs, 128]``.

    Byte i of block b holds input channel ``256 b + i`` in its low and ``256 b + 128 + i`` in its high four bits, so
    both halves of a kernel's loads are consecutive channels. Blocks come first: the bytes of consecutive output
    channels are contiguous. The last block is padded with 8.
    """
    outputs, inputs = levels.shape
    blocks = -(-inputs // BLOCK)
    full = functional.pad(levels, (0, blocks * BLOCK - inputs), value=_INT4_ZERO).view(outputs, blocks, 2, -1)
    return (full[:, :, 0] | full[:, :, 1] << 4).transpose(0, 1).contiguous()


def unpack_int4(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the values of :func:`pack_int4` as uint8 ``[outputs, inputs]``."""
    halves = torch.stack([packed & 0xF, packed >> 4], 2)
    return halves.transpose(0, 1).flatten(1)[:, :inputs]
