"""Transformers' configurations of a shape, and the processor that goes with it: written once for every random model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from transformers import (
    Gemma3Config,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    SiglipVisionConfig,
)
from transformers.utils import is_torchvision_available

from panscan.model.tokenizer import END_MARKS, MARKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from panscan.model.shapes import Shape, TextShape, VisionShape

__all__ = ["gemma3_config", "generation_config", "processor_for"]


def gemma3_config(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Gemma3Config | Gemma3TextConfig:
    """The configuration of ``shape`` with the token ids of ``tokenizer``; a text configuration for a text-only shape.

    The embedding keeps the rows of the shape's vocabulary, whatever the tokenizer's size.
    """
    text = _text_config(shape.text, tokenizer)
    if shape.vision is None:
        return text
    return Gemma3Config(
        text_config=text,
        vision_config=_vision_config(shape.vision),
        mm_tokens_per_image=shape.image_tokens,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        tie_word_embeddings=True,
    )


def _text_config(text: TextShape, tokenizer: PreTrainedTokenizerBase) -> Gemma3TextConfig:
    scaling = (
        {"rope_type": "default"} if text.rope_factor is None else {"rope_type": "linear", "factor": text.rope_factor}
    )
    return Gemma3TextConfig(
        vocab_size=text.vocabulary,
        hidden_size=text.hidden,
        intermediate_size=text.intermediate,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        num_key_value_heads=text.kv_heads,
        head_dim=text.head_size,
        sliding_window=text.window,
        layer_types=[
            "sliding_attention" if layer % text.pattern else "full_attention" for layer in range(1, text.layers + 1)
        ],
        query_pre_attn_scalar=text.query_scale,
        max_position_embeddings=text.max_positions,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": text.rope_theta_global},
            "sliding_attention": {"rope_type": "default", "rope_theta": text.rope_theta_local},
        },
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _vision_config(vision: VisionShape) -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=vision.hidden,
        intermediate_size=vision.intermediate,
        num_hidden_layers=vision.layers,
        num_attention_heads=vision.heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        vision_use_head=False,
    )


def generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Greedy, ends at ``<eos>`` or ``<end_of_turn>``, and never writes another special token.

    A random model would: an ``<image_soft_token>`` that is fed back makes Transformers look for an image.
    """
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(END_MARKS)),
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=tokenizer.convert_tokens_to_ids([mark for mark in MARKS if mark not in END_MARKS]),
        do_sample=False,
    )


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
