"""What the host computes for a request, within which memory, and how its waiting is timed."""

import io
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.conftest import noise, until
from tests.engine.driving import SHORT, Driver, Reference, check_stages, requests, state_of
from tests.footprint import run_measured
from tests.images.test_pool import slow_pdf

from panscan import GenerateRunner, PanAndScan, Request, Result, Sampling
from panscan.core import ImageError, InputError, SettingError, Stamps, daemons, now
from panscan.core.deadline import Deadline
from panscan.engine import prepare
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.prepare import _THREADS, ImageMemory, Preparer
from panscan.engine.request_state import RequestState
from panscan.engine.views import PixelStore
from panscan.images import pool
from panscan.images.encode import encoded_image
from panscan.images.page_levels import copy_levels
from panscan.images.pixels import PixelSpec, levels_of
from panscan.serve import tracing

SIZE = (300, 800)
BOUNDARIES = ("preparing", "loaded", "preprocessed", "scheduled", "vision")
OPTIONS = EngineOptions(kv_cache_gb=0.05)


class Host:
    """A preparer beside a pixel store and a set of views that are known."""

    def __init__(self, runner: GenerateRunner) -> None:
        self.known: set[bytes] = set()
        spec = runner.loaded.reader.pixels or PixelSpec()
        self.pixels = PixelStore(torch.device("cpu"), torch.float32, spec)
        self.preparer = Preparer(runner.loaded, EngineOptions(), lambda key: key in self.known, self.pixels)

    def prepare(self, image: object) -> RequestState:
        """Prepare a question about one image."""
        request = Request(prompt="What is the total?", images=[image], id="one")
        state = state_of(request)
        self.preparer.prepare(state)
        return state


@pytest.fixture
def host(tiny: GenerateRunner) -> Host:
    return Host(tiny)


def traced(host: Host, content: bytes) -> tuple[RequestState, int]:
    """Return a prepared question, and the most bytes that Python objects took meanwhile."""
    tracemalloc.start()
    try:
        return host.prepare(content), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_views_have_one_key_whatever_an_image_comes_in(host: Host, tmp_path: Path) -> None:
    image = noise(*SIZE)
    path = tmp_path / "page.png"
    path.write_bytes(encoded_image(image))
    states = [host.prepare(form) for form in (image, levels_of(image), encoded_image(image), path, str(path))]
    assert len({tuple(state.request_views) for state in states}) == 1
    assert len({tuple(state.ids) for state in states}) == 1
    assert all(view.pixels is not None for state in states for view in state.request_views.values())


def test_a_known_file_is_not_decoded_again(host: Host) -> None:
    content = encoded_image(noise(*SIZE))
    (first, before), levels = traced(host, content), 3 * SIZE[0] * SIZE[1]
    host.known = {*first.request_views}
    again, after = traced(host, content)
    assert after < levels / 4 < levels < before
    assert [*again.request_views] == [*first.request_views]
    assert all(view.pixels is None for view in again.request_views.values())
    for lost in first.request_views:  # one view left the cache
        host.known = {*first.request_views} - {lost}
        assert [key for key, view in host.prepare(content).request_views.items() if view.pixels is not None] == [lost]


def test_pixels_are_computed_again_while_the_program_exits(host: Host) -> None:
    """The exit waits for the engine's thread, which must not wait for the exit."""
    content = encoded_image(noise(*SIZE))
    host.known = {*host.prepare(content).request_views}
    state = host.prepare(content)
    [view, *_] = state.request_views.values()
    thread = threading.Thread(target=host.preparer.place, args=(state, view), daemon=True)
    daemons._work.finish()
    try:
        thread.start()
        thread.join(60)
        assert view.pixels is not None
    finally:
        daemons._work.forget_threads()


