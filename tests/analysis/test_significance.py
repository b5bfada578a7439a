"""Cells against each other on the same questions: p-values by enumeration, and what may be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.records.test_quality import run_of_cells

from panscan.analysis.accuracy import QualityDifference, compare_with_baseline, evidence_text, quality_difference
from panscan.analysis.significance import sign_flip_p_value
from panscan.records.store import Run


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


def against(cells: dict[str, Sequence[Sequence[float]]], views: dict[str, float]) -> tuple[str, dict[str, str]]:
    compared = compare_with_baseline(run_of_cells(**cells), list(cells), views.__getitem__)
    assert compared is not None
    return compared


def difference(cells: dict[str, Sequence[Sequence[float]]], cell: str, baseline: str) -> QualityDifference:
    lost = quality_difference(run_of_cells(**cells), cell, baseline)
    assert lost is not None
    return lost


def right(number: int, of: int) -> list[list[float]]:
    return [[1.0]] * number + [[0.0]] * (of - number)


def test_the_baseline_has_the_most_views_and_is_not_chosen_by_its_answers() -> None:
    cells = {"few": right(9, 10), "most": right(5, 10), "best": right(6, 10)}
    baseline, others = against(cells, {"few": 1.0, "most": 3.0, "best": 3.0})
    assert baseline == "most"
    assert set(others) == {"few", "best"}


def test_cells_that_answer_nothing_right_show_nothing() -> None:
    _, others = against({"a": right(0, 300), "b": right(0, 300)}, {"a": 5.0, "b": 3.0})
    assert others == {"b": "undecided: neither cell has a correct answer"}


def test_a_small_loss_of_every_question_is_a_loss_though_its_interval_reaches_0() -> None:
    """ANLS 0.3 points lower in each of 200 questions."""
    base, worse = [[0.9]] * 200, [[0.897]] * 200
    cells = {"a": base, "b": worse}
    _, others = against(cells, {"a": 5.0, "b": 3.0})
    lost = difference(cells, "b", "a")
    assert -0.02 < lost.low < 0 < lost.high
    assert others["b"].startswith("measurable loss (")
    assert not lost.excludes_loss
    assert evidence_text(run_of_cells(**cells), lost, "a").startswith("measurable loss: ")


def test_equal_answers_to_many_questions_lose_nothing_measurable() -> None:
    _, others = against({"a": right(150, 200), "b": right(150, 200)}, {"a": 5.0, "b": 3.0})
    assert others["b"] == (
        "no measurable loss (p = 1, difference +0.0 points [-1.0, +1.0]): with 200 questions, a loss of more than 1.0"
        " points is excluded"
    )


def test_few_questions_cannot_tell_and_say_what_they_do_not_exclude() -> None:
    _, others = against({"a": right(15, 20), "b": right(15, 20)}, {"a": 5.0, "b": 3.0})
    assert others["b"].startswith("undecided (")
    assert others["b"].endswith("with 20 questions, a loss of 8.9 points is possible")


def test_a_clear_loss_and_a_clear_gain() -> None:
    cells = {"base": right(60, 100), "worse": right(40, 100), "better": right(80, 100)}
    _, others = against(cells, {"base": 5.0, "worse": 3.0, "better": 3.0})
    assert others["worse"].startswith("measurable loss (p < 0.001, difference -20.0 points [-2")
    assert others["better"].startswith("measurable gain (")


def test_one_loss_among_many_cells_must_be_clearer() -> None:
    """6 of 6 lost is p = 0.03: enough alone, not among four comparisons that could each raise an alarm."""
    base, worse = right(50, 100), right(44, 100)
    assert against({"base": base, "c0": worse}, {"base": 5.0, "c0": 1.0})[1]["c0"].startswith("measurable loss (")
    other = [[0.0]] * 6 + [[1.0]] * 44 + [[1.0]] * 6 + [[0.0]] * 44
    cells = {"base": base, "c0": worse, **{f"c{number}": other for number in (1, 2, 3)}}
    _, others = against(cells, {"base": 5.0, "c0": 1.0, "c1": 1.0, "c2": 1.0, "c3": 1.0})
    assert difference(cells, "c0", "base").p_value == 2 * 0.5**6
    assert others["c0"].startswith("undecided ("), "nor does it lose nothing: its own interval has no 0 in it"


def test_one_cell_is_compared_with_none() -> None:
    assert compare_with_baseline(run_of_cells(c=right(3, 4)), ["c"], lambda _: 1.0) is None
    assert compare_with_baseline(run_of_cells(c=[[None]], d=right(1, 2)), ["c", "d"], lambda _: 1.0) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (right(29, 29), right(29, 29), "fewer than the 30 required"),
        (right(50, 100), right(60, 100), "measurable loss: "),
        (right(50, 50), right(50, 50), "undecided, a loss of 3.8 points is possible: "),
        (
            right(100, 100),
            right(100, 100),
            "no measurable loss: accuracy (exact match) +0.0 points (95%: -1.9 to +1.9, p = 1)",
        ),
    ],
)
def test_the_rule_of_recommendations(ours: list[list[float]], theirs: list[list[float]], said: str) -> None:
    run: Run = run_of_cells(c=ours, d=theirs)
    lost = difference({"c": ours, "d": theirs}, "c", "d")
    text = evidence_text(run, lost, "the other")
    assert lost.excludes_loss == text.startswith("no measurable loss")
    assert said in text
    assert "against the other over" in text
