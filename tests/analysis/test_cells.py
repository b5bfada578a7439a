"""Cells of a run: what was swept, those that have no measurement, speed-ups, and the summary as CSV."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.records import synthetic
from tests.records.synthetic import batches_of, header, outcome, repeat, request, run_of, write_run

from panscan.analysis.cells import (
    MeasuredCell,
    Sweep,
    cell_metrics,
    distinguishing_names,
    effective_settings,
    measured_rows,
    shared_settings,
    speedup_lines,
    sweeps,
    unmeasured,
)
from panscan.analysis.summary import write_summary
from panscan.bench.grid import build_cells
from panscan.core import RecordsError


def rows_of(directory: Path, grid: list[dict[str, Any]]) -> list[MeasuredCell]:
    """A measured cell for each point; each takes a second longer than the one before."""
    cells = {f"c{number}": point for number, point in enumerate(grid)}
    records = [synthetic.header(cells)]
    for number, cell in enumerate(cells):
        records += synthetic.batches_of(cell, [1.0 + number])
    return measured_rows(synthetic.write_run(directory, records))


def cells_in(sweep: Sweep) -> dict[str, list[tuple[int, str]]]:
    return {name: [(sweep.index(row), row.cell) for row in rows] for name, rows in sweep.series.items()}


def test_a_number_ascends_and_series_keep_the_cells_order(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [{"a": name, "n": size} for name in ("slow", "quick") for size in (4, 1)][::-1])
    word, number = sweeps(rows)
    assert (number.name, number.numeric, number.values) == ("n", True, (1, 4))
    assert cells_in(number) == {"a quick": [(0, "c0"), (1, "c1")], "a slow": [(0, "c2"), (1, "c3")]}
    assert (word.name, word.numeric, word.values) == ("a", False, ("quick", "slow"))


def test_without_is_a_value_where_nothing_else_differs(tmp_path: Path) -> None:
    """No padding against some; no pan and scan against some crops."""
    [sweep] = sweeps(rows_of(tmp_path / "1", [{"pad": None}, {"pad": 64}, {"pad": 128}]))
    assert (sweep.numeric, sweep.values) == (False, (None, 64, 128))
    off = {"do_pan_and_scan": False, "pan_and_scan_max_num_crops": 4}
    on = [{"do_pan_and_scan": True, "pan_and_scan_max_num_crops": crops} for crops in (8, 2)]
    [sweep] = sweeps(rows_of(tmp_path / "2", [off, *on]))
    assert (sweep.name, sweep.numeric, sweep.values) == ("pan_and_scan_max_num_crops", True, (0, 2, 8))
    assert sweep.ticks == ("none", "2", "8")
    assert cells_in(sweep) == {"": [(0, "c0"), (1, "c2"), (2, "c1")]}


def test_crops_that_differ_only_by_being_off_are_no_setting_of_their_own(tmp_path: Path) -> None:
    grid = [{"do_pan_and_scan": on, "pan_and_scan_max_num_crops": 6} for on in (False, True)]
    rows = rows_of(tmp_path, grid)
    assert distinguishing_names([row.settings for row in rows]) == ["do_pan_and_scan"]
    assert shared_settings([row.settings for row in rows]) == {"pan_and_scan_max_num_crops": 6}
    [sweep] = sweeps(rows)
    assert (sweep.name, sweep.values) == ("do_pan_and_scan", (False, True))


@pytest.mark.parametrize("odd", [[1], {"x": 1}, float("nan"), float("inf"), True, "1"])
def test_what_is_no_plain_number_is_no_curve(tmp_path: Path, odd: Any) -> None:
    [sweep] = sweeps(rows_of(tmp_path, [{"a": odd}, {"a": 2}, {"a": 3}]))
    assert not sweep.numeric
    assert len(sweep.values) == 3
    assert sorted(place for place, _ in cells_in(sweep)[""]) == [0, 1, 2]


def test_settings_that_never_differ_alone_are_not_swept(tmp_path: Path) -> None:
    assert sweeps(rows_of(tmp_path, [{"a": 1, "b": 1}, {"a": 2, "b": 2}])) == []
    assert sweeps([]) == []


def test_a_cell_without_an_answer_is_not_measured(tmp_path: Path) -> None:
    cells = {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}
    records = [synthetic.header(cells), *synthetic.batches_of("a", [1.0]), *synthetic.batches_of("b", [1.0, 1.0])]
    records[1]["error"] = "no luck"
    records[4]["error"] = "once"
    groups = unmeasured(synthetic.write_run(tmp_path, records))
    assert [(group.outcome, group.cells, group.shared) for group in groups] == [
        ("without an answer", ("a",), "n 1"),
        ("unfinished", ("c",), "n 3"),
    ]
    assert groups[0].reason == "every request failed, the first with: no luck"


# The engine against other runners: which cells are compared, and the sentences about them.


def lines(cells: dict[str, tuple[dict[str, Any], float]]) -> list[str]:
    """Lines of a run in which each cell answered one request of five tokens in its seconds."""
    records: list[dict[str, Any]] = []
    for name, (_, seconds) in cells.items():
        stamps = [seconds * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
        records += [request(name, "q", 0.0, stamps), repeat(name, 0, 0.0, seconds)]
    recorded = {name: settings for name, (settings, _) in cells.items()}
    return speedup_lines(measured_rows(run_of(*records, cells=recorded)))


def test_the_fastest_cells_of_the_same_work_are_compared() -> None:
    generate, engine = ({"runner": runner, "batch_size": 1, "max_new_tokens": 5} for runner in ("generate", "engine"))
    slower = {"a": (generate, 8.0), "d": ({**engine, "max_num_seqs": 2}, 3.0)}
    fastest = {"b": ({**generate, "batch_size": 4}, 4.0), "c": ({**engine, "max_num_seqs": 8}, 2.0)}
    [line] = lines({**slower, **fastest, "more tokens": ({**generate, "max_new_tokens": 50}, 0.1)})
    assert line.startswith("engine to generate (batch size 4): 2.00x requests per second; verdicts unverified and unv")
    assert line.endswith("; measured once, so noise is unknown (--repeats 5).")


def test_a_ratio_has_an_interval_over_the_repeats_of_both() -> None:
    records = [
        record | {"repeat": number}
        for number, noise in enumerate((0.98, 1.0, 1.02))
        for name, seconds in (("a", 8.0), ("b", 4.0))
        for record in (
            request(name, "q", 0.0, [seconds * noise / 2, seconds * noise]),
            repeat(name, number, 0.0, seconds * (noise if name == "a" else 2 - noise)),
        )
    ]
    cells = {"a": {"runner": "generate"}, "b": {"runner": "engine"}}
    [line] = speedup_lines(measured_rows(run_of(*records, cells=cells)))
    assert line.startswith("engine to generate: 2.00x (1.81 to 2.21) requests per second")


def test_one_runner_alone_says_nothing() -> None:
    assert lines({"a": ({"runner": "engine"}, 1.0), "b": ({"runner": "engine", "max_num_seqs": 2}, 2.0)}) == []
    assert lines({"a": ({"runner": "generate"}, 1.0), "b": ({"runner": "pipeline"}, 2.0)}) == []


def test_what_only_one_runner_has_is_a_column_only_where_it_differs_there() -> None:
    def swept(**flags: list[str]) -> list[str]:
        cells = build_cells({"runner": ["generate", "engine"], **flags})
        return distinguishing_names([effective_settings(asdict(cell.settings)) for cell in cells])

    assert swept() == ["runner"]
    assert swept(batch_size=["1", "2"]) == ["runner", "batch_size"]
    assert swept(kv_cache_gb=["none", "1"], batch_size=["4"]) == ["runner", "kv_cache_gb"]
    assert swept(max_num_seqs=["8"]) == ["runner"]
    [engine] = build_cells({"runner": ["engine"]})
    assert effective_settings(asdict(engine.settings))["batch_size"] is None
    assert effective_settings(asdict(engine.settings))["attention"] == "sdpa"


# The summary of a run as CSV: odd settings and reasons, and all metrics. Reports have snapshots of whole ones.


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
