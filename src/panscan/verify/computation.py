"""Final hidden states of one sequence, with changes to the mask, the weights, the image features or the positions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from panscan.model.reference import converted_model, one_view_at_a_time
from panscan.verify.weights import ROUNDED

__all__ = ["changed_model", "final_states", "rope_factor", "view_features"]

_SCALE = "exact-embedding-scale"


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
        UnsupportedError: see :func:`panscan.model.reference.converted_model`.
    """
    text = getattr(model.model, "language_model", model.model)
    linear = next((ROUNDED[change] for change in changes if change in ROUNDED), None)
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
