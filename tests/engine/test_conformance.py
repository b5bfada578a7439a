"""The backbone: whatever joins, leaves, is cut, cached, evicted or preempted, tokens are those of ``generate()``.

On two models, since each hides errors that the other shows. Random weights attend to everything a little, so that any
wrong key moves the next token; but they never look sharply at one place, and their answers hardly ever end. Trained
ones copy single characters from single places of a page, and end; but what they do not look at could be wrong unseen.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.driving import Arrival, Driver, Reference, arrivals, play, questions, requests

from panscan import GenerateRunner
from panscan.engine.options import EngineOptions

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
).map(lambda each: each[0] | each[1])
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
