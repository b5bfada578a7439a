import csv
import json
from pathlib import Path

import pytest
from tests.records.synthetic import batches_of, header, outcome, scored, verdict, write_run

from panscan.analysis.cells import cell_metrics
from panscan.analysis.summary import summary_columns, write_summary
from panscan.core import RecordsError
from panscan.records.metrics import COLUMNS, INTERVALS, LAUNCHER
from panscan.records.quality import quality_of

CELLS = {
    "c0": {"model": 'a "model", 4B', "batch_size": 1, "do_pan_and_scan": True, "crops": None},
    "c1": {"model": 'a "model", 4B', "batch_size": 2, "do_pan_and_scan": False, "buckets": [1, 2]},
    "c2": {"model": "x\udce9", "batch_size": 4, "do_pan_and_scan": True},
    "c3": {"model": "m", "batch_size": 8, "do_pan_and_scan": True},
}
RECORDS = [
    header(CELLS),
    *batches_of("c0", [0.1, 0.2, 0.3]),
    outcome("c1", "skipped", "needs a GPU,\nreally"),
    *batches_of("c2", [1.0]),
    outcome("c2", "oom", "no room"),
]


def test_the_csv_parses_back_to_settings_outcomes_and_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECORDS)
    write_summary(run, tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = {row["cell"]: row for row in reader}
    assert reader.fieldnames == summary_columns(run)
    assert list(rows) == list(CELLS)
    assert [(row["outcome"], row["reason"]) for row in rows.values()] == [
        ("done", ""),
        ("skipped", "needs a GPU,\nreally"),
        ("oom", "no room"),
        ("unfinished", ""),
    ]
    assert rows["c0"]["model"] == 'a "model", 4B'
    assert rows["c0"]["do_pan_and_scan"] == "true"
    assert rows["c1"]["do_pan_and_scan"] == "false"
    assert (rows["c0"]["crops"], rows["c3"]["crops"]) == ("", "")
    assert json.loads(rows["c1"]["buckets"]) == [1, 2]
    for cell in ("c0", "c2"):
        metrics = cell_metrics(run, cell)
        for name, value in metrics.values.items():
            assert rows[cell][name] == ("" if value is None else str(value)), name
        for name in INTERVALS:
            bounds = [rows[cell][f"{name}_{side}"] for side in ("low", "high")]
            expected = [str(bound) for bound in metrics.intervals[name]] if name in metrics.intervals else ["", ""]
            assert bounds == expected, name
        assert tuple(rows[cell]["uncertified"].split()) == metrics.uncertified
    for cell in ("c1", "c3"):
        assert not any(rows[cell][name] for name in (*COLUMNS, "uncertified"))


def test_columns_stay_in_their_order(tmp_path: Path) -> None:
    columns = summary_columns(write_run(tmp_path, RECORDS))
    assert columns[:8] == ["cell", "model", "batch_size", "do_pan_and_scan", "crops", "buckets", "outcome", "reason"]
    assert columns[8:13] == ["verdict", "verdict_ratio", "exact_match", "exact_match_low", "exact_match_high"]
    assert columns[13:17] == list(LAUNCHER)
    at = columns.index("p95_ttft_ms")
    assert columns[at : at + 3] == ["p95_ttft_ms", "p95_ttft_ms_low", "p95_ttft_ms_high"]
    assert columns[-2:] == ["uncertified", "aliases"]
    assert len(columns) == len(set(columns))


def test_answers_are_beside_the_speed(tmp_path: Path) -> None:
    scores = [1.0, 0.0, 1.0]
    records = [*scored(batches_of("c0", [0.1, 0.2, 0.3]), scores), verdict("c0", "close", 3.0)]
    run = write_run(tmp_path, [header({"c0": {}, "c1": {}}), *records, *batches_of("c1", [1.0])])
    write_summary(run, tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(newline="", encoding="utf-8") as file:
        verified, plain = csv.DictReader(file)
    quality = quality_of(run, "c0")
    assert (verified["verdict"], float(verified["verdict_ratio"])) == ("close", pytest.approx(3))
    shown = [float(verified[f"exact_match{part}"]) for part in ("", "_low", "_high")]
    assert shown == [pytest.approx(2 / 3), quality.low, quality.high]
    assert plain["verdict"] == "unverified"
    assert not any(plain[name] for name in ("verdict_ratio", "exact_match", "exact_match_low", "exact_match_high"))


def test_an_older_summary_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", RECORDS)
    target = tmp_path / "out"
    target.mkdir()
    (target / "summary.csv").write_text("old\n" * 10_000)
    write_summary(run, target / "summary.csv")
    assert "old" not in (target / "summary.csv").read_text()
    assert [path.name for path in target.iterdir()] == ["summary.csv"]
    with pytest.raises(RecordsError, match=r"summary\.csv could not be written"):
        write_summary(run, target / "nowhere" / "summary.csv")
