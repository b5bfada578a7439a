"""Products with quantised weights: Triton's kernels and modules against the same arithmetic in PyTorch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.triton_here import DEVICE, drawn

from panscan.model.linear import kernels, multiply
from panscan.model.linear.kernels import Tiles
from panscan.model.linear.multiply import ANY_ROWS, apply_scales, multiply_int4, multiply_int8, quantize_rows
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear, unpack_int4
from panscan.model.linear.rows import LARGEST
from panscan.model.linear.tuning import choose_methods, choose_rows, median_ratio
from panscan.model.sharding import SINGLE_RANK

SEEDS = st.integers(0, 99)
WIDTHS = st.sampled_from([128, 256, 384, 640])
ROWS = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.gpu)]  # the interpreter truncates float8
few = settings(max_examples=12)  # the interpreter is slow
gpu = pytest.mark.gpu


def weights(
    seed: int, inputs: int, outputs: int, weight_format: WeightFormat, scale_type: torch.dtype = torch.float32
) -> QuantizedLinear:
    """Return drawn weights; with drawn zero points where the format has them."""
    made = quantized_linear(inputs, outputs, weight_format, scale_type=scale_type, device=torch.device(DEVICE))
    if weight_format.zero_points:
        generator = torch.Generator().manual_seed(seed)
        made.weight.copy_(torch.randint(0, 256, made.weight.shape, dtype=torch.uint8, generator=generator))
        made.scale.copy_(torch.rand(made.scale.shape, generator=generator))
        made.zero.copy_(torch.randint(0, 16, made.zero.shape, dtype=torch.uint8, generator=generator))
    else:
        made.quantize(drawn(seed, outputs, inputs))
    return made


def float32_error(roundings: int, mass: torch.Tensor) -> torch.Tensor:
    """Return the largest possible error of sums in float32, in any order and with or without fused multiply-adds.

    Higham, Accuracy and Stability of Numerical Algorithms (2002), lemma 3.1: a term that passes ``roundings`` roundings
    has a relative error of at most ``n u / (1 - n u)``. The sum of the terms may be much smaller than the errors.

    Args:
        roundings: most roundings that a term passes.
        mass: sums of the terms' absolute values, float64.
    """
    unit = roundings * 2.0**-24
    return unit / (1 - unit) * mass


@pytest.mark.parametrize("dtype", ROWS)
@few
@given(seed=SEEDS, rows=st.integers(1, 4), width=WIDTHS)
def test_rows_are_quantised_as_in_pytorch(dtype: torch.dtype, seed: int, rows: int, width: int) -> None:
    values = drawn(seed, rows, width)
    values[0] = 0.0
    quantized, scale = kernels.quantize(values, dtype)
    largest = values.abs().amax(1, keepdim=True).clamp_min(1e-12)
    assert torch.equal(scale, largest / LARGEST[dtype])
    step = 0.5 if dtype == torch.int8 else 0.0626 * (values / scale).abs().clamp_min(2.0**-6)
    assert bool(((quantized.float() - values / scale).abs() <= step).all())


@few
@given(SEEDS, st.integers(1, 40), WIDTHS, st.integers(1, 70), st.booleans())
def test_int8_products_are_exact_sums(seed: int, rows: int, inputs: int, outputs: int, biased: bool) -> None:
    made = weights(seed, inputs, outputs, WeightFormat("int8"))
    values = quantize_rows(drawn(seed + 1, rows, inputs), torch.int8)
    sums = (values.values.double() @ made.weight.double().T) * (values.scale * made.scale).double()
    tiles = Tiles(16, 32, 128, 4, 2)
    bias = drawn(seed + 2, outputs) if biased else None
    expected = sums if bias is None else sums + bias.double()
    product = kernels.product_int8(values.values, values.scale, made.weight, made.scale, torch.float32, tiles, bias)
    atol = 1e-9 if bias is None else 1e-6 * float(sums.abs().max())
    torch.testing.assert_close(product.double(), expected, rtol=1e-6, atol=atol)
    integers = torch._int_mm(values.values.cpu(), made.weight.T.cpu()).to(DEVICE) if DEVICE.type == "cpu" else None
    if integers is not None:
        scaled = kernels.scale_sums(integers, values.scale, made.scale, torch.float32, bias)
        torch.testing.assert_close(scaled.double(), expected, rtol=1e-6, atol=atol)
        assert biased or torch.equal(scaled, product), "whichever is chosen, products are the same"


@few
@given(
    SEEDS, st.integers(1, 2), WIDTHS, st.integers(1, 40), st.sampled_from([32, 64, 128]), st.booleans(), st.booleans()
)
@example(72, 1, 384, 1, 32, True, False)  # sums that almost cancel, so that errors are large relative to them
@example(541, 1, 384, 1, 32, True, True)
def test_int4_of_few_rows(seed: int, rows: int, inputs: int, outputs: int, group: int, zeros: bool, half: bool) -> None:
    """Includes slices of the outputs, whose packed weights and scales are strided views."""
    made = weights(seed, inputs, outputs, WeightFormat("int4", group, zero_points=zeros))
    values = drawn(seed + 1, rows, inputs)
    part = slice(outputs // 2 if half else 0, outputs)
    weight, scale, zero = made.weight[:, part], made.scale[:, part], None if made.zero is None else made.zero[:, part]
    zeros_there = torch.full_like(scale, 8.0) if zero is None else zero
    levels = unpack_int4(weight, inputs).double()
    lowest, factor = (parameter.double().T.repeat_interleave(group, 1) for parameter in (zeros_there, scale))
    dense = (levels - lowest) * factor
    groups = inputs // group

    fixed = kernels.fixed_point(values, group)
    product = kernels.vector_int4(fixed, weight, scale, zero, torch.float32)
    exact = fixed_values(fixed, group)
    # Sums of four are exact; the kernel adds words, then groups, and scales each in up to three multiplications.
    bound = float32_error(group // 4 + groups + 3, exact.abs() @ ((levels + lowest) * factor).T)
    assert bool(((product - exact @ dense.T).abs() <= bound).all())

    product = kernels.product_int4(values, weight, scale, zero, group, shared_bytes=1 << 17)
    bound = float32_error(group + groups + 2, values.double().abs() @ dense.abs().T)
    assert bool(((product - values.double() @ dense.T).abs() <= bound).all())
    assert torch.equal(kernels.dequantize_int4(weight, scale, zero, group, inputs, torch.float32), dense.float())
    assert torch.equal(made.dequantized()[part], dense.float())


def fixed_values(fixed: kernels.FixedPoint, group: int) -> torch.Tensor:
    """Return the values of fixed-point rows, exactly: ``[T, inputs]`` in float64."""
    return (256.0 * fixed.high.double() + fixed.low.double()) * fixed.scale.double().repeat_interleave(group, 1)


@few
@given(SEEDS, st.sampled_from([1e-30, 1.0, 1e4]), st.sampled_from([32, 128]), st.booleans())
def test_fixed_point_errs_by_half_a_step(seed: int, size: float, group: int, bfloat16: bool) -> None:
    """And by the rounding of its quotient, which has 15 bits before the point and is within 2 ulp on a GPU."""
    values = size * drawn(seed, 2, 256)
    values = values.bfloat16().float() if bfloat16 else values
    fixed = kernels.fixed_point(values, group)
    decoded = fixed_values(fixed, group)
    step = fixed.scale.double().repeat_interleave(group, 1)
    assert bool(((decoded - values).abs() <= (0.5 + 32512 * 2.0**-22) * step).all())
    largest = values.unflatten(1, (-1, group)).abs().amax(-1).clamp_min(1e-12)
    torch.testing.assert_close(fixed.scale, largest / 32512, rtol=2.0**-22, atol=0)
    # The sum of integers is exact, below 2^24; only its product with the scale is rounded.
    sums = decoded.unflatten(1, (-1, group)).sum(-1)
    torch.testing.assert_close(fixed.sum.double(), sums, rtol=2.0**-23, atol=0)


@gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 65, 128, 129, 600, 1102])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4 with zero points"])
def test_products_on_the_gpu_for_every_number_of_rows(rows: int, kind: str) -> None:
    """Each number of rows has its kernel or library; more outputs than are dequantised at once."""
    if kind.startswith("int4"):
        zero_points = kind != "int4"
        inputs, scale_type = (512, torch.float32) if zero_points else (4096, torch.bfloat16)
        made = weights(0, inputs, 26_000, WeightFormat("int4", 128, zero_points=zero_points), scale_type)
        values = drawn(1, rows, made.in_features).bfloat16()
        exact = values.float() @ made.dequantized().T
        for most in (None, 0, ANY_ROWS):  # as chosen, by libraries and by our kernels
            assert_near(multiply_int4(values, made.weight, made.scale, made.zero, 128, most), exact)
    else:
        check_products(weights(0, 4096, 1040, WeightFormat(kind)), rows, torch.bfloat16)


@gpu
@pytest.mark.parametrize("rows", [16, 600, 4096])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(1152, 3456), (1152, 4304), (4304, 1152)])
def test_products_with_a_bias_on_the_gpu(rows: int, kind: str, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """The vision tower's matrices, by every kernel and library that multiplies them."""
    made = weights(0, inputs, outputs, WeightFormat(kind))
    made.bias = torch.nn.Parameter(100 * drawn(2, outputs).to(dtype), requires_grad=False)
    check_products(made, rows, dtype)


