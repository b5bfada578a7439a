"""Small random Gemma 3 models: fixed shapes, and configurations drawn from all that Transformers offers."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from training.tokenizer import build_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from panscan.images.pixels import PixelSpec
from panscan.model.checkpoint import Loaded, Reader, load_random
from panscan.model.shapes import SHAPES, Shape, VisionShape

TOKENIZER = build_tokenizer()
"""The bundled models' own, which takes half a second to build. Tests that change it copy it."""

SOFT = 9  # the id of image tokens
SIDE = 48  # pixels of a view

_TEXT = replace(SHAPES["tiny"].text, hidden=64, intermediate=96, layers=4, heads=2, kv_heads=1, pattern=2, window=7)
_EYES = VisionShape(hidden=16, intermediate=24, layers=1, heads=2, image_size=SIDE, patch_size=4)
MODELS: dict[str, Shape] = {
    "window inside image blocks": Shape("t", _TEXT, _EYES, 16),
    "four query heads per kv head": Shape("t", replace(_TEXT, heads=4, head_size=48, window=12), _EYES, 9),
    "two kv heads": Shape("t", replace(_TEXT, kv_heads=2, head_size=16, window=30, pattern=3), _EYES, 4),
    "global layers only": Shape("t", replace(_TEXT, pattern=1), _EYES, 9),
    "local layers only": Shape("t", replace(_TEXT, pattern=6), _EYES, 16),
    "text only": Shape("t", _TEXT, None, 0),
}


def kv_bytes(shape: Shape, tokens: int, width: int) -> int:
    """Return the bytes of the keys and values of a request of ``tokens``, ``width`` per value; local layers keep their
    window."""
    text = shape.text
    positions = text.global_layers * tokens + text.local_layers * min(tokens, text.window)
    return 2 * text.kv_heads * text.head_size * positions * width


@cache
def loaded_of(name: str) -> Loaded:
    """Return a model in float32. The text-only class caps its logits; the conditional class ignores the setting."""
    loaded = load_random("t", MODELS[name], torch.float32, torch.device("cpu"))
    loaded.model.config.get_text_config().final_logit_softcapping = 0.5
    return loaded


def model_of(name: str) -> Any:
    """Return the model of :func:`loaded_of`."""
    return loaded_of(name).model


_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 4.0},
]


def _longrope(head_size: int) -> dict[str, Any]:
    """Frequencies that differ on both sides of a context of 400 tokens, longer than any sequence of the tests."""
    half = head_size // 2
    factors = {"short_factor": [1.0 + at / half for at in range(half)], "long_factor": [4.0] * half}
    return {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 400, **factors}


@st.composite
def odd_configs(
    draw: st.DrawFn,
    head_sizes: tuple[int, ...] = (16, 18, 32, 48, 64, 128, 256),
    *,
    most_layers: int = 4,
    most_kv_heads: int = 4,
) -> Any:
    """Draw a configuration: any heads, layer order, RoPE types, biases and ties; half of them with vision."""
    kv_heads = draw(st.integers(1, most_kv_heads))
    heads = kv_heads * draw(st.integers(1, 3))
    head_size = draw(st.sampled_from(head_sizes))
    ropes = st.sampled_from([*_ROPES, _longrope(head_size)])
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    text = Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=heads * draw(st.integers(4, 12)),
        intermediate_size=draw(st.integers(5, 80)),
        layer_types=(kinds := draw(st.lists(kinds, min_size=1, max_size=most_layers))),
        num_hidden_layers=len(kinds),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        sliding_window=draw(st.integers(1, 40)),
        query_pre_attn_scalar=draw(st.sampled_from([16, 168, 256])),
        rope_parameters={
            "full_attention": draw(ropes) | {"rope_theta": 1e6},
            "sliding_attention": draw(ropes) | {"rope_theta": 1e4},
        },
        max_position_embeddings=512,
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        final_logit_softcapping=draw(st.sampled_from([None, 0.5])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 0.1])),
        hidden_activation=draw(st.sampled_from(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"])),
    )
    if draw(st.booleans()):
        return text
    eyes = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=4,
        vision_use_head=False,
    )
    return Gemma3Config(
        text_config=text,
        vision_config=eyes,
        mm_tokens_per_image=draw(st.sampled_from([4, 9, 16])),
        image_token_index=SOFT,
        boi_token_index=7,
        eoi_token_index=8,
        tie_word_embeddings=text.tie_word_embeddings,
    )


@torch.no_grad()
def odd_model(config: Any) -> Loaded:
    """Return a model of a configuration, all of its weights random. Its reader has pixel settings only."""
    sees = isinstance(config, Gemma3Config)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    gains = {module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for parameter in model.parameters():
        parameter.normal_(float(parameter in gains), 0.02, generator=generator)
    # Model runners read a checkpoint's pixel settings alone.
    reader: Any = Reader("odd", None, None, None, PixelSpec(SIDE) if sees else None)  # type: ignore[arg-type]  # unused
    return Loaded(model, reader)
