"""A request is prepared: images decoded, views planned, prompt written, pixels of unknown views computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from panscan.core import View, now, waits_noted
from panscan.engine.detokenizer import Detokenizer
from panscan.engine.options import EngineOptions
from panscan.engine.readback import mark, side_stream
from panscan.engine.request_state import RequestState, Sight
from panscan.engine.scheduling.sequence import PromptLayout, Sequence
from panscan.engine.vision import image_digest, view_key
from panscan.images.pixels import PixelSpec, levels_of
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import plan_request, read_images, view_pixels

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

    def prepare(self, state: RequestState) -> None:
        """Fill in all that the request's passes need.

        Raises:
            ImageError: an image cannot be read.
            SettingError: images and their places do not match, and the like.
        """
        state.stamps.preparing = now()
        with waits_noted(state.stamps.waits):
            read = read_images(state.request, copy=not self._on_device)  # their levels are copied below
        state.stamps.loaded = now()
        plans, prompt = plan_request(read, self._reader)
        keys: list[bytes] = []
        sights: dict[bytes, Sight] = {}
        for image, plan in zip(read.images, plans, strict=True):
            levels = levels_of(image)
            digest = image_digest(levels)
            for view in plan.views:
                keys.append(view_key(digest, view.box, self._preprocess, self._spec))
                sights.setdefault(keys[-1], Sight(levels if self._on_device else image, view))
        self._see_all([sight for key, sight in sights.items() if not self._known(key)])
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

    def see(self, sight: Sight) -> torch.Tensor:
        """A view's pixels, ``[3, size, size]``, for the present stream: those that wait, or computed now."""
        if sight.pixels is None:
            self._see_all([sight])
        assert sight.pixels is not None  # they were just computed
        if sight.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sight.ready)
            sight.pixels.record_stream(stream)
        return sight.pixels

    def _see_all(self, sights: list[Sight]) -> None:
        """Pixels of many views, image by image: an image goes to the device once."""
        for _, group in groupby(sights, key=lambda sight: id(sight.image)):
            same = list(group)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):  # beside the passes
                pixels = self._pixels(same[0].image, [each.view for each in same])
                for sight, each in zip(same, pixels, strict=True):
                    sight.pixels = each.clone() if len(same) > 1 else each  # a slice would keep them all
                    sight.ready = None if self._stream is None else mark(self._device)

    def _pixels(self, image: Image.Image | NDArray[np.uint8], views: list[View]) -> torch.Tensor:
        return view_pixels(image, views, self._spec, self._device).to(self._dtype)
