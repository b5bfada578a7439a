"""Requests of every layout with Transformers' own answers to them, and a loop that is driven step by step."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.conftest import noise, printed

from panscan import GenerateRunner, PanAndScan, Request, Result, Sampling
from panscan.core import Stamps, TokenEvent, now
from panscan.engine.engine import Engine
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.engine.request_state import RequestState

TINY_ENGINE = {"model": "tiny", "runner": "engine", "dtype": "fp32", "device": "cpu"}
TOKENS = 8
BOI = "<start_of_image>"
SHORT = Sampling(max_new_tokens=TOKENS)


def pages(*sizes: tuple[int, int], seed: int = 0) -> list[Any]:
    return [noise(width, height, seed + place) for place, (width, height) in enumerate(sizes)]


def crops(most: int) -> PanAndScan:
    return PanAndScan(min_crop_size=50, max_num_crops=most)


@cache
def requests() -> tuple[Request, ...]:
    """0 to 7 views, several images, text between them, images first and last, short and longer than the window."""
    long = "The total of line %d is not what it says. "
    between = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "First?"}, {"type": "image"}]},
        {"role": "assistant", "content": "A table."},
        {"role": "user", "content": [{"type": "text", "text": "So"}, {"type": "image"}, {"type": "text", "text": "?"}]},
    ]
    wide, tall, square = (700, 100), (100, 800), (90, 90)
    asked = [
        Request("Hi"),
        Request("What is it? " + "".join(long % line for line in range(16))),
        Request("What is the total?", pages(square), pan_and_scan=crops(4)),
        Request("What is the total?", pages(wide), pan_and_scan=crops(4)),
        Request("What is the date?", pages(wide), pan_and_scan=crops(4)),
        Request("What is the date?", pages(wide), pan_and_scan=crops(2)),
        Request("What is the date?", pages(wide), pan_and_scan=PanAndScan(enabled=False)),
        Request("And this?", pages(tall, seed=7), pan_and_scan=crops(6), system="Answer in few words."),
        Request("Compare.", pages(wide, tall, seed=20), pan_and_scan=crops(2)),
        Request(messages=between, images=pages(square, tall, square, seed=30), pan_and_scan=crops(2)),
        Request(f"{BOI}", pages(square, seed=40), raw=True),
        Request(f"{BOI} between {BOI}", pages(wide, square, seed=41), raw=True, pan_and_scan=crops(3)),
        Request("A long story: " + long % 7 * 12 + BOI, pages(tall, seed=50), raw=True, pan_and_scan=crops(1)),
        Request("What is the total? Say it in other words, please.", pages(square), pan_and_scan=crops(4)),
        Request(f"Read {BOI} and <end_of_turn> aloud."),
    ]
    return tuple(replace(request, id=str(place), sampling=SHORT) for place, request in enumerate(asked))


@cache
def questions() -> tuple[Request, ...]:
    """The same for the mini model, which was trained: text on paper and what it was taught to ask of it. Fewer, since
    its views are larger. Every other one goes on after its answer, where the model is less sure of itself."""
    chart, receipt, board = printed("chart", 300, 300), printed("receipt", 220, 660), printed("board", 640, 220)
    (first, *_, last), [posted, *_] = receipt.questions, board.questions
    story = "".join(f"The total of line {line} is not what it says. " for line in range(20))
    asked = [
        Request("Hi"),
        Request(chart.questions[0].question, [chart.image], pan_and_scan=crops(2)),
        Request(first.question, [receipt.image], pan_and_scan=crops(3)),
        Request(last.question, [receipt.image], pan_and_scan=crops(3)),
        Request(last.question, [receipt.image], pan_and_scan=crops(2)),
        Request(posted.question, [board.image], pan_and_scan=crops(2), system="Answer in few words."),
        Request(posted.question, [chart.image, board.image], pan_and_scan=crops(2)),
        Request(f"{story}{BOI}{chart.questions[0].question}", [chart.image], raw=True, pan_and_scan=crops(1)),
    ]
    how = [replace(SHORT, ignore_eos=place % 2 == 1) for place in range(len(asked))]
    return tuple(replace(request, id=str(place), sampling=how[place]) for place, request in enumerate(asked))


def state_of(request: Request, number: int = 0, **fields: Any) -> RequestState:
    """Return a request as the loop sees it, with callbacks that do nothing unless others are given."""
    callbacks: dict[str, Any] = {"on_event": lambda _: None, "on_end": lambda _: None}
    stamps, seed = Stamps(accepted=now()), request.sampling.seed or 0
    return RequestState(number, request=request, stamps=stamps, seed=seed, **callbacks | fields)


class Reference:
    """What ``generate()`` with eager attention says to some requests, each alone."""

    def __init__(self, runner: GenerateRunner, asked: Sequence[Request] | None = None) -> None:
        self._runner = runner
        self.requests = requests() if asked is None else asked
        self._known: dict[str, Result] = {}

    def __call__(self, request: Request) -> Result:
        if request.id not in self._known:
            self._known[request.id] = self.answer(request)
        return self._known[request.id]

    def answer(self, request: Request) -> Result:
        before = self._runner.settings
        self._runner.configure(replace(before, attention="eager"))
        [result] = self._runner.run([request])
        self._runner.configure(before)
        return result

    def tokens(self, asked: Iterable[Request]) -> list[list[int]]:
        return [self(request).token_ids for request in asked]


def hold(engine: Engine) -> Callable[[], None]:
    """Keep the engine's thread busy, as a long pass does; return what lets it continue."""
    busy, go = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        go.wait(60)

    engine._worker._send(wait)
    assert busy.wait(60)
    return go.set


