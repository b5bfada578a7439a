"""Any mixture of sampled, penalised, structured, stopped and cancelled requests answers as each of them alone.

With ``PANSCAN_HISTORIES=500``, there are 500 histories in one process and 100 with two ranks.
"""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.driving import Driver, Reference, arrivals, play, requests
from tests.engine.test_conformance import HOW, OPTIONS
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
