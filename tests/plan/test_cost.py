"""Counted work against PyTorch's FLOP counter, the engine's own layers and messages, and loaded models."""

from dataclasses import astuple, dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import kv_bytes
from torch.utils.flop_counter import FlopCounterMode

from panscan.core import SettingError
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.layers import LayerCache
from panscan.model.linear.quantized import WeightFormat
from panscan.model.quantization import weight_bytes
from panscan.model.shapes import SHAPES, Shape, TextShape
from panscan.plan.cost import Variant, Work, pass_work, vision_work

MODELS = ("tiny", "mini")
ANY = Shape(
    "any",
    TextShape(1001, 48, 80, 5, 4, 2, 24, window=9, query_scale=24, max_positions=512, pattern=3),
    replace(SHAPES["tiny"].vision, hidden=32, intermediate=40, heads=2),
    64,
)
"""A Gemma 3 that is nowhere published: no size divides another."""


@dataclass
class CountingRanks:
    """One of several ranks, which counts what a ring of them sends; every rank has the same values."""

    size: int
    rank: int = 0
    messages: int = 0
    sent: float = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.messages += 1
        self.sent += 2 * (self.size - 1) / self.size * tensor.nbytes
        return tensor

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all_gather(tensor), -1)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.messages += 1
        self.sent += (self.size - 1) * tensor.nbytes
        return [tensor] * self.size

    def all_reduce_min(self, numbers: Any) -> list[int]:
        return list(numbers)


@dataclass
class NoAttention:
    """An attention plan that computes nothing, so that only products are counted."""

    slots: torch.Tensor = field(default_factory=lambda: torch.arange(0))

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        return query.clone()


def decoder_pass(model: Any, rows: int, sampled: int, ranks: CountingRanks | None = None, vocabulary: int = 0) -> int:
    """FLOPs of the products in one pass of the engine's decoder."""
    text = TextLayers(model, ranks, vocab_size=vocabulary) if ranks else TextLayers(model)
    caches = [LayerCache(*torch.zeros(2, rows, layer.kv_heads, layer.head_size)) for layer in text.layers]
    plan = NoAttention(torch.arange(rows))
    if ranks is not None:
        ranks.messages, ranks.sent = 0, 0.0  # the constructor embeds a token
    with FlopCounterMode(display=False) as counter:
        hidden = text.embed(torch.ones(rows, dtype=torch.long))
        final = text.run(hidden, torch.arange(rows), caches, {True: plan, False: plan})
        text.logits(final[:sampled])
    return int(counter.get_total_flops())


def pairs_of(text: TextShape, positions: range, ends: list[int]) -> int:
    """Pairs that rows at these positions attend to, layer by layer and row by row, as the engine defines them."""
    return sum(
        end - (max(0, position - text.window + 1) if layer % text.pattern else 0)
        for layer in range(1, text.layers + 1)
        for position, end in zip(positions, ends, strict=True)
    )


def variant(shape: Shape | str, *others: Any, **settings: Any) -> Variant:
    return Variant(SHAPES[shape] if isinstance(shape, str) else shape, *others, **{"dtype": "fp32", **settings})


@pytest.mark.parametrize("shape", [*MODELS, ANY])
def test_products_are_those_of_the_engines_layers(shape: str | Shape) -> None:
    model, _ = random_model(shape, dtype=torch.float32, device="cpu")
    found = variant(shape)
    work = pass_work(found, decode_contexts=[5, 900], prefill=[(0, 9)], sampled=3)
    assert work.products == work.link_bytes == work.reductions == 0
    assert work.dense == decoder_pass(model, rows=11, sampled=3)
    vision = found.shape.vision
    with FlopCounterMode(display=False) as counter:
        VisionLayers(model)(torch.zeros(2, 3, vision.image_size, vision.image_size))
    # PyTorch counts no FLOPs of its attention on a CPU, and the engine pads patches to a multiple of 8 values.
    assert vision_work(found, 2).dense == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("shape", ["tiny", ANY])
def test_a_shard_computes_its_part_and_sends_what_the_engine_sends(shape: str | Shape) -> None:
    model, _ = random_model(shape, size=2, dtype=torch.float32, device="cpu")
    vocabulary = (SHAPES[shape] if isinstance(shape, str) else shape).text.vocabulary
    ranks, found = CountingRanks(2), variant(shape, tensor_parallel_size=2)
    work = pass_work(found, decode_contexts=[40] * 6, prefill=[(3, 8)], sampled=2)
    assert work.dense == decoder_pass(model, 11, 2, ranks, vocabulary)
    assert (work.reductions, work.link_bytes) == (ranks.messages, ranks.sent)
    assert found.weight_bytes() == weight_bytes(model)


