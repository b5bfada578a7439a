"""The engine's thread: what is cancelled, closed or broken while something else goes on. Nobody waits for ever."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.conftest import noise
from tests.engine.driving import Driver, Reference, hold, requests
from tests.forked_workers import program
from tests.images.site import Site, serving

from panscan import GenerateRunner, Request, Sampling
from panscan.core import EngineError, ImageError, SettingError, TokenEvent
from panscan.engine.engine import Engine
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.images.encode import encoded_image

OPTIONS = EngineOptions(kv_cache_gb=0.02)
ENDLESS = Sampling(max_new_tokens=1000, ignore_eos=True)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("PANSCAN_ALLOW_PRIVATE_URLS", "1")
    with serving() as opened:
        yield opened


@pytest.fixture
def engine(tiny: GenerateRunner) -> Iterator[Engine]:
    with Engine(tiny.loaded, OPTIONS) as opened:
        yield opened


def test_cancelled_while_it_is_prepared_and_before(engine: Engine, site: Site) -> None:
    """Neither computes anything, and a page that nobody wants any more is not fetched."""
    heard, let = threading.Event(), threading.Event()
    site.before_answer = lambda *_: (heard.set(), let.wait(60))
    urls = [site.put(f"/{place}.png", encoded_image(noise(90, 90))) for place in range(40)]
    slow = [Request("What?", [url], sampling=ENDLESS) for url in urls]

    async def leave() -> list[str]:
        streams = [engine.submit(replace(request, id=str(place))) for place, request in enumerate(slow)]
        await asyncio.to_thread(heard.wait, 60)
        for stream in streams:
            stream.cancel()
        return [(await stream.result()).finish_reason for stream in streams]

    assert asyncio.run(leave()) == ["cancelled"] * 40
    let.set()
    [fine] = engine.generate([requests()[0]])
    assert fine.error is None
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.output_tokens) == (0, 0, fine.output_tokens)
    assert isinstance(engine._worker.loop.runner, ModelRunner) and len(engine._worker.loop.runner.pixels) == 0
    assert len(site.asked) <= 8


def test_few_requests_are_prepared_ahead(tiny: GenerateRunner) -> None:
    """However many wait: their images are what memory is bounded by."""
    with Engine(tiny.loaded, replace(OPTIONS, max_num_seqs=1)) as engine:
        worker, seen = engine._worker, []
        endless = replace(requests()[0], sampling=Sampling(max_new_tokens=60, ignore_eos=True))
        for _ in engine.stream_results([endless, *requests()[1:] * 2], max_concurrency=40):
            stamps = [state.stamps for state in [*worker._unfinished.values()]]
            seen.append(sum(each.preparing is not None and each.scheduled is None for each in stamps))
        assert 0 < max(seen) <= 8


def test_pixels_are_dropped_when_no_pass_needs_them(tiny: GenerateRunner) -> None:
    """Also those of views whose blocks came from the prefix cache."""
    driver = Driver(tiny, replace(OPTIONS, max_num_seqs=1))
    first, second = driver.add(requests()[3]), driver.add(requests()[4])
    assert all(view.pixels is not None for view in second.job.request_views.values())
    assert driver.pixels == len(first.job.request_views) + len(second.job.request_views)
    driver.run(lambda: len(second.tokens) == 1)
    assert second.job.cached
    assert all(view.pixels is None for view in second.job.request_views.values())
    assert driver.pixels == 0
    driver.run()
    assert first.job.request_views == second.job.request_views == {}


def test_closing_beside_requests(engine: Engine) -> None:
    """What came before is cancelled, what comes after is told so; nothing is left waiting."""
    go = hold(engine)
    with ThreadPoolExecutor(4) as threads:
        before = threads.submit(lambda: engine.generate([requests()[3]]))
        while engine._worker._messages.empty():  # until it stands behind what holds the engine
            pass
        closing = threads.submit(engine.close)
        while not engine._worker._closed:
            pass
        for after in (lambda: engine.generate([requests()[3]]), engine.stats, engine.reset_caches):
            with pytest.raises(EngineError, match="closed"):
                after()
        go()
        assert [result.finish_reason for result in before.result(60)] == ["cancelled"]
        closing.result(60)


def test_a_broken_engine_tells_everybody(engine: Engine) -> None:
    """A bug in the bookkeeping, put there by hand: a block that is given back twice."""
    results = engine.stream_results([replace(requests()[3], sampling=ENDLESS), requests()[0]])
    assert next(results)[0] == 1

    def break_it() -> None:
        [job] = engine._worker.loop._scheduler.running
        engine._worker.loop.blocks.pool.release(job.tables[0][:1])
        engine._worker.loop.end(job, "cancelled")

    engine._worker._send(break_it)
    for _, result in results:
        assert isinstance(result.error, EngineError) and "released more often" in str(result.error)
    [later] = engine.generate([requests()[0]])
    assert isinstance(later.error, EngineError)
    with pytest.raises(EngineError, match="released more often"):
        engine.stats()


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


def test_an_ended_stream_is_empty(engine: Engine, reference: Reference) -> None:
    async def read() -> tuple[list[int | None], list[int | None], str]:
        stream = engine.submit(replace(requests()[0], id=""))
        return [event.token_id async for event in stream], [event.token_id async for event in stream], stream.id

    first, second, name = asyncio.run(read())
    assert (first, second) == (reference(requests()[0]).token_ids, [])
    assert name.startswith("request-")


def test_names_of_streams(engine: Engine) -> None:
    async def ask() -> list[str]:
        streams = [engine.submit(replace(requests()[0], id=name)) for name in ("request-1", "", "", "")]
        results = [await stream.result() for stream in streams]
        assert [result.id for result in results] == [stream.id for stream in streams]
        engine.close()
        for _ in range(2):
            with pytest.raises(EngineError, match="closed"):
                engine.submit(replace(requests()[0], id="again"))
        engine.cancel("again")
        return [stream.id for stream in streams]

    names = asyncio.run(ask())
    assert len(set(names)) == 4


def test_a_second_reader_is_refused(engine: Engine) -> None:
    """Of a stream, and of an iterator of results: each would miss what the other takes."""

    async def read() -> None:
        stream = engine.submit(replace(requests()[0], sampling=ENDLESS))
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


# Each ending has a fork of a process that has imported everything and started no thread: imports take seconds.
ENDINGS = """
import gc, os, sys, threading
from panscan import Engine
import panscan.engine.engine, panscan.model.load

