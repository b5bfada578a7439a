"""Every logit of a model runner's passes against one eager pass of Transformers' model."""

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.pages import ForcedSequence, Pages, ask, teacher
from tests.small_models import SIDE, SOFT, loaded_of, odd_configs, odd_model
from tests.triton_here import interpreted

from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence
from panscan.engine.triton_attention import HEAD_SIZES
from panscan.model.checkpoint import Loaded

SEEDS = st.integers(0, 2**32)


Logits = dict[Sequence, dict[int, torch.Tensor]]
"""Logits by position."""


def computed(batch: list[ForcedSequence], pages: Pages, draw: random.Random, most: int) -> Logits:
    """Run sequences to their ends, some of them in each pass, in any order; return logits of all positions.

    Some passes observe all of their rows, others none. Of the latter, only the logits of sampled rows are known.
    """
    seen: Logits = {asked.sequence: {} for asked in batch}
    while rest := [asked for asked in batch if not asked.done]:
        chunks = [asked.next_chunk(draw, most) for asked in draw.sample(rest, draw.randint(1, len(rest)))]
        observes = draw.random() < 0.5
        result = pages.run(chunks, batch, observed=None if observes else [])
        samples = [chunk for chunk in chunks if chunk.samples]
        assert len(result.tokens) == len(samples) and (result.answers is None) == (not samples)
        assert (result.logits is not None) == observes
        if result.logits is not None:
            parts = result.logits.split([chunk.end - chunk.start for chunk in chunks])
            for chunk, part in zip(chunks, parts, strict=True):
                seen[chunk.sequence] |= dict(zip(range(chunk.start, chunk.end), part, strict=True))
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


@pytest.mark.parametrize("name", ["window inside image blocks", "text only"])
def test_long_text_is_computed_in_parts(name: str) -> None:
    """Longer than a piece of the sdpa backend, with a decode row of few keys in the same pass."""
    draw, loaded = random.Random(0), loaded_of(name)
    short = ask(loaded, draw, number=1, longest=3)
    ids = [draw.randrange(20, 1000) for _ in range(600)]
    long = ForcedSequence(Sequence(0, ids, len(ids), PromptLayout(), len(ids) + 3), short.forced)
    check(loaded, [short, long], computed([short, long], Pages(loaded, 16, draw), draw, 1000))


def test_sequences_of_one_pass_do_not_attend_to_each_other() -> None:
    """Two equal prompts and one with the images swapped: equal up to the first image, different from there."""
    loaded, draw = loaded_of("window inside image blocks"), random.Random(5)
    views = dict(
        zip([b"a", b"b"], np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8), strict=True)
    )
    ids = [30, 31, *[SOFT] * 16, 32, 33, *[SOFT] * 16, 34]
    orders = [(b"a", b"b"), (b"a", b"b"), (b"b", b"a")]
    batch = [
        ForcedSequence(Sequence(number, list(ids), len(ids), PromptLayout.of(ids, SOFT, keys), 99), [], views)
        for number, keys in enumerate(orders)
    ]
    result = Pages(loaded, 4, draw).run([Chunk(asked.sequence, 0, len(ids)) for asked in batch], batch)
    first, second, swapped = result.hidden.split(len(ids))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    torch.testing.assert_close(first[:2], swapped[:2], rtol=0, atol=1e-5)
    assert float((first[2:] - swapped[2:]).abs().amax(1).min()) > 1e-2


def test_a_result_has_only_the_observed_rows() -> None:
    loaded = loaded_of("text only")
    pages = Pages(loaded, 4, random.Random(0))
    rows = [Sequence(number, [20, 21, 22, 23, 24], 5, PromptLayout(), 9) for number in range(2)]
    whole = pages.run([Chunk(rows[0], 0, 5)])
    few = pages.run([Chunk(rows[1], 0, 5)], observed=[1, 4])
    none = pages.run([Chunk(Sequence(2, [20], 1, PromptLayout(), 9), 0, 1)], observed=[])
    for found, expected in ((few.hidden, whole.hidden), (few.logits, whole.logits)):
        torch.testing.assert_close(found, expected[[1, 4]])
    assert none.hidden is None and none.logits is None and whole.vision is None


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
