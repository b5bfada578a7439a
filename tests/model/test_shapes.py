"""The formulas of panscan.model.shapes against Transformers' own models, masks and caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from panscan.model.bundled.tokenizer import build_tokenizer
from panscan.model.gemma3.config import gemma3_config
from panscan.model.shapes import SHAPES, TextShape
from panscan.plan.cost import Variant, pass_work

TINY = SHAPES["tiny"]


@cache
def tiny() -> PreTrainedModel:
    config = gemma3_config(TINY, build_tokenizer())
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def counted(**inputs: Any) -> int:
    """FLOPs of the tiny model's decoder or tower as PyTorch counts them, without the table of rotations."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if "pixel_values" in inputs:
            tiny().get_image_features(**inputs)
        else:
            tiny()(**inputs, logits_to_keep=1)
    rotations = sum(
        sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    return int(counter.get_total_flops()) - int(rotations)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers_model(name: str) -> None:
    shape = SHAPES[name]
    auto = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(gemma3_config(shape, build_tokenizer()))
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_the_published_sizes_and_the_costs_counted_elsewhere() -> None:
    large = SHAPES["27b"]
    assert large.parameters() == pytest.approx(27.43e9, rel=1e-3)
    assert SHAPES["4b"].parameters() == pytest.approx(4.30e9, rel=1e-3)
    assert large.vision_flops(1) == pytest.approx(5.45e12, rel=5e-3)
    assert pass_work(Variant(large), prefill=[(0, 1102)]).flops() == pytest.approx(56e12, rel=0.02)
    assert Variant(large).text_bytes() == pytest.approx(54e9, rel=2e-3)
    assert large.kv_bytes(1150, 2) == pytest.approx(0.53e9, rel=2e-3)


@pytest.mark.parametrize("views", [1, 3])
def test_vision_flops_are_those_that_pytorch_counts(views: int) -> None:
    assert TINY.vision is not None
    side = TINY.vision.image_size
    assert TINY.vision_flops(views) == counted(pixel_values=torch.zeros(views, 3, side, side))


def test_a_text_only_shape_spends_nothing_on_views() -> None:
    assert SHAPES["1b"].vision_flops(4) == 0


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_prefill_flops_are_those_that_pytorch_counts_but_for_the_masked_pairs(tokens: int) -> None:
    text = TINY.text
    masked = text.layers * tokens**2 - text.attention_pairs(tokens)
    flops = counted(input_ids=torch.ones(1, tokens, dtype=torch.long)) - 4 * text.heads * text.head_size * masked
    assert pass_work(Variant(TINY), prefill=[(0, tokens)]).flops() == flops


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_attention_pairs_are_the_open_entries_of_transformers_masks(tokens: int) -> None:
    config = tiny().config.text_config
    kinds = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    given_to_each: dict[str, Any] = {
        "config": config,
        "inputs_embeds": torch.zeros(1, tokens, config.hidden_size),
        "attention_mask": None,
        "past_key_values": None,
    }
    masks = {kind: make(**given_to_each) for kind, make in kinds.items()}
    open_entries = {kind: int((mask == 0).sum()) for kind, mask in masks.items()}
    assert TINY.text.attention_pairs(tokens) == sum(open_entries[kind] for kind in config.layer_types)


@given(
    tokens=st.integers(0, 400),
    window=st.integers(1, 300),
    layers=st.integers(1, 20),
    pattern=st.integers(2, 7),
)
def test_attention_pairs_add_up_row_by_row(tokens: int, window: int, layers: int, pattern: int) -> None:
    text = TextShape(16, 8, 8, layers, 1, 1, 8, window, 8, 512, pattern=pattern)
    windows = [window if layer % pattern else tokens + 1 for layer in range(1, layers + 1)]
    assert text.attention_pairs(tokens) == sum(min(row + 1, seen) for seen in windows for row in range(tokens))


@pytest.mark.parametrize("tokens", [5, 127, 128, 300])
def test_kv_bytes_are_what_transformers_keeps_and_the_next_token_beside_a_full_window(tokens: int) -> None:
    with torch.no_grad():
        kept = tiny()(torch.ones(1, tokens, dtype=torch.long), past_key_values=DynamicCache(config=tiny().config))
    layers = kept.past_key_values.layers
    stored = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    # A sliding layer drops its oldest position before the next token comes, which makes the window full again.
    awaited = TINY.text.local_layers if tokens >= TINY.text.window else 0
    assert TINY.kv_bytes(tokens, 4) == stored + awaited * 2 * TINY.text.kv_heads * TINY.text.head_size * 4
