"""Transformers' configurations of a shape, and the processor that goes with it: written once for every random model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers
from transformers import (
    Gemma3Config,
    Gemma3Processor,
    Gemma3TextConfig,
    SiglipVisionConfig,
)
from transformers.utils import is_torchvision_available

from panscan.core import UnsupportedError
from panscan.model.shapes import (
    SHAPES,
    TEXT_FIELDS,
    VISION_FIELDS,
    Shape,
    TextShape,
    VisionShape,
    first_global_layer,
    text_shape,
    vision_shape,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def gemma3_config(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Gemma3Config | Gemma3TextConfig:
    """The configuration of ``shape`` with the token ids of ``tokenizer``; a text configuration for a text-only shape.

    The embedding keeps the rows of the shape's vocabulary, whatever the tokenizer's size.
    """
    scaling = (
        {"rope_type": "default"}
        if shape.text.rope_factor is None
        else {"rope_type": "linear", "factor": shape.text.rope_factor}
    )
    text = Gemma3TextConfig(
        **_renamed_fields(shape.text, TEXT_FIELDS),
        layer_types=_layer_types(shape.text.layers, shape.text.pattern),
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": shape.text.rope_theta_global},
            "sliding_attention": {"rope_type": "default", "rope_theta": shape.text.rope_theta_local},
        },
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if shape.vision is None:
        return text
    return Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**_renamed_fields(shape.vision, VISION_FIELDS), vision_use_head=False),
        mm_tokens_per_image=shape.image_tokens,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        tie_word_embeddings=True,
    )


def _renamed_fields(shape: TextShape | VisionShape, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a part of a shape under Transformers' names."""
    return {name: getattr(shape, ours) for name, ours in names.items()}


def shape_of_config(config: Gemma3Config | Gemma3TextConfig) -> Shape:
    """The shape of any Gemma 3 checkpoint, from its configuration: the inverse of :func:`gemma3_config`.

    Its name is that of the published shape with the same numbers, else ``gemma3``.

    Raises:
        UnsupportedError: it has a part that the formulas of :mod:`panscan.model.shapes` leave out, as no published
            Gemma 3 does: other layers than every n-th global, biases, a separate output matrix or a vision head.
    """
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None)
    others = {
        "attention biases": text.attention_bias,
        "an output matrix of its own": not config.tie_word_embeddings,
        "an irregular order of layers": list(text.layer_types)
        != _layer_types(len(text.layer_types), first_global_layer(text.layer_types)),
        "a vision head": vision is not None and getattr(vision, "vision_use_head", True),
        "pictures of other than 3 channels": vision is not None and vision.num_channels != 3,
    }
    for what, there in others.items():
        if there:
            raise UnsupportedError(f"the checkpoint has {what}: its costs are not known")
    rope = text.rope_parameters
    decoder = text_shape(
        text,
        rope_factor=rope["full_attention"].get("factor"),
        rope_theta_global=rope["full_attention"]["rope_theta"],
        rope_theta_local=rope["sliding_attention"]["rope_theta"],
        pattern=first_global_layer(text.layer_types),
    )
    shape = Shape("gemma3", decoder)
    if vision is not None:
        shape = replace(shape, vision=vision_shape(vision), image_tokens=config.mm_tokens_per_image)
    published = (name for name, known in SHAPES.items() if replace(known, name=shape.name) == shape)
    return replace(shape, name=next(published, shape.name))


def _layer_types(layers: int, pattern: int) -> list[str]:
    return ["sliding_attention" if layer % pattern else "full_attention" for layer in range(1, layers + 1)]


def processor_for(tokenizer: PreTrainedTokenizerBase, image_size: int, image_seq_length: int) -> Gemma3Processor:
    """Gemma 3's processor: views of ``image_size`` pixels a side, ``image_seq_length`` soft tokens each.

    Resizes with torchvision where it is installed and with PIL elsewhere, as Transformers itself would choose.
    """
    kind = transformers.Gemma3ImageProcessor if is_torchvision_available() else transformers.Gemma3ImageProcessorPil
    image_processor = kind(
        size={"height": image_size, "width": image_size},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        resample=2,
        do_convert_rgb=True,
    )
    return Gemma3Processor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=image_seq_length,
    )
