"""What a request becomes under changes: its prompt and pixels, and the final hidden states that the model computes.

Changed weights are those that quantised checkpoints hold, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from panscan.core import PanAndScan, Request, View
from panscan.core.foreign import JsonObject
from panscan.images.pixels import PixelSpec, levels_of, normalised, resized_pil, view_pixels
from panscan.images.views import ViewPlan, plan_views
from panscan.model.checkpoint import Reader
from panscan.model.linear.quantized import WeightFormat, quantized_linear
from panscan.model.prompt import conversation
from panscan.verdict.float32 import converted_model
from panscan.verify.hypotheses import CHANGES, Changes

_SYSTEM = "You are a helpful assistant."
_KEPT_IMAGES = {"images-ignored": slice(0), "first-image-only": slice(1), "last-image-only": slice(-1, None)}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_GROUP = 32  # weights that share a scale in 4 bits


@dataclass(frozen=True, slots=True)
class ChangedPrompt:
    """Token ids of a prompt, the images in it, and their views."""

    ids: list[int]
    images: list[Image.Image]
    plans: list[ViewPlan]


def changed_prompt(request: Request, changes: Changes, reader: Reader) -> ChangedPrompt:
    """Return the prompt of a request under changes. Those that concern something else have no effect.

    A raw request has no turns, so changes of turns have no effect on it either.

    Args:
        request: the request, with decoded images.
        changes: names of :data:`panscan.verify.hypotheses.CHANGES`.
        reader: reader of the checkpoint.
    """
    images: list[Image.Image] = list(request.images)
    if not request.raw:
        numbers = next((_KEPT_IMAGES[change] for change in changes if change in _KEPT_IMAGES), slice(None))
        selected = range(len(images))[numbers]
        count = iter(range(len(images)))
        turns = [
            {**turn, "content": [p for p in turn["content"] if p["type"] != "image" or next(count, None) in selected]}
            for turn in conversation(request)
        ]
        images = images[numbers]
        if "image-after-text" in changes:  # a stable sort keeps the order of each kind
            turns = [{**turn, "content": sorted(turn["content"], key=lambda p: p["type"] == "image")} for turn in turns]
        if "system-prompt" in changes and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": [{"type": "text", "text": _SYSTEM}]}, *turns]
        request = replace(request, prompt=None, system=None, messages=turns, images=images)
        request = _templated(request, turns, changes, reader)
    settings = request.pan_and_scan
    if "no-pan-and-scan" in changes:
        settings = replace(settings, enabled=False)
    elif "pan-and-scan" in changes:
        settings = PanAndScan()
    plans = [plan_views(*image.size, settings) for image in images]
    around = "" if "no-image-line-breaks" in changes else "\n\n"
    prompt = reader.prompts.write(request, [plan.crops for plan in plans], around_view=around)
    return ChangedPrompt(_changed_ids(prompt.ids, changes, reader), images, plans)


def changed_pixels(prompt: ChangedPrompt, changes: Changes, spec: PixelSpec) -> torch.Tensor:
    """Return normalised pixels of all views under changes: float32 ``[views, 3, size, size]`` on the CPU."""
    if "clip-normalisation" in changes:
        spec = replace(spec, mean=_CLIP_MEAN, std=_CLIP_STD)
    resize = next((_RESIZE[change] for change in changes if change in _RESIZE), resized_pil)
    pixels = []
    for image, plan in zip(prompt.images, prompt.plans, strict=True):
        source = Image.fromarray(levels_of(image)[..., ::-1]) if "bgr-channels" in changes else image
        if "resize-torchvision" in changes:
            pixels.append(view_pixels(source, plan.views, spec, "cpu", on_device=True))
        else:
            pixels.append(normalised(torch.from_numpy(resize(source, plan.views, spec)), spec))
    return torch.cat(pixels)


def _templated(request: Request, turns: Sequence[JsonObject], changes: Changes, reader: Reader) -> Request:
    """Return the request, raw if the server does not use the checkpoint's template."""
    marks = (reader.prompts.boi, getattr(reader.tokenizer, "image_token", None))

    def content(turn: JsonObject) -> str:
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


def _changed_ids(ids: list[int], changes: Changes, reader: Reader) -> list[int]:
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
    pair = known["\n\n"]
    rest = {known["\n" * n]: known["\n" * (n - 2)] for n in range(3, 32) if "\n" * n in known}
    split: list[int] = []
    for previous, token, following in zip([None, *ids], ids, [*ids[1:], None], strict=False):
        if token in rest and following == start:
            split += [rest[token], pair]
        elif token in rest and previous == end:
            split += [pair, rest[token]]
        else:
            split.append(token)
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
    share = (
        (at - floor).reshape([-1 if dimension == axis else 1 for dimension in range(levels.ndim)]).astype(np.float32)
    )
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


