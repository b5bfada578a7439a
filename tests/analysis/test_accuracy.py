"""The rule for accuracy: what it says of differences, which cell is the baseline, and where it is shown."""

from pathlib import Path
from typing import Any

import pytest
from tests.records import synthetic
from tests.report.test_terminal import shown

from panscan.analysis import accuracy
from panscan.analysis.cells import measured_rows
from panscan.records.store import Run
from panscan.report.terminal import print_summary

BASE = {"model": "mini", "attention": "sdpa", "batch_size": 1, "do_pan_and_scan": True, "max_new_tokens": 32}
QUESTIONS = 40


def cell_records(cell: str, word: str, wrong: int, views: int = 4, answered: int = QUESTIONS) -> list[dict[str, Any]]:
    """Questions one by one, the first ``wrong`` of them answered wrongly."""
    records = []
    for number in range(answered):
        fields = {"batch": number, "views": views, "prompt_sha256": str(number)}
        fields["scores"] = {"exact_match": float(number >= wrong)}
        records.append(synthetic.request(cell, f"q{number}", float(number), [number + 0.5, number + 1.0], **fields))
    figure = {"exact": 1.0, "close": 5.0, "different": 90.0, "unverified": None}[word]
    others: dict[str, Any] = {"reason": "not asked", "truth": None} if word == "unverified" else {}
    line = synthetic.repeat(cell, 0, 0.0, float(QUESTIONS))
    return [*records, line, synthetic.outcome(cell, "done"), synthetic.verdict(cell, word, figure, figure, **others)]


def run_of(tmp_path: Path, **cells: tuple[dict[str, Any], list[dict[str, Any]]]) -> Run:
    header = synthetic.header({cell: {**BASE, **settings} for cell, (settings, _) in cells.items()})
    records = [record for _, lines in cells.values() for record in lines]
    return synthetic.write_run(tmp_path, [header, synthetic.truth(), *records])


def standings(run: Run) -> accuracy.Standings:
    return accuracy.standings_of(run, measured_rows(run))


def decided(wins: int, losses: int, ties: int, cells: int = 1, max_loss: float = 0.02) -> accuracy.Accuracy:
    """The first of some cells with the same answers against the baseline."""
    difference = accuracy.paired_difference([1.0] * wins + [-1.0] * losses + [0.0] * ties)
    return accuracy.decide_accuracy({f"c{number}": difference for number in range(cells)}, max_loss)["c0"]


WORDS = [
    (0, 0, 35, "the same score on all 35 questions; about 360 questions needed to exclude a loss of 2 points"),
    (0, 0, 188, "the same score on all 188 questions; about 190 questions needed to exclude a loss of 2 points"),
    (0, 0, 189, "the same score on all 189 questions"),
    (0, 20, 80, "loss: -20.0 points (-28.9 to -13.3) over 100 questions"),
    (20, 0, 80, "gain: +20.0 points (+13.3 to +28.9) over 100 questions"),
    (20, 20, 960, "no loss above 2 points: +0.0 points (-1.3 to +1.3) over 1000 questions"),
    (3, 5, 92, "undecided: -2.0 points (-8.7 to +4.2) over 100 questions; about 1,500 questions needed"),
    (0, 0, 1, "the same score on the only question; about 940 questions needed to exclude a loss of 2 points"),
    (0, 1, 2999, "no loss above 2 points: +0.0 points (-0.2 to +0.1)"),  # no negative zero
]


@pytest.mark.parametrize(("wins", "losses", "ties", "text"), WORDS)
def test_the_words_of_the_rule(wins: int, losses: int, ties: int, text: str) -> None:
    decision = decided(wins, losses, ties)
    assert decision.text.startswith(text)
    assert decision.lossless == (decision.word in ("gain", "no loss"))


def test_a_small_loss_of_every_question_is_a_loss_though_its_interval_reaches_0() -> None:
    """ANLS 0.3 points lower in each of 300 questions."""
    [decision] = accuracy.decide_accuracy({"c": accuracy.paired_difference([-0.003] * 300)}).values()
    assert decision.word == "loss" and decision.difference.low > -0.02 and decision.difference.high > 0


def test_one_loss_among_many_cells_must_be_clearer() -> None:
    """6 of 6 lost is p = 0.03: enough alone, not among four comparisons that could each raise an alarm."""
    assert decided(0, 6, 94).word == "loss"
    assert decided(0, 6, 94, cells=4).word == "undecided"


def test_the_loss_to_exclude_is_an_option_and_thirty_questions_are_the_least() -> None:
    assert decided(0, 0, 100).word == "undecided" and decided(0, 0, 100, max_loss=0.04).word == "no loss"
    assert decided(0, 0, 29, max_loss=0.5).word == "undecided"
    assert decided(0, 0, 30, max_loss=0.5).word == "no loss"


def test_identical_answers_are_the_same_answers_and_qualify_only_with_enough_questions() -> None:
    few, many = (accuracy.paired_difference([0.0] * number, identical=True) for number in (35, 189))
    one, other = (accuracy.decide_accuracy({"c": difference})["c"] for difference in (few, many))
    assert (one.word, other.word) == ("same answers", "same answers")
    assert (one.lossless, other.lossless) == (False, True)
    assert one.text.startswith("the same answers to all 35 questions; about 360 questions needed")


@pytest.fixture
def mixed(tmp_path: Path) -> Run:
    """Cells that compute the baseline's answers, and cells that do not."""
    return run_of(
        tmp_path,
        near=({"batch_size": 4}, cell_records("near", "close", 2)),
        best=({}, cell_records("best", "exact", 2)),
        other=({"batch_size": 2, "attention": "eager"}, cell_records("other", "exact", 1)),
        wrong=({"attention": "flash_attention_2"}, cell_records("wrong", "different", 10, views=5)),
        unknown=({"batch_size": 8}, cell_records("unknown", "unverified", 2)),
        fewer=({"pan_and_scan_max_num_crops": 2}, cell_records("fewer", "close", 2, views=3)),
        large=({"model": "larger"}, cell_records("large", "exact", 0)),
        long=({"max_new_tokens": 64}, cell_records("long", "close", 2)),
    )


def test_the_baseline_is_the_trusted_cell_with_the_most_views_exact_before_close(mixed: Run) -> None:
    result = standings(mixed)
    assert result.baseline is not None and result.baseline.cell == "best"
    assert result.cells.keys() == mixed.cells.keys() - {"best"}
    assert result.same_work == {"best", "near", "other"}
    assert [row.cell for row in measured_rows(mixed) if result.qualifies(row)] == ["near", "best", "other"]
    wrong = result.cells["wrong"]
    assert (wrong.word, wrong.difference.p_value, wrong.difference.questions) == ("loss", 2 / 2**8, QUESTIONS)


def test_without_answers_there_is_nothing_to_say(tmp_path: Path) -> None:
    run = run_of(tmp_path / "exact", best=({}, cell_records("best", "exact", 2)))
    assert standings(run).cells == {} == accuracy.accuracy_columns(synthetic.run_of(), [])
    assert "vs baseline" not in shown(print_summary, run, 200)
