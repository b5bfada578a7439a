"""Shards of a model: together they are the whole model, in their parameters and in what they compute."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model.text_logits import text_logits
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from panscan.core import UnsupportedError
from panscan.model.bundled.random_weights import random_model
from panscan.model.checkpoint import drop_weights, load_random
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.linear.vocabulary import VocabularyMatrix, quantize_vocabulary
from panscan.model.load import load_meta_model_for
from panscan.model.shapes import Shape, TextShape, VisionShape
from panscan.model.sharding import Ranks, check_divides, fill_shard, shard_config, shard_of
from panscan.settings import Settings
from panscan.verdict.float32 import head_logits

TEXT = TextShape(5001, 64, 96, 4, 4, 2, 32, 16, 32, 256)
EYES = VisionShape(hidden=48, intermediate=64, layers=1, heads=2, image_size=56)
SHAPES = {"sees": Shape("sees", TEXT, EYES, image_tokens=4), "text only": Shape("text only", TEXT)}
BOTH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@cache
def model_of(shape: Shape) -> Any:
    """A random model in float32; the text-only one caps its logits."""
    model, _ = random_model(shape, dtype=torch.float32, device="cpu")
    model.config.get_text_config().final_logit_softcapping = 0.5
    return model


def empty_shard(model: Any, size: int) -> Any:
    kind = AutoModelForImageTextToText if hasattr(model.config, "vision_config") else AutoModelForCausalLM
    return kind.from_config(shard_config(model.config, size), dtype=torch.float32).eval()


def shard(model: Any, rank: int, size: int) -> Any:
    filled = empty_shard(model, size)
    fill_shard(filled, model.named_parameters(), rank, size)
    return filled


def joined(parts: list[torch.Tensor], full: torch.Tensor) -> torch.Tensor:
    """The parts as one tensor, padding included, along the only dimension in which they are smaller."""
    smaller = [
        at for at, (size, full_length) in enumerate(zip(parts[0].shape, full.shape, strict=True)) if size < full_length
    ]
    if not smaller:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    [dimension] = smaller
    return torch.cat(parts, dimension)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Shape, int]:
    """A shape of any kind, and a number of ranks that divides it, though not its vocabulary."""
    size = draw(st.integers(2, 4))
    kv_heads = size * draw(st.integers(1, 2))
    text = replace(
        TEXT,
        vocabulary=5000 + draw(st.integers(0, 7)),
        hidden=48,
        layers=2,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 2)),
        intermediate=size * draw(st.integers(1, 40)),
    )
    return Shape("drawn", text, draw(st.sampled_from([EYES, None])), image_tokens=4), size


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(splits())
def test_the_shards_of_every_parameter_join_to_the_whole(split: tuple[Shape, int]) -> None:
    shape, size = split
    model, _ = random_model(shape, dtype=torch.float32, device="cpu")
    accepted = dict(empty_shard(model, size).named_parameters(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert accepted.keys() == parameters.keys()
    for name, full in parameters.items():
        parts = [shard_of(name, full, rank, size) for rank in range(size)]
        assert {part.shape for part in parts} == {accepted[name].shape}, name
        tensor = joined(parts, full)
        assert torch.equal(tensor[: len(full)], full), name
        assert not tensor[len(full) :].any(), name


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.down_proj.bias"])
def test_a_bias_of_partial_sums_is_added_once(name: str) -> None:
    bias = torch.randn(8)
    torch.testing.assert_close(sum(shard_of(name, bias, rank, 4) for rank in range(4)), bias)


def test_a_shard_is_not_filled_from_a_model_that_lacks_a_parameter() -> None:
    model = model_of(SHAPES["text only"])
    some = [(name, value) for name, value in model.named_parameters() if "layers.1.mlp" not in name]
    with pytest.raises(ValueError, match=r"no value for model\.layers\.1\.mlp\.down_proj\.weight"):
        fill_shard(empty_shard(model, 2), some, 0, 2)


@dataclass(frozen=True)
class ThreadRanks:
    """One of several ranks, which are threads of this process, as the layers see it. ``given``: a tensor of each."""

    rank: int
    given: list[torch.Tensor]
    barrier: threading.Barrier

    @property
    def size(self) -> int:
        return len(self.given)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0))

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all_gather(tensor), -1)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.rank] = tensor.clone()
        self.barrier.wait()
        gathered = list(self.given)
        self.barrier.wait()
        return gathered


def logits(model: Any, ids: torch.Tensor, ranks: Any, vocabulary: int) -> torch.Tensor:
    """Next-token logits of all positions of one text."""
    return text_logits(TextLayers(model, ranks, vocab_size=vocabulary), ids)


@BOTH
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("quantized_head", [False, True])
def test_shards_compute_what_the_model_computes(shape: Shape, size: int, quantized_head: bool) -> None:
    """With a quantised head, what a model of its dequantised values computes."""
    model, vocabulary = deepcopy(model_of(shape)), shape.text.vocabulary
    ids = torch.tensor([30, 4000, 5, vocabulary - 1, 0, 2500, 2501])
    shards = [shard(model, rank, size) for rank in range(size)]
    if quantized_head:
        for part in shards:
            quantize_vocabulary(part)
        model.lm_head.weight.data = VocabularyMatrix(model.lm_head.weight).dequantized()
    tolerance = 1e-4 if quantized_head else 1e-5  # inputs have 15 bits
    due = model(input_ids=ids[None]).logits[0].detach()
    given, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=60)

    def computed(rank: int) -> torch.Tensor:
        return logits(shards[rank], ids, ThreadRanks(rank, given, barrier), vocabulary)

    with ThreadPoolExecutor(size) as threads:
        by_rank = [*threads.map(computed, range(size))]
    for actual in by_rank:
        assert actual.shape == (len(ids), vocabulary)
        torch.testing.assert_close(actual, due, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(logits(model, ids, Ranks(), vocabulary), due, rtol=1e-5, atol=tolerance)


REFUSED_SIZES = [
    (8, 4, 96, 3, "--tensor-parallel-size 3 does not divide the model's 8 attention heads, 4 KV heads, 96 MLP"),
    (8, 4, 96, 3, "use 1 or 2$"),
    (8, 4, 96, 8, "use 1, 2 or 4$"),
    (8, 4, 90, 4, "use 1 or 2$"),
    (4, 1, 96, 2, "use 1$"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "columns", "size", "message"), REFUSED_SIZES)
def test_refused_sizes_name_those_that_divide(heads: int, kv_heads: int, columns: int, size: int, message: str) -> None:
    text = replace(TEXT, heads=heads, kv_heads=kv_heads, intermediate=columns)
    model, _ = random_model(Shape("drawn", text), dtype=torch.float32, device="meta")
    with pytest.raises(UnsupportedError, match=message):
        check_divides(model.config, size)
    check_divides(model.config, 1)


def test_a_padding_token_may_lie_beyond_a_shard() -> None:
    model = model_of(SHAPES["text only"])
    config = shard_config(model.config, 2)
    assert config.pad_token_id is None
    config = model.config
    before, config.pad_token_id = config.pad_token_id, config.vocab_size - 1
    try:
        assert len(empty_shard(model, 2).get_input_embeddings().weight) == 2501
    finally:
        config.pad_token_id = before


def test_a_quantised_checkpoint_is_refused() -> None:
    config = shard_config(model_of(SHAPES["sees"]).config, 1)
    config.quantization_config = {"quant_method": "gptq"}
    check_divides(config, 1)
    with pytest.raises(UnsupportedError, match="--tensor-parallel-size 2: the checkpoint's quantised weights"):
        check_divides(config, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_weights_keeps_its_embedding_or_its_output_matrix(tied: bool) -> None:
    loaded = load_random("tiny", "tiny", torch.float32, torch.device("cpu"))
    model = loaded.model
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    due, hidden = model.lm_head.weight.detach().clone(), torch.randn(3, model.lm_head.weight.shape[1])
    expected = model.lm_head(hidden)
    for _ in range(2):  # a second time, after the processes that held the weights have died
        torch.testing.assert_close(head_logits(loaded.model, hidden), expected)
        drop_weights(loaded)
        parameters = loaded.model.named_parameters(remove_duplicate=False)
        materialized = {name for name, parameter in parameters if not parameter.is_meta}
        assert {name.rsplit(".", 2)[-2] for name in materialized} == {"lm_head", *(["embed_tokens"] if tied else [])}
        assert torch.equal(loaded.model.get_output_embeddings().weight, due)
        assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    if tied:
        settings = Settings(random_weights=True, model_shape="tiny", dtype="fp32", device="cpu")
        assert torch.equal(load_meta_model_for(settings, head=True).model.get_output_embeddings().weight, due)


def test_random_weights_drawn_elsewhere_are_the_same() -> None:
    one, _ = random_model(SHAPES["sees"], dtype=torch.float32, device="cpu")
    other, _ = random_model(SHAPES["sees"], dtype=torch.float32, device="cpu", drawn_on=torch.device("cpu"))
    for (name, first), (_, second) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(first, second), name
