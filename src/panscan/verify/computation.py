"""Final hidden states of one sequence, with changes to the mask, the weights, the image features or the positions.

Changed weights are those that quantised checkpoints hold, in float32: rounded to the grid of a format and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from panscan.verdict.float32 import converted_model, one_view_at_a_time

_SCALE = "exact-embedding-scale"
_GROUP = 32  # weights
_FP8 = torch.float8_e4m3fn


def view_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return features ``[views, image tokens, hidden]`` of normalised pixels ``[views, 3, size, size]``."""
    with one_view_at_a_time(model):
        features: torch.Tensor = model.model.get_image_features(pixels, return_dict=True).pooler_output
    return features


def final_states(
    model: Any,
    ids: Sequence[int],
    features: torch.Tensor | None,
    soft_id: int | None,
    last: int,
    changes: Collection[str] = (),
) -> torch.Tensor:
    """Return the final hidden states ``[last, hidden]`` of the last positions of a sequence, in one prefill.

    Args:
        model: model with eager attention.
        ids: token ids of prompt and answer, not empty.
        features: image features of the views in order, ``[views, image tokens, hidden]``; None without images.
        soft_id: id of image tokens; None for a text-only checkpoint.
        last: number of positions.
        changes: names of changes; those of the mask and the features count.
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
    masks = {"full_attention": None, "sliding_attention": window}
    hidden = text(
        inputs_embeds=embedded[None],
        attention_mask={kind: _mask(ends, width, embedded.dtype) for kind, width in masks.items()},
        use_cache=False,
    ).last_hidden_state
    kept: torch.Tensor = hidden[0, -last:]
    return kept


def _ends(image: torch.Tensor, changes: Collection[str]) -> torch.Tensor:
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


def _mask(ends: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that eager attention adds to scores, ``[1, 1, positions, positions]``: 0 where it attends."""
    keys = torch.arange(len(ends), device=ends.device)
    seen = keys < ends[:, None]
    if window is not None:
        seen &= keys > keys[:, None] - window
    hidden = torch.zeros(seen.shape, dtype=dtype, device=ends.device)
    return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


@contextmanager
def changed_model(model: Any, changes: Collection[str], dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Make a model compute in ``dtype`` with changed weights, RoPE or embedding scale while in the block.

    Parameters and buffers are the same objects with the same values afterwards.

    Raises:
        UnsupportedError: see :func:`panscan.verdict.float32.converted_model`.
    """
    text = getattr(model.model, "language_model", model.model)
    linear = next((_ROUNDED[change] for change in changes if change in _ROUNDED), None)
    buffers = []
    if "no-rope-factor" in changes and (factor := rope_factor(model)) != 1:
        name = "full_attention_inv_freq"
        buffers.append((text.rotary_emb, name, getattr(text.rotary_emb, name) * factor))
    if _SCALE in changes:
        scale = text.embed_tokens.embed_scale
        buffers.append((text.embed_tokens, "embed_scale", torch.full_like(scale.float(), text.config.hidden_size**0.5)))
    kept = [(module, name, getattr(module, name)) for module, name, _ in buffers]
    try:
        for module, name, value in buffers:
            setattr(module, name, value)
        with converted_model(model, dtype, linear):
            yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def rope_factor(model: Any) -> float:
    """Return the linear RoPE scaling factor of the global layers; 1 without scaling."""
    text = getattr(model.model, "language_model", model.model)
    parameters = text.config.rope_parameters["full_attention"]
    return float(parameters.get("factor", 1)) if parameters.get("rope_type") == "linear" else 1.0


def _rounded_int8(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 with one scale per output channel, as torchao's weight-only quantisation rounds."""
    scale = (weight.abs().amax(-1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight * scale.reciprocal()).round_().clamp_(-128, 127).mul_(scale)


def _rounded_int4(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 weights with one float16 scale, as GGUF's Q4_0 rounds: the largest weight becomes -8."""
    rows, columns = weight.shape
    groups = functional.pad(weight, (0, -columns % _GROUP)).view(rows, -1, _GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, scale, scale.reciprocal())
    levels = (groups * inverse + 8.5).floor_().clamp_(0, 15)
    return levels.sub_(8).mul_(scale.half().float()).view(rows, -1)[:, :columns].contiguous()


def _rounded_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Quantise to E4M3 with one scale per matrix, as vLLM does on load."""
    scale = (weight.abs().amax() / torch.finfo(_FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale).to(_FP8).float().mul_(scale)


_ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8-weights": _rounded_int8,
    "int4-weights": _rounded_int4,
    "fp8-weights": _rounded_fp8,
}
"""By the name of the change: float32 weights ``[outputs, inputs]`` to those that a quantised server computes with."""
