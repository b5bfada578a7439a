"""Tests of the installed Transformers on the tiny model: attention, ``generate()``, ``generate_batch()``.

The tests of attention ask whether image tokens attend to later tokens of their image, by the masks that
:mod:`panscan.model.attention_masks` measures, and compare final hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch._dynamo.utils import counters
from transformers import ContinuousBatchingConfig, GenerationConfig

from panscan.core import PanAndScan, Request
from panscan.model.attention_masks import Masks, effective_mask
from panscan.model.checkpoint import Loaded, Placement, load_model, load_random
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.shapes import SHAPES, Shape
from panscan.runners.observe import greedy_config

_CHUNK = 40  # tokens; a view of the tiny model has 64
_BLOCK = 256  # tokens of a cache block
_STEPS = 6
_SAME = 1e-3  # tolerance relative to the largest logit
Inputs = dict[str, Any]
"""Keyword arguments of a model (see :func:`panscan.model.inputs.collate`)."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What an implementation of attention computes for an image prompt.

    Args:
        both_ways: whether image tokens attend to later tokens of their image.
        ahead: whether other tokens attend to later tokens.
        last: final hidden state of the last position, float32 ``[hidden]``; None: not computed.
    """

    both_ways: bool
    ahead: bool
    last: torch.Tensor | None = None

    @classmethod
    def of(cls, masks: Masks, image: NDArray[np.bool_], last: torch.Tensor | None = None) -> AttentionFacts:
        """Return what masks show.

        Args:
            masks: see :data:`panscan.model.attention_masks.Masks`.
            image: bool ``[tokens]``: which positions are tokens of the image.
            last: see above.
        """
        later = np.triu(np.ones((len(image), len(image)), np.bool_), 1)
        inside, outside = later & image & image[:, None], later & ~image[:, None]
        both_ways = all(mask[inside].all() for mask in masks.values())
        return cls(both_ways, any(bool(mask[outside].any()) for mask in masks.values()), last)


def tiny_model(device: torch.device, dtype: torch.dtype = torch.float32) -> Loaded:
    """Return the tiny model. In float32, rounding errors are too small to be mistaken for a fault."""
    return load_model("tiny", Placement(device, dtype))


def sample_inputs(loaded: Loaded, *prompts: str) -> Inputs:
    """Return the inputs of a batch of prompts, padded on the left (see ``collate``).

    Each prompt has the same noise image, unless the model is text-only.
    """
    images = [] if loaded.reader.pixels is None else [_noise(loaded.reader.pixels.size)]
    requests = [Request(prompt=prompt, images=images, pan_and_scan=PanAndScan(enabled=False)) for prompt in prompts]
    read = [read_images(request) for request in requests]
    prepared = [prepare(request, loaded.reader, loaded.device, loaded.dtype, on_device=False) for request in read]
    return collate(prepared, loaded)


@torch.no_grad()
def attention_facts(loaded: Loaded, implementation: str, *, kernel: bool = True) -> AttentionFacts:
    """Test an attention implementation.

    Args:
        loaded: the tiny model. It keeps the implementation afterwards.
        implementation: a value of ``attn_implementation``.
        kernel: run its kernel; False: only what Transformers prepares for it.

    Raises:
        UnsupportedError, ImportError, ValueError, RuntimeError: Transformers or the kernel does not support it here.
    """
    model, inputs, last = loaded.model, sample_inputs(loaded, "What is the total?"), None
    image = inputs["token_type_ids"][0].bool().numpy(force=True)
    if kernel:
        model.set_attn_implementation(implementation)
        last = model.model(**inputs, use_cache=False).last_hidden_state[0, -1].float().cpu()
    masks = effective_mask(image, implementation, model.config, device=str(loaded.device), kernel=kernel)
    return AttentionFacts.of(masks, image, last)


def _noise(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


@torch.no_grad()
def chunked_prefill(loaded: Loaded, chunk: int = _CHUNK) -> Literal["images dropped", "image blocks cut", "right"]:
    """Return what ``generate(prefill_chunk_size=...)`` computes for an image prompt.

    ``images dropped``: a different image gives the same logits. ``image blocks cut``: the logits depend on the image,
    but differ from those of a prefill in one pass.

    Args:
        loaded: the tiny model.
        chunk: tokens per chunk.

    Raises:
        Exception: whatever Transformers raises.
    """
    inputs = sample_inputs(loaded, "What is the total?")
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    unchunked = _next_logits(loaded, inputs)
    chunked, changed = (_next_logits(loaded, given, prefill_chunk_size=chunk) for given in (inputs, other))
    if torch.equal(chunked, changed):
        return "images dropped"
    return "right" if _relative_difference(chunked, unchunked) < _SAME else "image blocks cut"


@torch.no_grad()
def batch_answers(loaded: Loaded) -> Literal["images dropped", "refused", "right"]:
    """Return what ``generate_batch()`` does with an image prompt.

    ``images dropped``: it answers from the token ids and does not accept the pixels.
    """
    inputs = sample_inputs(loaded, "What is the total?")
    ids = inputs["input_ids"][0].tolist()
    config = ContinuousBatchingConfig(block_size=_BLOCK, num_blocks=8, max_batch_tokens=2 * _BLOCK)
    common = {"generation_config": _config(loaded, _STEPS), "continuous_batching_config": config, "progress_bar": False}
    answers = []
    for pixels in (inputs["pixel_values"], inputs["pixel_values"].flip(-1)):
        try:
            outputs = loaded.model.generate_batch(inputs=[ids], pixel_values=pixels, **common)
        except (TypeError, ValueError):
            outputs = loaded.model.generate_batch(inputs=[ids], **common)
        answers.append([output.generated_tokens for output in outputs.values() if output.error is None])
    return (
        "refused" if not answers[0] or not answers[0][0] else "images dropped" if answers[0] == answers[1] else "right"
    )


@torch.no_grad()
def padding_error(loaded: Loaded) -> float:
    """Return how much padding changes a prompt's next-token logits, relative to the largest logit."""
    short, long = "Total?", "What is the total of this receipt, and in which currency is it?"
    alone, padded = (_next_logits(loaded, sample_inputs(loaded, *prompts))[0] for prompts in ([short], [short, long]))
    return _relative_difference(padded, alone)


