"""Faults of one request, which ends alone; ends of the engine, which leave no call waiting; requests as streams."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tests.conftest import noise, until
from tests.engine.driving import Driver, Reference, hold, requests
from tests.images.site import Site

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.core import EngineError, ImageError, InputError, QueueFullError, SettingError, TokenEvent, now
from panscan.engine import worker
from panscan.engine.engine import Admission, Engine
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.images.encode import encoded_image
from panscan.model.observation import ForcedTokens

OPTIONS = EngineOptions(kv_cache_gb=0.02, max_num_seqs=2)
ENDLESS = replace(requests()[1], sampling=Sampling(max_new_tokens=1000, ignore_eos=True))


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.fixture(scope="module")
def shared(tiny: GenerateRunner) -> Iterator[Engine]:
    with Engine(tiny.loaded, OPTIONS) as opened:
        yield opened


@pytest.fixture
def engine(shared: Engine, reference: Reference) -> Iterator[Engine]:
    """The shared engine; it must still answer afterwards, and hold nothing."""
    yield shared
    [result] = shared.generate([requests()[0]], progress=False)
    assert result.token_ids == reference(requests()[0]).token_ids
    stats = shared.stats()
    assert (stats.running, stats.waiting, stats.kv_slabs_used, shared.waiting) == (0, 0, 0, 0)


@pytest.fixture
def opened(tiny: GenerateRunner) -> Iterator[Engine]:
    with Engine(tiny.loaded, OPTIONS) as engine:
        yield engine


@pytest.fixture
def mortal(opened: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose thread ends when :func:`kill` is called."""

    def fail(error: BaseException) -> None:
        raise SystemExit from error

    monkeypatch.setattr(opened._worker, "_fail", fail)
    return opened


def kill(engine: Engine) -> None:
    engine._worker._send(lambda: next(iter(())))
    engine._worker._thread.join(60)
    assert not engine._worker._thread.is_alive()


def answer(engine: Engine, request: Request, on_event: Callable[[TokenEvent], None] | None) -> Result:
    results: SimpleQueue[Result] = SimpleQueue()
    engine.start(request, on_event, results.put)
    return results.get(timeout=60)


def _ignore_arguments(function: Callable[[], object], *_: object) -> None:
    function()


@pytest.mark.parametrize("fault", [ValueError("bug"), SystemExit(3), EngineError("another's"), UnprintableError()])
def test_a_request_whose_callback_fails_ends_alone(engine: Engine, reference: Reference, fault: BaseException) -> None:
    events: list[TokenEvent] = []

    def on_event(event: TokenEvent) -> None:
        events.append(event)
        if len(events) == 2:
            raise fault

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(engine.generate, [requests()[3]], progress=False)
        result = answer(engine, ENDLESS, on_event)
        assert other.result(60)[0].token_ids == reference(requests()[3]).token_ids
    assert (result.finish_reason, len(result.token_ids), len(events)) == ("error", 2, 2)
    assert isinstance(result.error, InputError) and result.error.__cause__ is fault
    assert type(fault).__name__ in str(result.error)


def test_a_callback_fails_at_the_last_event(engine: Engine) -> None:
    """Also of a request that is cancelled, or has failed already: then its first error counts."""

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            raise ValueError("bug")

    result = answer(engine, requests()[1], on_event)
    assert (result.finish_reason, result.output_tokens > 0) == ("error", True)
    assert "ValueError: bug" in str(result.error)
    assert "none.png" in str(answer(engine, Request("What?", ["none.png"]), on_event).error)
    results: SimpleQueue[Result] = SimpleQueue()
    engine.start(ENDLESS, on_event, results.put)()
    assert "ValueError: bug" in str(results.get(timeout=60).error)


def test_an_on_end_that_fails_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    called: SimpleQueue[Result] = SimpleQueue()

    def on_end(result: Result) -> None:
        called.put(result)
        raise SystemExit("bug")

    with caplog.at_level(logging.ERROR, "panscan.engine"):
        engine.start(requests()[1], None, on_end)
        assert called.get(timeout=60).error is None
        engine.stats()
    [record] = caplog.records
    assert "on_end" in record.getMessage() and record.exc_info is not None
    assert called.empty()


