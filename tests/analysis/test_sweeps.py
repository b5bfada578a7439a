"""What was swept, from settings of any kind; and the cells that have no measurement."""

from pathlib import Path
from typing import Any

import pytest
from tests.records import synthetic

from panscan.analysis.cells import (
    MeasuredCell,
    Sweep,
    distinguishing_names,
    measured_rows,
    shared_settings,
    sweeps,
    unmeasured,
)


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
    found = unmeasured(synthetic.write_run(tmp_path, records))
    assert [(group.outcome, group.cells, group.shared) for group in found] == [
        ("without an answer", ("a",), "n 1"),
        ("unfinished", ("c",), "n 3"),
    ]
    assert found[0].reason == "every request failed, the first with: no luck"