@given(model=st.sampled_from([*SHAPES]), context=st.integers(1, 5000), batch=st.integers(1, 64))
def test_a_step_reads_the_keys_of_every_request(model: str, context: int, batch: int) -> None:
    shape = SHAPES[model]
    step, narrow = (pass_work(Variant(shape, kind), decode_contexts=[context] * batch) for kind in (None, "int8"))
    assert step.flops() == narrow.flops() == batch * pass_work(Variant(shape), decode_contexts=[context]).flops()
    assert narrow.flops(2.0) == step.flops() - narrow.products / 2
    written = batch * 4 * shape.text.kv_heads * shape.text.head_size * shape.text.layers
    assert step.kv_bytes == batch * kv_bytes(shape, context, 2) + written
    assert vision_work(Variant(shape), batch).flops() == shape.vision_flops(batch)
    if shape.vision is not None:
        tower = vision_work(Variant(shape, quantize_vision="int8"), batch)
        matrices = 2 * shape.vision.patches * shape.vision.layers * shape.vision.layer_matrices()
        assert (tower.tower, tower.flops()) == (batch * matrices, shape.vision_flops(batch))
        assert tower.flops(tower_narrow=2.0) == tower.flops() - tower.tower / 2


@given(start=st.integers(0, 30), blocks=st.integers(0, 3), text_tokens=st.integers(1, 30))
def test_chunks_attend_to_the_intervals_of_the_engine(start: int, blocks: int, text_tokens: int) -> None:
    shape, text = replace(ANY, image_tokens=16), ANY.text
    after = start + blocks * shape.image_tokens
    ends = [start + (1 + row // 16) * 16 for row in range(blocks * 16)] + [
        after + 1 + row for row in range(text_tokens)
    ]
    positions = range(start, after + text_tokens)
    work = pass_work(variant(shape), prefill=[(positions.start, positions.stop)], views=blocks)
    assert work.attention == 4 * text.heads * text.head_size * pairs_of(text, positions, ends)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", None])
def test_weights_take_the_bytes_of_a_loaded_model(kind: str | None) -> None:
    weight_format = None if kind is None else WeightFormat(kind, 64)
    model, _ = random_model("mini", dtype=torch.float32, device="cpu", weight_format=weight_format)
    assert variant("mini", kind, 64).weight_bytes() == weight_bytes(model)


@given(
    model=st.sampled_from(["4b", "12b", "27b"]),
    kind=st.sampled_from([None, "fp8", "int8", "int4"]),
    size=st.sampled_from([2, 4]),
    contexts=st.lists(st.integers(1, 9000), max_size=9),
    chunk=st.integers(1, 3000),
)
def test_shares_of_a_group_add_up(model: str, kind: str | None, size: int, contexts: list[int], chunk: int) -> None:
    alone, share = Variant(SHAPES[model], kind), Variant(SHAPES[model], kind, tensor_parallel_size=size)
    whole, part = (pass_work(each, decode_contexts=contexts, prefill=[(7, 7 + chunk)]) for each in (alone, share))
    for name in ("products", "dense", "attention", "kv_bytes"):
        assert size * getattr(part, name) == pytest.approx(getattr(whole, name), rel=1e-4)
    assert whole.activation_bytes / size < part.activation_bytes < whole.activation_bytes
    assert alone.weight_bytes() / size < share.weight_bytes() < alone.weight_bytes()
    assert whole.reductions == 0 < part.link_bytes


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=5), st.integers(1, 4000), st.sampled_from(["1b", "27b"]))
def test_work_grows_with_every_token_and_chunks_add_up(contexts: list[int], cut: int, model: str) -> None:
    of = Variant(SHAPES[model], "int8")
    less = pass_work(of, decode_contexts=contexts)
    more = pass_work(of, decode_contexts=[*contexts, 1])
    longer = pass_work(of, decode_contexts=[contexts[0] + 1, *contexts[1:]])
    assert all(a <= b for a, b in zip(astuple(less), astuple(more), strict=True))
    assert less.attention < longer.attention and less.kv_bytes <= longer.kv_bytes
    once = pass_work(of, prefill=[(0, cut + contexts[0])], sampled=0)
    twice = pass_work(of, prefill=[(0, cut)], sampled=0) + pass_work(of, prefill=[(cut, cut + contexts[0])], sampled=0)
    assert twice.attention == once.attention and twice.products == once.products
    assert twice.weight_bytes == 2 * once.weight_bytes


def test_nothing_to_compute_is_no_work() -> None:
    assert pass_work(Variant(SHAPES["4b"])) == Work() == vision_work(Variant(SHAPES["1b"]), 4)


NO_VARIANTS = [
    ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 does not divide the model's 32 attention heads, "),
    ({"tensor_parallel_size": 32}, "--tensor-parallel-size 32 .* use 1, 2, 4, 8 or 16"),
]


@pytest.mark.parametrize(("settings", "reason"), NO_VARIANTS)
def test_variants_that_do_not_exist_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        Variant(SHAPES["27b"], **settings)


def test_int4_takes_the_largest_group_that_fits_and_names_those_that_do() -> None:
    assert Variant(SHAPES["27b"], "int4").weight_bytes() == Variant(SHAPES["27b"], "int4", 128).weight_bytes()
    assert Variant(SHAPES["27b"], "int4", 32).weight_bytes() > Variant(SHAPES["27b"], "int4").weight_bytes()
    with pytest.raises(SettingError, match=r"groups of 128 do not divide 576 .*; use 64 or 32$"):
        Variant(SHAPES["mini"], "int4", 128)
    with pytest.raises(SettingError, match="use --quantization int8 or fp8"):
        Variant(ANY, "int4")
