"""Load runs against an endpoint with known times: what is recorded when it is right, wrong, overloaded or gone; and
``--save-result`` against figures that are computed from the same streams by vLLM's definitions alone.
"""

import itertools
import json
import math
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import noise
from tests.load.fake_server import fake_server

from panscan.core import EndpointError
from panscan.core.activity import Activity
from panscan.load import options
from panscan.load.chat import ChatStream, Endpoint, RequestOutcome
from panscan.load.content import RequestMix
from panscan.load.generator import LevelResult
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.probe import probe_endpoint
from panscan.load.run import LoadPlan, OnLevel, run_load
from panscan.load.variants import VariantImage
from panscan.load.vllm_result import vllm_result
from panscan.records.load_records import ProbeRecord
from panscan.records.request_records import ClientFigures
from panscan.records.store import Run, read_run
from panscan.workload.requests import DocumentFile, Item

PROBE = ProbeRecord(
    model="fake", text_prompt_tokens=None, image_prompt_tokens=None, expected_image_tokens=None, warnings=[]
)
SEARCH: dict[str, Any] = {"find_max_rate": True, "arrival": "constant", "num_prompts": 8}
DOCUMENT = DocumentFile("page.png", 120, 200, "0" * 64)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_ms=10, itl_ms=2, dialect="vllm") as url:
        yield url


def load(
    url: str,
    directory: Path,
    model: str = "fake",
    timeout: float = 20.0,
    cancelled: threading.Event | None = None,
    on_level: OnLevel = lambda *_: None,
    **given: Any,
) -> Run:
    """Run a load of small requests."""
    cancelled = cancelled or threading.Event()
    options = LoadOptions(**{"num_prompts": 4, "num_warmups": 0, "max_tokens": 4, **given})
    image = VariantImage(noise(120, 200))
    mix = RequestMix([Item("0", (DOCUMENT,), "What is it?")], None, lambda document: image)
    plan = LoadPlan(Endpoint(url, model, timeout=timeout), options, mix, PROBE)
    return run_load(plan, directory, ["panscan", "load"], cancelled, lambda _: None, on_level)


@pytest.mark.parametrize(("fault", "kind"), [("early-close", "stream"), ("silent", "timeout"), ("no-usage", "usage")])
def test_a_fault_is_counted_and_the_run_ends(url: str, tmp_path: Path, fault: str, kind: str) -> None:
    timeout = 0.5 if fault == "silent" else 20.0
    run = load(url, tmp_path, f"fake:{fault}", timeout, max_concurrencies=(2,))
    records, outcome = run.requests["concurrency-2", 0], run.outcomes["concurrency-2"]
    assert [record.error_kind for record in records] == [kind] * 4
    assert [record.error is None for record in records] == [kind == "usage"] * 4
    reason = None if kind == "usage" else f"no request succeeded: {records[0].error}"
    assert (outcome.outcome, outcome.reason) == ("done" if kind == "usage" else "failed", reason)
    assert (tmp_path / "summary.csv").exists()


PROBE_WARNINGS = [
    ("ignore-images", "the image added 0 prompt tokens.* treats the request as text"),
    ("refuse-images", "refused a prompt with an image: .*does not support image inputs"),
    ("500", "refused a prompt without an image: .*CUDA out of memory"),
]


@pytest.mark.parametrize(("fault", "warning"), PROBE_WARNINGS)
def test_the_probe_warns(url: str, fault: str, warning: str) -> None:
    probe, _ = probe_endpoint(Endpoint(url, f"fake:{fault}"))
    assert any(re.search(warning, text) for text in probe.warnings), probe.warnings


def test_the_probe_compares_image_tokens(url: str) -> None:
    plain, _ = probe_endpoint(Endpoint(url, ""))
    assert (plain.model, plain.warnings, plain.expected_image_tokens) == ("fake", [], None)
    assert plain.image_prompt_tokens - plain.text_prompt_tokens == 256
    gemma, _ = probe_endpoint(Endpoint(url, "google/gemma-3-4b-it"), {"do_pan_and_scan": True})
    assert gemma.expected_image_tokens == 4 * 256
    [listed, cropped] = gemma.warnings  # the server has another model, and takes two crops, not three
    assert "the server lists fake" in listed and "added 768 prompt tokens, expected 1,024" in cropped


def test_an_endpoint_that_is_somewhere_else_is_one_error(url: str) -> None:
    with pytest.raises(EndpointError, match=r"/nowhere: GET .*: HTTP 404: Not Found"):
        probe_endpoint(Endpoint(f"{url}/nowhere", "", timeout=5.0))


