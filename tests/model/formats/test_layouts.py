"""Layouts of packed values: unpacking inverts packing, written here as each format defines it."""

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.core import UnsupportedError
from panscan.model.formats.layouts import gptq_zeros, int4_linear, order_of
from panscan.model.linear.quantized import WeightFormat, quantized_linear

SEEDS = st.integers(0, 2**32 - 1)


def draw(seed: int, *shape: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last dimension into int32 words, the first value in the lowest bits."""
    count = 32 // bits
    words = values.long().unflatten(-1, (-1, count))
    return (words << bits * torch.arange(count)).sum(-1).to(torch.uint32).view(torch.int32)


def int4_values(seed: int, outputs: int, groups: int, *, size: int = 32, zeros: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(groups, outputs, generator=generator).to(torch.float16) + 0.1
    zero = draw(seed + 1, groups, outputs) if zeros else None
    return {"levels": draw(seed, outputs, groups * size), "scale": scale, "zero": zero}


def dense(values: dict[str, Any], group_of: torch.Tensor) -> torch.Tensor:
    """Return the weights by definition, given the group of each input channel."""
    zero = torch.full_like(values["scale"], 8) if values["zero"] is None else values["zero"]
    return (values["levels"].float() - zero.float()[group_of].T) * values["scale"].float()[group_of].T


@given(SEEDS, st.integers(1, 3), st.sampled_from([4, 8]))
def test_gptq_zero_points_of_both_versions_are_the_same(seed: int, groups: int, bits: int) -> None:
    """Version 1 subtracts 1 from whole words, so zero points of 0 borrow from their neighbours."""
    zeros = draw(seed, groups, 16, bits=bits)
    zeros[:, :3] = 0
    second = packed(zeros, bits)
    first = second - sum(1 << shift for shift in range(0, 32, bits))
    assert torch.equal(gptq_zeros(second, bits, minus_one=False), zeros)
    assert torch.equal(gptq_zeros(first, bits, minus_one=True), zeros)


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 40), st.integers(1, 17), st.booleans(), st.booleans())
def test_int4_matrices_have_their_values(seed: int, outputs: int, groups: int, zeros: bool, ordered: bool) -> None:
    """Up to 544 input channels: more than two blocks of the packed weights."""
    values = int4_values(seed, outputs, groups, zeros=zeros)
    group_of = torch.arange(groups * 32) // 32
    if ordered:
        group_of = group_of[torch.randperm(groups * 32, generator=torch.Generator().manual_seed(seed))]
        values["order"] = order_of(group_of, groups)
    assert torch.equal(int4_linear(**values).dequantized(), dense(values, group_of))


@given(SEEDS, st.integers(2, 5))
def test_groups_of_several_sizes_are_refused(seed: int, groups: int) -> None:
    group_of = torch.arange(groups * 32) // 32
    assert order_of(group_of, groups) is None
    group_of[seed % 32] = 1
    with pytest.raises(ValueError, match="expected one size"):
        order_of(group_of, groups)


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([32, 64, 128, 512]), st.sampled_from(["rows", "columns"]))
def test_parts_of_a_matrix_are_the_matrix(seed: int, size: int, group: int, by: Literal["rows", "columns"]) -> None:
    """Groups that the split cuts keep their scale; each of four parts of 512 channels is half a block."""
    linear = int4_linear(**int4_values(seed, 8, 512 // group, size=group))
    linear.bias = torch.nn.Parameter(torch.rand(8), requires_grad=False)
    parts = [linear.shard(rank, size, by) for rank in range(size)]
    joined = torch.cat([part.dequantized() for part in parts], 0 if by == "rows" else 1)
    assert torch.equal(joined, linear.dequantized())
    inputs = torch.rand(3, 512)
    whole = linear(inputs)
    shares = inputs.chunk(size, 1) if by == "columns" else [inputs] * size
    outputs = [part(share) for part, share in zip(parts, shares, strict=True)]
    together = torch.cat(outputs, -1) if by == "rows" else torch.stack(outputs).sum(0)
    assert torch.allclose(together, whole, rtol=1e-4, atol=1e-3)


def test_matrices_that_cannot_be_split_are_refused() -> None:
    linear = int4_linear(**int4_values(0, 6, 3))
    with pytest.raises(UnsupportedError, match="cuts groups of 32 input channels into 16"):
        linear.shard(0, 2, "columns")
    with pytest.raises(UnsupportedError, match="does not divide 6 channels"):
        linear.shard(0, 4, "rows")
    eight = quantized_linear(64, 8, WeightFormat("int8"))
    eight.quantize(torch.rand(8, 64))
    assert torch.equal(torch.cat([eight.shard(rank, 4, "columns").weight for rank in range(4)], 1), eight.weight)