@torch.no_grad()
def recompilations(device: torch.device, prompts: Sequence[str]) -> list[int]:
    """Return the number of graphs that ``torch.compile`` traces for each of several prompts with a static cache.

    Only tracing is tested, on a random one-layer decoder: the graphs run uncompiled.

    Args:
        device: device of the decoder.
        prompts: prompts of different lengths, at least one.
    """
    text = replace(SHAPES["tiny"].text, layers=1, pattern=1)
    loaded = load_random("decoder", Shape("decoder", text, None, 0), torch.float32, device)
    torch.compiler.reset()
    counters.clear()
    loaded.model.get_decoder().compile(backend="eager")
    counts = []
    for prompt in prompts:
        before = counters["stats"]["unique_graphs"]
        inputs = sample_inputs(loaded, prompt)
        config = _config(loaded, _STEPS, cache_implementation="static")
        loaded.model.generate(**inputs, generation_config=config)
        counts.append(counters["stats"]["unique_graphs"] - before)
    return counts


def _next_logits(loaded: Loaded, inputs: Inputs, **options: Any) -> torch.Tensor:
    """Return next-token logits, float32 ``[requests, vocabulary]``."""
    config = _config(loaded, 1, output_logits=True, return_dict_in_generate=True, **options)
    logits: torch.Tensor = loaded.model.generate(**inputs, generation_config=config).logits[0]
    return logits.float()


def _config(loaded: Loaded, tokens: int, **extra: Any) -> GenerationConfig:
    return greedy_config(loaded, tokens, suppress_tokens=loaded.model.generation_config.suppress_tokens, **extra)


def _relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())
