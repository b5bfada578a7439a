"""The embedding and the output matrix as int8: errors within their bounds, one copy if they are tied."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from panscan.model.bundled.random_weights import random_model
from panscan.model.linear.vocabulary import QuantizedEmbedding, VocabularyMatrix, quantize_vocabulary
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes, weights_name
from panscan.settings import settings_from


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Values whose rows differ in size, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return values**3 * torch.rand(shape[0], 1, generator=generator).exp()


@given(st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16]))
def test_embeddings_and_logits_differ_by_half_a_step_of_each_weight(seed: int, dtype: torch.dtype) -> None:
    weight, inputs = drawn(seed, 100, 64).to(dtype), drawn(seed + 1, 5, 64)
    matrix = VocabularyMatrix(weight)
    step = weight.float().abs().amax(1) / 127
    plain = Gemma3TextScaledWordEmbedding(100, 64, 0, embed_scale=8.0).to(dtype)
    plain.weight.data = weight
    ids = torch.arange(100).view(2, 50)
    found, due = QuantizedEmbedding(matrix, plain)(ids), plain(ids)
    assert found.dtype == dtype and found.shape == due.shape
    rounding = due.float().abs() * torch.finfo(dtype).eps
    assert bool(((found - due).float().abs() <= 8 * 0.5001 * step[ids][..., None] + rounding).all())
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
