"""Tests of ``generate()`` and ``generate_batch()`` in the installed Transformers, on the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._dynamo.utils import counters
from transformers import ContinuousBatchingConfig, GenerationConfig

from panscan.model.checkpoint import Loaded, load_random
from panscan.model.shapes import SHAPES, Shape
from panscan.runners.attention_check import sample_inputs
from panscan.runners.observe import greedy_config

__all__ = ["Recompilations", "batch_answers", "chunked_prefill", "padding_error", "recompilations"]

_CHUNK = 40  # tokens; a view of the tiny model has 64
_BLOCK = 256  # tokens of a cache block
_STEPS = 6
_SAME = 1e-3  # tolerance relative to the largest logit


@dataclass(frozen=True, slots=True)
class Recompilations:
    """Numbers of graphs that a compiled decoder traced: for the first prompt, and for each later one."""

    first: int
    later: tuple[int, ...]


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
    whole = _next_logits(loaded, inputs, None)
    chunked, changed = _next_logits(loaded, inputs, chunk), _next_logits(loaded, other, chunk)
    if torch.equal(chunked, changed):
        return "images dropped"
    return "right" if _relative_difference(chunked, whole) < _SAME else "image blocks cut"


@torch.no_grad()
def batch_answers(loaded: Loaded) -> Literal["images dropped", "refused", "right"]:
    """Return what ``generate_batch()`` does with an image prompt.

    ``images dropped``: it answers from the token ids and does not accept the pixels.
    """
    inputs = sample_inputs(loaded, "What is the total?")
    ids = inputs["input_ids"][0].tolist()
    config = ContinuousBatchingConfig(block_size=_BLOCK, num_blocks=8, max_batch_tokens=2 * _BLOCK)
    common = {"generation_config": _config(loaded, _STEPS), "continuous_batching_config": config, "progress_bar": False}
    found = []
    for pixels in (inputs["pixel_values"], inputs["pixel_values"].flip(-1)):
        try:
            outputs = loaded.model.generate_batch(inputs=[ids], pixel_values=pixels, **common)
        except (TypeError, ValueError):
            outputs = loaded.model.generate_batch(inputs=[ids], **common)
        found.append([output.generated_tokens for output in outputs.values() if output.error is None])
    return "refused" if not found[0] or not found[0][0] else "images dropped" if found[0] == found[1] else "right"


@torch.no_grad()
def padding_error(loaded: Loaded) -> float:
    """Return how much padding changes a prompt's next-token logits, relative to the largest logit."""
    short, long = "Total?", "What is the total of this receipt, and in which currency is it?"
    alone = _next_logits(loaded, sample_inputs(loaded, short), None)[0]
    padded = _next_logits(loaded, sample_inputs(loaded, short, long), None)[0]
    return _relative_difference(padded, alone)


@torch.no_grad()
def recompilations(device: torch.device, prompts: Sequence[str]) -> Recompilations:
    """Count the graphs that ``torch.compile`` traces for prompts of different lengths with a static cache.

    Only tracing is tested, on a random one-layer decoder: the graphs run uncompiled.

    Args:
        device: device of the decoder.
        prompts: prompts of different lengths, at least one.
    """
    text = replace(SHAPES["tiny"].text, layers=1, pattern=1)
    loaded = load_random("decoder", Shape("decoder", text, None, 0), torch.float32, device)
    torch.compiler.reset()
    counters.clear()
    inner = loaded.model.model
    getattr(inner, "language_model", inner).compile(backend="eager")
    counts = []
    for prompt in prompts:
        before = counters["stats"]["unique_graphs"]
        inputs = sample_inputs(loaded, prompt)
        config = _config(loaded, _STEPS, cache_implementation="static")
        loaded.model.generate(**inputs, generation_config=config)
        counts.append(counters["stats"]["unique_graphs"] - before)
    return Recompilations(counts[0], tuple(counts[1:]))


def _next_logits(loaded: Loaded, inputs: dict[str, Any], chunk: int | None) -> torch.Tensor:
    """Return next-token logits, float32 ``[requests, vocabulary]``."""
    extra: dict[str, Any] = {} if chunk is None else {"prefill_chunk_size": chunk}
    config = _config(loaded, 1, output_logits=True, return_dict_in_generate=True, **extra)
    logits: torch.Tensor = loaded.model.generate(**inputs, generation_config=config).logits[0]
    return logits.float()


def _config(loaded: Loaded, tokens: int, **extra: Any) -> GenerationConfig:
    return greedy_config(loaded, tokens, suppress_tokens=loaded.model.generation_config.suppress_tokens, **extra)


def _relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())
