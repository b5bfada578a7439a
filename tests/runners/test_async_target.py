"""Requests one by one through an asynchronous target: measured at its client, as records and metrics like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import noise

from panscan import Engine, Request, Sampling
from panscan.core import ImageError, Result, SettingError, Stamps, TokenEvent, now
from panscan.records.metrics import metrics_of
from panscan.records.requests import RequestMetrics, request_fields
from panscan.runners.async_target import answer_all, answer_one


@dataclass
class Answer:
    """A stream whose tokens have known times after the request was submitted."""

    target: Timetable
    request: Request
    begun: float = field(default_factory=now)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        self.target.in_flight += 1
        self.target.most = max(self.target.most, self.target.in_flight)
        for number, seconds in enumerate(self.target.seconds):
            await asyncio.sleep(0)  # the other clients' turn
            yield TokenEvent(number, "x", self.begun + seconds)
        self.target.in_flight -= 1

    async def result(self) -> Result:
        tokens = list(range(len(self.target.seconds)))
        return Result(self.request.id, "", tokens, "length", 4, 3, 1024, 1102, Stamps(self.begun))


@dataclass
class Timetable:
    """A target of known answers."""

    seconds: list[float]
    in_flight: int = 0
    most: int = 0

    def submit(self, request: Request) -> Answer:
        return Answer(self, request)


def records_of(results: list[Result]) -> list[dict[str, Any]]:
    """As a source that takes requests one by one writes them: each is a batch of its own."""
    return [{"batch": number, "request": result.id, **request_fields(result)} for number, result in enumerate(results)]


@settings(deadline=None, max_examples=30)
@given(
    gaps=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    count=st.integers(1, 12),
    max_concurrency=st.integers(1, 5),
)
def test_metrics_are_those_of_the_times_that_the_client_sees(
    gaps: list[float], count: int, max_concurrency: int
) -> None:
    seconds = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    target = Timetable(seconds)
    started = now()
    requests = (Request("What?", id=str(number)) for number in range(count))
    results = asyncio.run(answer_all(target, requests, max_concurrency=max_concurrency))
    ended = now()
    assert [result.id for result in results] == [str(number) for number in range(count)]
    assert target.most == min(count, max_concurrency)
    records = records_of(results)
    for record in records:
        one = RequestMetrics.from_record(record)
        assert one.ttft is not None and seconds[0] <= one.ttft <= seconds[0] + (ended - started)
        assert one.itl == pytest.approx(gaps[1:], abs=1e-5)
    found = metrics_of([({"started": started, "ended": started + 10.0}, records)])
    assert found is not None
    assert found.values["completed"] == count
    assert found.values["request_throughput"] == pytest.approx(count / 10.0)
    assert found.values["total_output_tokens"] == count * len(gaps)
    if len(gaps) > 1:
        assert found.values["mean_tpot_ms"] == pytest.approx(1e3 * sum(gaps[1:]) / (len(gaps) - 1), abs=0.01)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("tiny", device="cpu", dtype="fp32", kv_cache_gb=0.02) as engine:
        yield engine


def test_no_request_in_flight_is_refused(engine: Engine) -> None:
    with pytest.raises(SettingError, match="max_concurrency must be at least 1"):
        asyncio.run(answer_all(engine, [Request("What?")], max_concurrency=0))


def test_an_engine_is_a_target(engine: Engine) -> None:
    """Its answers are those of its offline interface, and every token has its time."""
    requests = [
        Request(f"What is {number}?", [noise(200, 500, number)], sampling=Sampling(3 + number), id=str(number))
        for number in range(3)
    ]
    results = asyncio.run(answer_all(engine, requests, max_concurrency=2))
    assert [each.token_ids for each in results] == [each.token_ids for each in engine.generate(requests)]
    for record, result in zip(records_of(results), results, strict=True):
        one = RequestMetrics.from_record(record)
        assert one.output_tokens == len(result.token_ids) == len(result.stamps.tokens)
        assert one.ttft is not None and one.e2e is not None and 0 < one.ttft <= one.e2e
        assert one.vision is not None and one.vision > 0
        assert result.stamps.end is not None and result.stamps.end >= result.stamps.tokens[-1]


def test_a_request_that_fails_is_a_result_too(engine: Engine) -> None:
    result = asyncio.run(answer_one(engine, Request("What?", ["none.png"], id="broken")))
    assert isinstance(result.error, ImageError)
    [record] = records_of([result])
    assert "none.png" in record["error"]
    assert metrics_of([({"started": 0.0, "ended": 1.0}, [record])]) is None
