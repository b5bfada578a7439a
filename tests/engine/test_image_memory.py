"""What requests in preparation take: images within a budget, prompts refused before they are encoded."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from PIL import Image
from tests.conftest import noise
from tests.engine.driving import Driver, requests, state_of
from tests.footprint import run_measured

from panscan import Engine, GenerateRunner, Request, Result, Sampling
from panscan.core import ImageError, SettingError
from panscan.engine.options import EngineOptions
from panscan.engine.prepare import ImageMemory, Preparer

OPTIONS = EngineOptions(kv_cache_gb=0.05)


SETTINGS = """
from panscan import Engine
settings = dict(dtype="fp32", device="cpu", kv_cache_gb=0.02, max_new_tokens=1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_pages_are_decoded_within_the_budget_and_a_larger_one_alone(tmp_path: Path) -> None:
    for number in range(4):  # 20 million pixels: 80 MB as levels, more while it is decoded
        noise(1, 1, number).resize((4500, 4500 - number), Image.Resampling.NEAREST).save(
            tmp_path / f"{number}.png", compress_level=1
        )
    code = """
import ctypes
with Engine.from_pretrained("tiny", image_memory_gb=0.1, **settings) as engine:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: each thread's allocator would keep a page that it freed
    first, *rest = [engine.request("What?", [path]) for path in sys.argv[1:]]
    engine.generate([first])
    one = peak()
    print(*(result.finish_reason for result in engine.generate(rest)), peak() - one)
"""
    *reasons, growth = run_measured(
        SETTINGS + code, *(str(tmp_path / f"{number}.png") for number in range(4)), forked=True
    )
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
        while not memory._waiting:
            pass
        small = threads.submit(take, "small", 10)  # fits, but must not overtake for ever
        while len(memory._waiting) < 2:
            pass
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
    preparer = driver.loop.preparer = Preparer(
        tiny.loaded, OPTIONS, driver.loop.vision.holds, driver.loop.runner.pixels, pixel_bytes=7 * view
    )
    first = driver.add(requests()[3])
    assert (preparer.pixel_memory.taken, preparer.memory.taken) == (5 * view, 0)
    other = replace(requests()[3], images=[noise(700, 100, 9)])
    second = state_of(other, 1)
    with ThreadPoolExecutor(1) as thread:
        prepared = thread.submit(preparer.prepare, second)
        while not preparer.pixel_memory._waiting:
            pass
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


def test_memory_is_given_back_however_a_request_ends(tiny: GenerateRunner, tmp_path: Path) -> None:
    driver = Driver(tiny, OPTIONS)
    memory = driver.loop.preparer.pixel_memory
    answered, cancelled = driver.add(requests()[3]), driver.add(requests()[7])
    assert memory.taken > 0 and driver.pixels == 5 + len(cancelled.job.request_views)
    driver.loop.end(cancelled.job, "cancelled")
    assert driver.pixels == 5
    driver.run(lambda: len(answered.tokens) == 1)
    assert (memory.taken, driver.pixels) == (0, 0)
    noise(90, 90).save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    for images in ([content[:-4000]], [noise(90, 90), content[:-4000]]):
        with pytest.raises(ImageError):
            driver.add(Request("What?", images))
        assert (memory.taken, driver.pixels) == (0, 0)


def test_a_second_image_that_fails_drops_the_first(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels of the first image wait already when the second fails."""
    driver = Driver(tiny, OPTIONS)
    put, calls = driver.loop.runner.pixels.put, iter([True, False])

    def failing(*given: Any) -> Any:
        if next(calls):
            return put(*given)
        assert driver.pixels == 1
        raise MemoryError

    monkeypatch.setattr(driver.loop.runner.pixels, "put", failing)
    with pytest.raises(MemoryError):
        driver.add(Request("What?", [noise(90, 90), noise(90, 90, 1)]))
    assert (driver.loop.preparer.pixel_memory.taken, driver.loop.preparer.memory.taken, driver.pixels) == (0, 0, 0)


def test_requests_that_fail_drop_their_pixels(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower that fails; and requests that are longer than the KV cache, which are prepared and then refused."""
    driver = Driver(tiny, replace(OPTIONS, kv_cache_gb=0.0025))
    refused = driver.add(replace(requests()[7], sampling=Sampling(max_new_tokens=30_000)))
    assert isinstance(refused.results[0].error, SettingError) and driver.pixels == 0

    def fail(*_: Any) -> None:
        raise RuntimeError("in the tower")

    monkeypatch.setattr(driver.loop.runner, "_encode", fail)
    failed = driver.add(requests()[2])
    assert driver.pixels == 1
    driver.run()
    assert "in the tower" in str(failed.results[0].error)
    assert (driver.pixels, driver.loop.preparer.pixel_memory.taken, len(driver.loop.vision)) == (0, 0, 0)


def test_two_requests_that_show_a_view_leave_no_pixels(tiny: GenerateRunner) -> None:
    """Both have pixels of it, one pass encodes it once."""
    driver = Driver(tiny, OPTIONS)
    both = [driver.add(replace(requests()[3], id=name)) for name in ("one", "two")]
    assert driver.pixels == 2 * 5
    driver.run(lambda: all(each.tokens for each in both))
    assert driver.pixels == 0
    assert driver.loop.stats().views_encoded == 5


def test_an_image_that_is_needed_again_is_read_again(tiny: GenerateRunner, tmp_path: Path) -> None:
    """As after its features were dropped: no decoded image is kept for that case."""
    place = tmp_path / "page.png"
    noise(700, 100).save(place)
    due = Driver(tiny, OPTIONS)
    expected = due.add(replace(requests()[3], images=[str(place)]))
    due.run()
    driver = Driver(tiny, OPTIONS)
    again = driver.add(replace(requests()[3], images=[str(place)]))
    pixels = driver.loop.runner.pixels
    for view in again.job.request_views.values():
        before, view.pixels = pixels.take(view.pixels), None
        assert torch.equal(pixels.take(driver.loop.preparer.place(again.job, view)), before)
        view.pixels = None
    driver.run()
    assert again.tokens == expected.tokens
    assert driver.pixels == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_images_that_changed_fail_their_own_requests(tiny: GenerateRunner, tmp_path: Path, overlap: bool) -> None:
    """The pass computes the other requests of the step. One that waited for the same prefix computes it."""
    driver = Driver(tiny, replace(OPTIONS, overlap=overlap))
    asked = [replace(requests()[3], images=[str(tmp_path / f"{number}.png")]) for number in range(2)]
    for seed, request in enumerate(asked):
        noise(700, 100, seed).save(request.images[0])
    lost = [*map(driver.add, asked)]
    for seed, (request, each) in enumerate(zip(asked, lost, strict=True)):
        each.job.drop_pixels()
        noise(700, 100, seed + 5).save(request.images[0])
    others = [driver.add(requests()[number]) for number in (7, 3)]
    driver.step()
    assert all("image 1 changed while it was read" in str(each.results[0].error) for each in lost)
    assert (driver.loop.stats().steps, driver.loop.running, driver.loop.waiting) == (1, 1, 1)
    driver.run()
    alone = Driver(tiny, OPTIONS)
    for number, each in zip((7, 3), others, strict=True):
        expected = alone.add(requests()[number])
        alone.run()
        assert each.results[0].error is None and each.tokens == expected.tokens
    assert driver.pixels == driver.used == 0
