"""Tensor-parallel shards of quantised matrices."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Literal

import torch
from torch import nn

from panscan.core import UnsupportedError
from panscan.model.linear.quantized import BLOCK, QuantizedLinear, pack_int4, unpack_int4


@torch.no_grad()
def shard_linear(
    linear: QuantizedLinear, rank: int, size: int, by: Literal["rows", "columns"] = "rows"
) -> QuantizedLinear:
    """Return a rank's shard of a quantised matrix. It shares no memory with the whole matrix, which may be freed.

    Args:
        linear: the whole matrix.
        rank: rank of the shard, from 0.
        size: number of ranks.
        by: ``rows`` splits output channels. ``columns`` splits input channels, so products are partial sums: only the
            first rank keeps the bias, the others have zeros.

    Raises:
        UnsupportedError: the number of ranks does not divide the channels, a group cannot be cut, or the input channels
            are reordered.
    """
    if size == 1:
        return linear
    count = linear.out_features if by == "rows" else linear.in_features
    if count % size:
        raise UnsupportedError(f"--tensor-parallel-size {size} does not divide {count} channels of a quantised matrix")
    share = slice(rank * count // size, (rank + 1) * count // size)
    return _rows(linear, share) if by == "rows" else _shard_columns(linear, share, rank, size)


def _rows(linear: QuantizedLinear, share: slice) -> QuantizedLinear:
    part = _like(linear, linear.in_features, share.stop - share.start)
    if linear.weight_format.kind == "int4":
        part.weight = linear.weight[:, share].clone()
        part.scale = linear.scale[:, share].clone()
        part.zero = None if linear.zero is None else linear.zero[:, share].clone()
        part.order = linear.order
    else:
        part.weight = linear.weight[share].clone()
        part.scale = linear.scale[share].clone()
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias[share].clone(), requires_grad=False)
    return part


def _shard_columns(linear: QuantizedLinear, share: slice, rank: int, size: int) -> QuantizedLinear:
    inputs = share.stop - share.start
    if linear.weight_format.kind == "int4":
        part = _int4_columns(linear, share, size)
    else:
        part = _like(linear, inputs, linear.out_features)
        part.weight = linear.weight[:, share].contiguous()
        part.scale = linear.scale.clone()
    if linear.bias is not None:
        bias = linear.bias.clone() if rank == 0 else torch.zeros_like(linear.bias)
        part.bias = nn.Parameter(bias, requires_grad=False)
    return part


def _int4_columns(linear: QuantizedLinear, share: slice, size: int) -> QuantizedLinear:
    """Return a slice of the input channels. Groups that the split cuts become smaller groups with the same scale."""
    if linear.order is not None:
        raise UnsupportedError(
            f"--tensor-parallel-size {size}: the checkpoint's input channels are reordered (act-order), which cannot be"
            " split; use --tensor-parallel-size 1, or a checkpoint without act-order"
        )
    inputs = share.stop - share.start
    group = gcd(linear.weight_format.group_size, inputs)
    if group % 32:
        raise UnsupportedError(
            f"--tensor-parallel-size {size} cuts groups of {linear.weight_format.group_size} input channels into"
            f" {group}; use a smaller size, so that parts of groups are multiples of 32"
        )
    part = _like(linear, inputs, linear.out_features, group)
    if share.start % BLOCK == 0 and inputs % BLOCK == 0:
        part.weight = linear.weight[share.start // BLOCK : share.stop // BLOCK].clone()
    else:
        part.weight = pack_int4(unpack_int4(linear.weight, linear.in_features)[:, share])
    repeats, groups = linear.weight_format.group_size // group, slice(share.start // group, share.stop // group)
    part.scale = linear.scale.repeat_interleave(repeats, 0)[groups].clone()
    if linear.zero is not None:
        part.zero = linear.zero.repeat_interleave(repeats, 0)[groups].clone()
    return part


def _like(linear: QuantizedLinear, inputs: int, outputs: int, group_size: int | None = None) -> QuantizedLinear:
    """Return a module of the same format, with buffers on the meta device."""
    weight_format = linear.weight_format if group_size is None else replace(linear.weight_format, group_size=group_size)
    return QuantizedLinear(inputs, outputs, weight_format, device=torch.device("meta"))
