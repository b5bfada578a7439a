"""Divergences against their definition, and what becomes of logits that are no numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr

from panscan.model.observation import Observation
from panscan.runners.generate import GenerateRunner
from panscan.verdict.divergence import DivergenceTally, Noise, PositionComparison, compare_logits
from panscan.verdict.float32 import head_logits

CPU = torch.device("cpu")
SHAPES = st.tuples(st.just(2), st.integers(1, 40), st.integers(3, 12))
LOGITS = arrays(np.float32, SHAPES, elements=st.floats(-30, 30, width=32))  # of a truth, and of another computation


@settings(max_examples=60)
@given(LOGITS)
def test_every_position_is_scipys_relative_entropy(pair: NDArray[np.float32]) -> None:
    truth, seen = torch.from_numpy(pair)
    found = compare_logits(truth, seen, [], CPU)
    p, q = (log_softmax(each.double().numpy(), axis=-1) for each in (truth, seen))
    expected = rel_entr(np.exp(p), np.exp(q)).sum(-1)
    np.testing.assert_allclose(found.kl, np.maximum(expected, 0), rtol=1e-6, atol=1e-10)
    ordered = np.sort(p, axis=-1)
    np.testing.assert_allclose(found.margin, ordered[:, -1] - ordered[:, -2], rtol=1e-9, atol=1e-12)


@settings(max_examples=30)
@given(LOGITS, st.floats(-5, 5))
def test_a_shift_of_all_logits_changes_nothing(pair: NDArray[np.float32], shift: float) -> None:
    truth = torch.from_numpy(pair[0]).double()
    found = compare_logits(truth, truth + shift, [], CPU)
    assert float(found.kl.max()) < 1e-12
    assert float(found.moved.max()) < 1e-9


def test_suppressed_tokens_are_nobodys_choice() -> None:
    truth = torch.tensor([[9.0, 5.0, 1.0]])
    assert compare_logits(truth, torch.tensor([[0.0, 7.0, 1.0]]), [0], CPU).agree.tolist() == [True]
    found = compare_logits(truth, torch.tensor([[9.0, 5.0, 6.0]]), [0], CPU)
    assert found.agree.tolist() == [False]
    assert found.margin.item() == pytest.approx(4.0)
    assert found.moved.item() == pytest.approx(5.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_infinitely_far(broken: float) -> None:
    truth = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    seen = truth.clone()
    seen[1, 0] = broken
    assert compare_logits(truth, seen, [], CPU).kl.tolist() == [0.0, math.inf]


@pytest.mark.parametrize(("margin", "word"), [(1e-4, "close"), (1e-2, "different")])
def test_a_tie_that_tips_costs_an_exact_word_but_is_not_different(margin: float, word: str) -> None:
    """In float32, where the yardstick has no noise of its own."""
    margins = torch.tensor([margin, 3.0], dtype=torch.float64)
    seen = PositionComparison(torch.zeros(2).double(), margins, torch.zeros(2).double(), torch.tensor([False, True]))
    record = DivergenceTally([seen]).verdict("c", Noise([[0.0, 0.0]], None, 0.0), 2, float32=True)
    assert record.verdict == word
    assert not record.equal_tokens


def test_noise_is_the_mean_over_the_tokens_that_a_cell_may_write() -> None:
    noise = Noise([[1.0, 3.0, 8.0], [2.0]], None, 0.0)
    assert [noise.answer_mean(steps) for steps in (1, 2, 128)] == [1.5, 2.0, 3.5]


@pytest.mark.parametrize("times", [1, 30, 700])
def test_reported_tokens_are_compared_with_the_noise_of_reported_tokens(tiny: GenerateRunner, times: float) -> None:
    """A deviation so many times the noise is called so from 20 tokens, too, at both kinds of position.

    Over the noise of the whole vocabulary, 30 times the noise would look like less than once.
    """
    draws = torch.Generator().manual_seed(4)
    hidden = torch.randn(24, 128, generator=draws)
    reference = head_logits(tiny.loaded.model, hidden)
    seen, other = (
        Observation(list(range(24)), list(range(24)), logits, logits)
        for logits in (
            reference + 0.02 * scale * torch.randn(reference.shape, generator=draws) for scale in (1, times**0.5)
        )
    )
    tallies = [DivergenceTally() for _ in range(4)]
    for tally, observation in zip(tallies, (seen, seen.reported(), other, other.reported()), strict=True):
        tally.add(tiny.loaded, hidden, hidden, observation)
    noise = replace(tallies[0].noise(), reported=tallies[1].noise())
    full, coarse = (tally.verdict("c", noise, 24, float32=False) for tally in tallies[2:])
    for kind in ("answer", "image"):
        assert getattr(full, kind).ratio == pytest.approx(times, rel=0.3)
        assert times / 2 <= getattr(coarse, kind).ratio <= times * 5, "the choice of reported tokens deviates, too"
    assert (full.verdict, coarse.verdict) == (("exact",) * 2 if times == 1 else ("different",) * 2)
    assert tallies[3].verdict("c", tallies[0].noise(), 24, float32=False).verdict == "unverified"