def test_a_callback_that_waits_for_the_engine_is_refused(engine: Engine) -> None:
    def generate() -> list[Result]:
        return engine.generate([requests()[0]], progress=False)

    for wait in (engine.stats, engine.reset_caches, generate):
        result = answer(engine, requests()[1], partial(_ignore_arguments, wait))
        assert isinstance(result.error, SettingError) and "callback" in str(result.error)


@pytest.mark.parametrize(("asked", "forced"), [(1, 0), (0, 1), (2, 1), (1, 2)])
def test_observations_need_forced_tokens_for_each_request(engine: Engine, asked: int, forced: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        engine.observe([requests()[0]] * asked, [ForcedTokens(None, [], 1)] * forced)


def test_what_fails_in_the_text_of_an_answer_fails_its_request(tiny: GenerateRunner, reference: Reference) -> None:
    """A fault put there by hand, as a tokenizer's or a grammar's panic would be: not even an ``Exception``."""

    class Panic(BaseException): ...

    class Broken:
        text = ""

        def push(self, _token: int) -> str:
            raise Panic("in Rust")

        finish = push

    driver = Driver(tiny, OPTIONS)
    broken, fine = driver.add(requests()[1]), driver.add(requests()[3])
    broken.job.text = Broken()  # type: ignore[assignment]
    driver.run()
    assert fine.results[0].token_ids == reference(requests()[3]).token_ids
    assert "Panic: in Rust" in str(broken.results[0].error)
    assert (driver.used, driver.pixels) == (0, 0)


def test_what_a_failed_image_held_is_free_once_the_result_is(engine: Engine) -> None:
    """Without a garbage collection: the error's traceback would keep the frames, and they the pixels."""

    class Pixels: ...

    held: list[weakref.ref[Pixels]] = []

    class Failing:
        def __array__(self, *_: object, **__: object) -> object:
            pixels = Pixels()
            held.append(weakref.ref(pixels))
            raise RuntimeError("bug")

    gc.disable()
    try:
        result = answer(engine, Request("What?", [Failing()]), None)
        assert "bug" in str(result.error) and len(held) == 1 and held[0]() is None
    finally:
        gc.enable()


def test_an_array_that_is_too_large_is_refused_before_it_is_copied(engine: Engine) -> None:
    endless = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (10**9, 10**9, 3))
    assert "the limit is 178956970" in str(answer(engine, Request("What?", [endless]), None).error)


def test_all_accepted_requests_that_do_not_run_wait(engine: Engine) -> None:
    """Not only prepared ones; and the number is known during a pass."""
    results: SimpleQueue[Result] = SimpleQueue()
    go = hold(engine)
    cancels = [engine.start(ENDLESS, None, results.put) for _ in range(60)]
    assert engine.waiting == 60
    go()
    until(lambda: engine.stats().running == 2)
    assert engine.stats().waiting == engine.waiting == 58
    for cancel in cancels:
        cancel()
    assert {results.get(timeout=60).finish_reason for _ in cancels} == {"cancelled"}


def test_requests_are_prepared_during_a_pass(engine: Engine) -> None:
    go = hold(engine)
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(engine.generate, [requests()[3]], progress=False)
        until(lambda: not engine._worker._messages.empty())  # it is prepared
        at = now()
        go()
        [result] = answered.result(60)
    assert result.stamps.preprocessed is not None and result.stamps.preprocessed < at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("silent", [False, True])
