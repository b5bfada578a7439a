"""The prompt and the pixels of a request under changes: which images, views and tokens a server gives to the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from panscan.core import PanAndScan, Request, View
from panscan.images.pixels import PixelSpec, levels_of, levels_to_device, normalised, pixels_torch, resized_pil
from panscan.images.views import ViewPlan, plan_views
from panscan.model.checkpoint import Reader
from panscan.model.inputs import DecodedRequest
from panscan.model.prompt import conversation

_SYSTEM = "You are a helpful assistant."
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ChangedPrompt:
    """Token ids of a prompt, the images in it, and their views."""

    ids: list[int]
    images: list[Image.Image]
    plans: list[ViewPlan]


def changed_prompt(read: DecodedRequest, changes: Collection[str], reader: Reader) -> ChangedPrompt:
    """Return the prompt of a request under changes. Those that concern something else have no effect.

    A raw request has no turns, so changes of turns have no effect on it either.

    Args:
        read: the request and its decoded images.
        changes: names of :data:`panscan.verify.hypotheses.CHANGES`.
        reader: reader of the checkpoint.
    """
    request, images = read.request, list(read.images)
    if not request.raw:
        kept = range(len(images))
        if "images-ignored" in changes:
            kept = range(0)
        elif "first-image-only" in changes:
            kept = kept[:1]
        elif "last-image-only" in changes:
            kept = kept[-1:]
        numbers = iter(range(len(images)))
        turns = [
            {**turn, "content": [p for p in turn["content"] if p["type"] != "image" or next(numbers, None) in kept]}
            for turn in conversation(request)
        ]
        images = [images[number] for number in kept]
        turns = _changed_turns(turns, changes)
        request = replace(request, prompt=None, system=None, messages=turns, images=images)
        request = _templated(request, turns, changes, reader)
    settings = _pan_and_scan(request.pan_and_scan, changes)
    plans = [plan_views(*image.size, settings) for image in images]
    around = "" if "no-image-line-breaks" in changes else "\n\n"
    prompt = reader.prompts.write(request, [plan.crops for plan in plans], around_view=around)
    return ChangedPrompt(_changed_ids(prompt.ids, changes, reader), images, plans)


def changed_pixels(prompt: ChangedPrompt, changes: Collection[str], spec: PixelSpec) -> torch.Tensor:
    """Return normalised pixels of all views under changes: float32 ``[views, 3, size, size]`` on the CPU."""
    if "clip-normalisation" in changes:
        spec = replace(spec, mean=_CLIP_MEAN, std=_CLIP_STD)
    resize = next((_RESIZE[change] for change in changes if change in _RESIZE), resized_pil)
    pixels = []
    for image, plan in zip(prompt.images, prompt.plans, strict=True):
        source = Image.fromarray(levels_of(image)[..., ::-1]) if "bgr-channels" in changes else image
        if "resize-torchvision" in changes:
            pixels.append(pixels_torch(levels_to_device(levels_of(source), "cpu"), plan.views, spec))
        else:
            pixels.append(normalised(torch.from_numpy(resize(source, plan.views, spec)), spec))
    return torch.cat(pixels)


def _changed_turns(turns: list[dict[str, Any]], changes: Collection[str]) -> list[dict[str, Any]]:
    if "image-after-text" in changes:  # a stable sort keeps the order of each kind
        turns = [{**turn, "content": sorted(turn["content"], key=lambda p: p["type"] == "image")} for turn in turns]
    if "system-prompt" in changes and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": [{"type": "text", "text": _SYSTEM}]}, *turns]
    return turns


def _templated(request: Request, turns: Sequence[dict[str, Any]], changes: Collection[str], reader: Reader) -> Request:
    """Return the request, raw if the server does not use the checkpoint's template."""
    marks = (reader.prompts.boi, getattr(reader.tokenizer, "image_token", None))

    def content(turn: dict[str, Any]) -> str:
        return "".join(marks[0] if part["type"] == "image" else plain(part["text"]) for part in turn["content"])

    def plain(text: str) -> str:  # a raw prompt would take an image for each mark
        for mark in filter(None, marks):
            text = text.replace(mark, "")
        return text

    if "chatml-template" in changes:
        text = "".join(f"<|im_start|>{turn['role']}\n{content(turn)}<|im_end|>\n" for turn in turns)
        return replace(request, messages=None, prompt=f"{text}<|im_start|>assistant\n", raw=True)
    if "no-template" in changes:
        return replace(request, messages=None, prompt="\n".join(map(content, turns)), raw=True)
    return request


