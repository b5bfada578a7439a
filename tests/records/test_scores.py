"""Metrics of one answer, and of cells: by hand, by reference implementations, by Wilson's and Tango's formulas."""

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from tests.records.synthetic import header, record_of, request

from panscan.analysis.accuracy import QualityDifference, quality_difference
from panscan.records.fields import METRICS
from panscan.records.intervals import paired_interval
from panscan.records.quality import metrics_for, quality_of
from panscan.records.scores import (
    anls,
    contains_answer,
    exact_match,
    plain_answer,
    relaxed_accuracy,
    scores_of,
    vqa_accuracy,
)
from panscan.records.store import Run

_PAIRS = "abc=abc abc=Abc Abc=abc 100%=96% 100%=94% 100%=0.96 100%=0.94 Don't=Won't"
PIX2STRUCT = [pair.split("=") for pair in _PAIRS.split()]
"""(answer, accepted) of pix2struct's metrics_test.py, which expects ANLS 47.5 and relaxed accuracy 62.5."""


def test_pix2structs_own_examples() -> None:
    assert 100 * sum(anls(answer, [right]) for answer, right in PIX2STRUCT) / 8 == pytest.approx(47.5)
    assert 100 * sum(relaxed_accuracy(answer, [right]) for answer, right in PIX2STRUCT) / 8 == pytest.approx(62.5)


NEARLY_RIGHT = [
    ("Denver Broncos", ["Denver Broncos", "Denver R. Broncos"], 1),
    ("12/15/89", ["12/15/88"], 7 / 8),
    ("Dear dr. Lobo", ["Dear Dr. Lobo", "Dr. Lobo"], 1),
    ("kitten", ["sitting"], 4 / 7),  # three edits
    ("ab", ["abcd"], 1 / 2),  # exactly the threshold is kept, as the script does
    ("a", ["abc"], 0),  # 1 / 3 is below it
    ("2 p.m.", ["2 pm", "14:00"], 4 / 6),
    ("  YES\n", ["yes"], 1),
    ("a  b", ["a b"], 1),
    ("a  x", ["a b"], 1 - 1 / 4),  # by the length of the text as it was given
    ("", ["yes"], 0),
    ("ß", ["ss"], 0),  # two edits, two letters in upper case
]


@pytest.mark.parametrize(("answer", "accepted", "score"), NEARLY_RIGHT)
def test_anls(answer: str, accepted: list[str], score: float) -> None:
    assert anls(answer, accepted) == pytest.approx(score)


RIGHT = {
    exact_match: "$12.50=$12.50|  Acme\n GmbH =acme gmbh|STRASSE=straße|cafe\u0301=caf\u00e9|12.50.=12.50|No=no",
    contains_answer: "The total is $12.50.=$12.50|The total is $12.50.=12.50|It is 12, or 13.=12|a cat.=cat"
    "|Acme  GmbH, Berlin=acme gmbh|答案是北京市=北京|cats and a cat=cat",
    relaxed_accuracy: "105=100|95=100|-105=-100|0.12=12%|1e3=1000|0=0| 5 =5|2016=2010|nan=nan",
}
WRONG = {
    exact_match: "12.50=$12.50|The total is $12.50=$12.50|12.5=12.50|=x|acmegmbh=acme gmbh|1250=12.50",
    contains_answer: "It is 12.50=12|112=12|1,250=250|two cats=cat|=yes",
    relaxed_accuracy: "105.01=100|94.9=100|105=-100|12=12%|yes.=yes|0.0=0|0.001=0|1,000=1000|$5=5|inf=5|=5",
}
"""Pairs of an answer and an accepted one; relaxed accuracy compares with 0 as text."""


@pytest.mark.parametrize("metric", RIGHT)
def test_answers_that_are_right_and_wrong(metric: Callable[[str, Sequence[str]], float]) -> None:
    for pairs, score in ((RIGHT, 1.0), (WRONG, 0.0)):
        for pair in pairs[metric].split("|"):
            answer, accepted = pair.split("=")
            assert metric(answer, [accepted]) == metric(answer, ["something else", accepted]) == score, pair


