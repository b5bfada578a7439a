"""The accuracy of cells that are not exact, against an exact cell that differs in nothing that changes answers."""

from __future__ import annotations

import csv
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from tests.records import synthetic
from tests.report.report_page import page_of, section, settings_of_page
from tests.report.test_terminal import shown

from panscan.analysis.accuracy import COLUMNS, NO_EXACT_CELL, TITLE, cost_columns, cost_lines, costs_of_cells
from panscan.analysis.summary import write_summary
from panscan.records.store import Run
from panscan.report import to_markdown
from panscan.report.terminal import print_summary

BASE = {"model": "mini", "attention": "sdpa", "batch_size": 1, "do_pan_and_scan": True, "max_new_tokens": 32}
QUESTIONS = 40


def cell_records(cell: str, word: str, wrong: int, views: int = 4, answered: int = QUESTIONS) -> list[dict[str, Any]]:
    """Questions one by one, the first ``wrong`` of them answered wrongly."""
    records = [
        synthetic.request(
            cell,
            f"q{number}",
            float(number),
            [number + 0.5, number + 1.0],
            batch=number,
            views=views,
            prompt_sha256=str(number),
            scores={"exact_match": float(number >= wrong)},
        )
        for number in range(answered)
    ]
    figure = {"exact": 1.0, "close": 5.0, "different": 90.0, "unverified": None}[word]
    others: dict[str, Any] = {"reason": "not asked", "truth": None} if word == "unverified" else {}
    line = synthetic.repeat(cell, 0, 0.0, float(QUESTIONS))
    return [*records, line, synthetic.outcome(cell, "done"), synthetic.verdict(cell, word, figure, figure, **others)]


def run_of(tmp_path: Path, **cells: tuple[dict[str, Any], list[dict[str, Any]]]) -> Run:
    header = synthetic.header({cell: {**BASE, **settings} for cell, (settings, _) in cells.items()})
    records = [record for _, lines in cells.values() for record in lines]
    return synthetic.write_run(tmp_path, [header, synthetic.truth(), *records])


@pytest.fixture
def mixed(tmp_path: Path) -> Run:
    """An exact cell, its equals that are not exact, and cells for which there is no exact one."""
    return run_of(
        tmp_path,
        other=({"batch_size": 2, "attention": "eager"}, cell_records("other", "exact", 1)),
        best=({}, cell_records("best", "exact", 2)),
        wrong=({"attention": "flash_attention_2"}, cell_records("wrong", "different", 10)),
        near=({"batch_size": 4}, cell_records("near", "close", 2)),
        unknown=({"batch_size": 8}, cell_records("unknown", "unverified", 5)),
        fewer=({"pan_and_scan_max_num_crops": 2}, cell_records("fewer", "close", 3, views=3)),
        large=({"model": "larger"}, cell_records("large", "different", 0)),
        long=({"max_new_tokens": 64}, cell_records("long", "close", 0)),
    )


def test_each_is_compared_with_the_closest_exact_cell(mixed: Run) -> None:
    costs = costs_of_cells(mixed)
    assert {cell: cost.exact for cell, cost in costs.items()} == {
        "wrong": "best",
        "near": "best",
        "unknown": "best",
        "fewer": None,
        "large": None,
        "long": None,
    }
    wrong = costs["wrong"].difference
    assert wrong is not None
    # 8 of 40 questions lost, none won. Agresti and Min: half a win, half a loss and a tie more. McNemar: 2 / 2**8.
    centre = -8 / 42
    reach = 1.959964 * sqrt((9 / 42 - centre**2) / 42)
    assert (wrong.value, wrong.low, wrong.high) == pytest.approx((-0.2, centre - reach, centre + reach))
    assert (wrong.p_value, wrong.questions) == (2 / 2**8, QUESTIONS)
    assert costs["wrong"].text == f"-20.0 ({100 * wrong.low:+.1f} to {100 * wrong.high:+.1f}), p = 0.0078"
    near = costs["near"].difference
    assert near is not None and (near.value, near.p_value) == (0, 1)
    assert costs["fewer"].text == NO_EXACT_CELL


def test_without_answers_or_with_exact_cells_only_there_is_nothing_to_say(tmp_path: Path) -> None:
    run = run_of(tmp_path / "exact", best=({}, cell_records("best", "exact", 2)))
    assert costs_of_cells(run) == {} == costs_of_cells(synthetic.run_of())
    assert TITLE not in to_markdown(run)
    unlabelled = run_of(tmp_path / "plain", wrong=({}, cell_records("wrong", "different", 2)))
    for records in unlabelled.requests.values():
        for record in records:
            record.scores = {}
    assert costs_of_cells(unlabelled) == {} == cost_columns(unlabelled)


def test_a_cell_that_answered_nothing_in_common_has_no_partner(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        best=({}, cell_records("best", "exact", 2, answered=3)),
        wrong=({"batch_size": 2}, cell_records("wrong", "different", 2)),
    )
    run.requests["wrong", 0] = run.requests["wrong", 0][3:]
    assert costs_of_cells(run)["wrong"].exact is None


def test_it_stands_beside_the_verdict_everywhere(mixed: Run, tmp_path: Path) -> None:
    costs = costs_of_cells(mixed)
    lines = cost_lines(costs)
    assert "3 cells that are not exact cannot be compared: the run has no exact cell" in lines[1]
    table = section(page_of(mixed), "cells")
    rows = {row["id"].text: row for row in settings_of_page(page_of(mixed))}
    assert {cell: row[TITLE].text for cell, row in rows.items()} == {
        cell: costs[cell].text if cell in costs else "-" for cell in mixed.cells
    }
    assert all(line in table.text for line in lines)
    terminal = " ".join(shown(print_summary, mixed, 200).split())
    markdown = to_markdown(mixed)
    assert costs["wrong"].text in terminal and costs["wrong"].text in markdown
    assert all(line in terminal and line in markdown for line in lines)

    write_summary(mixed, tmp_path / "summary.csv", cost_columns(mixed))
    with (tmp_path / "summary.csv").open(newline="") as file:
        found = {row["cell"]: [row[name] for name in COLUMNS] for row in csv.DictReader(file)}
    wrong = costs["wrong"].difference
    assert wrong is not None
    assert found["best"] == [""] * 5 and found["fewer"] == [NO_EXACT_CELL, "", "", "", ""]
    assert found["wrong"][0] == "best"
    assert [float(each) for each in found["wrong"][1:]] == [wrong.value, wrong.low, wrong.high, wrong.p_value]
