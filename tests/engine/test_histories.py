"""Any mixture of sampled, penalised, structured, stopped and cancelled requests answers as each of them alone.

With ``PANSCAN_HISTORIES=500``, there are 500 histories in one process and 100 with two ranks.
"""

import json
import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.driving import Driver, requests
from tests.engine.test_conformance import OPTIONS
from tests.engine.test_grammar import DIGIT, SHORT_TEXT, closed
from tests.engine.test_ranks import SETTINGS

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup

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
ASKED = (0, 1, 2, 3, 4, 11)


@cache
def asked(request: int, kind: int) -> Request:
    return replace(requests()[request], id=f"{request} {kind}", sampling=Sampling(TOKENS, **KINDS[kind]))


class Alone:
    """The answers of one request after another: without overlap, forced tokens, caches and other requests."""

    def __init__(self, runner: GenerateRunner) -> None:
        self._driver, self._known = Driver(runner, ALONE), dict[str, Result]()

    def __call__(self, request: Request) -> Result:
        if request.id not in self._known:
            driven = self._driver.add(request)
            self._driver.run()
            [self._known[request.id]] = driven.results
        return self._known[request.id]


@pytest.fixture(scope="module")
def alone(tiny: GenerateRunner) -> Alone:
    return Alone(tiny)


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from(ASKED),
        st.integers(0, len(KINDS) - 1),
        st.integers(0, 12),
        st.none() | st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=9,
)
HISTORIES = int(os.environ.get("PANSCAN_HISTORIES", "4"))
HOW = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def play(driver: Driver, alone: Alone, history: list[tuple[int, int, int, int | None]]) -> None:
    """Play a history of (request, kind, step of its arrival, tokens after which it is cancelled)."""
    driven, waiting, step, busy = [], sorted(history, key=lambda arrival: arrival[2]), 0, True
    while waiting or busy:
        while waiting and waiting[0][2] <= step:
            request, kind, _, leaves = waiting.pop(0)
            driven.append((asked(request, kind), leaves, driver.add(asked(request, kind))))
        busy = driver.step()
        for _, leaves, each in driven:
            if leaves is not None and len(each.tokens) >= leaves and not each.job.ended:
                driver.loop.end(each.job, "cancelled")
        step += 1
    for request, leaves, each in driven:
        due, [result] = alone(request), each.results
        assert result.error is None and each.tokens == result.token_ids
        assert "".join(event.text for event in each.events) == result.text
        if result.finish_reason == "cancelled":
            assert leaves is not None and len(result.token_ids) >= leaves
            assert result.token_ids == due.token_ids[: len(result.token_ids)]
            continue
        assert (result.token_ids, result.text, result.finish_reason) == (due.token_ids, due.text, due.finish_reason)
        if due.logprobs is not None:
            found = [each.logprob for each in result.logprobs or ()]
            assert found == pytest.approx([each.logprob for each in due.logprobs], abs=1e-3)
    assert driver.used == 0 and driver.pixels == 0
    assert (driver.loop.running, driver.loop.waiting) == (0, 0)


@settings(max_examples=HISTORIES, **HOW)
@given(OPTIONS, st.booleans(), ARRIVALS)
def test_any_mixture_answers_as_each_request_alone(
    tiny: GenerateRunner, alone: Alone, options: dict[str, Any], force: bool, history: list
) -> None:
    driver = Driver(tiny, EngineOptions(**options, force_tokens=force))
    try:
        play(driver, alone, history)
    finally:
        driver.loop.close()


@pytest.fixture(scope="module")
def group() -> Any:
    ranks = RankGroup(SETTINGS)
    yield ranks
    ranks.close()


@settings(max_examples=max(1, HISTORIES // 5), **HOW)
@given(OPTIONS, ARRIVALS)
def test_so_does_any_mixture_on_two_ranks(
    tiny: GenerateRunner, alone: Alone, group: RankGroup, options: dict[str, Any], history: list
) -> None:
    driver = Driver(tiny, EngineOptions(**options | {"overlap": True}), group)
    try:
        play(driver, alone, history)
    finally:
        driver.loop.close()
