"""Quantised matrices as modules: values, products on any device, fused modules, one copy of tied ones."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from panscan.model.bundled.random_weights import random_model
from panscan.model.linear.products import linear_of
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.model.linear.vocabulary import QuantizedEmbedding, VocabularyMatrix, quantize_vocabulary
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes, weights_name
from panscan.settings import settings_from

SEEDS = st.integers(0, 99)
FORMATS = [WeightFormat("int8"), WeightFormat("fp8"), WeightFormat("int4", 32), WeightFormat("int4", 128)]
FORMATS += [WeightFormat("int8", quantizes_inputs=False)]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(seed: int, inputs: int, outputs: int, weight_format: WeightFormat, bias: bool = False) -> QuantizedLinear:
    bias_values = nn.Parameter(drawn(seed + 7, outputs), requires_grad=False) if bias else None
    linear = quantized_linear(inputs, outputs, weight_format, scale_type=torch.float32, bias=bias_values)
    linear.quantize(drawn(seed, outputs, inputs))
    return linear


@given(SEEDS, st.sampled_from(FORMATS))
def test_every_weight_becomes_the_nearest_of_its_group(seed: int, weight_format: WeightFormat) -> None:
    values = drawn(seed, 6, 256)
    made = quantized_linear(256, 6, weight_format, scale_type=torch.float32)
    made.quantize(values)
    size = weight_format.group_size if weight_format.kind == "int4" else 256
    largest = values.unflatten(1, (-1, size)).abs().amax(-1, keepdim=True).expand(-1, -1, size).flatten(1)
    # Half a step; float8 has three mantissa bits. The highest of 16 levels is 7 / 7.5 of the largest value.
    steps = {"int8": largest / 254, "fp8": values.abs() / 16 + largest / 448 / 1024, "int4": largest / 15}
    error = (made.dequantized() - values).abs()
    assert bool((error <= 1.001 * steps[weight_format.kind] + (values == largest) * largest / 15).all())


@given(SEEDS, st.sampled_from(FORMATS), st.booleans(), st.sampled_from([(3,), (2, 3)]))
def test_dequantised_products(seed: int, weight_format: WeightFormat, bias: bool, leading: tuple[int, ...]) -> None:
    linear = quantized(seed, 256, 24, weight_format, bias=bias)
    inputs = drawn(seed + 1, *leading, 256)
    expected = inputs @ linear.dequantized().T + (0.0 if linear.bias is None else linear.bias)
    outputs = linear(inputs)
    assert outputs.shape == expected.shape
    # The error of rounding inputs, half a step each; steps of float8 are relative.
    steps = {"int8": 254, "fp8": 16} if weight_format.quantizes_inputs else {}
    bound = inputs.abs().max() / steps.get(weight_format.kind, torch.inf) * linear.dequantized().abs().sum(1).max()
    assert float((outputs - expected).abs().max()) <= float(bound) + 1e-4


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_one_product_for_matrices_of_the_same_input(weight_format: WeightFormat) -> None:
    parts = [quantized(seed, 256, outputs, weight_format, bias=True) for seed, outputs in enumerate((8, 4, 20))]
    inputs = drawn(9, 5, 256)
    expected = torch.cat([part(inputs) for part in parts], -1)
    product = linear_of(*parts)
    assert isinstance(product, QuantizedLinear)
    torch.testing.assert_close(product(inputs), expected)
    torch.testing.assert_close(torch.cat([part(inputs) for part in parts], -1), expected)  # from views now
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


def test_matrices_of_different_formats_are_separate_products() -> None:
    parts = [quantized(0, 256, 8, WeightFormat("int8")), quantized(1, 256, 8, WeightFormat("int4", 64))]
    inputs = drawn(2, 5, 256)
    assert torch.equal(linear_of(*parts)(inputs), torch.cat([part(inputs) for part in parts], -1))


@pytest.mark.parametrize(("inputs", "group"), [(192, 128), (256, 48), (256, 256)])
def test_groups_that_do_not_fit_are_refused(inputs: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group}"):
        quantized_linear(inputs, 8, WeightFormat("int4", group))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_other_types_are_for_dense_parameters(weight_format: WeightFormat) -> None:
    """``model.half()`` would round scales, and make float8 weights float16."""
    made = quantized(0, 256, 8, weight_format, bias=True)
    before = made.dequantized()
    made.half()
    assert torch.equal(made.dequantized(), before)
    assert made.bias is not None and made.bias.dtype == torch.float16


# The embedding and the output matrix as int8: errors within their bounds, one copy if they are tied.


def drawn_rows(seed: int, *shape: int) -> torch.Tensor:
    """Values whose rows differ in size, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return values**3 * torch.rand(shape[0], 1, generator=generator).exp()


