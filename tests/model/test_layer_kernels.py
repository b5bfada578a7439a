"""The Triton kernels of our layers against Transformers' modules and PyTorch's operators.

On a GPU the compiled kernels run, elsewhere Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.triton_here import DEVICE
from torch import nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, apply_rotary_pos_emb

from panscan.model.layer_kernels import add_layer_norm, add_rms_norms, gelu_product, rms_norm, rotate_and_store

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # one unit in the last place, and a little
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # NumPy has no bfloat16
SEEDS = st.integers(0, 99)
WIDTHS = st.sampled_from([1, 8, 24, 64, 100])
EPS = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of NumPy: exp to infinity
many = settings(max_examples=30, deadline=None)  # the interpreter is slow


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rms_norm_of(weight: torch.Tensor) -> Gemma3RMSNorm:
    norm = Gemma3RMSNorm(len(weight), EPS)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def assert_near(found: torch.Tensor, expected: torch.Tensor, units: float = 1) -> None:
    close = units * CLOSE[expected.dtype]
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=WIDTHS, seed=SEEDS, mean=st.sampled_from([0.0, 1.0, 300.0]), adds=st.booleans())
def test_sum_and_layer_norm(rows: int, width: int, dtype: torch.dtype, seed: int, mean: float, adds: bool) -> None:
    norm = nn.LayerNorm(width, eps=EPS).to(DEVICE, dtype)
    norm.weight.data, norm.bias.data = drawn(seed, width, dtype=dtype), drawn(seed + 1, width, dtype=dtype)
    hidden = (drawn(seed + 2, 2, rows, width) + mean).to(dtype)
    part = drawn(seed + 3, 2, rows, width, dtype=dtype) if adds else None
    before = hidden.clone()
    total, normed = add_layer_norm(hidden, part, norm)
    assert torch.equal(hidden, before)
    assert torch.equal(total, hidden if part is None else hidden + part)
    truth = norm.double()(total.double())
    scale = 1 + truth.abs() + (total.double() - total.double().mean(-1, keepdim=True)).abs()
    assert bool(((normed.double() - truth).abs() <= CLOSE[dtype] * scale * (1 + mean)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=WIDTHS, seed=SEEDS, size=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, seed: int, size: float) -> None:
    """300: squares overflow float16, so a norm that does not compute in float32 fails."""
    hidden = (size * drawn(seed, rows, width)).to(dtype)
    weight = drawn(seed + 1, width, dtype=dtype)
    assert_near(rms_norm(hidden, weight, EPS), rms_norm_of(weight)(hidden), units=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [640, 1152, 2560, 3840, 5376])
def test_rms_norms_of_the_published_widths(width: int, dtype: torch.dtype) -> None:
    hidden, weight = drawn(0, 3, width, dtype=dtype), drawn(1, width, dtype=dtype)
    assert_near(rms_norm(hidden, weight, EPS), rms_norm_of(weight)(hidden), units=2)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=WIDTHS, seed=SEEDS, scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_sum_and_rms_norms(rows: int, width: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    hidden, part = ((scale * drawn(seed + at, rows, width)).to(dtype) for at in range(2))
    part_weight, next_weight = (drawn(seed + at, width, dtype=dtype) for at in (2, 3))
    before = hidden.clone(), part.clone()
    total, normed = add_rms_norms(hidden, part, part_weight, next_weight, EPS)
    assert torch.equal(hidden, before[0])
    assert torch.equal(part, before[1])
    assert_near(total, hidden + rms_norm_of(part_weight)(part), units=2)
    assert_near(normed, rms_norm_of(next_weight)(total), units=2)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=st.sampled_from([1, 24, 1023, 1024, 1025, 2100]), seed=SEEDS,
       scale=st.sampled_from([0.1, 1.0, 6.0]))  # fmt: skip
def test_gelu_product(rows: int, width: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    gate_up = (scale * drawn(seed, rows, 2 * width)).to(dtype)
    gate, up = gate_up.split(width, -1)
    expected = functional.gelu(gate.float(), approximate="tanh").to(dtype) * up
    assert_near(gelu_product(gate_up), expected, units=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_extreme_values(dtype: torch.dtype) -> None:
    """Any finite gate: 0 far below zero, the gate itself far above."""
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -50, -0.0, 0.0, 50, 1e4, largest], device=DEVICE, dtype=dtype)
    found = gelu_product(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    assert torch.equal(found, gate.clamp(min=0))


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(
    rows=st.integers(1, 5), heads=st.integers(1, 20), kv_heads=st.integers(1, 4), seed=SEEDS,
    size=st.sampled_from([16, 32, 64, 128, 256]), padding=st.sampled_from([0, 3]),
)  # fmt: skip
def test_rotation_and_caches(
    rows: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int, padding: int
) -> None:
    """Between rows and in the caches is NaN: it is not read, and only the slots are written."""
    columns = (heads + 2 * kv_heads) * size
    wide = torch.full((rows, columns + padding), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, :columns] = drawn(seed, rows, columns)
    qkv = wide[:, :columns]
    q_weight, k_weight, cos, sin = (drawn(seed + at, *shape, dtype=dtype) for at, shape in
                                    enumerate([(size,), (size,), (rows, size), (rows, size)], 1))  # fmt: skip
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    caches = torch.full((2, 9, kv_heads, size), torch.nan, device=DEVICE, dtype=dtype).unbind()
    query = rotate_and_store(qkv, q_weight, k_weight, EPS, cos, sin, slots, *caches, heads)

    q, k, v = (part.reshape(rows, -1, size) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], -1))
    normed = rms_norm_of(q_weight)(q), rms_norm_of(k_weight)(k)
    rotated = apply_rotary_pos_emb(*(part.float() for part in normed), cos.float(), sin.float())
    assert_near(query, rotated[0].to(dtype), units=4)
    assert_near(caches[0][slots], rotated[1].to(dtype), units=4)
    assert torch.equal(caches[1][slots], v)
    others = torch.ones(9, dtype=torch.bool).to(DEVICE).index_fill(0, slots, False)
    assert all(bool(cache[others].isnan().all()) for cache in caches)
