"""Gemma 3 at its true sizes with random weights: the true speed and memory, without a download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from panscan.core import SettingError
from panscan.linear.quantized import WeightFormat
from panscan.model.build import empty_quantized_model
from panscan.model.config import gemma3_config, generation_config, processor_for
from panscan.model.shapes import SHAPES, Shape
from panscan.model.sharding import check_divides, fill_shard, shard_config
from panscan.model.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import Gemma3Processor, GemmaTokenizer, PreTrainedModel

__all__ = ["random_meta_model", "random_model", "random_shard", "write_shape"]

_DEVIATION = 0.02


@torch.no_grad()
def random_model(
    shape: str | Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    drawn_on: torch.device | None = None,
    weight_format: WeightFormat | None = None,
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer]:
    """Build ``shape`` (a name of ``SHAPES``, or a shape) in place on ``device``, its weights drawn there in ``dtype``.

    It is returned with a processor, or for a text-only shape with a tokenizer; the tokenizer is a bundled model's.
    Weights are N(0, 0.02), those of SigLIP's layer norms N(1, 0.02); the image projection, which Transformers leaves
    at zero, is drawn like the rest. The embedding keeps all its rows; ids beyond the tokenizer's decode to nothing.
    The same seed gives the same weights on the same kind of device. Global random states stay as they are.

    Args:
        shape: what to build.
        dtype: of the weights.
        device: of the model.
        seed: of the weights.
        drawn_on: another device to draw the weights on, one parameter at a time.
        weight_format: format that the decoder's matrices are quantised to as they are drawn; None: dense.

    Raises:
        SettingError: for an unknown name.
        UnsupportedError: the group size does not divide a matrix.
    """
    shape, device = _shape_named(shape), torch.device(device)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    config = gemma3_config(shape, tokenizer)
    model = _undrawn(shape, config, dtype, device, weight_format)
    if drawn_on is not None or weight_format is not None:
        drawn_on = drawn_on or device
        whole = _undrawn(shape, config, dtype, torch.device("meta"))
        fill_shard(model, _drawn_model(whole, torch.Generator(drawn_on).manual_seed(seed), dtype, drawn_on), 0, 1)
        return _with_reader(model, shape, tokenizer)
    for _ in _drawn_model(model, torch.Generator(device).manual_seed(seed), dtype, device):
        pass  # each parameter was filled in place
    return _with_reader(model, shape, tokenizer)


def random_shard(
    shape: str | Shape,
    rank: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    weight_format: WeightFormat | None = None,
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer, int]:
    """Build one rank's shard of :func:`random_model` without ever holding more than one whole parameter.

    Returns:
        The shard, its processor or tokenizer, and the size of the full vocabulary.

    Raises:
        SettingError: an unknown name.
        UnsupportedError: ``size`` does not divide the shape.
    """
    shape, device = _shape_named(shape), torch.device(device)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    config = gemma3_config(shape, tokenizer)
    check_divides(config, size)
    whole = _undrawn(shape, config, dtype, torch.device("meta"))
    shard = _undrawn(shape, shard_config(config, size), dtype, device, weight_format)
    fill_shard(shard, _drawn_model(whole, torch.Generator(device).manual_seed(seed), dtype, device), rank, size)
    return *_with_reader(shard, shape, tokenizer), shape.text.vocabulary


def random_meta_model(
    shape: str | Shape, dtype: torch.dtype
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer]:
    """Build ``shape`` on the meta device, without weights, with its processor or tokenizer.

    Raises:
        SettingError: an unknown name.
    """
    shape = _shape_named(shape)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    model = _undrawn(shape, gemma3_config(shape, tokenizer), dtype, torch.device("meta"))
    return _with_reader(model, shape, tokenizer)


def _undrawn(
    shape: Shape, config: Any, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat | None = None
) -> PreTrainedModel:
    if weight_format is not None:
        model: PreTrainedModel = empty_quantized_model(config, weight_format, dtype, device)
        return model
    auto = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return auto.from_config(config, dtype=dtype).eval()


def _with_reader(
    model: PreTrainedModel, shape: Shape, tokenizer: GemmaTokenizer
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer]:
    model.generation_config = generation_config(tokenizer)
    if shape.vision is None:
        return model, tokenizer
    return model, processor_for(tokenizer, shape.vision.image_size, shape.image_tokens)


def write_shape(shape: str | Shape, directory: Path) -> None:
    """Write a checkpoint of ``shape`` without weights: configurations, and the processor or tokenizer.

    Raises:
        SettingError: for an unknown name.
    """
    shape = _shape_named(shape)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    config = gemma3_config(shape, tokenizer)
    config.architectures = ["Gemma3ForCausalLM" if shape.vision is None else "Gemma3ForConditionalGeneration"]
    config.save_pretrained(directory)
    generation_config(tokenizer).save_pretrained(directory)
    if shape.vision is None:
        tokenizer.save_pretrained(directory)
    else:
        processor_for(tokenizer, shape.vision.image_size, shape.image_tokens).save_pretrained(directory)


def _shape_named(shape: str | Shape) -> Shape:
    if isinstance(shape, Shape):
        return shape
    if shape not in SHAPES:
        raise SettingError(f"there is no model shape {shape!r}: use one of {', '.join(SHAPES)}")
    return SHAPES[shape]


def _drawn_model(
    model: PreTrainedModel, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and drawn values of each parameter, in the order of the model: drawn in place, or for a model on the
    meta device into a new tensor.

    Gemma's norms multiply by 1 + weight, so only layer norms need a mean.
    """
    gains = {module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=dtype, device=device) if parameter.is_meta else parameter
        yield name, values.normal_(float(parameter in gains), _DEVIATION, generator=generator)
