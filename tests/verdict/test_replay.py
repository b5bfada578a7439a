"""Replayed answers: a rare fault is found, the time is kept, and drawn tokens are judged by their probabilities."""

import random
from collections.abc import Sequence

import pytest
import torch
from tests.verdict.test_tokens import END, SUPPRESSED, VOCABULARY, judge

from panscan.verdict.replay import MeasuredAnswer, replay
from panscan.verdict.tokens import ReferenceRows

RIGHT = (1, 2, 3, 4)


def along(tokens: Sequence[int], margin: float = 5.0) -> torch.Tensor:
    """The hidden states of a model that prefers one token at each position, whatever came before."""
    states = torch.zeros(len(tokens), VOCABULARY)
    states[range(len(tokens)), RIGHT[: len(tokens)]] = margin
    return states


def replayed(answers: list[tuple[int, ...]], *, seconds: float = 60.0, margin: float = 5.0, noise: float = 0.0):
    rows = ReferenceRows(lambda _, tokens: along(tokens, margin))
    asked = [MeasuredAnswer(f"r{number}", tokens, 0) for number, tokens in enumerate(answers)]
    return replay(judge(noise), asked, lambda group: [along(a.tokens, margin) for a in group], rows, seconds)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wrong", [(1, 2, 0, 4), (1, 2, 3, SUPPRESSED), (1, END, 3, 4)])
def test_a_fault_in_one_of_three_hundred_answers_is_found(seed: int, wrong: tuple[int, ...]) -> None:
    answers = [RIGHT] * 300
    number = random.Random(seed).randrange(300)
    answers[number] = wrong
    check = replayed(answers)
    assert (check.requests, check.answers, check.tokens, check.departed) == (300, 300, 1200, 1)
    assert check.first.request == f"r{number}"


def test_what_rounding_explains_is_no_fault() -> None:
    check = replayed([RIGHT, (1, 2, 0, 4)], margin=0.9, noise=0.5)
    assert (check.departed, check.first) == (0, None)
    assert replayed([RIGHT, (1, 2, 0, 4)], margin=1.1, noise=0.5).departed == 1


def test_without_time_one_answer_is_replayed_and_the_rest_is_counted() -> None:
    check = replayed([RIGHT] * 50, seconds=0.0)
    assert (check.requests, check.answers) == (1, 50)


def test_a_model_that_cannot_compute_leaves_a_note() -> None:
    def fail(_: object) -> list[torch.Tensor]:
        raise RuntimeError("the weights are quantised")

    check = replay(judge(), [MeasuredAnswer("r", RIGHT, 0)], fail, ReferenceRows(lambda *_: along(RIGHT)), 1.0)
    assert check.requests == 0
    assert "the weights are quantised" in check.note


@pytest.mark.parametrize(("sharpness", "departed"), [(1.0, 0), (100.0, 5), (0.2, 5)])
def test_drawn_tokens_are_as_probable_as_draws(sharpness: float, departed: int) -> None:
    """A sampler that ignores the temperature, or that applies another one, is found by its tokens alone."""
    draws = torch.Generator().manual_seed(3)
    states = torch.randn(400, VOCABULARY, generator=draws)
    states[:, SUPPRESSED] = -100.0
    tokens = (sharpness * states).softmax(-1).multinomial(1, generator=draws)[:, 0].tolist()
    parts = [slice(first, first + 80) for first in range(0, 400, 80)]
    hidden = {f"r{number}": states[part] for number, part in enumerate(parts)}
    asked = [MeasuredAnswer(f"r{number}", tuple(tokens[part]), 0) for number, part in enumerate(parts)]
    sampled = judge(temperature=1.0, ignore_eos=True)
    check = replay(sampled, asked, lambda group: [hidden[a.request] for a in group], ReferenceRows(None), 60.0)
    assert (check.requests, check.departed) == (5, departed)