def test_failed_preparation_frees_tensors_in_native_work(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes Python's lock when it frees a tensor: elsewhere, that aborts a process that exits."""
    original, freed = PixelStore.put, list[int]()

    def put(store: PixelStore, *given: Any) -> None:
        pixels = torch.zeros(3)  # held by the traceback
        weakref.finalize(pixels, lambda: freed.append(daemons._work.active))
        if store._waiting:
            raise MemoryError
        original(store, *given)
        [waiting] = store._waiting.values()
        weakref.finalize(waiting.pixels, lambda: freed.append(daemons._work.active))

    monkeypatch.setattr(PixelStore, "put", put)
    with Engine(tiny.loaded, EngineOptions()) as engine:
        [result] = engine.generate([Request("What?", [noise(90, 90), noise(90, 90, 1)])])
    assert isinstance(result.error, InputError)
    assert freed == [1, 1, 1]


def test_requests_that_are_prepared_at_once_get_pixels_of_their_own(host: Host) -> None:
    with ThreadPoolExecutor(8) as threads:
        states = [*threads.map(host.prepare, [noise(*SIZE)] * 40)]
    handles = [view.pixels for state in states for view in state.request_views.values()]
    assert len(set(handles)) == len(host.pixels) == len(handles) > 40


def test_pages_of_one_file_are_told_apart(host: Host) -> None:
    stream = io.BytesIO()
    noise(*SIZE).save(stream, "TIFF", save_all=True, append_images=[noise(*SIZE, 1)])
    state = host.prepare(stream.getvalue())
    host.known = {*state.request_views}
    assert len(host.known) == 2 * len(host.prepare(noise(*SIZE)).request_views)
    assert [*host.prepare(stream.getvalue()).request_views] == [*state.request_views]


def test_an_image_may_change_once_it_is_prepared(host: Host) -> None:
    image = noise(*SIZE)
    due = host.prepare(image.copy())
    state = host.prepare(image)
    image.paste(0, (0, 0, *SIZE))
    for key, view in state.request_views.items():
        assert torch.equal(host.pixels.take(view.pixels), host.pixels.take(due.request_views[key].pixels))


def test_preparation_changes_no_result_of_a_cancelled_request(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Result] = []
    request = Request(prompt="What is the total?", images=[noise(*SIZE)], id="one")
    state = state_of(request, on_end=results.append)
    plan_sizes = prepare.plan_sizes

    def cancelled(*arguments: Any) -> Any:
        state.end("cancelled")
        return plan_sizes(*arguments)

    monkeypatch.setattr(prepare, "plan_sizes", cancelled)
    with pytest.raises(TimeoutError):
        host.preparer.prepare(state)
    assert len(host.pixels) == 0
    [result] = results
    assert (result.finish_reason, result.views, result.prompt_tokens, result.pages) == ("cancelled", 0, 0, ())


def test_a_page_that_is_prepared_alone_is_copied_by_threads(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a request that failed."""
    large = noise(30, 40).resize((900, 1200))
    expected = tuple(host.prepare(large).request_views)
    flags: list[bool] = []
    both = threading.Barrier(2)

    def copying(image: Image.Image, *, alone: bool) -> Any:
        flags.append(alone)
        if len(flags) in (3, 4):
            both.wait(60)
        return copy_levels(image, alone=alone)

    monkeypatch.setattr(prepare, "copy_levels", copying)
    assert tuple(host.prepare(large).request_views) == expected
    with pytest.raises(ImageError):
        host.prepare(encoded_image(large)[:1000])
    assert tuple(host.prepare(large).request_views) == expected
    assert flags == [True, True]
    with ThreadPoolExecutor(2) as threads:
        assert all(tuple(state.request_views) == expected for state in threads.map(host.prepare, [large, large]))
    host.prepare(large)
    assert sorted(flags[2:4]) in ([False, False], [False, True]) and flags[4]


SETTINGS = """
from panscan import Engine
settings = dict(dtype="fp32", device="cpu", kv_cache_gb=0.02, max_new_tokens=1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_pages_are_decoded_within_the_budget_and_a_larger_one_alone(tmp_path: Path) -> None:
    for number in range(4):  # 20 million pixels: 80 MB as levels, more while it is decoded
        page = noise(1, 1, number).resize((4500, 4500 - number), Image.Resampling.NEAREST)
        page.save(tmp_path / f"{number}.png", compress_level=1)
    code = """
import ctypes
with Engine.from_pretrained("tiny", image_memory_gb=0.1, **settings) as engine:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: each thread's allocator would keep a page that it freed
    first, *rest = [engine.request("What?", [path]) for path in sys.argv[1:]]
    engine.generate([first])
    one = peak()
    print(*(result.finish_reason for result in engine.generate(rest)), peak() - one)
"""
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    *reasons, growth = run_measured(SETTINGS + code, *paths, forked=True)
    assert reasons == ["length"] * 3
    assert int(growth) < 160, growth  # about 20; without a budget, 320


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_a_question_beyond_the_context_is_refused_before_it_is_encoded() -> None:
    code = """
with Engine.from_pretrained("tiny", **settings) as engine:
    engine.generate([engine.request("What? " * 100)])
    short = peak()
    [result] = engine.generate([engine.request("What is the total? " * 1_000_000)])
    print(peak() - short, type(result.error).__name__, result.error)
"""
    growth, kind, *message = run_measured(SETTINGS + code, forked=True)
    assert kind == "ContextLengthError"
    assert "tokens (0 views); this model's maximum context length is 32768 tokens" in " ".join(message)
    assert int(growth) < 500  # the tokenizer takes gigabytes


def test_a_document_beyond_the_context_is_refused_before_it_is_decoded(tmp_path: Path, tiny: GenerateRunner) -> None:
    broken = noise(60, 60)
    broken.save(tmp_path / "all.tif", save_all=True, append_images=[noise(60, 60)] * 100)
    driver = Driver(tiny, OPTIONS)
    asked = Request("What?", [str(tmp_path / "all.tif")] * 10)
    with pytest.raises(SettingError, match=r"the prompt has at least \d+ tokens \(1010 views\); this model's maximum"):
        driver.add(asked)
    assert driver.loop.preparer.memory.taken == 0


def test_the_bound_refuses_no_prompt_that_fits(tiny: GenerateRunner) -> None:
    writer = tiny.loaded.reader.prompts
    longest = max(tiny.loaded.reader.tokenizer.get_vocab(), key=len)
    for text in ("\n" * 20, longest * 50, "What is the total? " * 40, " " * 5000):
        request = Request(text)
        tokens = len(writer.write(request, []).ids)
        before, writer.context = writer.context, tokens + 1
        try:
            writer.check_length(request, 0)
        finally:
            writer.context = before


def test_shares_wait_for_their_turn() -> None:
    memory = ImageMemory(100)
    first = memory.acquire(60)
    taken: list[str] = []

    def take(name: str, size: int) -> None:
        share = memory.acquire(size)
        taken.append(name)
        share.close()

    with ThreadPoolExecutor(3) as threads:
        large = threads.submit(take, "large", 500)
        until(lambda: memory._waiting)
        small = threads.submit(take, "small", 10)  # fits, but must not overtake for ever
        until(lambda: len(memory._waiting) == 2)
        assert taken == []
        memory.acquire(0).close()  # a request without images does not wait
        first.close()
        large.result(60)
        small.result(60)
    assert taken == ["large", "small"]
    first.close()
    assert memory.taken == 0


def test_closed_memory_wakes_all_waiting_threads() -> None:
    memory = ImageMemory(1)
    memory.acquire(1)
    thread = threading.Thread(target=memory.acquire, args=(1,))
    thread.start()
    memory.close()
    thread.join(60)
    assert not thread.is_alive()


def test_pixels_have_a_budget_of_their_own_which_known_views_do_not_take(tiny: GenerateRunner) -> None:
    """Requests decode within one budget, wait until their new pixels fit into the other, and give both back."""
    driver = Driver(tiny, OPTIONS)
    view = 3 * tiny.loaded.reader.pixels.size**2 * 4
    loop, pixel_bytes = driver.loop, 7 * view
    preparer = Preparer(tiny.loaded, OPTIONS, loop.vision.holds, loop.runner.pixels, pixel_bytes=pixel_bytes)
    loop.preparer = preparer
    first = driver.add(requests()[3])
    assert (preparer.pixel_memory.taken, preparer.memory.taken) == (5 * view, 0)
    other = replace(requests()[3], images=[noise(700, 100, 9)])
    second = state_of(other, 1)
    with ThreadPoolExecutor(1) as thread:
        prepared = thread.submit(preparer.prepare, second)
        until(lambda: preparer.pixel_memory._waiting)
        assert driver.pixels == 5
        driver.run(lambda: len(first.tokens) == 1)
        prepared.result(60)
    assert (preparer.pixel_memory.taken, preparer.memory.taken, driver.pixels) == (5 * view, 0, 5)
    known = driver.add(replace(requests()[3], id="known"))  # while the pixels of another request take the budget
    assert (preparer.pixel_memory.taken, known.results) == (5 * view, [])
    driver.loop.end(second, "cancelled")
    assert (preparer.pixel_memory.taken, driver.pixels) == (0, 0)


def test_requests_that_wait_for_room_delay_no_request_that_needs_none(tiny: GenerateRunner) -> None:
    with Engine(tiny.loaded, OPTIONS) as engine:
        preparer = engine._worker.loop.preparer
        preparer.pixel_memory = ImageMemory(1)
        other = preparer.pixel_memory.acquire(1)
        results: SimpleQueue[Result] = SimpleQueue()
        for seed in range(6):
            engine.start(Request("What?", [noise(90, 90, seed)], sampling=Sampling(1)), None, results.put)
        [answered] = engine.generate([Request("Hi", sampling=Sampling(1))], progress=False)
        assert answered.finish_reason == "length" and results.empty()
        other.close()
        assert {results.get(timeout=60).finish_reason for _ in range(6)} == {"length"}


def test_slow_documents_delay_no_picture_and_can_end(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than threads prepare requests, and than requests may be in preparation."""
    documents = pool.DecodingPool(2, seconds=300.0)
    monkeypatch.setattr(pool, "_DOCUMENTS", documents)
    slow = slow_pdf()
    ended: SimpleQueue[Result] = SimpleQueue()
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02, max_num_seqs=2)) as engine:
        asked = [Request("What is it?", [slow], sampling=Sampling(2), id=f"slow-{number}") for number in range(40)]
        cancels = [engine.start(request, None, ended.put) for request in asked]
        picture = Request("What is it?", [encoded_image(noise(60, 40))], sampling=Sampling(2))
        [result] = engine.generate([picture], progress=False)
        assert (result.error, result.views) == (None, 1)
        assert ended.empty()
        children = [psutil.Process(child.pid) for child in documents._children]
        for cancel in cancels:
            cancel()
        assert {ended.get(timeout=60).finish_reason for _ in cancels} == {"cancelled"}
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        assert engine.stats().waiting == 0
    documents.close()


def held(driver: Driver) -> tuple[int, int, int]:
    """Return the views whose pixels wait, and the bytes of both budgets that are taken."""
    preparer = driver.loop.preparer
    return driver.pixels, preparer.pixel_memory.taken, preparer.memory.taken


def test_requests_that_fail_leave_no_pixels(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that cannot be read, a KV cache that is too small, a tower that fails, memory that ends."""
    driver, fine = Driver(tiny, replace(OPTIONS, kv_cache_gb=0.0025)), noise(90, 90)
    for images in ([encoded_image(fine)[:-4000]], [fine, encoded_image(fine)[:-4000]]):
        with pytest.raises(ImageError):
            driver.add(Request("What?", images))
        assert held(driver) == (0, 0, 0)
    refused = driver.add(replace(requests()[7], sampling=Sampling(max_new_tokens=30_000)))
    assert isinstance(refused.results[0].error, SettingError) and held(driver) == (0, 0, 0)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the tower")

    monkeypatch.setattr(driver.loop.runner, "_encode", fail)
    failed = driver.add(requests()[2])
    assert driver.pixels == 1
    driver.run()
    assert "in the tower" in str(failed.results[0].error)
    assert held(driver) == (0, 0, 0) and len(driver.loop.vision) == 0
    put = driver.loop.runner.pixels.put

    def put_once(*given: Any) -> None:
        if driver.pixels:
            raise MemoryError
        put(*given)

    monkeypatch.setattr(driver.loop.runner.pixels, "put", put_once)
    with pytest.raises(MemoryError):
        driver.add(Request("What?", [fine, noise(90, 90, 1)]))
    assert held(driver) == (0, 0, 0)


def test_an_image_needed_again_is_read_again(tiny: GenerateRunner, reference: Reference, tmp_path: Path) -> None:
    """As after its features were dropped: no decoded image is kept for that case."""
    expected = reference(requests()[3]).token_ids
    requests()[3].images[0].save(tmp_path / "page.png")
    driver = Driver(tiny, OPTIONS)
    again = driver.add(replace(requests()[3], images=[tmp_path / "page.png"]))
    pixels = driver.loop.runner.pixels
    for view in again.job.request_views.values():
        before, view.pixels = pixels.take(view.pixels), None
        assert torch.equal(pixels.take(driver.loop.preparer.place(again.job, view)), before)
        view.pixels = None
    driver.run()
    assert again.tokens == expected
    assert driver.pixels == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_changed_images_fail_alone(tiny: GenerateRunner, reference: Reference, tmp_path: Path, overlap: bool) -> None:
    """The pass computes the other requests of the step. One that waited for the same prefix computes it."""
    fine = [requests()[number] for number in (7, 3)]
    expected = reference.tokens(fine)
    driver = Driver(tiny, replace(OPTIONS, overlap=overlap))
    lost = []
    for seed in range(2):
        path = tmp_path / f"{seed}.png"
        noise(700, 100, seed).save(path)
        lost.append(driver.add(replace(requests()[3], images=[path])))
        lost[-1].job.drop_pixels()
        noise(700, 100, seed + 5).save(path)
    others = [*map(driver.add, fine)]
    driver.step()
    assert all("image 1 changed while it was read" in str(driven.results[0].error) for driven in lost)
    assert (driver.loop.stats().steps, driver.loop.running, driver.loop.waiting) == (1, 1, 1)
    driver.run()
    assert [driven.results[0].error for driven in others] == [None, None]
    assert [driven.tokens for driven in others] == expected
    assert driver.pixels == driver.used == 0


class Watched:
    """An image that notes when it is read, from when to when."""

    reading: ClassVar[list[tuple[float, int]]] = []

    def __init__(self, seed: int) -> None:
        self._levels = np.asarray(noise(700, 500, seed))

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.uint8]:
        self.reading.append((now(), 1))
        copied = self._levels.copy()
        self.reading.append((now(), -1))
        return copied


def test_waiting_for_a_turn_is_queueing(mini: GenerateRunner) -> None:
    """More requests than turns and seats, all accepted at once."""
    images = [Watched(seed) for seed in range(3 * _THREADS)]
    asked = [Request("What is it?", [image], sampling=SHORT, pan_and_scan=PanAndScan(False)) for image in images]
    with Engine(mini.loaded, EngineOptions(kv_cache_gb=0.02, max_num_seqs=2)) as engine:
        results = engine.generate(asked)
    for result in results:
        check_stages(result)
        stamps, stages = result.stamps, result.stamps.stages()
        waited = sum(end - start for start, end in stamps.waits if end <= stamps.loaded)  # for a turn
        assert stages["load"] == pytest.approx(stamps.loaded - stamps.preparing - waited)
        assert stages["queue"] is not None and stages["queue"] >= stamps.preparing - stamps.accepted + waited - 1e-6
    at_once = accumulate(change for _, change in sorted(Watched.reading))
    assert 0 < max(at_once) <= _THREADS, "a request that loads has a turn"


def test_decoder_waits_are_queueing(tiny: GenerateRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only process is busy with another document."""
    noise(300, 300).save(tmp_path / "page.pdf")
    monkeypatch.setattr(pool, "_DOCUMENTS", pool.DecodingPool(1))
    slow = Deadline()
    request = Request("What?", [tmp_path / "page.pdf"], sampling=SHORT)
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02)) as engine, ThreadPoolExecutor(2) as threads:
        busy = threads.submit(pool.read_page, BytesIO(slow_pdf()), None, "slow.pdf", deadline=slow)
        until(lambda: pool._DOCUMENTS._children)
        asked = threads.submit(engine.generate, [request])
        until(lambda: pool._DOCUMENTS._waiting)
        freed = now()
        slow.abandon()
        [result] = asked.result(60)
        assert isinstance(busy.exception(60), TimeoutError)
    pool._DOCUMENTS.close()
    check_stages(result)
    stamps, stages = result.stamps, result.stamps.stages()
    [(start, end)] = stamps.waits
    assert start <= end >= freed and stamps.preparing is not None and stamps.loaded is not None
    assert stages["load"] == pytest.approx(stamps.loaded - stamps.preparing - (end - start))
    assert stages["queue"] is not None and stages["queue"] >= end - start


@pytest.mark.parametrize("stamped", range(6))
def test_stages_of_a_request_that_ends_before_its_first_token_add_up(stamped: int) -> None:
    boundaries = dict(list(zip(BOUNDARIES, [0.1, 0.3, 0.6, 1.0, 1.5], strict=True))[:stamped])
    vision = {"vision_start": 1.2} if "vision" in boundaries else {}
    result = Result.unanswered("a", 0.0)
    result.stamps = Stamps(accepted=0.0, end=2.0, waits=[(0.2, 0.25)], **boundaries, **vision)
    stage = ["queue", "load", "preprocess", "queue", "prefill", "prefill"][stamped]
    assert sum(result.stages_ms.values()) == pytest.approx(2000)
    assert result.stages_ms[stage] > 0
    spans = tracing._stages(result)
    assert spans[-1][2] == 2.0 and all(one[2] == other[1] for one, other in pairwise(spans))