def check_products(made: QuantizedLinear, rows: int, dtype: torch.dtype) -> None:
    """Compare the products of drawn rows, by the kernels that are chosen and by ours, with exact ones."""
    if made.weight_format.kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    quantized = quantize_rows(drawn(1, rows, made.in_features).to(dtype), made.weight.dtype)
    expected = (quantized.values.float() @ made.weight.float().T) * quantized.scale * made.scale
    expected = expected if made.bias is None else expected + made.bias.float()
    products = [apply_scales(made.product(quantized, dtype), dtype)]
    if made.weight_format.kind == "int8":
        for most in (0, ANY_ROWS):
            products.append(multiply_int8(quantized, made.weight, made.scale, dtype, most, made.bias))
        assert made.bias is not None or torch.equal(*products[1:])
    for product in products:
        assert product.dtype == dtype
        assert_near(product, expected)


def assert_near(product: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(product.float(), expected, rtol=0.02, atol=float(0.01 * expected.abs().max()))


# The choice between our kernels and libraries for products with quantised weights.


INT8, INT4 = (64, 128, 512, ANY_ROWS), (16, 32, 64, 128)
GAINS = st.floats(0.01, 100).filter(lambda ratio: not 0.95 < ratio < 1.06)


@given(st.sampled_from([(INT8, ANY_ROWS), (INT4, 64), (INT4, 16)]), st.data())
def test_noise_keeps_the_default(case: tuple[tuple[int, ...], int], data: st.DataObject) -> None:
    rungs, default = case
    assert choose_rows(rungs, default, lambda _: data.draw(st.floats(0.96, 1.05))).rows == default


@given(st.sampled_from([(INT8, ANY_ROWS), (INT4, 64)]), st.lists(GAINS, min_size=4, max_size=4))
def test_our_kernels_are_used_where_they_are_faster(case: tuple[tuple[int, ...], int], ratios: list[float]) -> None:
    """With more rows, libraries gain: ratios fall. The least choice is not measured."""
    rungs, default = case
    by_rows = {min(rung, 1024): ratio for rung, ratio in zip(rungs, sorted(ratios, reverse=True), strict=True)}
    choice = choose_rows(rungs, default, by_rows.__getitem__)
    faster = [rung for rung in rungs if by_rows[min(rung, 1024)] > 1]
    assert choice.rows == max([rungs[0], *faster])
    assert choice.ratios.items() <= by_rows.items()


def test_one_slow_round_and_the_first_do_not_count() -> None:
    def series(*seconds: float) -> Callable[[], float]:
        return iter(seconds).__next__

    kernel = series(90.0, 1.0, 1.0, 50.0, 1.0, 1.0)
    library = series(0.1, 2.0, 2.0, 2.0, 2.0, 80.0)
    assert median_ratio(kernel, library) == 2.0


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_nothing_is_measured_without_a_gpu(kind: str) -> None:
    module = quantized_linear(256, 32, WeightFormat(kind), device=torch.device("cpu"))
    assert choose_methods([module], torch.float32, SINGLE_RANK.all_reduce_min) == ["PyTorch"]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "rungs"), [("int8", INT8), ("int4", INT4)])
def test_the_choice_is_measured_once_and_used(kind: str, rungs: tuple[int, ...]) -> None:
    modules = [weights(seed, 1024, 2048, WeightFormat(kind), torch.bfloat16) for seed in range(3)]
    [logged] = choose_methods(modules, torch.bfloat16, SINGLE_RANK.all_reduce_min)
    assert "relative to cuBLAS" in logged
    assert multiply.kernel_rows(kind, modules[0].weight.device) in rungs
    assert choose_methods(modules, torch.bfloat16, SINGLE_RANK.all_reduce_min) == [logged]
