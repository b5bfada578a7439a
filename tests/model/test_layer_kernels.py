"""The Triton kernels of our layers against Transformers' modules and PyTorch's operators.

On a GPU the compiled kernels run, elsewhere Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.triton_here import DEVICE, drawn
from torch import nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, apply_rotary_pos_emb

from panscan.engine.attention import KernelInputs
from panscan.engine.kernels import decode
from panscan.engine.triton_attention import TritonPlan
from panscan.model import layer_kernels
from panscan.model.layer_kernels import add_layer_norm, add_rms_norms, gelu_product, rms_norm, rotate_and_store
from panscan.model.layers import LayerCache
from panscan.model.linear.multiply import quantize_rows
from panscan.model.linear.products import Rows
from panscan.model.linear.rows import QuantizedRows, UnscaledProduct

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # one unit in the last place, and a little
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # NumPy has no bfloat16
SEEDS = st.integers(0, 99)
WIDTHS = st.sampled_from([1, 8, 24, 64, 100])
GELU_WIDTHS = st.sampled_from([1, 24, 1023, 1024, 1025, 2100])
SIZES = st.sampled_from([16, 32, 64, 128, 256])
HEADS = {"heads": st.integers(1, 20), "kv_heads": st.integers(1, 4), "size": SIZES}
EPS = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of NumPy: exp to infinity
many = settings(max_examples=30)  # the interpreter is slow


def rms_norm_of(weight: torch.Tensor) -> Gemma3RMSNorm:
    norm = Gemma3RMSNorm(len(weight), EPS)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def assert_near(actual: torch.Tensor, expected: torch.Tensor, units: float = 1) -> None:
    close = units * CLOSE[expected.dtype]
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=WIDTHS, seed=SEEDS, mean=st.sampled_from([0.0, 1.0, 300.0]), adds=st.booleans())
@example(rows=2, width=1152, seed=0, mean=0.0, adds=True)
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
    if dtype == torch.float32:
        same, quantized = add_layer_norm(hidden, part, norm.to(dtype), torch.int8)
        assert torch.equal(same, total)
        assert_rows(quantized, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=WIDTHS, seed=SEEDS, size=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
@example(rows=3, width=1152, seed=0, size=1.0)
@example(rows=3, width=5376, seed=0, size=1.0)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, seed: int, size: float) -> None:
    """300: squares overflow float16, so a norm that does not compute in float32 fails."""
    hidden = (size * drawn(seed, rows, width)).to(dtype)
    weight = drawn(seed + 1, width, dtype=dtype)
    expected = rms_norm_of(weight)(hidden)
    assert_near(rms_norm(hidden, weight, EPS), expected, units=2)
    if dtype == torch.float32:
        assert_rows(rms_norm(hidden, weight, EPS, torch.int8), expected)


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
    if dtype == torch.float32:
        sums = scaled_sums(part, seed)
        actual, quantized = add_rms_norms(hidden, sums, part_weight, next_weight, EPS, torch.int8)
        assert torch.equal(actual, total)
        assert_rows(quantized, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), width=GELU_WIDTHS, seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 6.0]))
def test_gelu_product(rows: int, width: int, dtype: torch.dtype, seed: int, scale: float) -> None:
    gate_up = (scale * drawn(seed, rows, 2 * width)).to(dtype)
    gate, up = gate_up.split(width, -1)
    expected = functional.gelu(gate.float(), approximate="tanh").to(dtype) * up
    actual = gelu_product(gate_up)
    assert_near(actual, expected, units=2)
    if dtype == torch.float32:
        assert_rows(gelu_product(scaled_sums(gate_up, seed), torch.float32, torch.int8), actual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_extreme_values(dtype: torch.dtype) -> None:
    """Any finite gate: 0 far below zero, the gate itself far above."""
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -50, -0.0, 0.0, 50, 1e4, largest], device=DEVICE, dtype=dtype)
    actual = gelu_product(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    assert torch.equal(actual, gate.clamp(min=0))


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(rows=st.integers(1, 5), padding=st.sampled_from([0, 3]), seed=SEEDS, **HEADS)
def test_rotation(rows: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int, padding: int) -> None:
    """Between rows and in the caches is NaN: it is not read, and only the slots are written."""
    columns = (heads + 2 * kv_heads) * size
    wide = torch.full((rows, columns + padding), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, :columns] = drawn(seed, rows, columns)
    qkv = wide[:, :columns]
    shapes = enumerate([(size,), (size,), (rows, size), (rows, size)], 1)
    q_weight, k_weight, cos, sin = (drawn(seed + at, *shape, dtype=dtype) for at, shape in shapes)
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    caches = torch.full((2, 9, kv_heads, size), torch.nan, device=DEVICE, dtype=dtype).unbind()
    query = rotate_and_store(qkv, q_weight, k_weight, EPS, cos, sin, slots, LayerCache(*caches), heads)

    q, k, v = (part.reshape(rows, -1, size) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], -1))
    normed = rms_norm_of(q_weight)(q), rms_norm_of(k_weight)(k)
    rotated = apply_rotary_pos_emb(*(part.float() for part in normed), cos.float(), sin.float())
    assert_near(query, rotated[0].to(dtype), units=4)
    assert_near(caches[0][slots], rotated[1].to(dtype), units=4)
    assert torch.equal(caches[1][slots], v)
    others = torch.ones(9, dtype=torch.bool).to(DEVICE).index_fill(0, slots, False)
    assert all(bool(cache[others].isnan().all()) for cache in caches)
    if dtype == torch.float32:
        sums, again = scaled_sums(qkv, seed), torch.full_like(torch.stack(caches), torch.nan).unbind()
        actual = rotate_and_store(sums, q_weight, k_weight, EPS, cos, sin, slots, LayerCache(*again), heads)
        assert_near(actual, query)
        assert_near(torch.stack(again)[:, slots], torch.stack(caches)[:, slots])


def scaled_sums(product: torch.Tensor, seed: int) -> UnscaledProduct:
    """Return the product with drawn scales still to be applied; powers of two, so that applying them is exact."""
    rows, columns = product.shape
    generator = torch.Generator().manual_seed(seed)
    row_scale = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator).to(DEVICE)
    column_scale = 2.0 ** torch.randint(-3, 4, (columns,), generator=generator).to(DEVICE)
    return UnscaledProduct((product.float() / row_scale / column_scale).to(product.dtype), row_scale, column_scale)


@many
@given(rows=st.integers(1, 3), width=st.sampled_from([24, 1024, 2100]), seed=SEEDS)
@example(rows=1, width=4304, seed=0)
def test_gelu_of_the_vision_tower_quantises_its_result(rows: int, width: int, seed: int) -> None:
    values = 3 * drawn(seed, rows, width)
    assert_rows(layer_kernels.gelu_rows(values, torch.int8), functional.gelu(values, approximate="tanh"))


@many
@given(rows=st.integers(1, 4), heads=st.integers(1, 5), kv_heads=st.integers(1, 3), seed=SEEDS)
def test_an_int8_cache_holds_nearest_values_and_their_scales(rows: int, heads: int, kv_heads: int, seed: int) -> None:
    size, slots = 16, torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    qkv = drawn(seed, rows, (heads + 2 * kv_heads) * size) * 10.0 ** drawn(seed + 1, rows, 1)
    weight, cos, sin = drawn(2, size), drawn(3, rows, size), drawn(4, rows, size)
    wide = LayerCache(*torch.zeros(2, 9, kv_heads, size, device=DEVICE))
    values, scales = torch.zeros(2, 9, kv_heads, size, dtype=torch.int8), torch.full((2, kv_heads, 9), torch.nan)
    short = LayerCache(*values.to(DEVICE), scales.to(DEVICE))
    queries = [rotate_and_store(qkv, weight, weight, EPS, cos, sin, slots, cache, heads) for cache in (wide, short)]
    assert torch.equal(*queries)
    for exact, stored, scale in zip(wide[:2], short[:2], short.scales_of_parts(), strict=True):
        expected = quantize_rows(exact[slots], torch.int8)
        torch.testing.assert_close(scale[:, slots].T, expected.scale[..., 0], rtol=1e-6, atol=0)
        assert int((stored[slots].int() - expected.values.int()).abs().max()) <= 1  # where a tie is rounded
        others = torch.ones(9, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
        assert not stored[others].any() and scale[:, others].isnan().all()


@pytest.mark.gpu
def test_a_float8_cache_holds_the_nearest_values() -> None:
    """Triton's interpreter truncates float8. Values that float8 does not hold become its largest."""
    rows, heads, kv_heads, size = 7, 4, 2, 64
    qkv = (1000 * drawn(0, rows, (heads + 2 * kv_heads) * size)).bfloat16()
    weight, cos, sin = drawn(1, size).bfloat16(), drawn(2, rows, size).bfloat16(), drawn(3, rows, size).bfloat16()
    slots = torch.arange(rows, device=DEVICE)
    wide = torch.zeros(2, rows, kv_heads, size, device=DEVICE, dtype=torch.bfloat16)
    short = wide.to(torch.float8_e4m3fn)
    for caches in (wide, short):
        rotate_and_store(qkv, weight, weight, EPS, cos, sin, slots, LayerCache(*caches), heads)
    largest = torch.finfo(torch.float8_e4m3fn).max
    assert bool((wide[1].abs() > largest).any())
    assert torch.equal(short.float(), wide.clamp(-largest, largest).to(torch.float8_e4m3fn).float())


