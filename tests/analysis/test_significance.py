"""Answers to the same questions: p-values by enumeration."""

from collections.abc import Sequence
from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from panscan.analysis.significance import sign_flip_p_value


def enumerated(differences: Sequence[float]) -> float:
    """Twice the smaller tail over all ways to turn the signs."""
    seen = sum(differences)
    sums = [
        sum(s * each for s, each in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    upper, lower = (sum(sign * each >= sign * seen - 1e-9 for each in sums) / len(sums) for sign in (1, -1))
    return min(1.0, 2 * min(upper, lower))


graded = st.lists(st.sampled_from([-1.0, -0.6, -0.25, 0.0, 0.25, 0.5, 1.0]), max_size=9)


@given(graded)
def test_p_values_are_those_of_all_swaps(differences: list[float]) -> None:
    assert sign_flip_p_value(differences) == pytest.approx(enumerated(differences))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_right_and_wrong_have_mcnemars_exact_p_value(won: int, lost: int, ties: int) -> None:
    found = sign_flip_p_value([1.0] * won + [-1.0] * lost + [0.0] * ties)
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert found == pytest.approx(expected)
    assert sign_flip_p_value([0.3] * won + [-0.3] * lost) == pytest.approx(expected), "one size is as good as 1"


def test_mcnemar_of_many_questions_is_exact_and_quick() -> None:
    tail = sum(comb(5000, count) for count in range(2401))
    assert sign_flip_p_value([1.0] * 2400 + [-1.0] * 2600) == pytest.approx(2 * tail / 2**5000)


def test_many_graded_differences_are_close_to_the_normal_curves() -> None:
    """Too many swaps to look at all of them: the seeded draws give what the central limit gives."""
    differences = [0.5, -0.25, 0.75, -0.5] * 20 + [0.25] * 8
    z = (sum(differences) - 0.125) / sum(each**2 for each in differences) ** 0.5
    assert sign_flip_p_value(differences) == pytest.approx(2 * stats.norm.sf(z), abs=0.02)