@dataclass
class Driven:
    """A job, and all that it was told."""

    job: RequestState
    events: list[TokenEvent] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id is not None]


class Driver:
    """A loop without a thread: jobs join and leave between the steps that a test makes."""

    def __init__(self, runner: GenerateRunner, options: EngineOptions, ranks: RankGroup | None = None) -> None:
        executor = ModelRunner(runner.loaded, options) if ranks is None else ranks.start(options)
        self.loop = Loop(runner.loaded, options, executor)
        self._number = 0
        self.results: list[Result] = []

    def add(self, request: Request, **fields: Any) -> Driven:
        events: list[TokenEvent] = []
        results: list[Result] = []

        def end(result: Result) -> None:
            results.append(result)
            self.results.append(result)

        job = state_of(request, self._number, on_event=events.append, on_end=end, **fields)
        self._number += 1
        self.loop.preparer.prepare(job)
        self.loop.add(job)
        return Driven(job, events, results)

    @torch.no_grad()
    def step(self) -> bool:
        return self.loop.step()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until() and self.step():
            pass

    @property
    def used(self) -> int:
        """Slabs of the KV cache that requests hold."""
        return self.loop.stats().kv_slabs_used

    @property
    def pixels(self) -> int:
        """Views whose pixels wait at the runner, as far as this process knows."""
        return len(self.loop.runner.pixels) if isinstance(self.loop.runner, ModelRunner) else 0


@dataclass(frozen=True)
class Arrival:
    """A request, by its index, that joins before some step, and leaves after some tokens if it is cancelled."""

    request: int
    step: int
    leaves: int | None = None


def arrivals(most: int, requests: int) -> st.SearchStrategy[list[Arrival]]:
    leaves = st.none() | st.none() | st.none() | st.integers(0, 7)
    arrival = st.builds(Arrival, st.integers(0, requests - 1), st.integers(0, 12), leaves)
    return st.lists(arrival, min_size=1, max_size=most)


def check_stages(result: Result) -> None:
    """Stages are never negative, and together the end-to-end time."""
    stages = result.stamps.stages()
    assert all(value is None or value >= 0 for value in stages.values()), stages
    assert sum(value for value in stages.values() if value is not None) == pytest.approx(result.stamps.e2e)


def check_queue(result: Result) -> None:
    """The ``queue`` stage of a request that was not loaded in turns: before its first pass, and after preemptions."""
    stamps = result.stamps
    waited = sum(max(0.0, min(end, stamps.tokens[-1]) - start) for start, end in stamps.waits)
    begun = stamps.preparing - stamps.accepted if stamps.preparing is not None else 0.0
    assert stamps.stages()["queue"] == pytest.approx(begun + stamps.scheduled - stamps.preprocessed + waited)
    assert all(stamps.scheduled <= start <= end for start, end in stamps.waits)


def play(driver: Driver, reference: Reference, history: list[Arrival]) -> None:
    """Play a history to its end; every job has the reference's tokens, up to where it left."""
    driven = []
    waiting = sorted(history, key=lambda arrival: arrival.step)
    step, busy = 0, True
    while waiting or busy:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            driven.append((arrival, driver.add(reference.requests[arrival.request])))
        busy = driver.step()
        for arrival, run in driven:
            if arrival.leaves is not None and len(run.tokens) >= arrival.leaves and not run.job.ended:
                driver.loop.end(run.job, "cancelled")
        step += 1
    for arrival, run in driven:
        due = reference(reference.requests[arrival.request])
        [result] = run.results
        assert result.error is None
        assert "".join(event.text for event in run.events) == result.text
        assert run.tokens == result.token_ids
        if result.finish_reason == "cancelled":
            assert arrival.leaves is not None and len(result.token_ids) >= arrival.leaves
            assert result.token_ids == due.token_ids[: len(result.token_ids)]
            continue
        for name in ("token_ids", "finish_reason", "text", "views", "prompt_tokens"):
            assert getattr(result, name) == getattr(due, name)
        if due.logprobs is not None:
            logprobs = [token.logprob for token in result.logprobs or ()]
            assert logprobs == pytest.approx([token.logprob for token in due.logprobs], abs=1e-3)
        check_stages(result)
        check_queue(result)
    assert driver.used == driver.pixels == driver.loop.running == driver.loop.waiting == 0
    driver.loop.close()
