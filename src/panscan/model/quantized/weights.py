"""Quantised weights as modules: how each kind stores its values, quantises rows of inputs, and multiplies on any device.

Three kinds, all symmetric unless a published checkpoint has zero points:

- ``int8``: weights per output channel, inputs per token, both in [-127, 127]; sums are exact integers.
- ``fp8``: the same in float8_e4m3fn, up to 448.
- ``int4``: weights in groups of input channels, inputs as they are.

With inputs quantised, a product is ``(inputs / input_scale) @ (weights / scale) * input_scale * scale``, where both
quotients are rounded to the kind's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "BLOCK",
    "KINDS",
    "QuantizedLinear",
    "QuantizedRows",
    "WeightFormat",
    "is_quantized",
    "pack_int4",
    "quantize_rows",
    "row_type",
    "unpack_int4",
]

KINDS = ("fp8", "int8", "int4")
BLOCK = 256
"""Input channels of one block of packed 4-bit weights."""
_INT8_MOST, _FP8_MOST = 127.0, 448.0
_INT4_ZERO = 8  # stored for a weight of 0, without zero points
_INT4_HALF_RANGE = 7.5  # of 16 levels, as compressed-tensors and vLLM scale them
_TINY = 1e-12  # of a row of zeros


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is quantised.

    Args:
        kind: one of :data:`KINDS`.
        group_size: input channels that share a scale, a multiple of 32; ``int4`` alone.
        zero_points: whether groups have zero points of their own; ``int4`` alone.
        ordered: whether input channels are stored in another order (GPTQ's ``desc_act``); ``int4`` alone.
        quantizes_inputs: whether products quantise their inputs too. False: weights only.
    """

    kind: str
    group_size: int = 128
    zero_points: bool = False
    ordered: bool = False
    quantizes_inputs: bool = True

    @property
    def rows(self) -> torch.dtype | None:
        """Type of quantised inputs; None if inputs are multiplied as they are."""
        return row_type(self.kind) if self.quantizes_inputs else None


