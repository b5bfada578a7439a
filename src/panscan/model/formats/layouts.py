"""Value layouts of published formats, and their conversion to :class:`QuantizedLinear`.

Levels are uint8 ``[outputs, inputs]``. 4-bit levels are in [0, 15]; without zero points, level 8 is a weight of 0.
"""

from __future__ import annotations

from math import gcd

import torch

from panscan.core.weight_formats import GROUP_SIZES
from panscan.model.linear.quantized import (
    INT4_ZERO,
    LINEARS,
    QuantizedLinear,
    WeightFormat,
    pack_int4,
    quantized_linear,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds output channel ``AWQ_ORDER[i]`` of its eight."""


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the 4-bit or 8-bit values of words ``[..., n]`` of int32, or of bytes, lowest bits first.

    Returns:
        uint8 ``[..., n * bits of a word / bits]``.
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 0xF, octets >> 4], -1).flatten(-2)


def gptq_zeros(qzeros: torch.Tensor, bits: int, *, minus_one: bool) -> torch.Tensor:
    """Return the zero points of GPTQ's ``qzeros`` as uint8 ``[groups, outputs]``.

    Args:
        qzeros: int32 ``[groups, outputs * bits / 32]``.
        bits: bits per value.
        minus_one: whether the file stores zero points minus 1 (``gptq``; ``gptq_v2`` stores them unchanged). Writers
            subtract from whole words, so a zero point of 0 borrows from its neighbour; adding to whole words restores
            both.
    """
    if minus_one:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        # Modulo 2**32: int32 addition wraps around, as it did when the checkpoint was written.
        qzeros = qzeros + torch.tensor(ones, dtype=torch.int32, device=qzeros.device)
    return unpack_words(qzeros, bits)


def awq_levels(words: torch.Tensor) -> torch.Tensor:
    """Return the values of AWQ's ``qweight`` or ``qzeros``, int32 ``[n, outputs / 8]``, as uint8 ``[n, outputs]``."""
    inverse = [AWQ_ORDER.index(channel) for channel in range(8)]
    return unpack_words(words, 4).view(len(words), -1, 8)[..., inverse].flatten(-2)


def order_of(g_idx: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Return the order of input channels, int64 ``[inputs]``, in which the channels of each group are adjacent.

    None if they are adjacent already.

    Args:
        g_idx: integer ``[inputs]``, the group of each input channel.
        groups: number of groups.

    Raises:
        ValueError: groups differ in size, or an index is out of range.
    """
    g_idx = g_idx.long()
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise ValueError(f"g_idx names groups from {int(g_idx.min())} to {int(g_idx.max())}; there are {groups}")
    sizes = torch.bincount(g_idx, minlength=groups)
    if (sizes != len(g_idx) // groups).any():
        raise ValueError(f"g_idx has groups of {int(sizes.min())} to {int(sizes.max())} channels; expected one size")
    if (g_idx.diff() >= 0).all():
        return None
    return torch.argsort(g_idx, stable=True)


def int4_linear(
    levels: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> QuantizedLinear:
    """Return the module of a 4-bit matrix, on the device of its values.

    Groups of more than 128 input channels, such as whole rows, are split into groups with the same scale, because the
    kernels support groups of 32, 64 and 128.

    Args:
        levels: uint8 ``[outputs, inputs]`` in the order of the inputs.
        scale: floating-point ``[groups, outputs]``.
        zero: uint8 or float32 ``[groups, outputs]``, the level of a weight of 0; None: 8.
        order: order of the input channels from :func:`order_of`.

    Raises:
        ValueError: the group size does not divide the inputs, or the kernels do not support it.
    """
    if zero is not None and (zero == INT4_ZERO).all():
        zero = None
    outputs, inputs = levels.shape
    width = inputs // len(scale)
    size = gcd(width, GROUP_SIZES[0])
    if size < GROUP_SIZES[-1]:
        raise ValueError(f"groups of {width} input channels: expected a multiple of {GROUP_SIZES[-1]}")
    weight_format = WeightFormat("int4", size, zero_points=zero is not None, ordered=order is not None)
    linear = quantized_linear(inputs, outputs, weight_format, device=torch.device("meta"))
    linear.weight = pack_int4(levels if order is None else levels[:, order])
    linear.scale = scale.repeat_interleave(width // size, 0).contiguous()
    linear.zero = None if zero is None else zero.repeat_interleave(width // size, 0).contiguous()
    linear.order = order
    return linear


def channel_linear(weight: torch.Tensor, scale: torch.Tensor, *, quantizes_inputs: bool) -> QuantizedLinear:
    """Return the module of an 8-bit matrix.

    Args:
        weight: int8 or float8_e4m3fn ``[outputs, inputs]``.
        scale: floating-point: one value, or one per output in any shape.
        quantizes_inputs: whether matrix multiplications quantise their inputs.

    """
    outputs, inputs = weight.shape
    kind = next(kind for kind, linear in LINEARS.items() if linear.value_type == weight.dtype)
    weight_format = WeightFormat(kind, quantizes_inputs=quantizes_inputs)
    linear = quantized_linear(inputs, outputs, weight_format, device=torch.device("meta"))
    linear.weight = weight.contiguous()
    linear.scale = scale.flatten().float().expand(outputs).contiguous()
    return linear