def kernel_by_name(name: str, count: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of bfloat16 rows ``[count, width]`` that launches one kernel and nothing before it."""
    weight, other = drawn(1, width).bfloat16(), drawn(2, count, width).bfloat16()
    norm = nn.LayerNorm(width, eps=EPS).to(DEVICE, torch.bfloat16)
    heads = width // 128  # as many query heads as keys and values together
    cos, sin = drawn(3, 2, count, 64).bfloat16().unbind()
    caches = torch.zeros(2, count, heads // 2, 64, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange(count, device=DEVICE)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        query = rotate_and_store(rows, weight[:64], weight[:64], EPS, cos, sin, slots, LayerCache(*caches), heads=heads)
        return torch.cat([query.flatten(), caches.flatten()])

    return {
        "rms_norm": lambda rows: rms_norm(rows, weight, EPS),
        "add_rms_norms": lambda rows: add_rms_norms(other, rows, weight, weight, EPS)[1],
        "gelu_product": gelu_product,
        "add_layer_norm": lambda rows: add_layer_norm(other, rows, norm)[1],
        "rotate_and_store": rotate,
    }[name]


def long_attention(count: int, heads: int, size: int, keys: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of queries ``[count, heads, size]`` whose kernel reads many keys before it writes a result, and
    which runs on all multiprocessors at once."""
    cache = drawn(4, 2, keys, 2, size).bfloat16()
    lengths, members = torch.full((count,), keys, device=DEVICE), torch.arange(count, device=DEVICE)
    groups = torch.stack([members, torch.ones_like(members), torch.zeros_like(members)], 1)
    tables = torch.arange(keys // 16, device=DEVICE).expand(count, -1)
    none = members[:0]
    shared = {"slots": members, "lengths": lengths, "groups": groups, "members": members, "ends": none, "tiles": none}
    inputs = KernelInputs(**shared, decode_tables=tables, prefill_tables=none)
    inputs = KernelInputs._make(values.int().contiguous() for values in inputs)

    def attend(query: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        decode(query, LayerCache(*cache), output, TritonPlan(inputs, 16, 0), 0.1, splits=1)
        return output.flatten(1)

    return attend


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norms", "gelu_product", "add_layer_norm", "rotate_and_store"])
def test_a_kernel_that_starts_early_reads_what_the_one_before_it_writes(name: str) -> None:
    """The kernel before it lets it start at once, and writes at its end. Until then, memory holds other values."""
    queries = [drawn(seed, 64, 16, 128).bfloat16() for seed in range(10, 16)]
    first, second = long_attention(64, 16, 128, 16384), kernel_by_name(name, 64, 2048)
    expected = []
    for query in queries:
        rows = first(query)
        torch.cuda.synchronize()
        expected.append(second(rows))
    outputs = [second(first(query)) for query in queries]
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


def assert_rows(rows: Rows, dense: torch.Tensor) -> None:
    """Rows are quantised to within a rounding of the dense values, by their largest."""
    assert isinstance(rows, QuantizedRows)
    assert rows.values.dtype == torch.int8
    largest = dense.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(rows.scale, largest / 127, rtol=1e-5, atol=0)
    assert bool(((rows.values * rows.scale - dense).abs() <= 0.501 * largest / 127).all())