def final_states(
    model: Any,
    ids: Sequence[int],
    features: torch.Tensor | None,
    soft_id: int | None,
    last: int,
    changes: Changes = (),
    chunk: int = 1024,
) -> torch.Tensor:
    """Return the final hidden states ``[last, hidden]`` of the last positions of a sequence, in one prefill.

    A text is computed in chunks: the masks of a long one would not fit into memory.

    Args:
        model: model with eager attention.
        ids: token ids of prompt and answer, not empty.
        features: image features of the views in order, ``[views, image tokens, hidden]``; None without images.
        soft_id: id of image tokens; None for a text-only checkpoint.
        last: number of positions.
        changes: names of changes; those of the mask and the features count.
        chunk: positions of a text that are computed at once.
    """
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor(ids, device=device)
    image = tokens == (-1 if soft_id is None else soft_id)
    embedded = model.get_input_embeddings()(tokens.masked_fill(image, 0))
    if features is not None:
        shown = features.flatten(0, 1).to(embedded)
        embedded[image] = torch.zeros_like(shown) if "zero-image-features" in changes else shown
    text = getattr(model.model, "language_model", model.model)
    window = None if "no-sliding-window" in changes else int(text.config.sliding_window)
    ends = _ends(image, changes)
    chunk = len(ids) if window is None or features is not None else chunk  # the cache keeps a window of keys
    hidden, cache = [], None
    for rows in torch.split(torch.arange(len(ids), device=device), chunk):
        masks = {"full_attention": _mask(ends, rows, None, embedded.dtype)}
        masks["sliding_attention"] = _mask(ends, rows, window, embedded.dtype)
        done = text(
            inputs_embeds=embedded[None, rows],
            attention_mask=masks,
            position_ids=rows[None],
            past_key_values=cache,
            use_cache=len(ids) > chunk,
        )
        cache = done.past_key_values
        hidden.append(done.last_hidden_state[0])
    return torch.cat(hidden)[-last:]


def _ends(image: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Return the key end of each position, int64 ``[positions]``: after its image block, or after itself for text.

    Args:
        image: bool ``[positions]``: image tokens. Blocks of two images never touch: marks stand between them.
        changes: names of changes.
    """
    positions = torch.arange(len(image), device=image.device)
    if "causal-image-tokens" in changes or not bool(image.any()):
        return positions + 1
    last = image & ~torch.cat([image[1:], image.new_zeros(1)])
    stops = positions[last] + 1
    if "joined-image-blocks" in changes:
        stops = stops[-1:]
    ends = stops[torch.searchsorted(stops, positions[image], right=True)]
    return (positions + 1).masked_scatter(image, ends)


def _mask(ends: torch.Tensor, rows: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that eager attention adds to scores, ``[1, 1, rows, keys]``: 0 where it attends.

    Keys are those of earlier chunks, of which local layers keep a window, and of this chunk.
    """
    first, stop = int(rows[0]), int(rows[-1]) + 1
    keys = torch.arange(0 if window is None else max(0, first - window + 1), stop, device=ends.device)
    seen = keys < ends[rows, None]
    if window is not None:
        seen &= keys > rows[:, None] - window
    hidden = torch.zeros(seen.shape, dtype=dtype, device=ends.device)
    return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


@contextmanager
def changed_model(model: Any, changes: Changes, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Make a model compute in ``dtype`` with changed weights, RoPE or embedding scale while in the block.

    Parameters and buffers are the same objects with the same values afterwards.

    Raises:
        UnsupportedError: see :func:`panscan.verdict.float32.converted_model`.
    """
    text = getattr(model.model, "language_model", model.model)
    linear = next((partial(_stored_weights, change) for change in changes if CHANGES[change].aspect == "weights"), None)
    values: dict[tuple[Any, str], torch.Tensor] = {}
    if "no-rope-factor" in changes:
        name = "full_attention_inv_freq"
        values[text.rotary_emb, name] = getattr(text.rotary_emb, name) * rope_factor(model)
    if "exact-embedding-scale" in changes:
        scale = text.embed_tokens.embed_scale
        values[text.embed_tokens, "embed_scale"] = torch.full_like(scale.float(), text.config.hidden_size**0.5)
    originals = {buffer: getattr(*buffer) for buffer in values}
    try:
        for buffer, value in values.items():
            setattr(*buffer, value)
        with converted_model(model, dtype, linear):
            yield
    finally:
        for buffer, value in originals.items():
            setattr(*buffer, value)


def rope_factor(model: Any) -> float:
    """Return the linear RoPE scaling factor of the global layers; 1 without scaling."""
    text = getattr(model.model, "language_model", model.model)
    parameters = text.config.rope_parameters["full_attention"]
    return float(parameters.get("factor", 1)) if parameters.get("rope_type") == "linear" else 1.0


def _stored_weights(change: str, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 weights as panscan's format of a change stores them; those of other servers deviate as much."""
    rows = weight.flatten()[None] if change == "fp8-weights" else weight  # vLLM has one scale per matrix in fp8
    padded = functional.pad(rows, (0, -rows.shape[1] % _GROUP))
    outputs, inputs = padded.shape
    weight_format = WeightFormat(change.removesuffix("-weights"), group_size=_GROUP)
    linear = quantized_linear(inputs, outputs, weight_format, scale_type=torch.float32, device=weight.device)
    linear.quantize(padded)
    return linear.dequantized()[:, : rows.shape[1]].reshape(weight.shape)