def test_calls_end_when_the_thread_does(mortal: Engine, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """Even if it says nothing, as when a library ends it: nothing in it runs any more."""
    forced = ForcedTokens(None, [], 1000)

    async def stream() -> Result:
        return await mortal.submit(replace(ENDLESS, id="stream")).result()

    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as threads:
        if silent:
            patched.setattr(mortal._worker, "_stop", lambda: None)
            patched.setattr(worker, "_LIVENESS_SECONDS", 0.01)
        calls: list[Future[Any]] = [
            threads.submit(mortal.generate, [ENDLESS], progress=False),
            threads.submit(list, mortal.stream_results([ENDLESS])),
            threads.submit(mortal.observe, [requests()[0]], [forced]),
        ]
        streams = [] if silent else [threads.submit(asyncio.run, stream())]
        until(lambda: len(mortal._worker._unfinished) == len(calls + streams))
        kill(mortal)
        for call in calls:
            with pytest.raises(EngineError, match="thread has ended"):
                call.result(60)
        assert all(isinstance(streamed.result(60).error, EngineError) for streamed in streams)
        for later in (mortal.stats, mortal.reset_caches, lambda: mortal.generate([ENDLESS], progress=False)):
            with pytest.raises(EngineError, match="thread has ended"):
                later()
    if silent:
        mortal._worker._stop()
    assert mortal.waiting == 0
    mortal.close()


def test_cancelled_while_it_is_prepared_and_before(opened: Engine, site: Site) -> None:
    """Neither computes anything, and a page of a cancelled request is not fetched."""
    heard, let = threading.Event(), threading.Event()
    site.before_answer = lambda *_: (heard.set(), let.wait(60))
    urls = [site.put(f"/{place}.png", encoded_image(noise(90, 90))) for place in range(40)]
    slow = [Request("What?", [url], sampling=ENDLESS.sampling) for url in urls]

    async def leave() -> list[str]:
        streams = [opened.submit(replace(request, id=str(place))) for place, request in enumerate(slow)]
        await asyncio.to_thread(heard.wait, 60)
        for stream in streams:
            stream.cancel()
        return [(await stream.result()).finish_reason for stream in streams]

    assert asyncio.run(leave()) == ["cancelled"] * 40
    let.set()
    [fine] = opened.generate([requests()[0]])
    assert fine.error is None
    stats = opened.stats()
    assert (stats.running, stats.waiting, stats.output_tokens) == (0, 0, fine.output_tokens)
    assert isinstance(opened._worker.loop.runner, ModelRunner) and len(opened._worker.loop.runner.pixels) == 0
    assert len(site.asked) <= 8


def test_few_requests_are_prepared_ahead(tiny: GenerateRunner) -> None:
    """However many wait: their images are what memory is bounded by."""
    with Engine(tiny.loaded, replace(OPTIONS, max_num_seqs=1)) as engine:
        worker, seen = engine._worker, []
        first = replace(requests()[0], sampling=Sampling(max_new_tokens=60, ignore_eos=True))
        for _ in engine.stream_results([first, *requests()[1:] * 2], max_concurrency=40):
            stamps = [state.stamps for state in [*worker._unfinished.values()]]
            seen.append(sum(stamp.preparing is not None and stamp.scheduled is None for stamp in stamps))
        assert 0 < max(seen) <= 8


def test_closing_ends_requests_and_waits(bounded: Engine) -> None:
    """Earlier requests are cancelled; waits for a slot and later requests, also a second one with the same name, get an
    error; none is left waiting."""

    async def close(threads: ThreadPoolExecutor) -> list[str]:
        streamed = bounded.stream_results([ENDLESS])
        before = [threads.submit(bounded.generate, [ENDLESS]), threads.submit(lambda: [row for _, row in streamed])]
        streams = [bounded.submit(UNENDED) for _ in range(3)]
        waits = [asyncio.ensure_future(bounded.submit_wait(SHORT)) for _ in range(5)]
        await asyncio.sleep(0)
        until(lambda: len(bounded._worker._unfinished) == 5)
        go = hold(bounded)
        closing = threads.submit(bounded.close)
        until(lambda: bounded._worker._closed)
        for after in (lambda: bounded.generate([requests()[3]]), bounded.stats, bounded.reset_caches):
            with pytest.raises(EngineError, match="closed"):
                after()
        go()
        results = [result for call in before for result in await asyncio.to_thread(call.result, 60)]
        results += [await stream.result() for stream in streams]
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineError] * 5
        await asyncio.to_thread(closing.result, 60)
        for _ in range(2):
            with pytest.raises(EngineError, match="closed"):
                bounded.submit(replace(SHORT, id="again"))
        bounded.cancel("again")
        return [result.finish_reason for result in results]

    with ThreadPoolExecutor(4) as threads:
        assert asyncio.run(close(threads)) == ["cancelled"] * 5


