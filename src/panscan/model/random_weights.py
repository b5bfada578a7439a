"""Gemma 3 at its true sizes with random weights: the true speed and memory, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from panscan.core import SettingError
from panscan.model.config import gemma3_config, generation_config, processor_for
from panscan.model.shapes import SHAPES, Shape
from panscan.model.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import Gemma3Processor, GemmaTokenizer, PreTrainedModel

__all__ = ["random_model", "write_shape"]

_DEVIATION = 0.02


def random_model(
    shape: str | Shape, *, dtype: torch.dtype, device: str | torch.device, seed: int = 0
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer]:
    """Build ``shape`` (a name of ``SHAPES``, or a shape) in place on ``device``, its weights drawn there in ``dtype``.

    With it comes what feeds it: the processor, or for a text-only shape the tokenizer, a bundled model's either way.
    Weights are N(0, 0.02), those of SigLIP's layer norms N(1, 0.02); the image projection, which Transformers leaves
    at zero, is drawn like the rest. The embedding keeps all its rows; ids beyond the tokenizer's decode to nothing.
    The same seed gives the same weights on the same kind of device. Global random states stay as they are.

    Raises:
        SettingError: for an unknown name.
    """
    shape, device = _named(shape), torch.device(device)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    auto = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model = auto.from_config(gemma3_config(shape, tokenizer), dtype=dtype).eval()
    _draw(model, torch.Generator(device).manual_seed(seed))
    model.generation_config = generation_config(tokenizer)
    if shape.vision is None:
        return model, tokenizer
    return model, processor_for(tokenizer, shape.vision.image_size, shape.image_tokens)


def write_shape(shape: str | Shape, directory: Path) -> None:
    """Write all of a checkpoint of ``shape`` but weights: configurations, a bundled model's tokenizer, the processor.

    Raises:
        SettingError: for an unknown name.
    """
    shape = _named(shape)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    config = gemma3_config(shape, tokenizer)
    config.architectures = ["Gemma3ForCausalLM" if shape.vision is None else "Gemma3ForConditionalGeneration"]
    config.save_pretrained(directory)
    generation_config(tokenizer).save_pretrained(directory)
    if shape.vision is None:
        tokenizer.save_pretrained(directory)
    else:
        processor_for(tokenizer, shape.vision.image_size, shape.image_tokens).save_pretrained(directory)


def _named(shape: str | Shape) -> Shape:
    if isinstance(shape, Shape):
        return shape
    if shape not in SHAPES:
        raise SettingError(f"there is no model shape {shape!r}: use one of {', '.join(SHAPES)}")
    return SHAPES[shape]


@torch.no_grad()
def _draw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Gemma's norms multiply by 1 + weight, so only layer norms need a mean."""
    gains = {module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for parameter in model.parameters():
        parameter.normal_(float(parameter in gains), _DEVIATION, generator=generator)
