"""The backbone: whatever joins, leaves, is cut, cached, evicted or preempted, tokens are those of ``generate()``.

On two models, since each hides errors that the other shows. Random weights attend to everything a little, so that any
wrong key moves the next token; but they never look sharply at one place, and their answers hardly ever end. Trained
ones copy single characters from single places of a page, and end; but what they do not look at could be wrong unseen.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.driving import Arrival, Driver, Reference, arrivals, play, questions, requests
from tests.engine.test_grammar import DIGIT, SHORT_TEXT, closed
from tests.engine.test_ranks import SETTINGS

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.model.linear.vocabulary import VocabularyMatrix
from panscan.model.observation import ForcedTokens
from panscan.runners.factory import open_runner
from panscan.settings import Settings
from panscan.verdict.divergence import compare_logits

VIEW = 64 * 128 * 4  # bytes of one encoded view of the tiny model in float32


OPTIONS = st.fixed_dictionaries(
    {
        "prefill_chunk_size": st.sampled_from([1, 7, 63, 64, 65, 200, 5000]) | st.integers(1, 700),
        "max_num_seqs": st.integers(1, 32),
        "block_size": st.sampled_from([1, 3, 16, 32]),
        "prefix_caching": st.booleans(),
        "vision_cache_gb": st.sampled_from([VIEW / 1e9 * 1.01, VIEW / 1e9 * 3, 1.0]),
        "vision_batch_size": st.integers(1, 9),
        "kv_cache_gb": st.sampled_from([0.0025, 0.004, 0.05]),
        "overlap": st.booleans(),
        "tpot_target_ms": st.sampled_from([None, 0.001, 30.0]),
    }
)
MINI_VIEW = 144 * 256 * 4
MINI_OPTIONS = st.tuples(
    OPTIONS,
    st.fixed_dictionaries(
        {
            "prefill_chunk_size": st.sampled_from([143, 144, 145, 400, 5000]) | st.integers(40, 1000),
            "vision_cache_gb": st.sampled_from([MINI_VIEW / 1e9 * 1.01, MINI_VIEW / 1e9 * 3, 1.0]),
            "kv_cache_gb": st.sampled_from([0.009, 0.014, 0.2]),
        }
    ),
).map(lambda pair: pair[0] | pair[1])
"""Its views are larger, and so must caches be; its tokens are characters, of which chunks of a few take many passes."""


HOW = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def check(runner: GenerateRunner, reference: Reference, options: dict[str, Any], history: list[Arrival]) -> Driver:
    """Play a history; every job has the reference's tokens, up to where it left."""
    for arrival in history:
        reference(reference.requests[arrival.request])  # before the engine changes the model
    driver = Driver(runner, EngineOptions(**options))
    play(driver, reference, history)
    return driver


@settings(max_examples=16, **HOW)
@given(options=OPTIONS, history=arrivals(8, len(requests())))
def test_any_history_has_the_tokens_of_generate(tiny: GenerateRunner, reference: Reference, **drawn: Any) -> None:
    check(tiny, reference, **drawn)


@settings(max_examples=5, **HOW)
@given(options=MINI_OPTIONS, history=arrivals(6, len(questions())))
def test_the_trained_model_answers_alike(mini: GenerateRunner, mini_reference: Reference, **drawn: Any) -> None:
    check(mini, mini_reference, **drawn)


@settings(max_examples=7, **HOW)
@given(options=OPTIONS, history=arrivals(6, len(requests())))
def test_a_window_smaller_than_an_image(narrow: GenerateRunner, narrow_reference: Reference, **drawn: Any) -> None:
    check(narrow, narrow_reference, **drawn)


@settings(max_examples=6, **HOW)
@given(options=OPTIONS, history=arrivals(6, 2))
def test_a_model_that_reads_text_only(text_runner: GenerateRunner, text_reference: Reference, **drawn: Any) -> None:
    check(text_runner, text_reference, drawn["options"] | {"kv_cache_gb": 0.0013}, drawn["history"])


