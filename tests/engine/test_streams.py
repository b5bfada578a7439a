"""Requests as streams: their events, names and ends; and those beyond the queue, which are refused or wait in order."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.engine.driving import Reference, hold, requests, until

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.core import EngineError, ImageError, QueueFullError, SettingError, TokenEvent
from panscan.engine.engine import Admission, Engine
from panscan.engine.options import EngineOptions

SHORT = replace(requests()[0], id="")
ENDLESS = replace(SHORT, sampling=Sampling(max_new_tokens=2000, ignore_eos=True))


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

    found = asyncio.run(all_of_them())
    assert len({result.id for _, result in found}) == len(asked)
    for request, (events, result) in zip(asked, found, strict=True):
        due = reference(request)
        assert [event.token_id for event in events] == result.token_ids == due.token_ids
        assert "".join(event.text for event in events) == result.text == due.text
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == result.finish_reason == due.finish_reason
        assert [event.at for event in events] == result.stamps.tokens


def test_a_stream_is_cancelled_by_its_id_and_by_leaving_it(engine: Engine) -> None:
    async def cancelled() -> list[Result]:
        named, left, unnamed = (engine.submit(replace(ENDLESS, id=name)) for name in ("a", "b", ""))
        with pytest.raises(SettingError, match="in flight"):
            engine.submit(replace(ENDLESS, id="a"))
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
            engine.submit(ENDLESS)

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
        stream = engine.submit(ENDLESS)
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
        while not results.gi_running:
            pass
        with pytest.raises(ValueError, match="already executing"):
            next(results)
        go()
        assert first.result(60)[1].error is None
    assert list(results) == []


def test_a_full_queue_is_refused_and_a_free_slot_is_taken(bounded: Engine) -> None:
    async def ask() -> list[str]:
        streams = [bounded.submit(ENDLESS) for _ in range(3)]
        with pytest.raises(QueueFullError, match=r"queue is full: 2 submitted requests wait.*max_queued_requests"):
            bounded.submit(SHORT)
        streams[0].cancel()
        await streams[0].result()
        streams.append(bounded.submit(SHORT))
        with pytest.raises(QueueFullError):
            bounded.submit(SHORT)
        for stream in streams[:3]:
            stream.cancel()
        return [(await stream.result()).finish_reason for stream in streams]

    assert asyncio.run(ask()) == ["cancelled", "cancelled", "cancelled", "length"]


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


def test_requests_that_stop_waiting_or_cannot_begin_take_no_slot(bounded: Engine) -> None:
    async def ask() -> None:
        streams = [bounded.submit(replace(ENDLESS, id="same"))]
        for _ in range(5):
            with pytest.raises(SettingError, match="already in flight"):
                bounded.submit(replace(SHORT, id="same"))
        streams += [bounded.submit(ENDLESS) for _ in range(2)]
        waits = [asyncio.ensure_future(bounded.submit_wait(SHORT)) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        for stream in streams:
            stream.cancel()
        for wait in waits[1:]:
            assert (await (await wait).result()).error is None
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        assert bounded._admission._free == 3

    asyncio.run(ask())


def test_closing_ends_every_wait(bounded: Engine) -> None:
    """Later requests are refused, also a second one with the same name."""

    async def ask() -> list[object]:
        for _ in range(3):
            bounded.submit(ENDLESS)
        waits = [asyncio.ensure_future(bounded.submit_wait(SHORT)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(bounded.close)
        for _ in range(2):
            with pytest.raises(EngineError, match="closed"):
                bounded.submit(replace(SHORT, id="again"))
        bounded.cancel("again")
        return await asyncio.gather(*waits, return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [EngineError] * 5


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
