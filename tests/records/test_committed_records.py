"""Every run among the benchmarks' records still says what it said when it was measured.

``committed_records.json`` holds what an earlier version derived from them; ``python -m
tests.records.test_committed_records`` writes it again, after a change of a definition.
"""

import csv
import json
from math import log1p
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from panscan.analysis.levels import levels_of, load_result
from panscan.analysis.recommend import recommend
from panscan.analysis.summary import write_summary
from panscan.core import RecordsError
from panscan.records.load_runs import is_load_run
from panscan.records.store import read_run
from panscan.verdict.judgement import verdict_lines

RUNS = Path(__file__).parents[2] / "benchmarks" / "records"
EXPECTED = Path(__file__).with_name("committed_records.json")
SHOWN = ("outcome", "verdict", "verdict_ratio", "request_throughput", "request_throughput_low", "p95_e2el_ms")
SHOWN += ("mean_vision_ms", "exact_match", "goodput", "attainment", "uncertified", "accuracy_result")


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def figures(row: dict[str, str]) -> dict[str, Any]:
    """A few columns of a row of the summary, and one number that a change of any other moves, too."""
    numbers = [value for text in row.values() if (value := number(text)) is not None]
    total = sum(log1p(abs(value)) for value in numbers)
    texts = {name: row[name] for name in SHOWN if row.get(name) and number(row[name]) is None}
    shown = {name: float(row[name]) for name in SHOWN if number(row.get(name, "")) is not None}
    return {"texts": texts, "numbers": shown | {"columns": len(numbers), "sum": total}}


def derived(directory: Path) -> dict[str, Any]:
    run = read_run(directory)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "summary.csv"
        write_summary(run, path)
        rows = {row.get("cell") or row["level"]: row for row in csv.DictReader(path.read_text("utf-8").splitlines())}
    if is_load_run(run):
        result = load_result(run, levels_of(run))
        lines = [result.headline, *result.notes]
    else:
        try:
            lines = [recommend(run).decision, *verdict_lines(run, list(run.cells))]
        except RecordsError as error:
            lines = [str(error).partition(": ")[2]]
    requests = sum(map(len, run.requests.values()))
    return {"requests": requests, "lines": lines, "cells": {cell: figures(row) for cell, row in rows.items()}}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RUNS.glob("*/records.jsonl")))
def test_a_committed_run_still_says_the_same(name: str) -> None:
    expected, actual = json.loads(EXPECTED.read_text("utf-8"))[name], derived(RUNS / name)
    assert {**actual, "cells": list(actual["cells"])} == {**expected, "cells": list(expected["cells"])}
    for cell, row in expected["cells"].items():
        assert actual["cells"][cell]["texts"] == row["texts"], cell
        assert actual["cells"][cell]["numbers"] == pytest.approx(row["numbers"], rel=1e-9), cell


if __name__ == "__main__":
    values = {path.parent.name: derived(path.parent) for path in sorted(RUNS.glob("*/records.jsonl"))}
    EXPECTED.write_text(json.dumps(values, indent=1) + "\n")