@given(st.lists(st.sampled_from(["yes", "no", "2", "two", "a two", "maybe"]), min_size=10, max_size=10))
def test_vqa_accuracy_is_the_mean_over_nine_of_ten(answers: list[str]) -> None:
    """The definition as it is written down, over the sets of nine people."""
    plain = [plain_answer(answer) for answer in answers]
    for answer in set(answers):
        scores = [min(1.0, nine.count(plain_answer(answer)) / 3) for nine in combinations(plain, 9)]
        assert vqa_accuracy(answer, answers) == pytest.approx(sum(scores) / len(scores))


PLAIN = "The Two dogs.=2 dogs|None=0|dont=don't|couldn'tve=couldn't've|1,000=1000|12.5=12.5|U.S.=us|coca-cola=coca cola"
PLAIN += "|coca- cola=coca cola|joe's=joe 's|  An\ta =|couldntve=couldntve"  # two apostrophes missing are too many


@pytest.mark.parametrize("pair", PLAIN.split("|"))
def test_answers_as_the_vqa_evaluation_compares_them(pair: str) -> None:
    text, plain = pair.split("=")
    assert plain_answer(text) == plain


def test_ten_answers_are_ten_peoples() -> None:
    assert set(metrics_for(["x"] * 10)) == set(METRICS)
    assert set(metrics_for(["x"] * 9)) == set(METRICS) - {"vqa_accuracy"}
    assert metrics_for([]) == () and scores_of("x", []) == {}


texts = st.text(st.sampled_from("aB1. ,%$-ßé中'"), max_size=8) | st.text(max_size=8)


@given(texts, st.lists(texts, min_size=1, max_size=10))
def test_scores_are_shares_and_better_for_more_answers(answer: str, answers: Sequence[str]) -> None:
    scores = scores_of(answer, answers)
    assert set(scores) == set(metrics_for(answers))
    assert all(0 <= score <= 1 for score in scores.values())
    assert scores["contains_answer"] >= scores["exact_match"]
    fewer = scores_of(answer, answers[:1])
    assert all(scores[name] >= score for name, score in fewer.items() if name != "vqa_accuracy")


def test_a_person_without_an_answer_counts_among_ten_and_accepts_nothing() -> None:
    answers = ["nokia"] * 2 + ["toshiba"] * 7 + [""]
    scores = scores_of(".", answers)  # what is left of it after processing is as empty as the tenth answer
    assert (scores["exact_match"], scores["contains_answer"], scores["anls"]) == (0.0, 0.0, 0.0)
    assert scores_of("nokia", answers)["vqa_accuracy"] == pytest.approx((2 * 1 / 3 + 8 * 2 / 3) / 10)


@given(texts.filter(str.strip), st.lists(texts, max_size=3))
def test_an_accepted_answer_is_right_by_every_metric(answer: str, others: list[str]) -> None:
    assert set(scores_of(answer, [*others, answer]).values()) == {1.0}
    assert vqa_accuracy(answer, [answer] * 10) == 1


@given(texts.filter(str.strip), texts.filter(str.strip))
def test_anls_and_exact_match_do_not_mind_which_side_is_which(one: str, other: str) -> None:
    assert anls(one, [other]) == anls(other, [one])
    assert exact_match(one, [other]) == exact_match(other, [one])


# Exact match, its intervals, and differences between cells: by hand, by Wilson's and Tango's formulas.


Scores = Sequence[Sequence[float | None]]
"""Of each question, its repeats."""


