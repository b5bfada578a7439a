"""What the host computes for a request: a page that is known is neither decoded nor resized again."""

import io
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.conftest import noise
from tests.engine.driving import state_of

from panscan import GenerateRunner, Request, Result
from panscan.core import ImageError, InputError, daemons
from panscan.engine import prepare
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.prepare import Preparer
from panscan.engine.request_state import RequestState
from panscan.engine.views import PixelStore
from panscan.images.encode import encoded_image
from panscan.images.page_levels import copy_levels
from panscan.images.pixels import PixelSpec, levels_of

SIZE = (300, 800)


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
    states = [host.prepare(each) for each in (image, levels_of(image), encoded_image(image), path, str(path))]
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


def test_pixels_of_a_known_file_are_computed_when_its_views_are_dropped_later(host: Host) -> None:
    content = encoded_image(noise(*SIZE))
    first = host.prepare(content)
    host.known = {*first.request_views}
    again = host.prepare(content)
    for key in again.request_views:
        expected, taken = (host.preparer.place(each, each.request_views[key]) for each in (first, again))
        assert torch.equal(host.pixels.take(expected), host.pixels.take(taken))


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


def test_failed_preparation_frees_its_tensors_in_native_work(
    tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes Python's lock when it frees a tensor: elsewhere, that aborts a process that exits."""
    original, freed = PixelStore.put, list[int]()

    def put(store: PixelStore, *given: Any) -> None:
        pixels = torch.zeros(3)  # held by the traceback
        weakref.finalize(pixels, lambda: freed.append(daemons._work._active))
        if store._waiting:
            raise MemoryError
        original(store, *given)
        [waiting] = store._waiting.values()
        weakref.finalize(waiting.pixels, lambda: freed.append(daemons._work._active))

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


def test_a_file_with_other_content_is_another_image(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(encoded_image(noise(*SIZE)))
    first = host.prepare(path)
    host.known = {*first.request_views}
    path.write_bytes(encoded_image(noise(*SIZE, 1)))
    second = host.prepare(path)
    assert not {*first.request_views} & {*second.request_views}
    assert all(view.pixels is not None for view in second.request_views.values())


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
    found: list[bool] = []
    both = threading.Barrier(2)

    def copying(image: Image.Image, *, alone: bool) -> Any:
        found.append(alone)
        if len(found) in (3, 4):
            both.wait(60)
        return copy_levels(image, alone=alone)

    monkeypatch.setattr(prepare, "copy_levels", copying)
    assert tuple(host.prepare(large).request_views) == expected
    with pytest.raises(ImageError):
        host.prepare(encoded_image(large)[:1000])
    assert tuple(host.prepare(large).request_views) == expected
    assert found == [True, True]
    with ThreadPoolExecutor(2) as threads:
        assert all(tuple(state.request_views) == expected for state in threads.map(host.prepare, [large, large]))
    host.prepare(large)
    assert sorted(found[2:4]) in ([False, False], [False, True]) and found[4]
