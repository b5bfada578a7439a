"""Tests of attention implementations on the tiny model: do image tokens attend to later tokens of their image?

The tests do not inspect masks. They change the features of an image's last token, or the prompt's last token, and
observe which positions change. They therefore also work for kernels without a mask argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from panscan.core import PanAndScan, Request
from panscan.model.checkpoint import Loaded, Placement, load_model
from panscan.model.inputs import collate, prepare, read_images

__all__ = ["FLASH_MASK", "AttentionResponse", "attention_response", "sample_inputs", "tiny_model"]

FLASH_MASK = "panscan-causal-images"
"""Attention implementation: SDPA with the mask that Transformers creates for flash attention. Runs on any device."""


@dataclass(frozen=True, slots=True)
class AttentionResponse:
    """Changes of final hidden states in response to changes of later tokens, relative to their mean magnitude.

    Args:
        image: largest change at an image's first tokens when the features of its last token change.
        text: largest change before the prompt's last token when that token changes.
        last: final hidden state of the last position without changes, float32 ``[hidden]``.
    """

    image: float
    text: float
    last: torch.Tensor


def tiny_model(device: torch.device, dtype: torch.dtype = torch.float32) -> Loaded:
    """Return the tiny model. In float32, rounding errors are too small to be mistaken for a fault."""
    return load_model("tiny", Placement(device, dtype))


def sample_inputs(loaded: Loaded, *prompts: str) -> dict[str, Any]:
    """Return the inputs of a batch of prompts, padded on the left (see ``collate``).

    Each prompt has the same noise image, unless the model is text-only.
    """
    images = [] if loaded.reader.pixels is None else [_noise(loaded.reader.pixels.size)]
    requests = [Request(prompt=prompt, images=images, pan_and_scan=PanAndScan(enabled=False)) for prompt in prompts]
    read = [read_images(request) for request in requests]
    prepared = [prepare(each, loaded.reader, loaded.device, loaded.dtype, on_device=False) for each in read]
    return collate(prepared, loaded, None)


@torch.no_grad()
def attention_response(loaded: Loaded, implementation: str) -> AttentionResponse:
    """Measure an attention implementation, which the model keeps afterwards.

    Args:
        loaded: the tiny model.
        implementation: a value of ``attn_implementation``, or :data:`FLASH_MASK`.

    Raises:
        ImportError, ValueError, RuntimeError: Transformers or the kernel does not support it here.
    """
    if implementation == FLASH_MASK:
        # The name must not contain "flash": Transformers would look for a kernel.
        AttentionInterface.register(FLASH_MASK, _flash_masked_sdpa)
        AttentionMaskInterface.register(FLASH_MASK, flash_attention_mask)
    model = loaded.model
    model.set_attn_implementation(implementation)
    inputs = sample_inputs(loaded, "What is the total?")
    places = (inputs["input_ids"][0] == loaded.reader.prompts.soft_id).nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1])
    plain = _hidden(model, inputs)
    with _changed_feature(model):
        changed = _hidden(model, inputs)
    ids = inputs["input_ids"].clone()
    ids[0, -1] = ids[0, -2]  # a different token: the prompt ends with "model" and a line break
    edited = _hidden(model, {**inputs, "input_ids": ids})
    scale = float(plain.abs().mean())
    return AttentionResponse(
        image=float((changed - plain)[first : (first + last) // 2].abs().max()) / scale,
        text=float((edited - plain)[:-1].abs().max()) / scale,
        last=plain[-1].cpu(),
    )


def _noise(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


def _hidden(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return final hidden states, float32 ``[tokens, hidden]``."""
    hidden: torch.Tensor = model.model(**inputs, use_cache=False).last_hidden_state[0].float()
    return hidden


@contextmanager
def _changed_feature(model: Any) -> Iterator[None]:
    """Double and negate the features of each view's last image token inside the ``with`` block."""

    def change(_module: Any, _inputs: Any, features: torch.Tensor) -> torch.Tensor:
        features = features.clone()
        features[:, -1] *= -2
        return features

    hook = model.model.multi_modal_projector.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _flash_masked_sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> Any:
    """Attend as a flash-attention kernel does: causally, within the window, without padded keys."""
    at = torch.arange(key.shape[2], device=key.device)[None]
    last = at[0, key.shape[2] - query.shape[2] :, None]
    seen = (at <= last) & (at > last - (options.get("sliding_window") or key.shape[2]))
    if not module.is_causal:  # the vision tower
        seen = torch.ones_like(seen)
    if mask is not None:
        seen = seen & mask[:, None, None, :].bool()
    seen = seen.expand(len(query), 1, *seen.shape[-2:])
    return sdpa_attention_forward(module, query, key, value, seen, **options)
