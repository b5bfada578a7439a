"""The choice between our kernels and libraries for products with quantised weights."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.triton_here import DEVICE, drawn

from panscan.model.linear.multiply import ANY_ROWS, kernel_rows, multiply_int4, multiply_int8, quantize_rows
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.model.linear.tuning import choose_methods, choose_rows, median_ratio
from panscan.model.sharding import SINGLE_RANK

INT8, INT4 = (64, 128, 512, ANY_ROWS), (16, 32, 64, 128)
GAINS = st.floats(0.01, 100).filter(lambda ratio: not 0.95 < ratio < 1.06)


def matrices(kind: str, inputs: int, outputs: int, count: int = 1) -> list[QuantizedLinear]:
    made = [quantized_linear(inputs, outputs, WeightFormat(kind), device=DEVICE) for _ in range(count)]
    for seed, each in enumerate(made):
        each.quantize(drawn(seed, outputs, inputs))
    return made


@given(st.sampled_from([(INT8, ANY_ROWS), (INT4, 64), (INT4, 16)]), st.data())
def test_noise_keeps_the_default(case: tuple[tuple[int, ...], int], data: st.DataObject) -> None:
    rungs, default = case
    assert choose_rows(rungs, default, lambda _: data.draw(st.floats(0.96, 1.05))).rows == default


@given(st.sampled_from([(INT8, ANY_ROWS), (INT4, 64)]), st.lists(GAINS, min_size=4, max_size=4))
def test_our_kernels_are_used_where_they_are_faster(case: tuple[tuple[int, ...], int], ratios: list[float]) -> None:
    """With more rows, libraries gain: ratios fall. The least choice is not measured."""
    rungs, default = case
    by_rows = {min(rung, 1024): ratio for rung, ratio in zip(rungs, sorted(ratios, reverse=True), strict=True)}
    found = choose_rows(rungs, default, by_rows.__getitem__)
    faster = [rung for rung in rungs if by_rows[min(rung, 1024)] > 1]
    assert found.rows == max([rungs[0], *faster])
    assert found.ratios.items() <= by_rows.items()


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
@pytest.mark.parametrize("rows", [17, 64, 100, 128, 1024])
def test_every_choice_has_the_same_products(rows: int) -> None:
    values = drawn(9, rows, 512).bfloat16()
    [made] = matrices("int8", 512, 1032)
    quantized = quantize_rows(values, torch.int8)
    ours, library = (multiply_int8(quantized, made.weight, made.scale, torch.bfloat16, most) for most in (ANY_ROWS, 0))
    assert torch.equal(ours, library)
    [made] = matrices("int4", 512, 1032)
    exact = values.float() @ made.dequantized().T
    for most in (rows, 0):
        found = multiply_int4(values, made.weight, made.scale, made.zero, 128, most)
        torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=float(0.01 * exact.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "rungs"), [("int8", INT8), ("int4", INT4)])
def test_the_choice_is_measured_once_and_used(kind: str, rungs: tuple[int, ...]) -> None:
    modules = matrices(kind, 1024, 2048, count=3)
    [logged] = choose_methods(modules, torch.bfloat16, SINGLE_RANK.all_reduce_min)
    assert "relative to cuBLAS" in logged
    assert kernel_rows(kind, modules[0].weight.device) in rungs
    assert choose_methods(modules, torch.bfloat16, SINGLE_RANK.all_reduce_min) == [logged]
