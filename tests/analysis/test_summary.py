"""The summary of a run as CSV: odd settings and reasons, and all metrics. Reports have snapshots of whole ones."""

import csv
import json
from pathlib import Path

import pytest
from tests.records.synthetic import batches_of, header, outcome, write_run

from panscan.analysis.cells import cell_metrics
from panscan.analysis.summary import write_summary
from panscan.core import RecordsError

CELLS = {
    "c0": {"model": 'a "model", 4B', "crops": None, "buckets": [1, 2]},
    "c1": {"model": "x\udce9", "do_pan_and_scan": False},
}


def test_odd_settings_and_reasons_parse_back_beside_the_metrics(tmp_path: Path) -> None:
    lines = [header(CELLS), *batches_of("c0", [0.1, 0.2, 0.3]), outcome("c1", "skipped", "needs a GPU,\nreally")]
    run = write_run(tmp_path, lines)
    write_summary(run, tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(newline="", encoding="utf-8") as file:
        measured, skipped = csv.DictReader(file)
    assert (measured["model"], measured["crops"], json.loads(measured["buckets"])) == ('a "model", 4B', "", [1, 2])
    assert (skipped["do_pan_and_scan"], skipped["buckets"], skipped["reason"]) == ("false", "", "needs a GPU,\nreally")
    metrics = cell_metrics(run, "c0")
    for name, value in metrics.values.items():
        assert measured[name] == ("" if value is None else str(value)), name
        assert skipped[name] == ""
    assert tuple(measured["uncertified"].split()) == metrics.uncertified
    with pytest.raises(RecordsError, match=r"summary\.csv could not be written"):
        write_summary(run, tmp_path / "nowhere" / "summary.csv")
