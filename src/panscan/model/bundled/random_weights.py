"""Gemma 3 at its true sizes with random weights: the true speed and memory, without a download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig

from panscan.model.build import build_model, empty_model
from panscan.model.bundled import mini_directory, tiny_directory
from panscan.model.gemma3.config import gemma3_config, processor_for
from panscan.model.linear.quantized import WeightFormat
from panscan.model.shapes import SHAPES, Shape
from panscan.model.sharding import fill_shard, shard_config

if TYPE_CHECKING:
    from transformers import Gemma3Processor, GemmaTokenizer, PreTrainedModel


_DEVIATION = 0.02
_MEANS = {"post_attention_layernorm": 3.0, "post_feedforward_layernorm": 3.0, "q_norm": 0.5, "k_norm": 0.5}
"""Means of Gemma's norms, which multiply by 1 + weight. With 0, a token's own embedding outweighs what attention reads,
so a random model repeats one token, and another image changes none."""


def tokenizer_for(rows: int) -> Any:
    """Return the tokenizer of a bundled model that fits so many rows of an embedding: tiny's, or the smaller mini's."""
    fits = rows >= SHAPES["tiny"].text.vocabulary
    return AutoTokenizer.from_pretrained(tiny_directory() if fits else mini_directory())


@torch.no_grad()
def random_model(
    shape: str | Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    rank: int = 0,
    size: int = 1,
    drawn_on: torch.device | None = None,
    weight_format: WeightFormat | None = None,
) -> tuple[PreTrainedModel, Gemma3Processor | GemmaTokenizer]:
    """Build ``shape`` (a name of ``SHAPES``, or a shape) in place on ``device``, its weights drawn there in ``dtype``.

    It is returned with a processor, or for a text-only shape with a tokenizer; the tokenizer is a bundled model's.
    Weights are N(0, 0.02), those of norms around other means, so that the tokens depend on the images; the image
    projection, which Transformers leaves at zero, is drawn like the rest. The embedding keeps all its rows; ids beyond
    the tokenizer's decode to nothing.
    The weights are the same each time on the same kind of device. Global random states stay as they are.

    Args:
        shape: what to build.
        dtype: of the weights.
        device: of the model; on the meta device it has no weights.
        rank: which shard, from 0.
        size: number of shards, each of which is built without ever holding more than one whole parameter.
        drawn_on: another device to draw the weights on, one parameter at a time.
        weight_format: format that the decoder's matrices are quantised to as they are drawn; None: dense.

    Raises:
        UnsupportedError: the group size does not divide a matrix, or ``size`` the shape.
    """
    shape, device = SHAPES[shape] if isinstance(shape, str) else shape, torch.device(device)
    tokenizer = tokenizer_for(shape.text.vocabulary)
    config = gemma3_config(shape, tokenizer)
    model = empty_model(shard_config(config, size), weight_format, dtype, device)
    if device.type != "meta":
        in_place = size == 1 and drawn_on is None and weight_format is None
        drawn_on = drawn_on or device
        generator = torch.Generator(drawn_on).manual_seed(0)
        if in_place:
            for _ in _drawn_model(model, generator, dtype, device):
                pass  # each parameter was filled in place
        else:
            full_model = build_model(config, dtype, torch.device("meta"))
            fill_shard(model, _drawn_model(full_model, generator, dtype, drawn_on), rank, size)
    model.generation_config = GenerationConfig.from_pretrained(tiny_directory())
    if shape.vision is None:
        return model, tokenizer
    return model, processor_for(tokenizer, shape.vision.image_size, shape.image_tokens)


def drawn_embedding(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the embedding that :func:`random_model` draws on a device, without keeping other weights.

    Args:
        model: the model, on the meta device.
        dtype: of the weights.
        device: device whose random generator draws them.
    """
    drawn = _drawn_model(model, torch.Generator(device).manual_seed(0), dtype, device)
    return next(values for name, values in drawn if name.endswith("embed_tokens.weight"))


def write_shape(shape: str | Shape, directory: Path) -> None:
    """Write a checkpoint of ``shape`` without weights: configurations, and the processor or tokenizer."""
    model, tools = random_model(shape, dtype=torch.bfloat16, device="meta")
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config, tools):
        part.save_pretrained(directory)


def _drawn_model(
    model: PreTrainedModel, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and drawn values of each parameter, in the order of the model: drawn in place, or for a model on the
    meta device into a new tensor.
    """
    means = {module.weight: 1.0 for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=dtype, device=device) if parameter.is_meta else parameter
        mean = means.get(parameter, _MEANS.get(name.split(".")[-2], 0.0))
        yield name, values.normal_(mean, _DEVIATION, generator=generator)