CROWDS = {
    "tiny": ("reference", 32, {"kv_cache_gb": 0.0045, "max_num_seqs": 32, "prefill_chunk_size": 96}),
    "mini": ("mini_reference", 16, {"kv_cache_gb": 0.014, "max_num_seqs": 16, "prefill_chunk_size": 200}),
}


@pytest.mark.parametrize("model", CROWDS)
def test_many_at_once_with_a_cache_that_holds_two(request: pytest.FixtureRequest, model: str) -> None:
    """Evictions, hits and views seen before, all of them certain: answers come from prefixes that others computed."""
    name, count, options = CROWDS[model]
    due: Reference = request.getfixturevalue(name)
    history = [Arrival(place % len(due.requests), place % 5) for place in range(count)]
    stats = check(request.getfixturevalue(model), due, options, history).loop.stats()
    assert stats.cached_tokens > 0 and stats.views_reused > 0


def test_preempted_requests_go_on_where_they_were(tiny: GenerateRunner, reference: Reference) -> None:
    """Short prompts that are let in together and do not fit together once they have grown."""
    options = {"kv_cache_gb": 0.0025, "max_num_seqs": 32, "block_size": 1, "prefix_caching": False}
    history = [Arrival(request, 0) for request in (0, 2, 10, 13, 14) * 3]
    driver = check(tiny, reference, options, history)
    assert sum(len(result.stamps.waits) for result in driver.results) == driver.loop.stats().preemptions > 0


def test_requests_share_prefixes(tiny: GenerateRunner, reference: Reference) -> None:
    """The same image with another question: all of the prompt up to the question's block comes from the cache. With
    other crops: the whole image comes first, so its block is shared; the crops' blocks, which are others, are not."""
    options = {"kv_cache_gb": 0.05, "block_size": 16}
    histories = [[Arrival(first, 0), Arrival(first + 1, 40)] for first in (3, 4)]
    question, crops = (check(tiny, reference, options, history).loop.stats() for history in histories)
    assert question.cached_tokens > 300 and question.views_encoded == 5
    assert 64 < crops.cached_tokens < 2 * 64 and (crops.views_encoded, crops.views_reused) == (5 + 2, 0)


# Any mixture of sampled, penalised, structured, stopped and cancelled requests answers as each of them alone.
# With ``PANSCAN_HISTORIES=500``, there are 500 histories in one process and 100 with two ranks.


TOKENS = 14
ALONE = EngineOptions(kv_cache_gb=0.02, max_num_seqs=1, prefix_caching=False, overlap=False, force_tokens=False)
OBJECT = json.dumps(closed(total=SHORT_TEXT, paid={"enum": ["cash", "card"]}))
LIST = json.dumps({"type": "array", "items": closed(number=DIGIT), "minItems": 1, "maxItems": 2})
GEMMA = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 1}
KINDS: list[dict[str, Any]] = [
    {},
    GEMMA,
    {"temperature": 1.4, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 2},
    {"frequency_penalty": 0.9, "presence_penalty": 0.4, "logit_bias": {40: 2.0}},
    {"temperature": 0.9, "top_p": 0.7, "seed": 3, "logprobs": 2, "stop": ("a", "e ")},
    {"json_schema": OBJECT},
    {"json_schema": OBJECT, **GEMMA, "stop": ("paid",)},
    {"json_schema": LIST, "frequency_penalty": 0.5, "temperature": 1.2, "seed": 4},
    {"json_schema": json.dumps({"const": "Total: 5 €"}), "logprobs": 1, "repetition_penalty": 1.2},
    {"regex": r"[A-C]{2}-\d+ (yes|no)", "temperature": 1.0, "seed": 5},
]
CASES = [(index, kind) for index in (0, 1, 2, 3, 4, 11) for kind in range(len(KINDS))]
ASKED = tuple(
    replace(requests()[index], id=f"{index} {kind}", sampling=Sampling(TOKENS, **KINDS[kind])) for index, kind in CASES
)


