"""Every logit of a model runner's passes against one eager pass of Transformers' model."""

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.pages import ForcedSequence, Pages, ask, teacher
from tests.small_models import loaded_of, odd_configs, odd_model
from tests.triton_here import interpreted

from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import Sequence
from panscan.engine.triton_attention import HEAD_SIZES
from panscan.model.checkpoint import Loaded

SEEDS = st.integers(0, 2**32)


Logits = dict[Sequence, dict[int, torch.Tensor]]
"""Logits by position."""


def computed(batch: list[ForcedSequence], pages: Pages, draw: random.Random, most: int) -> Logits:
    """Run sequences to their ends, some of them in each pass, in any order; return logits of all positions.

    Passes observe all of their rows, some or none. Of the other rows, only the logits of sampled ones are known.
    """
    seen: Logits = {asked.sequence: {} for asked in batch}
    while rest := [asked for asked in batch if not asked.done]:
        chunks = [asked.next_chunk(draw, most) for asked in draw.sample(rest, draw.randint(1, len(rest)))]
        rows = [(chunk.sequence, position) for chunk in chunks for position in range(chunk.start, chunk.end)]
        observed = sorted(draw.sample(range(len(rows)), draw.choice([0, len(rows), draw.randint(0, len(rows))])))
        result = pages.run(chunks, batch, observed)
        samples = [chunk for chunk in chunks if chunk.samples]
        assert len(result.tokens) == len(samples) and (result.answers is None) == (not samples)
        assert (result.logits is None) == (result.hidden is None) == (not observed)
        for row, logits in zip(observed, () if result.logits is None else result.logits, strict=True):
            sequence, position = rows[row]
            seen[sequence][position] = logits
        for chunk, logits in zip(samples, [] if result.answers is None else result.answers, strict=True):
            torch.testing.assert_close(logits, seen[chunk.sequence].setdefault(chunk.end - 1, logits))
    assert len(pages.runner.pixels) == 0
    return seen


def check(loaded: Loaded, batch: list[ForcedSequence], logits: Logits) -> None:
    for asked in batch:
        expected, found = teacher(loaded, asked), logits[asked.sequence]
        assert len(expected) - 1 in found
        rows = [*found]
        apart = (torch.stack([*found.values()]) - expected[rows]).abs().amax(1)
        close = torch.full_like(apart, 1e-5 * float(expected.abs().max()))
        if bool((apart > close).any()):
            # Norms over few values amplify the rounding of some rows, in Transformers too: float64 shows which.
            exact = teacher(replace(loaded, model=deepcopy(loaded.model).double()), asked)[rows]
            close = close.maximum(20 * (expected[rows] - exact).abs().amax(1).float())
        assert bool((apart <= close).all()), (apart / close).max()


@given(config=odd_configs(), seed=SEEDS, block_size=st.integers(1, 20), most=st.sampled_from([4, 20, 1000]))
@settings(max_examples=40)
def test_all_logits_are_those_of_one_eager_pass(config: Any, seed: int, block_size: int, most: int) -> None:
    """Of prompts of several sequences, whole or in chunks, mixed with decode rows, in scattered blocks."""
    draw, loaded = random.Random(seed), odd_model(config)
    batch = [ask(loaded, draw, number=number) for number in range(draw.randint(1, 4))]
    check(loaded, batch, computed(batch, Pages(loaded, block_size, draw), draw, most))


@interpreted
@given(config=odd_configs(HEAD_SIZES, most_layers=2, most_kv_heads=2), seed=SEEDS)
@settings(max_examples=5)
def test_odd_checkpoints_with_kernels(config: Any, seed: int) -> None:
    """Interpreted kernels are slow, so there is little text."""
    draw, loaded = random.Random(seed), odd_model(config)
    batch = [ask(loaded, draw, number=number, longest=4, outputs=2) for number in range(2)]
    check(loaded, batch, computed(batch, Pages(loaded, 4, draw, attention_backend="triton"), draw, 20))


@interpreted
def test_padded_passes_have_the_logits_of_one_eager_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that CUDA graphs record, launched one by one; padding uses the spare blocks, which hold NaN."""
    monkeypatch.setattr(ModelRunner, "_slow_reason", lambda _: None)
    draw, loaded = random.Random(1), loaded_of("window inside image blocks")
    batch = [ask(loaded, draw, number=number, longest=3, outputs=2) for number in range(2)]
    pages = Pages(loaded, 4, draw, attention_backend="triton", max_num_seqs=2, prefill_chunk_size=32)
    assert pages.runner.graphs is not None
    check(loaded, batch, computed(batch, pages, draw, 18))


def test_the_context_ends_where_rotary_frequencies_change() -> None:
    loaded = loaded_of("text only")
    parameters = loaded.model.config.rope_parameters["full_attention"]
    before = dict(parameters)
    parameters.update(rope_type="longrope", original_max_position_embeddings=77)
    try:
        assert ModelRunner(loaded, EngineOptions(kv_cache_gb=0.01)).facts.max_positions == 77
    finally:
        parameters.clear()
        parameters.update(before)
