"""``--save-result`` against figures that are computed from the same streams by vLLM's definitions alone."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.load.chat import ChatStream, RequestOutcome
from panscan.load.generator import LevelResult
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.vllm_result import vllm_result
from panscan.records.request_records import ClientFigures

OPTIONS = LoadOptions(goodput={"ttft": 900.0, "tpot": 120.0, "e2el": 2500.0}, metric_percentiles=(50, 99.9))
CLIENT = ClientFigures(1, 0.0, 0.0, 0.0, False, "")
EVENTS: dict[str, Any] = {
    "role": {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    "text": {"choices": [{"delta": {"content": "word"}}]},
    "empty": {"choices": [{"delta": {"content": ""}}]},
    "end": {"choices": [{"delta": {}, "finish_reason": "stop"}]},
}


@dataclass(frozen=True)
class Answer:
    """When a request was sent, the events of its answer with the seconds between them, its tokens, and its wait."""

    sent: float
    events: tuple[tuple[str, float], ...]
    tokens: int
    queued: float

    @property
    def times(self) -> list[float]:
        return list(self.sent + np.cumsum([gap for _, gap in self.events]))


GAPS = st.integers(0, 500).map(lambda milliseconds: milliseconds / 1e3)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    middle = draw(st.lists(st.sampled_from(["text", "text", "empty"]), min_size=0, max_size=8))
    names = [*draw(st.sampled_from([["role"], []])), "text", *middle, "end"]
    events = tuple((name, draw(GAPS)) for name in names)
    return Answer(draw(GAPS) * 4, events, draw(st.integers(1, 12)), draw(GAPS))


def outcome_of(answer: Answer) -> RequestOutcome:
    """The outcome of the stream, by the client of ``panscan load``."""
    outcome = RequestOutcome("r", answer.sent, answer.queued, answer.sent)
    stream = ChatStream(outcome, 64, lambda *_: None)
    stream.on_head(200, {"content-type": "text/event-stream"})
    for (name, _), at in zip(answer.events, answer.times, strict=True):
        stream.on_data(f"data: {json.dumps(EVENTS[name])}\n\n".encode(), at)
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": answer.tokens}}
    late = answer.times[-1] + 0.25
    stream.on_data(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode(), late)
    stream.on_end(late)
    return outcome


@settings(max_examples=60)
@given(st.lists(answers(), min_size=1, max_size=6), st.booleans())
def test_a_level_has_vllms_figures(level: list[Answer], fails: bool) -> None:
    outcomes = [outcome_of(answer) for answer in level]
    assert [outcome.error for outcome in outcomes] == [None] * len(level)
    if fails:
        outcomes.append(RequestOutcome("f", 0.0, 0.0, 0.0, end=9.0, error="HTTP 500", error_kind="http"))
    result = LevelResult(outcomes, 0.0, 10.0, CLIENT)
    found = vllm_result("m", OPTIONS, LoadLevel("c", 2.0, 4, 1.0), result)
    # Every event with a choice is a token, whatever it holds; the usage event is none.
    ttfts = [answer.times[0] - answer.sent for answer in level]
    latencies = [answer.times[-1] - answer.sent for answer in level]
    tpots = [
        (latency - ttft) / (answer.tokens - 1) if answer.tokens > 1 else 0.0
        for answer, ttft, latency in zip(level, ttfts, latencies, strict=True)
    ]
    samples = {
        "ttft": ttfts,
        "tpot": [tpot for tpot, answer in zip(tpots, level, strict=True) if answer.tokens > 1] or [0.0],
        "itl": [gap for answer in level for _, gap in answer.events[1:]],
        "client_queue_time": [answer.queued for answer in level],
    }
    for name, seconds in samples.items():
        milliseconds = 1e3 * np.array(seconds)
        figures = [milliseconds.mean(), np.median(milliseconds), milliseconds.std(), np.percentile(milliseconds, 99.9)]
        names = [f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99.9")]
        assert [found[key] for key in names] == pytest.approx(figures, abs=1e-6), name
    good = sum(
        ttft <= 0.9 and tpot <= 0.12 and latency <= 2.5
        for ttft, tpot, latency in zip(ttfts, tpots, latencies, strict=True)
    )
    tokens = sum(answer.tokens for answer in level)
    assert (found["completed"], found["failed"]) == (len(level), int(fails))
    assert (found["request_throughput"], found["request_goodput"]) == (len(level) / 10, good / 10)
    throughputs = (found["output_throughput"], found["total_token_throughput"])
    assert throughputs == (tokens / 10, (tokens + 7 * len(level)) / 10)
    middles = [(one + other) / 2 for one in _edges(level) for other in _edges(level)]
    most = max(sum(answer.sent <= at < answer.times[-1] for answer in level) for at in [*_edges(level), *middles])
    assert found["max_concurrent_requests"] == most
    first = min(answer.sent for answer in level)
    stamps = [int(at - first) for answer in level for at in answer.times]
    assert found["max_output_tokens_per_s"] == max(map(stamps.count, stamps))


def _edges(level: list[Answer]) -> list[float]:
    return [edge for answer in level for edge in (answer.sent, answer.times[-1])]