def test_levels_are_recorded_with_their_arrivals(url: str, tmp_path: Path) -> None:
    run = load(url, tmp_path, rates=(50.0, None), max_concurrencies=(2,), arrival="constant", num_prompts=8)
    assert list(run.cells) == ["rate-50-concurrency-2", "concurrency-2"]
    assert run.header.settings.load.arrival == "constant"
    due = [record.due for record in run.requests["rate-50-concurrency-2", 0]]
    started = run.repeats["rate-50-concurrency-2", 0].started
    assert [at - started for at in due] == pytest.approx([number / 50 for number in range(8)], abs=1e-6)
    for record in run.requests["concurrency-2", 0]:
        assert (record.image, record.image_size, record.output_tokens) == (["page.png"], [(120, 200)], 4)
        assert (record.views, record.crops, record.image_tokens) == (None, None, None)  # vLLM reports none


def test_a_cancelled_run_keeps_what_it_has(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, ended = threading.Event(), itertools.count(1)

    def advance(_: Activity) -> None:
        if next(ended) == 12:
            cancelled.set()

    monkeypatch.setattr(Activity, "advance", advance)
    run = load(url, tmp_path, cancelled=cancelled, max_concurrencies=(4, 1, 2), num_prompts=10, max_tokens=20)
    assert run.outcomes["concurrency-4"].reason is None
    assert run.outcomes["concurrency-1"].reason.endswith(" of 10 requests")
    assert 2 <= len(run.requests["concurrency-1", 0]) < 10
    assert "concurrency-2" not in run.outcomes


@pytest.fixture
def short_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of a search that take half a second."""
    monkeypatch.setattr(options, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(options, "_DELAY_SHARE", 0.0)


@pytest.mark.parametrize("limit", [None, 2])
def test_the_search_finds_the_capacity_of_an_endpoint(tmp_path: Path, limit: int | None, short_levels: None) -> None:
    with fake_server(ttft_ms=20, slots=1) as url:  # 50 requests per second
        given = {"rates": (20.0,), "goodput": {"ttft": 90.0}, "max_tokens": 1, "max_concurrencies": (limit,)}
        run = load(url, tmp_path, **SEARCH, **given)
    search = run.search
    rates = [trial.rate for trial in search.levels]
    assert len(rates) >= 2 and [cell.settings["request_rate"] for cell in run.cells.values()] == rates
    assert all(trial.attainment < 0.95 for trial in search.levels if trial.rate > 65)
    passing = [trial.rate for trial in search.levels if trial.attainment >= 0.95 and not trial.limited]
    assert search.rate in (passing or [None])
    fastest = list(run.cells)[rates.index(max(rates))]
    assert len(run.requests[fastest, 0]) == max(8, math.ceil(max(rates) * 0.5))


def test_a_search_for_an_impossible_goodput_ends_soon(url: str, tmp_path: Path, short_levels: None) -> None:
    run = load(url, tmp_path, **SEARCH, rates=(8.0,), goodput={"ttft": 1.0})
    assert run.search is not None and run.search.rate is None and "out of reach" in run.search.note
    assert len(run.search.levels) <= 2


def test_a_killed_run_loses_only_the_level_in_progress(url: str, tmp_path: Path) -> None:
    def copy(level: LoadLevel, *_: object) -> None:
        """Copy what a killed process leaves once the second level has been measured."""
        if level.cell == "concurrency-2":
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    load(url, tmp_path / "run", on_level=copy, max_concurrencies=(1, 2))
    run = read_run(tmp_path / "killed")
    assert list(run.outcomes) == ["concurrency-1"] and len(run.requests["concurrency-1", 0]) == 4
    assert list(run.cells) == ["concurrency-1", "concurrency-2"]


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
    record = vllm_result("m", OPTIONS, LoadLevel("c", 2.0, 4, 1.0), result)
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
        assert [record[key] for key in names] == pytest.approx(figures, abs=1e-6), name
    good = sum(
        ttft <= 0.9 and tpot <= 0.12 and latency <= 2.5
        for ttft, tpot, latency in zip(ttfts, tpots, latencies, strict=True)
    )
    tokens = sum(answer.tokens for answer in level)
    assert (record["completed"], record["failed"]) == (len(level), int(fails))
    assert (record["request_throughput"], record["request_goodput"]) == (len(level) / 10, good / 10)
    throughputs = (record["output_throughput"], record["total_token_throughput"])
    assert throughputs == (tokens / 10, (tokens + 7 * len(level)) / 10)
    middles = [(one + other) / 2 for one in _edges(level) for other in _edges(level)]
    most = max(sum(answer.sent <= at < answer.times[-1] for answer in level) for at in [*_edges(level), *middles])
    assert record["max_concurrent_requests"] == most
    first = min(answer.sent for answer in level)
    stamps = [int(at - first) for answer in level for at in answer.times]
    assert record["max_output_tokens_per_s"] == max(map(stamps.count, stamps))


def _edges(level: list[Answer]) -> list[float]:
    return [edge for answer in level for edge in (answer.sent, answer.times[-1])]
