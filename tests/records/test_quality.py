"""Exact match, its intervals, and differences between cells: by hand, by Wilson's and Tango's formulas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from tests.records.synthetic import header, record_of, request

from panscan.analysis.accuracy import QualityDifference, quality_difference
from panscan.records.intervals import paired_interval
from panscan.records.quality import quality_of
from panscan.records.scores import scores_of
from panscan.records.store import Run

Scores = Sequence[Sequence[float | None]]
"""Of each question, its repeats."""


def run_of_cells(**cells: Scores) -> Run:
    run = Run(Path("records.jsonl"), record_of(header({cell: {} for cell in cells})), {cell: {} for cell in cells})
    for cell, scores in cells.items():
        for question, repeats in enumerate(scores):
            for number, score in enumerate(repeats):
                others: dict[str, Any] = {} if score is None else {"scores": {"exact_match": score}}
                record = request(cell, f"q{question}", 0.0, [1.0], repeat=number, prompt_sha256=f"{question}", **others)
                run.requests.setdefault((cell, number), []).append(record_of(record))
    return run


def figures(difference: QualityDifference) -> tuple[float, float, float]:
    return difference.value, difference.low, difference.high


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("$12.50", ["$12.50"], True),
        ("  Acme\n GmbH ", ["acme gmbh"], True),
        ("STRASSE", ["straße"], True),
        ("cafe\u0301", ["caf\u00e9"], True),
        ("12.50.", ["12.50"], True),
        ("No", ["yes", "no"], True),
        ("12.50", ["$12.50"], False),
        ("The total is $12.50", ["$12.50"], False),
        ("12.5", ["12.50"], False),
        ("", ["x"], False),
        ("acmegmbh", ["acme gmbh"], False),
        ("1250", ["12.50"], False),
    ],
)
def test_what_counts_as_the_same_answer(answer: str, accepted: list[str], right: bool) -> None:
    assert scores_of(answer, accepted)["exact_match"] == float(right)


def test_the_mean_is_over_requests_and_the_interval_over_questions() -> None:
    scores: Scores = [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
    found = quality_of(run_of_cells(c=scores), "c")
    assert (found.mean, found.questions) == (pytest.approx(8 / 12), 4)
    assert 0 <= found.low < found.mean < found.high <= 1
    # The same scores as twelve questions say more about the next one.
    spread = quality_of(run_of_cells(c=[[score] for repeats in scores for score in repeats]), "c")
    assert spread.questions == 12
    assert spread.high - spread.low < found.high - found.low


def test_every_share_has_wilsons_interval_which_rises_with_it() -> None:
    """Every k of every n up to 40, against scipy, whatever the number of repeats; at 0 and n it ends at the share."""
    for questions in range(1, 41):
        lows, highs = [], []
        for right in range(questions + 1):
            found = quality_of(run_of_cells(c=[[1, 1]] * right + [[0, 0]] * (questions - right)), "c")
            due = binomtest(right, questions).proportion_ci(method="wilson")
            assert (found.low, found.high) == (pytest.approx(due.low, abs=1e-12), pytest.approx(due.high, abs=1e-12))
            assert found.low <= found.mean <= found.high
            lows.append(found.low)
            highs.append(found.high)
        assert lows == sorted(set(lows)) and highs == sorted(set(highs))
        assert (lows[0], highs[-1]) == (0, 1)


def test_unscored_and_failed_requests_have_no_part() -> None:
    run = run_of_cells(c=[[1], [None], [0]], d=[[None]])
    run.requests["c", 0][2].error = "no memory"
    found = quality_of(run, "c")
    assert (found.mean, found.questions) == (1, 1)
    assert quality_of(run, "d") is None
    assert quality_difference(run, "c", "d") is None


def test_differences_are_paired() -> None:
    """10 questions: 3 won, 1 lost."""
    ours: Scores = [[1]] * 3 + [[0]] + [[1]] * 6
    theirs: Scores = [[0]] * 3 + [[1]] + [[1]] * 6
    found = quality_difference(run_of_cells(c=ours, d=theirs), "c", "d")
    assert figures(found) == (pytest.approx(0.2), *paired_interval(3, 1, 10))
    assert (found.questions, found.better, found.worse) == (10, 3, 1)
    assert found.p_value == 2 * (1 + 4) / 2**4, "McNemar's exact test: 3 of 4 throws of a coin, or fewer on one side"


def test_requests_of_one_cell_alone_are_left_out_and_repeats_are_one_question() -> None:
    run = run_of_cells(c=[[1, 1], [0, 1], [1]], d=[[0, 0], [1, 1]])
    once = run_of_cells(c=[[1], [0.5]], d=[[0], [1]])
    assert quality_difference(run, "c", "d") == quality_difference(once, "c", "d")


@pytest.mark.parametrize(("questions", "low"), [(30, -0.1135), (188, -0.0200), (190, -0.0198)])
def test_equal_answers_exclude_only_the_loss_that_so_many_questions_can_see(questions: int, low: float) -> None:
    same: Scores = [[1]] * questions
    difference = quality_difference(run_of_cells(c=same, d=same), "c", "d")
    assert figures(difference) == (0, pytest.approx(low, abs=1e-4), pytest.approx(-low, abs=1e-4))
    assert difference.p_value == 1


pairs = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40)


@given(pairs)
def test_a_difference_turns_with_its_sides_and_lies_in_its_interval(scores: list[tuple[float, float]]) -> None:
    run = run_of_cells(c=[[ours] for ours, _ in scores], d=[[theirs] for _, theirs in scores])
    forth, back = quality_difference(run, "c", "d"), quality_difference(run, "d", "c")
    assert figures(back) == tuple(pytest.approx(-each) for each in (forth.value, forth.high, forth.low))
    assert (back.better, back.worse, back.p_value) == (forth.worse, forth.better, forth.p_value)
    assert -1 <= forth.low <= forth.value <= forth.high <= 1
