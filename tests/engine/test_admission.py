"""Backpressure: submitted requests beyond the queue are refused or wait, in their order."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.engine.driving import Driver, requests

from panscan import GenerateRunner, Request, Sampling
from panscan.core import EngineError, QueueFullError, SettingError
from panscan.engine.engine import Admission, Engine
from panscan.engine.options import EngineOptions

OPTIONS = EngineOptions(kv_cache_gb=0.02, max_num_seqs=1)
ENDLESS = replace(requests()[0], id="", sampling=Sampling(max_new_tokens=2000, ignore_eos=True))
SHORT = replace(requests()[0], id="")


@pytest.fixture
def engine(tiny: GenerateRunner) -> Iterator[Engine]:
    """One request computes and two wait."""
    with Engine(tiny.loaded, OPTIONS, max_queued_requests=2) as opened:
        yield opened


def test_a_full_queue_is_refused_and_a_free_slot_is_taken(engine: Engine) -> None:
    async def ask() -> list[str]:
        streams = [engine.submit(ENDLESS) for _ in range(3)]
        with pytest.raises(QueueFullError, match=r"queue is full: 2 submitted requests wait.*max_queued_requests"):
            engine.submit(SHORT)
        streams[0].cancel()
        await streams[0].result()
        streams.append(engine.submit(SHORT))
        with pytest.raises(QueueFullError):
            engine.submit(SHORT)
        for stream in streams[:3]:
            stream.cancel()
        return [(await stream.result()).finish_reason for stream in streams]

    assert asyncio.run(ask()) == ["cancelled", "cancelled", "cancelled", "length"]


def test_many_wait_for_a_slot_and_all_are_answered(engine: Engine) -> None:
    held: list[int] = []

    async def one(number: int) -> str:
        stream = await engine.submit_wait(replace(SHORT, id=str(number)))
        held.append(len(engine._streams))
        return (await stream.result()).id

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(30)))

    assert asyncio.run(all_of_them()) == [str(number) for number in range(30)]
    assert max(held) <= 3


def test_a_wait_that_is_cancelled_takes_no_slot(engine: Engine) -> None:
    async def ask() -> None:
        streams = [engine.submit(ENDLESS) for _ in range(3)]
        waits = [asyncio.ensure_future(engine.submit_wait(SHORT)) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        for stream in streams:
            stream.cancel()
        for wait in waits[1:]:
            assert (await (await wait).result()).error is None
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        assert engine._admission._free == 3

    asyncio.run(ask())


def test_a_request_that_cannot_begin_releases_its_slot(engine: Engine) -> None:
    async def ask() -> None:
        first = engine.submit(replace(ENDLESS, id="same"))
        for _ in range(5):
            with pytest.raises(SettingError, match="already in flight"):
                engine.submit(replace(SHORT, id="same"))
        assert engine._admission._free == 2
        first.cancel()
        await first.result()

    asyncio.run(ask())


def test_closing_ends_every_wait(engine: Engine) -> None:
    async def ask() -> list[object]:
        for _ in range(3):
            engine.submit(ENDLESS)
        waits = [asyncio.ensure_future(engine.submit_wait(SHORT)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*waits, return_exceptions=True)

    found = asyncio.run(ask())
    assert len(found) == 5 and all(isinstance(error, EngineError) for error in found)


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


def test_the_bound_is_checked() -> None:
    with pytest.raises(SettingError, match="max_queued_requests is out of range"):
        Engine.from_pretrained("tiny", device="cpu", max_queued_requests=-1)


def test_long_requests_run_at_once_as_the_memory_holds_their_windows(tiny: GenerateRunner) -> None:
    """None is preempted, though the memory holds all tokens of five requests only."""
    sizes = EngineOptions(kv_cache_gb=1.0, prefill_chunk_size=256, max_num_seqs=64, prefix_caching=False)
    text, sampling = "The total of a line is not what it says. " * 30, Sampling(max_new_tokens=16, ignore_eos=True)
    asked = [Request(f"{number}: {text}", id=str(number), raw=True, sampling=sampling) for number in range(20, 32)]
    driver = Driver(tiny, sizes)
    expected = [driver.add(request) for request in asked]
    driver.run()
    tokens = max(len(result.token_ids) + result.prompt_tokens for one in expected for result in one.results)
    shape = driver.loop.facts.kv_shape
    slabs = 5 * shape.slabs(tokens, sizes.block_size)
    driver = Driver(tiny, replace(sizes, kv_cache_gb=slabs * shape.slab_bytes(sizes.block_size) / 1e9))
    answered = [driver.add(request) for request in asked]
    most = 0
    while driver.step():
        most = max(most, driver.loop.running)
    assert [one.tokens for one in answered] == [one.tokens for one in expected]
    assert driver.loop.blocks.pool.count == slabs and driver.loop.stats().preemptions == 0
    assert 9 <= driver.loop.blocks.concurrent(tokens, sizes.prefill_chunk_size) <= most