gc.freeze()  # or each exit would visit all objects of the imports

class Stuck:
    def __array__(self, *_, **__):
        started.set()
        threading.Event().wait()

def opened():
    return Engine.from_pretrained("tiny", dtype="fp32", device="cpu", kv_cache_gb=0.02, max_new_tokens=2)

def late():
    started.set()
    threading.main_thread().join()
    print([result.finish_reason for result in engine.generate([engine.request("Hi")])], flush=True)

for ending in ("", "engine.close()", "raise SystemExit(0)", "late"):
    if not (pid := os.fork()):
        started = threading.Event()
        engine = opened()
        if ending == "late":
            threading.Thread(target=late).start()
            started.wait()
        else:
            results = engine.stream_results([engine.request("What?", [Stuck()]), engine.request("Hi")])
            print(next(results)[0], started.wait(60), flush=True)
            exec(ending)
        break
    _, status = os.waitpid(pid, 0)
    print("exit", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_program_ends_while_a_page_hangs_and_answers_a_thread_that_outlives_it() -> None:
    """However its engine is left: nothing waits for an image that never comes, such as a download without an answer.

    Python has shut its pools down when the thread asks; the engine says so instead of leaving it waiting.
    """
    done = subprocess.run(program(ENDINGS), capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    *hangs, late, ended = done.stdout.splitlines()
    assert (hangs, ended) == (["1 True", "exit 0"] * 3, "exit 0")
    assert late in ("['error']", "['length']")