def test_a_broken_engine_tells_everybody(opened: Engine) -> None:
    """A bug in the bookkeeping, put there by hand: a block that is given back twice."""
    results = opened.stream_results([ENDLESS, requests()[0]])
    assert next(results)[0] == 1

    def break_it() -> None:
        [job] = opened._worker.loop._scheduler.running
        opened._worker.loop.blocks.pool.release(job.tables[0][:1])
        opened._worker.loop.end(job, "cancelled")

    opened._worker._send(break_it)
    for _, result in results:
        assert isinstance(result.error, EngineError) and "released more often" in str(result.error)
    [later] = opened.generate([requests()[0]])
    assert isinstance(later.error, EngineError)
    with pytest.raises(EngineError, match="released more often"):
        opened.stats()


def test_scores_that_are_no_numbers_are_an_error_and_no_answer(tiny: GenerateRunner) -> None:
    weight = tiny.loaded.model.model.language_model.layers[-1].mlp.down_proj.weight.data
    original, weight[0, 0] = weight[0, 0].clone(), float("nan")
    kinds = (
        Sampling(max_new_tokens=4),
        Sampling(max_new_tokens=4, temperature=1.0, top_k=64, top_p=0.95, logprobs=2),
        Sampling(max_new_tokens=4, temperature=1.0, seed=1, repetition_penalty=1.1),
        Sampling(max_new_tokens=4, json_schema='{"type": "boolean"}'),
    )
    try:
        with Engine(tiny.loaded, OPTIONS) as engine:
            asked = [replace(requests()[0], id=str(number), sampling=kind) for number, kind in enumerate(kinds)]
            for result in engine.generate(asked, progress=False):
                assert (result.finish_reason, result.token_ids) == ("error", [])
                assert "no finite numbers" in str(result.error) and "bf16" in str(result.error)
            assert engine.stats().kv_slabs_used == 0
    finally:
        weight[0, 0] = original


SHORT = replace(requests()[0], id="")
UNENDED = replace(SHORT, sampling=Sampling(max_new_tokens=2000, ignore_eos=True))


@pytest.fixture
def bounded(tiny: GenerateRunner) -> Iterator[Engine]:
    """An engine in which one request computes and two wait."""
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02, max_num_seqs=1), max_queued_requests=2) as opened:
        yield opened


def test_events_are_those_of_the_result(engine: Engine, reference: Reference) -> None:
    """A second reading has none. Requests without a name get one that no other has."""
    asked = requests()[3:9]
    names = ["request-1", "", "", "", *"ab"]

    async def read(request: Request, name: str) -> tuple[list[TokenEvent], Result]:
        stream = engine.submit(replace(request, id=name))
        events = [event async for event in stream]
        assert [event async for event in stream] == []
        result = await stream.result()
        assert result.id == stream.id == name or (not name and stream.id.startswith("request-"))
        return events, result

    async def all_of_them() -> list[tuple[list[TokenEvent], Result]]:
        return await asyncio.gather(*map(read, asked, names))

    outcomes = asyncio.run(all_of_them())
    assert len({result.id for _, result in outcomes}) == len(asked)
    for request, (events, result) in zip(asked, outcomes, strict=True):
        due = reference(request)
        assert [event.token_id for event in events] == result.token_ids == due.token_ids
        assert "".join(event.text for event in events) == result.text == due.text
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == result.finish_reason == due.finish_reason
        assert [event.at for event in events] == result.stamps.tokens


def test_a_stream_is_cancelled_by_its_id_and_by_leaving_it(engine: Engine) -> None:
    async def cancelled() -> list[Result]:
        named, left, unnamed = (engine.submit(replace(UNENDED, id=name)) for name in ("a", "b", ""))
        with pytest.raises(SettingError, match="in flight"):
            engine.submit(replace(UNENDED, id="a"))
        seen = 0
        async for event in named:
            seen += 1
            if seen == 4:
                engine.cancel("a")
            last = event
        assert last.finish_reason == "cancelled" and last.token_id is None
        events = aiter(left)
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]  # a generator
        engine.cancel(unnamed.id)
        engine.cancel("nobody")
        return [await stream.result() for stream in (named, left, unnamed)]

    for result in asyncio.run(cancelled()):
        assert result.finish_reason == "cancelled" and result.error is None
        assert result.output_tokens < 2000


