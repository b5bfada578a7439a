"""Costs of any Gemma 3: random shapes and every published one, against models that Transformers builds of them.

Models are on the meta device: PyTorch counts their operations and tensors without computing anything.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.small_models import TOKENIZER, kv_bytes
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from transformers.models.gemma3 import Gemma3Config, Gemma3TextConfig

from panscan.core import RecordsError, UnsupportedError
from panscan.model.gemma3.config import gemma3_config, shape_of_config
from panscan.model.shapes import SHAPES, Shape, TextShape, VisionShape
from panscan.plan.cost import Variant, pass_work


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Small shapes; no size in them is tied to another unless Gemma 3 ties them."""
    kv_heads, head_size = draw(st.integers(1, 2)), 2 * draw(st.integers(2, 6))
    heads = kv_heads * draw(st.integers(1, 3))
    text = TextShape(
        vocabulary=1024 + draw(st.integers(0, 9)),
        hidden=heads * draw(st.integers(1, 9)),
        intermediate=draw(st.integers(3, 50)),
        layers=draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=draw(st.integers(2, 40)),
        query_scale=head_size,
        max_positions=512,
        rope_factor=draw(st.sampled_from([None, 8.0])),
        pattern=6,
    )
    pattern = draw(st.integers(1, text.layers)) if draw(st.booleans()) else 6
    text = replace(text, pattern=pattern if pattern <= text.layers else max(6, text.layers + 1))
    if draw(st.booleans()):
        return Shape("gemma3", text)
    side = draw(st.integers(1, 2))
    eyes = draw(st.integers(1, 3))
    patch = draw(st.sampled_from([4, 7]))
    image = side * draw(st.integers(1, 3)) * patch
    vision = VisionShape(eyes * 8, draw(st.integers(3, 20)), draw(st.integers(1, 3)), eyes, image, patch)
    return Shape("gemma3", text, vision, side**2)


def model_of(shape: Shape) -> PreTrainedModel:
    auto = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    with torch.device("meta"):
        return auto.from_config(gemma3_config(shape, TOKENIZER), attn_implementation="eager").eval()


def counted(work: Any, **inputs: Any) -> tuple[int, Any]:
    """FLOPs as PyTorch counts them, without the table of rotations; and what came out."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = work(**inputs)
    parts = counter.get_flop_counts()
    rotations = sum(sum(flops.values()) for name, flops in parts.items() if name.endswith("rotary_emb"))
    return int(counter.get_total_flops()) - int(rotations), output


def ids(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.long, device="meta")


def check_costs(shape: Shape, tokens: int, views: int) -> None:
    model, text = model_of(shape), shape.text
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())
    per_pair = 4 * text.heads * text.head_size
    # Eager attention also multiplies the pairs that its mask then closes.
    cache = DynamicCache(config=model.config)
    flops, prompt = counted(model, input_ids=ids(tokens), logits_to_keep=1, past_key_values=cache)
    masked = per_pair * (text.layers * tokens**2 - text.attention_pairs(tokens))
    assert flops - masked == pass_work(Variant(shape), prefill=[(0, tokens)]).flops()
    cached = sum(tensor.nbytes for layer in prompt.past_key_values.layers for tensor in (layer.keys, layer.values))
    # A sliding layer drops its oldest position before the next token comes, which makes the window full again.
    awaited = text.local_layers if tokens >= text.window else 0
    assert cached + awaited * 2 * text.kv_heads * text.head_size * 4 == kv_bytes(shape, tokens, 4)
    flops, _ = counted(model, input_ids=ids(1), past_key_values=prompt.past_key_values)
    assert flops == pass_work(Variant(shape), decode_contexts=[tokens + 1]).flops()
    if shape.vision is not None:
        side = shape.vision.image_size
        pixels = torch.zeros(views, 3, side, side, device="meta")
        assert counted(model.get_image_features, pixel_values=pixels)[0] == shape.vision_flops(views)


@given(shapes(), st.integers(1, 60), st.integers(1, 3))
@settings(max_examples=8)
def test_costs_of_a_random_shape_are_those_of_its_model(shape: Shape, tokens: int, views: int) -> None:
    check_costs(shape, tokens, views)


def test_costs_of_a_published_shape_are_those_of_its_model() -> None:
    """Without vision; smaller ones with vision are drawn above."""
    check_costs(SHAPES["270m"], SHAPES["270m"].text.window + 3, 2)


@given(shapes() | st.sampled_from([*SHAPES.values()]))
@settings(max_examples=80)
def test_a_shape_comes_back_from_its_configuration_and_from_records(shape: Shape) -> None:
    assert shape_of_config(gemma3_config(shape, TOKENIZER)) == shape
    assert Shape.from_dict(json.loads(json.dumps(asdict(shape)))) == shape


SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}
SIGLIP |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}


def test_published_files_are_understood_in_the_old_spelling_of_rotations() -> None:
    """What the released checkpoints' config.json say: everything else is left to defaults."""
    text = {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_hidden_layers": 62}
    text |= {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=256)
    assert shape_of_config(config) == SHAPES["27b"]
    text = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_hidden_layers": 26}
    text |= {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
    text |= {"rope_local_base_freq": 10000, "rope_theta": 1000000, "max_position_embeddings": 32768}
    small = Gemma3TextConfig(**text, vocab_size=262144)
    assert shape_of_config(small) == SHAPES["1b"]


LEFT_OUT = [
    ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "irregular order"),
    ({"attention_bias": True}, "biases"),
    ({"tie_word_embeddings": False}, "output matrix"),
]


@pytest.mark.parametrize(("change", "message"), LEFT_OUT)
def test_parts_that_the_formulas_leave_out_are_refused(change: dict[str, Any], message: str) -> None:
    tiny = Shape("gemma3", TextShape(1024, 8, 8, 3, 1, 1, 8, 8, 8, 512))
    config = gemma3_config(tiny, TOKENIZER)
    assert shape_of_config(config).text.layers == 3
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedError, match=message):
        shape_of_config(config)


OTHER_VERSIONS = [
    ({"experts": 8}, "no field 'experts'"),
    ({"\ud800": 8}, "surrogates not allowed"),
    ({"text": None}, "Expected `object`"),
    ({"text": {"vocabulary": 3}}, "missing required field `hidden`"),
    ({"vision": {**asdict(SHAPES["tiny"])["vision"], "layers": "2"}}, r"`int`, got `str` - at `\$.vision.layers`"),
    ({"image_tokens": None}, r"Expected `int`, got `null` - at `\$.image_tokens`"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_VERSIONS)
def test_another_versions_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        Shape.from_dict({**asdict(SHAPES["tiny"]), **change})


def test_the_published_sizes_and_the_costs_counted_elsewhere() -> None:
    large = SHAPES["27b"]
    assert large.parameters() == pytest.approx(27.43e9, rel=1e-3)
    assert SHAPES["4b"].parameters() == pytest.approx(4.30e9, rel=1e-3)
    assert Variant(large).text_bytes() == pytest.approx(54e9, rel=2e-3)


@given(tokens=st.integers(0, 400), window=st.integers(1, 300), layers=st.integers(1, 20), pattern=st.integers(2, 7))
def test_attention_pairs_add_up_row_by_row(tokens: int, window: int, layers: int, pattern: int) -> None:
    text = TextShape(16, 8, 8, layers, 1, 1, 8, window, 8, 512, pattern=pattern)
    windows = [window if layer % pattern else tokens + 1 for layer in range(1, layers + 1)]
    assert text.attention_pairs(tokens) == sum(min(row + 1, seen) for seen in windows for row in range(tokens))
