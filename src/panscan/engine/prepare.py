"""Preparation of requests: decode images, plan views, write the prompt, compute the pixels of new views."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, groupby

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from panscan.core import ImageError, PanAndScan, Request, SettingError, View, now, record_waits, recorded_wait
from panscan.core.daemons import native_work
from panscan.core.deadline import Deadline
from panscan.core.lru import LruCache
from panscan.core.process import hold_lock
from panscan.core.tools import ToolUse
from panscan.engine.detokenizer import Detokenizer
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PixelIntake
from panscan.engine.request_state import RequestState, RequestView
from panscan.engine.scheduling.batch import PromptLayout
from panscan.engine.scheduling.kv_blocks import extend_hashes
from panscan.engine.structured.grammar import Grammars
from panscan.engine.structured.tool_calls import ToolCallParser
from panscan.engine.vision import view_key
from panscan.images.files import Page, PageBytes, image_size, in_memory, open_pixels, opens_quickly
from panscan.images.page_levels import copy_levels
from panscan.images.pixels import PixelSpec
from panscan.images.pool import PageLevels
from panscan.images.views import plan_views, view_settings
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Prepared, images_of, plan_images, plan_sizes
from panscan.model.phases import phase

_THREADS = 4  # that decode and resize images; Pillow releases the GIL while it does
_DECODED_BYTES = 10  # peak per pixel: four in Pillow, four in the copy, and what decoders need in addition
_KNOWN_FILES = 4096
_NOT_DECODED: NDArray[np.uint8] = np.empty((0, 0, 4), np.uint8)  # because all views are known
_AGAIN_SECONDS = 10.0  # to read an image whose features were evicted
_handles = count()  # of pixels; of all engines: ranks may still get an image of an earlier one
_MOST_HASHED = 1 << 24  # bytes of a file: hashing them takes a tenth of the time that decoding them would take


class ImageMemory:
    """A byte budget for threads that prepare requests.

    Threads acquire bytes in order of arrival, so that large requests do not starve; no bytes, at once. A request that
    exceeds the whole budget runs alone. ``taken``: bytes that requests hold.

    Args:
        size: total bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.taken = 0
        self._closed = False
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, size: int) -> ExitStack:
        """Wait until ``size`` bytes are free, and acquire them until the result is closed.

        Cannot deadlock: holders finish their preparation and are then computed by the engine, without this thread.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            if not self._available(turn, size):
                with recorded_wait():
                    self._changed.wait_for(lambda: self._available(turn, size))
            self._waiting.remove(turn)
            self.taken += size
            self._changed.notify_all()
        share = ExitStack()
        share.callback(self._release, size)
        return share

    def _release(self, size: int) -> None:
        with self._changed:
            self.taken -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads and let them proceed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _available(self, turn: object, size: int) -> bool:
        if self._closed or not size:
            return True
        return self._waiting[0] is turn and (self.taken == 0 or self.taken + size <= self._size)


class Preparer:
    """Prepares requests. Thread-safe; independent of passes.

    Args:
        loaded: the model whose reader writes prompts.
        options: sets where pixels are computed, and the memory limit of images.
        known: returns whether a view's features are cached, so that its pixels need not be computed now.
        intake: receiver of the pixels.
        pixel_bytes: pixels that may wait on a GPU; None: they are in host memory, as much as decoded images.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: EngineOptions,
        known: Callable[[bytes], bool],
        intake: PixelIntake,
        pixel_bytes: int | None = None,
    ) -> None:
        self._reader = loaded.reader
        self._preprocess = options.preprocess
        self._hashed_blocks = options.block_size if options.prefix_caching else 0
        self._spec = loaded.reader.pixels or PixelSpec()  # without one, the prompt writer refuses images
        self._view_bytes = 3 * self._spec.size**2 * loaded.dtype.itemsize
        self._known, self._intake = known, intake
        # For a follow-up question, decoding a page would take longer than all other work on the host.
        self._files: LruCache[tuple[bytes, int], tuple[tuple[int, int], bytes]] = LruCache(_KNOWN_FILES)
        self._grammars = Grammars(loaded.reader.tokenizer, loaded.eos_ids)
        # Documents have a budget of their own: what takes long to open must not delay other requests.
        image_bytes = round(options.image_memory_gb * 1e9)
        self.memory, self.document_memory = ImageMemory(image_bytes), ImageMemory(image_bytes)
        self.pixel_memory = ImageMemory(image_bytes if pixel_bytes is None else pixel_bytes)
        self._turns = threading.Semaphore(_THREADS)
        self._lock, self._preparing = threading.Lock(), 0

    def close(self) -> None:
        """Wake threads that wait for memory and let them proceed."""
        for memory in (self.memory, self.document_memory, self.pixel_memory):
            memory.close()

    def is_slow(self, request: Request) -> bool:
        """Return whether the preparation may take long: documents, or a large schema that was not compiled yet."""
        if not all(map(opens_quickly, request.images)):
            return True
        return self._grammars.compiles_slowly(request.sampling, self._tool_use(request))

    def _tool_use(self, request: Request) -> ToolUse | None:
        """Return what the answer may call, in the format that the prompt asks for."""
        use = request.tool_use
        return None if use is None else replace(use, format=self._reader.prompts.call_format)

    def prepare(self, state: RequestState) -> None:
        """Set all fields that the request's passes need. Waits until memory for its images is free.

        Raises:
            ImageError: an image cannot be read.
            SettingError: the request is invalid: the number of images does not match the prompt, or the prompt is too
                long.
            TimeoutError: the request has ended.
        """
        state.stamps.preparing = now()
        with record_waits(state.stamps.waits):
            images = images_of(state.request)
            sizes = [image_size(image, state.deadline) for image in images]
            request = replace(state.request, images=images)
            _check_biased(request, self._reader.prompts.vocabulary)
            self._reader.prompts.check_length(request, sum(len(plan.views) for plan in plan_images(request, sizes)))
            memory = self.document_memory if state.slow else self.memory
            with memory.acquire(_DECODED_BYTES * sum(width * height for width, height in sizes)):
                with self._working(state), phase("load"):
                    pages = [
                        self._read(image, view_settings(image, request.pan_and_scan), state.deadline)
                        for image in request.images
                    ]
                state.stamps.loaded = now()
                with phase("preprocess"):
                    with self._working(state), native_work():
                        views = self._write_prompt(state, request, pages)
                    self._compute_pixels(state, pages, views)
        state.stamps.preprocessed = now()

    def place(self, state: RequestState, view: RequestView) -> int:
        """Return the handle of a view's pixels; compute them again if they were consumed or dropped.

        Raises:
            ImageError: the image must be read again, but cannot be read or has changed.
        """
        if view.pixels is None:
            # Rare: its features were evicted before its request could use them. Keeping the images of all running
            # requests would take most of the host's memory.
            name = f"request {state.request.id!r}: image {view.image + 1}"
            # Not native_work(): the engine's thread would wait forever at exit, and the exit waits for that thread.
            try:  # in the engine's thread, which others wait for
                image = images_of(state.request)[: view.image + 1][-1]  # a file may have fewer pages now
                page = _copied(open_pixels(image, deadline=Deadline.after(_AGAIN_SECONDS)), alone=False)
            except TimeoutError:
                raise ImageError(f"{name} took too long to read again") from None
            if page.digest != view.digest:
                raise ImageError(f"{name} changed while it was read")
            self._put(page.levels, [view])
        assert view.pixels is not None  # they were just computed
        return view.pixels

    @contextmanager
    def _working(self, state: RequestState) -> Iterator[None]:
        """Count a request that is being prepared, without those that wait for memory. Few work at once, but documents.

        Raises:
            TimeoutError: the request has ended.
        """
        with nullcontext() if state.slow else hold_lock(self._turns):
            state.deadline.check()
            with self._lock:
                self._preparing += 1
            try:
                yield
            finally:
                with self._lock:
                    self._preparing -= 1

    def _write_prompt(self, state: RequestState, request: Request, pages: list[PageLevels]) -> dict[bytes, RequestView]:
        """Set the fields of a request whose images are read, but for its views; return these by key."""
        use = self._tool_use(state.request)
        state.constraint = self._grammars.start(state.request.sampling, use)
        state.tool_calls = None if use is None else ToolCallParser(use)
        if state.constraint is not None and state.observation is not None:
            raise SettingError("observed requests support no structured answers: remove the schema, grammar or tools")
        plans, prompt = plan_sizes(request, [page.size for page in pages], self._reader)
        views = [
            (self._key(page.digest, view), RequestView(index, page.digest, view, self._intake.forget))
            for index, (page, plan) in enumerate(zip(pages, plans, strict=True))
            for view in plan.views
        ]
        state.result = result = replace(state.result, **Prepared(request, plans, prompt, None).counts())
        if state.request.sampling.prompt_logprobs is not None:
            result.prompt_ids, result.prompt_logprobs = list(prompt.ids), [None] * len(prompt.ids)
        state.layout = PromptLayout.of(prompt.ids, self._reader.prompts.soft_id, [key for key, _ in views])
        state.prompt_tokens, state.limit = len(prompt.ids), len(prompt.ids) + state.max_new_tokens
        state.reuse = not state.computes_prompt
        state.ids = list(prompt.ids)  # behind their number: a cancelled request has no answer
        if self._hashed_blocks:  # here rather than in the engine's thread, which launches the passes
            extend_hashes(state, self._hashed_blocks)
        stop = state.request.sampling.stop if state.observation is None else ()
        state.text = Detokenizer(self._reader.tokenizer, stop)
        return dict(views)

    def _compute_pixels(self, state: RequestState, pages: list[PageLevels], views: dict[bytes, RequestView]) -> None:
        """Set the views of a request, with the pixels of those whose features are not known, once they fit."""
        # Without levels, all views were known; one that was evicted since is read again.
        new = [view for key, view in views.items() if len(pages[view.image].levels) and not self._known(key)]
        memory = self.pixel_memory.acquire(self._view_bytes * len(new))
        try:
            with self._working(state), native_work():
                for image, of_image in groupby(new, lambda view: view.image):
                    self._put(pages[image].levels, [*of_image])
        except BaseException:
            with native_work():
                for view in new:
                    view.drop()
            memory.close()
            raise
        state.memory, state.request_views = memory, views

    def _read(self, image: Page | PageBytes | Image.Image, pan_and_scan: PanAndScan, deadline: Deadline) -> PageLevels:
        """Decode an image, unless its file was decoded before and all its views are known."""
        key = None
        if not isinstance(image, Image.Image):
            image = in_memory(image, _MOST_HASHED)
            if isinstance(image, PageBytes):
                with native_work():
                    key = blake3(image.content).digest(), image.page
                if (known := self._files.get(key)) is not None:
                    size, digest = known
                    views = plan_views(*size, pan_and_scan).views
                    if all(self._known(self._key(digest, view)) for view in views):
                        return PageLevels(size, digest, _NOT_DECODED)
        alone = self._preparing == 1
        page = open_pixels(image, alone=alone, deadline=deadline)
        with native_work():
            read = _copied(page, alone=alone)
        if key is not None:
            self._files.put(key, (read.size, read.digest))
        return read

    def _key(self, digest: bytes, view: View) -> bytes:
        return view_key(digest, view.box, self._preprocess, self._spec)

    def _put(self, levels: NDArray[np.uint8], request_views: list[RequestView]) -> None:
        """Send views of one image to the runner; the image is sent once."""
        by_handle = {next(_handles): view for view in request_views}
        self._intake.put(levels, {handle: view.view for handle, view in by_handle.items()})
        for handle, view in by_handle.items():
            view.pixels = handle


def _check_biased(request: Request, vocabulary: int | None) -> None:
    """Raise a SettingError if a biased token does not exist."""
    largest = max(request.sampling.logit_bias or (), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise SettingError(f"logit_bias: the token {largest} is not one of the model's {vocabulary:,}")


def _copied(page: PageLevels | Image.Image, *, alone: bool) -> PageLevels:
    """Return a copy of a decoded image, which its owner may modify; a child process has made a copy already."""
    if isinstance(page, PageLevels):
        return page
    levels, digest = copy_levels(page, alone=alone)
    return PageLevels(page.size, digest, levels)