def test_streams_of_closed_event_loops_are_cancelled(engine: Engine) -> None:
    async def leave() -> None:
        for _ in range(5):
            engine.submit(UNENDED)

    asyncio.run(leave())

    def idle() -> bool:
        stats = engine.stats()  # both numbers of one moment
        return not stats.running and not stats.waiting

    until(idle)  # each event finds the loop closed
    assert not engine._streams


def test_a_failed_request_ends_its_stream_with_the_reason(engine: Engine) -> None:
    async def read() -> None:
        stream = engine.submit(Request("What?", ["none.png"]))
        events: list[TokenEvent] = []
        with pytest.raises(ImageError, match="none"):
            async for event in stream:
                events.append(event)
        assert [event.finish_reason for event in events] == ["error"]
        assert isinstance((await stream.result()).error, ImageError)

    asyncio.run(read())


def test_a_second_reader_is_refused(engine: Engine) -> None:
    """Of a stream, and of an iterator of results: each would miss what the other takes."""

    async def read() -> None:
        stream = engine.submit(UNENDED)
        first = aiter(stream)
        assert (await anext(first)).token_id is not None
        with pytest.raises(SettingError, match="already has a reader"):
            await anext(aiter(stream))
        await first.aclose()  # type: ignore[attr-defined]
        assert (await stream.result()).finish_reason == "cancelled"

    asyncio.run(read())
    go = hold(engine)
    results = engine.stream_results([requests()[0]])
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(next, results)
        until(lambda: results.gi_running)
        with pytest.raises(ValueError, match="already executing"):
            next(results)
        go()
        assert first.result(60)[1].error is None
    assert list(results) == []


def test_a_full_queue_is_refused_and_a_free_slot_is_taken(bounded: Engine) -> None:
    """Requests that stop waiting, or that cannot begin, take none."""

    async def ask() -> list[str]:
        streams = [bounded.submit(replace(UNENDED, id="same"))]
        for _ in range(5):
            with pytest.raises(SettingError, match="already in flight"):
                bounded.submit(replace(SHORT, id="same"))
        streams += [bounded.submit(UNENDED) for _ in range(2)]
        with pytest.raises(QueueFullError, match=r"queue is full: 2 submitted requests wait.*max_queued_requests"):
            bounded.submit(SHORT)
        left, *waits = [asyncio.ensure_future(bounded.submit_wait(SHORT)) for _ in range(3)]
        await asyncio.sleep(0)
        left.cancel()
        for stream in streams:
            stream.cancel()
        streams += [await wait for wait in waits]
        reasons = [(await stream.result()).finish_reason for stream in streams]
        with pytest.raises(asyncio.CancelledError):
            await left
        assert bounded._admission._free == 3
        return [*reasons, (await bounded.submit(SHORT).result()).finish_reason]

    assert asyncio.run(ask()) == ["cancelled"] * 3 + ["length"] * 3


def test_a_slot_granted_to_a_request_that_stops_waiting_is_free_again() -> None:
    async def stop_at_that_moment() -> None:
        slots = Admission(1, "full")
        slots.acquire_nowait()
        wait = asyncio.ensure_future(slots.acquire())
        await asyncio.sleep(0)
        slots.release()
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        slots.acquire_nowait()

    asyncio.run(stop_at_that_moment())


def test_many_wait_for_a_slot_and_all_are_answered(bounded: Engine) -> None:
    held: list[int] = []

    async def one(number: int) -> str:
        stream = await bounded.submit_wait(replace(SHORT, id=str(number)))
        held.append(len(bounded._streams))
        return (await stream.result()).id

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(all_of_them()) == [str(number) for number in range(20)]
    assert max(held) <= 3


def test_a_slot_is_not_given_to_an_event_loop_that_has_ended() -> None:
    admission = Admission(1, "full")
    admission.acquire_nowait()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(admission.acquire())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    admission.release()
    admission.acquire_nowait()
    with pytest.raises(QueueFullError, match="full"):
        admission.acquire_nowait()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
