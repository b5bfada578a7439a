"""Sums and layer norms of the vision tower by a kernel of our own, against PyTorch's operators in float64.

On a GPU the compiled kernel runs, elsewhere Triton's interpreter.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.triton_here import DEVICE
from torch import nn

from panscan.model.norm_kernels import add_norm
from panscan.model.random_weights import random_model
from panscan.model.shapes import SHAPES
from panscan.model.tower import VisionTower

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # half a unit in the last place, and a little


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@given(
    rows=st.integers(1, 5), width=st.sampled_from([1, 8, 24, 64, 100]), dtype=st.sampled_from(list(CLOSE)),
    seed=st.integers(0, 99), mean=st.sampled_from([0.0, 1.0, 300.0]), adds=st.booleans(),
)  # fmt: skip
def test_it_is_as_near_to_the_truth_as_the_type_allows(
    rows: int, width: int, dtype: torch.dtype, seed: int, mean: float, adds: bool
) -> None:
    norm = nn.LayerNorm(width, eps=1e-6).to(DEVICE, dtype)
    norm.weight.data, norm.bias.data = drawn(seed, width).to(dtype), drawn(seed + 1, width).to(dtype)
    hidden = (drawn(seed + 2, 2, rows, width) + mean).to(dtype)
    part = drawn(seed + 3, 2, rows, width).to(dtype) if adds else None
    before = hidden.clone()
    total, normed = add_norm(hidden, part, norm)
    assert torch.equal(hidden, before)
    expected = hidden if part is None else hidden + part
    if dtype != torch.bfloat16 or DEVICE.type == "cuda":  # of which Triton's interpreter cuts off the rest
        assert torch.equal(total, expected), "rounded as PyTorch rounds a sum"
    torch.testing.assert_close(total, expected)
    truth = norm.double()(total.double())
    scale = 1 + truth.abs() + (total.double() - total.double().mean(-1, keepdim=True)).abs()
    assert bool(((normed.double() - truth).abs() <= CLOSE[dtype] * scale * (1 + mean)).all())


def test_the_tower_computes_the_same_with_it() -> None:
    model, _ = random_model(SHAPES["tiny"], dtype=torch.float32, device=str(DEVICE))
    tower = VisionTower(model)
    tower.add_norm = add_norm
    size = model.config.vision_config.image_size
    pixels = drawn(0, 3, 3, size, size)
    with torch.no_grad():
        expected = model.get_image_features(pixels, return_dict=True).pooler_output
    torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=1e-5)