def row_type(kind: str) -> torch.dtype | None:
    """Return the type of quantised values of 8-bit kinds; None for ``int4``."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind)


class QuantizedRows(NamedTuple):
    """Inputs quantised per row: ``values`` int8 or float8_e4m3fn ``[..., inputs]``, ``scale`` float32 ``[..., 1]``."""

    values: torch.Tensor
    scale: torch.Tensor


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with quantised weights. Buffers are named as below, and may be views into fused ones.

    ``weight``: int8 or float8_e4m3fn ``[outputs, inputs]``; for ``int4``, uint8 ``[blocks, outputs, 128]`` as
    :func:`pack_int4` packs it, whose last block is filled up with zeros.
    ``scale``: float32 ``[outputs]``; for ``int4``, any floating-point type ``[groups, outputs]``.
    ``zero``: uint8 ``[groups, outputs]`` or None: the stored value of a weight of 0; None: 8.
    ``order``: int64 ``[inputs]`` or None: stored input channel i multiplies channel ``order[i]`` of the input.

    Args:
        in_features: input channels.
        out_features: output channels.
        how: the weights' format.
        bias: ``[outputs]`` or None.
        scale_type: of ``int4`` scales.
        device: of the buffers, whose values are arbitrary until :meth:`quantize` or a loader sets them.

    Raises:
        ValueError: the group size does not divide the inputs, or is no multiple of 32.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, how: WeightFormat, *, bias: nn.Parameter | None = None,
        scale_type: torch.dtype = torch.bfloat16, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.how = in_features, out_features, how
        self.bias = bias
        zero = order = None
        if how.kind == "int4":
            if how.group_size % 32 or in_features % how.group_size:
                raise ValueError(f"groups of {how.group_size} do not divide {in_features} input channels")
            groups = in_features // how.group_size
            shape = (-(-in_features // BLOCK), out_features, BLOCK // 2)
            weight = torch.empty(shape, dtype=torch.uint8, device=device)
            scale = torch.empty(groups, out_features, dtype=scale_type, device=device)
            if how.zero_points:
                zero = torch.empty(groups, out_features, dtype=torch.uint8, device=device)
            if how.ordered:
                order = torch.empty(in_features, dtype=torch.long, device=device)
        else:
            weight = torch.empty(out_features, in_features, dtype=row_type(how.kind), device=device)
            scale = torch.empty(out_features, dtype=torch.float32, device=device)
        for name, value in (("weight", weight), ("scale", scale), ("zero", zero), ("order", order)):
            self.register_buffer(name, value)

    @torch.no_grad()
    def quantize(self, values: torch.Tensor) -> None:
        """Set the weights to dense ``values`` ``[outputs, inputs]``, rounded to the nearest quantised ones.

        Without zero points and in the inputs' own order only.
        """
        assert self.zero is None and self.order is None
        values = values.to(self.weight.device)
        if self.how.kind != "int4":
            rows = quantize_rows(values, self.weight.dtype)
            self.weight.copy_(rows.values)
            self.scale.copy_(rows.scale[:, 0])
            return
        groups = values.float().unflatten(1, (-1, self.how.group_size))
        scale = (groups.abs().amax(-1) / _INT4_HALF_RANGE).clamp_min(_TINY).to(self.scale.dtype)
        levels = torch.round(groups / scale.float()[:, :, None]).clamp_(-8, 7).flatten(1) + _INT4_ZERO
        self.weight.copy_(pack_int4(levels.to(torch.uint8)))
        self.scale.copy_(scale.T)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights as dense values ``[outputs, inputs]``, in the inputs' own order, rounded once."""
        if self.how.kind != "int4":
            return (self.weight.float() * self.scale[:, None]).to(dtype)
        levels = unpack_int4(self.weight, self.in_features).float().unflatten(1, (-1, self.how.group_size))
        zero = _INT4_ZERO if self.zero is None else self.zero.T[:, :, None].float()
        dense = ((levels - zero) * self.scale.T[:, :, None].float()).flatten(1).to(dtype)
        if self.order is None:
            return dense
        return torch.empty_like(dense).index_copy_(1, self.order, dense)

    def forward(self, input: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Return ``[..., outputs]`` in the type of the input, bfloat16 for quantised rows."""
        if self.how.rows is None:
            assert isinstance(input, torch.Tensor)  # formats of weights alone name no type of rows
            return functional.linear(input, self.dequantized(input.dtype), self.bias)
        dtype = input.dtype if isinstance(input, torch.Tensor) else torch.bfloat16
        rows = quantize_rows(input, self.how.rows) if isinstance(input, torch.Tensor) else input
        flat = rows.values.flatten(0, -2)
        sums = _product(flat, self.weight).unflatten(0, rows.values.shape[:-1])
        output = (sums * rows.scale * self.scale).to(dtype)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.how}"


def is_quantized(model: nn.Module) -> bool:
    """Return whether any weights of a model are quantised, by this package or by Transformers."""
    return getattr(model, "hf_quantizer", None) is not None or any(
        isinstance(module, QuantizedLinear) for module in model.modules()
    )


def quantize_rows(values: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Quantise each row of ``[..., inputs]`` symmetrically by its largest absolute value.

    Args:
        values: of any floating-point type.
        dtype: int8 or float8_e4m3fn.
    """
    values = values.float()
    most = _INT8_MOST if dtype == torch.int8 else _FP8_MOST
    scale = values.abs().amax(-1, keepdim=True).clamp_min(_TINY) / most
    scaled = values / scale
    return QuantizedRows((torch.round(scaled) if dtype == torch.int8 else scaled).to(dtype), scale)


def pack_int4(levels: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values ``[outputs, inputs]``, uint8 in [0, 15], into uint8 ``[blocks, outputs, 128]``.

    Byte i of block b holds input channel ``256 b + i`` in its low and ``256 b + 128 + i`` in its high four bits, so
    both halves of a kernel's loads are consecutive channels. Blocks come first: the bytes of consecutive output channels
    are contiguous. The last block is filled up with 8.
    """
    outputs, inputs = levels.shape
    blocks = -(-inputs // BLOCK)
    full = functional.pad(levels, (0, blocks * BLOCK - inputs), value=_INT4_ZERO).view(outputs, blocks, 2, -1)
    return (full[:, :, 0] | full[:, :, 1] << 4).transpose(0, 1).contiguous()


def unpack_int4(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the values of :func:`pack_int4` as uint8 ``[outputs, inputs]``."""
    halves = torch.stack([packed & 0xF, packed >> 4], 2)
    return halves.transpose(0, 1).flatten(1)[:, :inputs]


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 ``[n, outputs]``: sums of int8 products exactly, of float8 ones in float32."""
    if rows.dtype == torch.int8:
        return torch._int_mm(rows, weight.T).float()
    return rows.float() @ weight.float().T
