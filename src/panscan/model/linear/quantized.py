"""Quantised weights as modules: how each format stores its values, multiplies, and is split over ranks.

All are symmetric unless a published checkpoint has zero points:

- ``int8``: weights per output channel, inputs per token, both in [-127, 127]; sums are exact integers.
- ``fp8``: the same in float8_e4m3fn, up to 448.
- ``int4``: weights in groups of input channels, dense inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from panscan.core import PanscanError, SettingError, UnsupportedError
from panscan.core.weight_formats import FORMATS, GROUP_SIZES, Format
from panscan.model.linear.multiply import (
    apply_scales,
    has_kernels,
    multiply_fp8,
    multiply_fp8_scaled,
    multiply_int4,
    multiply_int8,
    multiply_weight_only,
    quantize_rows,
)
from panscan.model.linear.rows import LEAST_SCALE, QuantizedRows, UnscaledProduct

BLOCK = 256
"""Input channels of one block of packed 4-bit weights."""
INT4_ZERO = 8
"""Stored level of a weight of 0, without zero points."""
_INT4_HALF_RANGE = 7.5  # half the range of 16 levels, as in compressed-tensors and vLLM


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Quantisation of one matrix.

    Args:
        kind: one of :data:`panscan.core.weight_formats.WEIGHT_KINDS`.
        group_size: input channels that share a scale: 128, 64 or 32; grouped formats only.
        zero_points: whether each group has a zero point; grouped formats only.
        ordered: whether input channels are reordered (GPTQ's ``desc_act``); grouped formats only.
        quantizes_inputs: whether inputs are also quantised; False: weights only.
    """

    kind: str
    group_size: int = 128
    zero_points: bool = False
    ordered: bool = False
    quantizes_inputs: bool = True

    @classmethod
    def fitting(
        cls, kind: str, asked: int | None, widths: Collection[int], error: type[PanscanError] = SettingError
    ) -> Self:
        """Return the format of a model's matrices; see :meth:`panscan.core.weight_formats.Format.group_size`."""
        size = FORMATS[kind].group_size(asked, widths, error)
        return cls(kind) if size is None else cls(kind, size)

    @property
    def facts(self) -> Format:
        """What the format needs and costs."""
        return FORMATS[self.kind]

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type of quantised inputs; None if inputs stay dense."""
        return LINEARS[self.kind].value_type if self.quantizes_inputs else None

    def __str__(self) -> str:
        """Return the name for reports, such as ``int4, groups of 128`` or ``int8, weights only``."""
        if self.facts.grouped:
            return f"{self.kind}, groups of {self.group_size}"
        return self.kind if self.quantizes_inputs else f"{self.kind}, weights only"


class QuantizedLinear(nn.Module, ABC):
    """``nn.Linear`` with quantised weights; one subclass per way to store them. Buffers may be views into fused ones.

    Args:
        in_features: input channels.
        out_features: output channels.
        weight_format: format of the weights.
        bias: ``[outputs]`` or None.
        scale_type: type of the scales of groups.
        device: device of the buffers, which are uninitialised until :meth:`quantize` or a loader sets them.

    Raises:
        ValueError: the group size does not divide the inputs, or the kernels do not support it.
    """

    outputs_dimension: ClassVar[int]
    """The dimension of ``weight``, ``scale`` and ``zero`` that holds the output channels."""
    value_type: ClassVar[torch.dtype | None] = None
    """Type of a quantised weight and of a quantised input; None: packed, with dense inputs."""
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
        self.bias, self.input_dtype = bias, weight_format.input_dtype
        buffers = self._empty_buffers(scale_type, device)
        for name in ("weight", "scale", "zero", "order"):
            self.register_buffer(name, buffers.get(name))

    @abstractmethod
    def _empty_buffers(self, scale_type: torch.dtype, device: torch.device | None) -> Mapping[str, torch.Tensor]:
        """Return uninitialised buffers by name."""

    @abstractmethod
    def quantize(self, values: torch.Tensor, stored_scale: torch.dtype = torch.float32) -> None:
        """Set the weights to dense ``values`` ``[outputs, inputs]``, rounded to nearest.

        Formats with zero points or reordered channels are not supported.

        Args:
            values: dense weights.
            stored_scale: type that a checkpoint stores scales of channels in, which are rounded to it.
        """

    @abstractmethod
    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights as dense values ``[outputs, inputs]``, rounded once."""

    @abstractmethod
    def product(self, input: torch.Tensor | QuantizedRows, dtype: torch.dtype) -> torch.Tensor | UnscaledProduct:
        """Return the product of rows in ``dtype``, or :class:`UnscaledProduct` where applying scales later is faster.

        Args:
            input: ``[T, inputs]`` in ``dtype``, or quantised to the type :attr:`WeightFormat.input_dtype`.
            dtype: type of the model.
        """

    @abstractmethod
    def _columns(self, share: slice, size: int) -> Self:
        """Return a part of the input channels, without a bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., outputs]`` in the type of the input."""
        output = apply_scales(self.product(input.reshape(-1, self.in_features), input.dtype), input.dtype)
        return output.view(*input.shape[:-1], self.out_features)

    @torch.no_grad()
    def shard(self, rank: int, size: int, by: Literal["rows", "columns"] = "rows") -> Self:
        """Return a rank's shard. It shares no memory with the whole matrix, which may be freed.

        Args:
            rank: rank of the shard, from 0.
            size: number of ranks.
            by: ``rows`` splits output channels. ``columns`` splits input channels, so products are partial sums: only
                the first rank keeps the bias, the others have zeros.

        Raises:
            UnsupportedError: the number of ranks does not divide the channels, a group cannot be cut, or the input
                channels are reordered.
        """
        if size == 1:
            return self
        count = self.out_features if by == "rows" else self.in_features
        if count % size:
            raise UnsupportedError(
                f"--tensor-parallel-size {size} does not divide {count} channels of a quantised matrix"
            )
        share = slice(rank * count // size, (rank + 1) * count // size)
        part = self._rows(share) if by == "rows" else self._columns(share, size)
        if self.bias is not None:
            bias = self.bias[share] if by == "rows" else self.bias if rank == 0 else torch.zeros_like(self.bias)
            part.bias = nn.Parameter(bias.clone(), requires_grad=False)
        return part

    def _rows(self, share: slice) -> Self:
        """Return a part of the output channels, without a bias."""
        count = share.stop - share.start
        part = type(self)(self.in_features, count, self.weight_format, device=torch.device("meta"))
        part.order = self.order
        for name in ("weight", "scale", "zero"):
            if (values := getattr(self, name)) is not None:
                setattr(part, name, values.narrow(self.outputs_dimension, share.start, count).clone())
        return part

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.bias is None else output + self.bias

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move to other devices, but keep the types of weights and scales, which ``half()`` would change."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return fn(tensor) if tensor is self.bias else tensor.to(fn(tensor).device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_format}"


class ChannelLinear(QuantizedLinear):
    """8-bit weights with a scale for each output channel.

    ``weight``: int8 or float8_e4m3fn ``[outputs, inputs]``. ``scale``: float32 ``[outputs]``.
    """

    outputs_dimension = 0

    def _empty_buffers(self, scale_type: torch.dtype, device: torch.device | None) -> Mapping[str, torch.Tensor]:
        weight = torch.empty(self.out_features, self.in_features, dtype=self.value_type, device=device)
        return {"weight": weight, "scale": torch.empty(self.out_features, dtype=torch.float32, device=device)}

    @torch.no_grad()
    @override
    def quantize(self, values: torch.Tensor, stored_scale: torch.dtype = torch.float32) -> None:
        values, dtype = values.to(self.weight.device), self.weight.dtype
        rows = quantize_rows(values, dtype)
        self.scale.copy_(rows.scale[:, 0].to(stored_scale))
        if stored_scale == torch.float32:
            self.weight.copy_(rows.values)
            return
        largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
        scaled = (values.float() / self.scale[:, None]).clamp(-largest, largest)
        self.weight.copy_(scaled if dtype.is_floating_point else scaled.round())

    @torch.no_grad()
    @override
    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    @override
    def product(self, input: torch.Tensor | QuantizedRows, dtype: torch.dtype) -> torch.Tensor | UnscaledProduct:
        if not self.weight_format.quantizes_inputs:
            assert isinstance(input, torch.Tensor)  # weight-only formats have no row type
            return self._with_bias(multiply_weight_only(input, self.weight, self.scale))
        rows = quantize_rows(input, self.weight.dtype) if isinstance(input, torch.Tensor) else input
        if self.value_type is torch.int8:
            return multiply_int8(rows, self.weight, self.scale, dtype, bias=self.bias)
        if self.bias is None:
            return multiply_fp8(rows, self.weight, self.scale, dtype)
        return multiply_fp8_scaled(rows, self.weight, self.scale, self.bias, dtype)

    def _columns(self, share: slice, size: int) -> Self:
        inputs = share.stop - share.start
        part = type(self)(inputs, self.out_features, self.weight_format, device=torch.device("meta"))
        part.weight, part.scale = self.weight[:, share].contiguous(), self.scale.clone()
        return part


class Int8Linear(ChannelLinear):
    """int8 weights and inputs."""

    value_type = torch.int8


class Fp8Linear(ChannelLinear):
    """float8_e4m3fn weights and inputs."""

    value_type = torch.float8_e4m3fn


class Int4Linear(QuantizedLinear):
    """4-bit weights with a scale for each group of input channels.

    ``weight``: uint8 ``[blocks, outputs, 128]`` as :func:`pack_int4` packs it, with padding in the last block.
    ``scale``: any floating-point type ``[groups, outputs]``.
    ``zero``: uint8 ``[groups, outputs]`` or None: the stored value of a weight of 0; None: 8. float32 for
    formats with fractional zero points (torchao's int4).
    ``order``: int64 ``[inputs]`` or None: stored input channel i multiplies channel ``order[i]`` of the input.
    """

    outputs_dimension = 1

    def _empty_buffers(self, scale_type: torch.dtype, device: torch.device | None) -> Mapping[str, torch.Tensor]:
        size, inputs, outputs = self.weight_format.group_size, self.in_features, self.out_features
        if size not in GROUP_SIZES:
            raise ValueError(f"groups of {size} input channels: 128, 64 and 32 are supported")
        if inputs % size:
            raise ValueError(f"groups of {size} do not divide {inputs} input channels")
        groups = inputs // size, outputs
        buffers = {
            "weight": torch.empty(-(-inputs // BLOCK), outputs, BLOCK // 2, dtype=torch.uint8, device=device),
            "scale": torch.empty(groups, dtype=scale_type, device=device),
        }
        if self.weight_format.zero_points:
            buffers["zero"] = torch.empty(groups, dtype=torch.uint8, device=device)
        if self.weight_format.ordered:
            buffers["order"] = torch.empty(inputs, dtype=torch.long, device=device)
        return buffers

    @torch.no_grad()
    @override
    def quantize(self, values: torch.Tensor, stored_scale: torch.dtype = torch.float32) -> None:
        assert self.zero is None and self.order is None
        groups = values.to(self.weight.device).float().view(len(values), -1, self.weight_format.group_size)
        scale = (groups.abs().amax(-1) / _INT4_HALF_RANGE).clamp_min(LEAST_SCALE).to(self.scale.dtype)
        levels = torch.round(groups / scale.float()[:, :, None]).clamp_(-8, 7).flatten(1) + INT4_ZERO
        self.weight.copy_(pack_int4(levels.to(torch.uint8)))
        self.scale.copy_(scale.T)

    @torch.no_grad()
    @override
    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        dense = self._stored(dtype)
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)

    def _stored(self, dtype: torch.dtype) -> torch.Tensor:
        """Return dense weights with input channels in the order of :attr:`order`."""
        levels = unpack_int4(self.weight, self.in_features).float()
        zero = INT4_ZERO if self.zero is None else self.zero.T[:, :, None].float()
        groups = levels.view(self.out_features, -1, self.weight_format.group_size)
        dense: torch.Tensor = ((groups - zero) * self.scale.T[:, :, None].float()).flatten(1).to(dtype)
        return dense

    @override
    def product(self, input: torch.Tensor | QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(input, torch.Tensor)  # there is no row type
        rows = input if self.order is None else input.index_select(1, self.order)
        if has_kernels(rows.device):
            product = multiply_int4(rows, self.weight, self.scale, self.zero, self.weight_format.group_size)
        else:
            product = functional.linear(rows, self._stored(rows.dtype))
        return self._with_bias(product)

    def _columns(self, share: slice, size: int) -> Self:
        """Return a part of the input channels. Groups that the split cuts become smaller ones with the same scale."""
        if self.order is not None:
            raise UnsupportedError(
                f"--tensor-parallel-size {size}: the checkpoint's input channels are reordered (act-order), which"
                " cannot be split; use --tensor-parallel-size 1, or a checkpoint without act-order"
            )
        inputs, old = share.stop - share.start, self.weight_format.group_size
        group = gcd(old, inputs)
        if group % GROUP_SIZES[-1]:
            raise UnsupportedError(
                f"--tensor-parallel-size {size} cuts groups of {old} input channels into {group}; use a smaller size,"
                " so that parts of groups are multiples of 32"
            )
        part_format = replace(self.weight_format, group_size=group)
        part = type(self)(inputs, self.out_features, part_format, device=torch.device("meta"))
        if share.start % BLOCK or inputs % BLOCK:
            part.weight = pack_int4(unpack_int4(self.weight, self.in_features)[:, share])
        else:  # as in all sizes of Gemma 3 but a few: unpacked, large matrices take many times their size
            part.weight = self.weight[share.start // BLOCK : share.stop // BLOCK].clone()
        groups = slice(share.start // group, share.stop // group)
        for name in ("scale", "zero"):
            if (values := getattr(self, name)) is not None:
                setattr(part, name, values.repeat_interleave(old // group, 0)[groups].clone())
        return part


LINEARS: Mapping[str, type[QuantizedLinear]] = {"int8": Int8Linear, "fp8": Fp8Linear, "int4": Int4Linear}
"""Modules of panscan's own formats, by name."""


def quantized_linear(
    in_features: int, out_features: int, weight_format: WeightFormat, **others: Any
) -> QuantizedLinear:
    """Return an uninitialised module of a format; arguments as for :class:`QuantizedLinear`."""
    return LINEARS[weight_format.kind](in_features, out_features, weight_format, **others)


def fused(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Fuse modules that share an input into one that concatenates their outputs in this order.

    The buffers of the parts become views into the fused ones.

    Args:
        parts: modules of one format on one device, all or none with a bias, and not :attr:`WeightFormat.ordered`.
    """
    first, dimension = parts[0], parts[0].outputs_dimension
    if len(parts) == 1:
        return first
    result = copy(first)
    result._buffers, result._parameters = dict(first._buffers), dict(first._parameters)
    result.out_features = sum(part.out_features for part in parts)
    for name in ("weight", "scale", "zero"):
        if getattr(first, name) is not None:
            tensors = [getattr(part, name) for part in parts]
            setattr(result, name, joined := joined_tensor(tensors, dimension))
            views = torch.split(joined, [part.out_features for part in parts], dimension)
            for part, view in zip(parts, views, strict=True):
                setattr(part, name, view)
    if first.bias is not None:
        result.bias = nn.Parameter(torch.cat([part.bias for part in parts if part.bias is not None]), False)
    return result


def joined_tensor(parts: Sequence[torch.Tensor], dimension: int = 0) -> torch.Tensor:
    """Concatenate tensors; without a copy if they are views into one tensor already, side by side in this order."""
    first, size = parts[0], sum(part.shape[dimension] for part in parts)
    shape, step = list(first.shape), first.stride(dimension) * first.element_size()
    shape[dimension] = size
    ends = [part.data_ptr() + part.shape[dimension] * step for part in parts]
    adjacent = [part.data_ptr() for part in parts[1:]] == ends[:-1]
    same = {(part.untyped_storage().data_ptr(), part.stride()) for part in parts}
    if adjacent and len(same) == 1:
        return first.as_strided(shape, first.stride(), first.storage_offset())
    return torch.cat([*parts], dimension)


def is_quantized(model: nn.Module) -> bool:
    """Return whether any weights of a model are quantised, by this package or by Transformers, or were when loaded."""
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "dequantized_from", None):
        return True
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def pack_int4(levels: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values ``[outputs, inputs]``, uint8 in [0, 15], into uint8 ``[blocks, outputs, 128]``.

    Byte i of block b holds input channel ``256 b + i`` in its low and ``256 b + 128 + i`` in its high four bits, so
    both halves of a kernel's loads are consecutive channels. Blocks come first: the bytes of consecutive output
    channels are contiguous. The last block is padded with 8.
    """
    outputs, inputs = levels.shape
    blocks = -(-inputs // BLOCK)
    full = functional.pad(levels, (0, blocks * BLOCK - inputs), value=INT4_ZERO).view(outputs, blocks, 2, -1)
    return (full[:, :, 0] | full[:, :, 1] << 4).transpose(0, 1).contiguous()


def unpack_int4(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the values of :func:`pack_int4` as uint8 ``[outputs, inputs]``."""
    halves = torch.stack([packed & 0xF, packed >> 4], 2)
    return halves.transpose(0, 1).flatten(1)[:, :inputs]
