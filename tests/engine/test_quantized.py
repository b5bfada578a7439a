"""The engine with quantised weights and an 8-bit KV cache: the answers of ``generate()``, and of the plain model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.engine.driving import Reference, questions

from panscan import GenerateRunner, Request
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.model.linear.vocabulary import VocabularyMatrix
from panscan.model.observation import ForcedTokens
from panscan.runners.factory import open_runner
from panscan.settings import Settings
from panscan.verdict.divergence import compare_logits

gpu = pytest.mark.gpu
ANSWERED = [request for request in questions() if request.images and not request.sampling.ignore_eos]
"""Questions about a page that end with their answer: there the trained model is sure of itself."""


def answers(asked: Sequence[Request] = ANSWERED, **changes: Any) -> list[list[int]]:
    runner = open_runner(Settings(runner="engine", model="mini", kv_cache_gb=0.2, **changes))
    try:
        return [result.token_ids for result in runner.run(asked)]
    finally:
        runner.close()


def needs_float8(*kinds: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9) and "fp8" in kinds:
        pytest.skip("float8 needs compute capability 8.9")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_engine_has_the_tokens_of_generate(kind: str) -> None:
    """Continued answers: an int4 product is that of generate()'s dequantised weights, an int8 product exact."""
    generate = GenerateRunner.from_pretrained("mini", dtype="fp32", device="cpu", quantization=kind)
    asked = questions()[3::4]  # of crops, and of a story that is longer than the window
    expected = Reference(generate, asked)
    with Engine(generate.loaded, EngineOptions(kv_cache_gb=0.2)) as engine:
        results = engine.generate(asked)
    assert [result.token_ids for result in results] == expected.tokens(asked)


def test_a_quantised_head_has_the_tokens_of_its_dequantised_values() -> None:
    generate = GenerateRunner.from_pretrained("mini", dtype="fp32", device="cpu")
    weight = generate.loaded.model.lm_head.weight
    weight.data = VocabularyMatrix(weight).dequantized()
    asked, expected = questions()[:4], Reference(generate, questions())
    with Engine.from_pretrained("mini", dtype="fp32", device="cpu", quantize_head="int8", kv_cache_gb=0.2) as engine:
        found = engine.generate(asked)
    assert [result.token_ids for result in found] == expected.tokens(asked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_int8_vision_tower_keeps_the_answers(ranks: int, mini_reference: Reference) -> None:
    """Every rank holds the whole tower, quantised."""
    asked = ANSWERED[:3]
    found = answers(asked, dtype="fp32", device="cpu", quantize_vision="int8", tensor_parallel_size=ranks)
    assert found == mini_reference.tokens(asked)


def test_keys_and_values_in_8_bits_keep_the_answers(mini: GenerateRunner, mini_reference: Reference) -> None:
    """Memory of a key or value of 64 numbers: 256 bytes in float32, 64 in float8, 68 in int8 with its scale."""
    asked = ANSWERED[:3]
    expected = mini_reference.tokens(asked)
    forced = [ForcedTokens(tokens, [], len(tokens)) for tokens in expected]
    slabs, logits = {}, {}
    for kind in ("auto", "fp8", "int8"):
        with Engine(mini.loaded, EngineOptions(kv_cache_gb=0.1, kv_cache_dtype=kind)) as engine:
            slabs[kind] = engine.stats().kv_slabs
            seen = engine.observe(asked, forced)
        assert [row.answer.argmax(-1).tolist() for row in seen] == expected
        logits[kind] = torch.cat([row.answer for row in seen])
    assert slabs["fp8"] / slabs["auto"] == pytest.approx(4, rel=0.01)
    assert slabs["int8"] / slabs["auto"] == pytest.approx(256 / 68, rel=0.01)
    cpu = torch.device("cpu")
    fp8, int8 = (compare_logits(logits["auto"], logits[kind], [], cpu).kl.mean() for kind in ("fp8", "int8"))
    assert 0 < int8 < fp8 / 4


@gpu
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("kv", ["auto", "fp8", "int8"])
def test_quantised_weights_keep_the_answers_on_the_gpu(kind: str, kv: str, mini_reference: Reference) -> None:
    """With captured graphs and fused kernels, alone (few rows) and together; some with a quantised head."""
    needs_float8(kind, kv)
    head = "int8" if kv == "int8" else None
    changes = {"dtype": "bf16", "quantization": kind, "quantize_head": head, "kv_cache_dtype": kv}
    expected = mini_reference.tokens(ANSWERED)
    assert answers(**changes) == expected
    assert answers(ANSWERED[:1], **changes) == expected[:1]


@gpu
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("tower", ["fp8", "int8"])
def test_quantised_towers_keep_the_answers_on_a_gpu(tower: str, weights: str | None, mini_reference: Reference) -> None:
    needs_float8(tower)
    found = answers(dtype="bf16", quantization=weights, quantize_vision=tower)
    assert found == mini_reference.tokens(ANSWERED)


@gpu
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantised_ranks_keep_the_answers(kind: str, mini_reference: Reference) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cache = "int8" if kind == "int8" else "auto"
    changes = {"quantization": kind, "kv_cache_dtype": cache, "quantize_head": "int8", "tensor_parallel_size": 2}
    assert answers(dtype="bf16", **changes) == mini_reference.tokens(ANSWERED)