def run_of_cells(**cells: Scores) -> Run:
    run = Run(Path("records.jsonl"), record_of(header({cell: {} for cell in cells})))
    run.add_cells(run.header.cells)
    for cell, scores in cells.items():
        for question, repeats in enumerate(scores):
            for number, score in enumerate(repeats):
                others: dict[str, Any] = {} if score is None else {"scores": {"exact_match": score}}
                record = request(cell, f"q{question}", 0.0, [1.0], repeat=number, prompt_sha256=f"{question}", **others)
                run.requests.setdefault((cell, number), []).append(record_of(record))
    return run


def figures(difference: QualityDifference) -> tuple[float, float, float]:
    return difference.value, difference.low, difference.high


def test_the_mean_is_over_requests_and_the_interval_over_questions() -> None:
    scores: Scores = [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
    quality = quality_of(run_of_cells(c=scores), "c")
    assert (quality.mean, quality.questions) == (pytest.approx(8 / 12), 4)
    assert 0 <= quality.low < quality.mean < quality.high <= 1
    # The same scores as twelve questions say more about the next one.
    spread = quality_of(run_of_cells(c=[[score] for repeats in scores for score in repeats]), "c")
    assert spread.questions == 12
    assert spread.high - spread.low < quality.high - quality.low


def test_every_share_has_wilsons_interval_which_rises_with_it() -> None:
    """Every k of every n up to 40, against scipy, whatever the number of repeats; at 0 and n it ends at the share."""
    for questions in range(1, 41):
        lows, highs = [], []
        for right in range(questions + 1):
            quality = quality_of(run_of_cells(c=[[1, 1]] * right + [[0, 0]] * (questions - right)), "c")
            due = binomtest(right, questions).proportion_ci(method="wilson")
            assert (quality.low, quality.high) == pytest.approx((due.low, due.high), abs=1e-12)
            assert quality.low <= quality.mean <= quality.high
            lows.append(quality.low)
            highs.append(quality.high)
        assert lows == sorted(set(lows)) and highs == sorted(set(highs))
        assert (lows[0], highs[-1]) == (0, 1)


def test_unscored_and_failed_requests_have_no_part() -> None:
    run = run_of_cells(c=[[1], [None], [0]], d=[[None]])
    run.requests["c", 0][2].error = "no memory"
    quality = quality_of(run, "c")
    assert (quality.mean, quality.questions) == (1, 1)
    assert quality_of(run, "d") is None
    assert quality_difference(run, "c", "d") is None


def test_differences_are_paired() -> None:
    """10 questions: 3 won, 1 lost."""
    ours: Scores = [[1]] * 3 + [[0]] + [[1]] * 6
    baseline: Scores = [[0]] * 3 + [[1]] + [[1]] * 6
    difference = quality_difference(run_of_cells(c=ours, d=baseline), "c", "d")
    assert figures(difference) == (pytest.approx(0.2), *paired_interval(3, 1, 10))
    assert (difference.questions, difference.better, difference.worse) == (10, 3, 1)
    assert difference.p_value == 2 * (1 + 4) / 2**4, "McNemar's exact test: 3 of 4 coin flips, or fewer on one side"


def test_requests_of_one_cell_alone_are_left_out_and_repeats_are_one_question() -> None:
    run = run_of_cells(c=[[1, 1], [0, 1], [1]], d=[[0, 0], [1, 1]])
    once = run_of_cells(c=[[1], [0.5]], d=[[0], [1]])
    assert quality_difference(run, "c", "d") == quality_difference(once, "c", "d")


pairs = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40)


@given(pairs)
def test_a_difference_turns_with_its_sides_and_lies_in_its_interval(scores: list[tuple[float, float]]) -> None:
    run = run_of_cells(c=[[left] for left, _ in scores], d=[[right] for _, right in scores])
    forth, back = quality_difference(run, "c", "d"), quality_difference(run, "d", "c")
    assert figures(back) == tuple(pytest.approx(-figure) for figure in (forth.value, forth.high, forth.low))
    assert (back.better, back.worse, back.p_value) == (forth.worse, forth.better, forth.p_value)
    assert -1 <= forth.low <= forth.value <= forth.high <= 1
