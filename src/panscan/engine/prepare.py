"""A request is prepared: images decoded, views planned, prompt written, pixels of unknown views computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from panscan.core import ImageError, now, waits_noted
from panscan.engine.detokenizer import Detokenizer
from panscan.engine.image_memory import DECODED_BYTES, ImageMemory
from panscan.engine.options import EngineOptions
from panscan.engine.readback import mark, side_stream
from panscan.engine.request_state import RequestState, Sight
from panscan.engine.scheduling.sequence import PromptLayout, Sequence
from panscan.engine.vision import image_digest, view_key
from panscan.images.files import Page, PageBytes, image_size, open_image
from panscan.images.pixels import PixelSpec, levels_of
from panscan.images.views import plan_views
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Read, images_of, plan_request, view_pixels

__all__ = ["Preparer"]


class Preparer:
    """Prepares requests, several at once if several threads call it. Knows nothing of the passes.

    Args:
        loaded: the model whose reader writes prompts.
        options: where pixels are computed.
        known: whether a view's features are at hand, so that its pixels need not be computed now.
    """

    def __init__(self, loaded: Loaded, options: EngineOptions, known: Callable[[bytes], bool]) -> None:
        self._reader, self._device, self._dtype = loaded.reader, loaded.device, loaded.dtype
        self._on_device = options.preprocess == "device"
        self._preprocess = options.preprocess
        self._spec = loaded.reader.pixels or PixelSpec()  # without one, the prompt writer refuses images
        self._known = known
        self._stream = side_stream(self._device) if self._device.type == "cuda" else None
        self.memory = ImageMemory(round(options.image_memory_gb * 1e9))

    def prepare(self, state: RequestState) -> None:
        """Fill in all that the request's passes need. Waits until there is memory for its images.

        Raises:
            ImageError: an image cannot be read.
            SettingError: images and their places do not match, the prompt is too long, and the like.
        """
        state.stamps.preparing = now()
        with waits_noted(state.stamps.waits):
            self._prepare_within_memory(state)

    def see(self, sight: Sight) -> torch.Tensor:
        """A view's pixels, ``[3, size, size]``, for the present stream: those that wait, or computed now.

        Raises:
            ImageError: its image has to be read again, and cannot be, or is another one now.
        """
        if sight.pixels is None:
            self._see_again(sight)
        assert sight.pixels is not None  # they were just computed
        if sight.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sight.ready)
            sight.pixels.record_stream(stream)
        return sight.pixels

    def _prepare_within_memory(self, state: RequestState) -> None:
        images = images_of(state.request)
        sizes = [image_size(image) for image in images]
        views = sum(len(plan_views(*size, state.request.pan_and_scan).views) for size in sizes)
        self._reader.prompts.check_length(state.request, views)
        pixels = views * 3 * self._spec.size**2 * self._dtype.itemsize
        share = self.memory.take(pixels + DECODED_BYTES * sum(width * height for width, height in sizes))
        try:
            if not state.ended:
                self._prepare(state, images)
        except BaseException:
            share.free()
            raise
        # None where features were known already.
        share.shrink(sum(sight.pixels.nbytes for sight in state.sights.values() if sight.pixels is not None))
        state.memory = share

    def _prepare(self, state: RequestState, images: list[Page | PageBytes | Image.Image]) -> None:
        opened = [open_image(image, copy=not self._on_device) for image in images]  # their levels are copied below
        state.stamps.loaded = now()
        plans, prompt = plan_request(Read(replace(state.request, images=opened), opened), self._reader)
        keys: list[bytes] = []
        sights: dict[bytes, Sight] = {}
        for index, plan in enumerate(plans):
            image = opened[index]
            levels = levels_of(image)
            digest = image_digest(levels)
            new: list[Sight] = []
            for view in plan.views:
                keys.append(view_key(digest, view.box, self._preprocess, self._spec))
                if keys[-1] not in sights:
                    sights[keys[-1]] = Sight(state.request, index, digest, view)
                    new += [] if self._known(keys[-1]) else [sights[keys[-1]]]
            self._see_all(levels if self._on_device else image, new)
        state.sights, state.views, state.crops = sights, len(keys), sum(plan.crops for plan in plans)
        state.image_tokens = prompt.image_tokens
        state.sequence = Sequence(
            number=state.number,
            ids=list(prompt.ids),
            prompt_tokens=len(prompt.ids),
            layout=PromptLayout.of(prompt.ids, self._reader.prompts.soft_id, keys),
            limit=len(prompt.ids) + state.max_new_tokens,
            reuse=state.watched is None or not state.watched.forced_tokens.places,
        )
        state.text = Detokenizer(self._reader.tokenizer, state.request.sampling.stop if state.watched is None else ())
        state.stamps.preprocessed = now()

    def _see_again(self, sight: Sight) -> None:
        """Pixels of a view whose features were dropped before its request could use them, or had to be computed again.

        Keeping every running request's images for this rare case would take most of the host's memory.
        """
        found = images_of(sight.request)
        image = open_image(found[sight.index], copy=not self._on_device) if sight.index < len(found) else None
        levels = None if image is None else levels_of(image)
        if image is None or levels is None or image_digest(levels) != sight.digest:
            raise ImageError(f"request {sight.request.id!r}: image {sight.index + 1} changed while it was read")
        self._see_all(levels if self._on_device else image, [sight])

    def _see_all(self, image: Image.Image | NDArray[np.uint8], sights: list[Sight]) -> None:
        """Pixels of views of one image, which goes to the device once."""
        if not sights:
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):  # beside the passes
            views = [sight.view for sight in sights]
            pixels = view_pixels(image, views, self._spec, self._device).to(self._dtype)
            for sight, each in zip(sights, pixels, strict=True):
                sight.pixels = each.clone() if len(sights) > 1 else each  # a slice would keep them all
                sight.ready = None if self._stream is None else mark(self._device)