def _pan_and_scan(settings: PanAndScan, changes: Collection[str]) -> PanAndScan:
    if "no-pan-and-scan" in changes:
        return replace(settings, enabled=False)
    return PanAndScan() if "pan-and-scan" in changes else settings


def _changed_ids(ids: list[int], changes: Collection[str], reader: Reader) -> list[int]:
    tokenizer = reader.tokenizer
    if "split-line-breaks" in changes:
        ids = _split_line_breaks(ids, reader)
    if "no-model-turn" in changes:
        turn = tokenizer.convert_tokens_to_ids("<start_of_turn>")
        if turn in ids:
            ids = ids[: len(ids) - 1 - ids[::-1].index(turn)]
    bos = tokenizer.bos_token_id
    if "no-bos" in changes and ids[0] == bos:
        return ids[1:]
    return [bos, *ids] if "double-bos" in changes else ids


def _split_line_breaks(ids: list[int], reader: Reader) -> list[int]:
    """Tokenise the two line breaks on each side of an image separately from other line breaks."""
    tokenizer = reader.tokenizer
    start, end = (tokenizer.convert_tokens_to_ids(mark) for mark in (reader.prompts.boi, reader.prompts.eoi))
    known = tokenizer.get_vocab()
    breaks = {known["\n" * count]: count for count in range(1, 32) if "\n" * count in known}
    split: list[int] = []
    for at, token in enumerate(ids):
        extra = breaks.get(token, 0) - 2
        before, after = ids[at + 1 : at + 2] == [start], at > 0 and ids[at - 1] == end
        if extra <= 0 or not (before or after):
            split.append(token)
        elif before:
            split += [known["\n" * extra], known["\n\n"]]
        else:
            split += [known["\n\n"], known["\n" * extra]]
    return split


_Resize = Callable[[Image.Image, Sequence[View], PixelSpec], NDArray[np.uint8]]
"""An RGB image, its views and the size to uint8 ``[views, size, size, 3]``."""


def _by_filter(
    resample: Image.Resampling, image: Image.Image, views: Sequence[View], spec: PixelSpec
) -> NDArray[np.uint8]:
    square = (spec.size, spec.size)
    return np.stack([np.asarray(image.crop(view.box).resize(square, resample)) for view in views])


def _without_antialiasing(image: Image.Image, views: Sequence[View], spec: PixelSpec) -> NDArray[np.uint8]:
    levels = torch.from_numpy(levels_of(image).copy()).permute(2, 0, 1)[None].float()
    resized = []
    for view in views:
        left, top, right, bottom = view.box
        part = functional.interpolate(
            levels[:, :, top:bottom, left:right], size=(spec.size, spec.size), mode="bilinear"
        )
        resized.append(part[0].round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
    return np.stack(resized)


def _letterboxed(image: Image.Image, views: Sequence[View], spec: PixelSpec) -> NDArray[np.uint8]:
    """Resize as llama.cpp does: two samples per axis, rounded down, centred on black."""
    levels, size = levels_of(image).astype(np.float32), spec.size
    boxed = np.zeros((len(views), size, size, 3), np.uint8)
    for square, view in zip(boxed, views, strict=True):
        left, top, right, bottom = view.box
        part = levels[top:bottom, left:right]
        scale = min(size / view.size[0], size / view.size[1])
        width, height = (min(int(np.ceil(np.float32(side * scale))), size) for side in view.size)
        part = _interpolated(_interpolated(part, height, 0), width, 1)
        row, column = (size - height) // 2, (size - width) // 2
        square[row : row + height, column : column + width] = part.astype(np.uint8)
    return boxed


def _interpolated(levels: NDArray[np.float32], size: int, axis: int) -> NDArray[np.float32]:
    """Linear interpolation along an axis, from the first sample on; the last source sample is never reached."""
    count = levels.shape[axis]
    at = np.arange(size, dtype=np.float32) * np.float32((count - 1) / size)
    floor = np.minimum(at.astype(np.int64), max(0, count - 2))
    share = (at - floor).reshape([-1 if each == axis else 1 for each in range(levels.ndim)]).astype(np.float32)
    low = levels.take(floor, axis)
    high = levels.take(np.minimum(floor + 1, count - 1), axis)
    interpolated: NDArray[np.float32] = low + (high - low) * share
    return interpolated


_RESIZE: dict[str, _Resize] = {
    "resize-letterbox": _letterboxed,
    "resize-no-antialias": _without_antialiasing,
    "resize-bicubic": partial(_by_filter, Image.Resampling.BICUBIC),
    "resize-lanczos": partial(_by_filter, Image.Resampling.LANCZOS),
    "resize-nearest": partial(_by_filter, Image.Resampling.NEAREST),
}