@given(st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16]))
def test_embeddings_and_logits_differ_by_half_a_step_of_each_weight(seed: int, dtype: torch.dtype) -> None:
    weight, inputs = drawn_rows(seed, 100, 64).to(dtype), drawn_rows(seed + 1, 5, 64)
    matrix = VocabularyMatrix(weight)
    step = weight.float().abs().amax(1) / 127
    plain = Gemma3TextScaledWordEmbedding(100, 64, 0, embed_scale=8.0).to(dtype)
    plain.weight.data = weight
    ids = torch.arange(100).view(2, 50)
    rows, due = QuantizedEmbedding(matrix, plain)(ids), plain(ids)
    assert rows.dtype == dtype and rows.shape == due.shape
    rounding = due.float().abs() * torch.finfo(dtype).eps
    assert bool(((rows - due).float().abs() <= 8 * 0.5001 * step[ids][..., None] + rounding).all())
    error = (matrix(inputs) - inputs @ weight.float().T).abs()
    # The inputs are rounded to 1 / 127 / 254 of the largest.
    beside = inputs.abs().amax(1, keepdim=True) / 127 / 254 * matrix.dequantized().abs().sum(1)
    assert bool((error <= 0.5 * step * inputs.abs().sum(1, keepdim=True) + 1.01 * beside).all())


def test_a_row_of_padding_is_zero() -> None:
    matrix = VocabularyMatrix(torch.zeros(3, 32))
    assert not matrix.dequantized().any() and not matrix(torch.ones(1, 32)).any()


@pytest.mark.parametrize("most", [1, 7, 100, 300])
def test_a_few_numbers_of_rows_compile_all_kernels(most: int) -> None:
    kernels = pytest.importorskip("panscan.model.linear.kernels")

    def compiled(counts: Iterable[int]) -> set[tuple[Any, bool]]:
        return {(kernels.int8_tiles(2 * rows, 232_448, tma=True), 2 * rows % 16 == 0) for rows in counts}

    warm = VocabularyMatrix.compiled_rows(most)
    assert max(warm) <= most and compiled(warm) == compiled(range(1, most + 1))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_matrices_are_one_and_others_keep_their_values(tied: bool) -> None:
    model: Any
    model, _ = random_model("tiny", dtype=torch.float32, device="cpu")
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    before = SimpleNamespace(embedding=model.get_input_embeddings().weight.detach(), head=model.lm_head.weight.detach())
    dense = weight_bytes(model)
    quantize_vocabulary(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for matrix, values in ((embedding.matrix, before.embedding), (head, before.head)):
        torch.testing.assert_close(matrix.dequantized(), values, rtol=0, atol=float(values.abs().max()) / 250)
    assert (embedding.matrix is head) == tied
    vocabulary, hidden = before.head.shape
    assert dense - weight_bytes(model) == vocabulary * (3 * hidden - 4) * (1 if tied else 2)


def test_weights_are_named_with_their_head() -> None:
    values = {"model": "mini", "device": "cpu", "quantize_head": "int8"}
    names = [weights_name(load_for(settings_from({**values, **more})).model) for more in ({}, {"quantization": "int4"})]
    assert names == ["int8 head", "int4, groups of 64, int8 head"]