class Alone(Reference):
    """The answers of one request after another: without overlap, forced tokens, caches and other requests."""

    def __init__(self, runner: GenerateRunner) -> None:
        super().__init__(runner, ASKED)
        self._driver = Driver(runner, ALONE)

    def answer(self, request: Request) -> Result:
        driven = self._driver.add(request)
        self._driver.run()
        return driven.results[0]


@pytest.fixture(scope="module")
def alone(tiny: GenerateRunner) -> Alone:
    return Alone(tiny)


ARRIVALS = arrivals(9, len(ASKED))
HISTORIES = int(os.environ.get("PANSCAN_HISTORIES", "4"))


@settings(max_examples=HISTORIES, **HOW)
@given(OPTIONS, st.booleans(), ARRIVALS)
def test_any_mixture_of_requests(tiny: GenerateRunner, alone: Alone, options: dict, force: bool, history: list) -> None:
    play(Driver(tiny, EngineOptions(**options, force_tokens=force)), alone, history)


@pytest.fixture(scope="module")
def group() -> Any:
    ranks = RankGroup(SETTINGS)
    yield ranks
    ranks.close()


@settings(max_examples=max(3, HISTORIES // 5), **HOW)
@given(OPTIONS, ARRIVALS)
def test_mixtures_on_ranks(tiny: GenerateRunner, alone: Alone, group: RankGroup, options: dict, history: list) -> None:
    play(Driver(tiny, EngineOptions(**options | {"overlap": True}), group), alone, history)


# Quantised weights and an 8-bit KV cache: the answers of ``generate()``, and of the plain model.


ANSWERED = [request for request in questions() if request.images and not request.sampling.ignore_eos]
"""Questions about a page that end with their answer: there the trained model is sure of itself."""


def answers(asked: Sequence[Request] = ANSWERED, **changes: Any) -> list[list[int]]:
    runner = open_runner(Settings(runner="engine", model="mini", kv_cache_gb=0.2, **changes))
    try:
        return [result.token_ids for result in runner.run(asked)]
    finally:
        runner.close()


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
        results = engine.generate(asked)
    assert [result.token_ids for result in results] == expected.tokens(asked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_int8_vision_tower_keeps_the_answers(ranks: int, mini_reference: Reference) -> None:
    """Every rank holds the whole tower, quantised."""
    asked = ANSWERED[:3]
    results = answers(asked, dtype="fp32", device="cpu", quantize_vision="int8", tensor_parallel_size=ranks)
    assert results == mini_reference.tokens(asked)


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


def on_gpus() -> list[dict[str, Any]]:
    """Return settings of every kind of weights with every kind of cache, of towers, and of two ranks."""
    kinds, caches = ("fp8", "int8", "int4"), ("auto", "fp8", "int8")
    weights = [{"quantization": kind, "kv_cache_dtype": cache} for kind, cache in product(kinds, caches)]
    towers = [{"quantization": kind, "quantize_vision": tower} for kind, tower in product((None, "int8"), kinds[:2])]
    ranks = [{**changes, "quantize_head": "int8", "tensor_parallel_size": 2} for changes in weights[::4]]
    return [*weights, *({**changes, "quantize_head": "int8"} for changes in weights[2::3]), *towers, *ranks]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", on_gpus(), ids=str)
def test_quantised_engines_keep_the_answers_on_gpus(changes: dict[str, Any], mini_reference: Reference) -> None:
    """With captured graphs and fused kernels, alone (few rows) and together."""
    if torch.cuda.get_device_capability() < (8, 9) and "fp8" in changes.values():
        pytest.skip("float8 needs compute capability 8.9")
    if torch.cuda.device_count() < changes.get("tensor_parallel_size", 1):
        pytest.skip("needs two GPUs")
    expected = mini_reference.tokens(ANSWERED)
    assert answers(dtype="bf16", **changes) == expected
    assert answers(ANSWERED[:1], dtype="bf16", **changes) == expected[:1]
