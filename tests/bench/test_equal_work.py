"""Settings that lead to the same views are one cell, which is shown with all of them, everywhere."""

import csv
import json
import shlex
from itertools import permutations
from pathlib import Path

import pytest
from tests.conftest import noise
from tests.report.report_page import page_of, section

from panscan.analysis.pairing import compare_runs
from panscan.bench.grid import build_cells, merge_equal_work
from panscan.cli.main import run
from panscan.records.store import Run, read_run
from panscan.workload.requests import DocumentFile, Item, views_of

pytestmark = pytest.mark.usefixtures("without_charts")

LINE = shlex.split("bench --repeats 1 docs -p x --model tiny --device cpu --max-new-tokens 2 --warmup 0")
CROPS = ["--grid-max-crops", "2,4,6", "--min-crop-size", "50"]
NAME = "pan_and_scan_max_num_crops"


def page(width: int, height: int) -> Item:
    return Item("1", (DocumentFile("a.png", width, height, "0" * 64),), "What?")


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with a page that three crops read, and one that needs none."""
    (folder / "docs").mkdir()
    noise(260, 800).save(folder / "docs" / "tall.png")
    noise(300, 300).save(folder / "docs" / "square.png")
    return folder


def only_run(folder: Path) -> Run:
    [directory] = (folder / "runs").iterdir()
    return read_run(directory)


def test_equal_views_and_equal_settings_are_one_cell() -> None:
    cells = build_cells({NAME: ["2", "4", "6"], "min_crop_size": ["50"], "batch_size": ["1", "2"]})
    for items, crops in (
        ([page(260, 800)], {2: [], 4: [6]}),
        ([page(260, 800), page(100, 900)], {2: [], 4: [], 6: []}),
        ([page(300, 300)], {2: [4, 6]}),
    ):
        merged = merge_equal_work(cells, views_of(items))
        found = [(cell.settings.batch_size, cell.settings.pan_and_scan_max_num_crops) for cell in merged]
        assert sorted(found) == [(size, most) for size in (1, 2) for most in crops]
        for cell in merged:
            others = [alias.settings for alias in cell.aliases]
            assert [each.pan_and_scan_max_num_crops for each in others] == crops[
                cell.settings.pan_and_scan_max_num_crops
            ]
            assert all(each.batch_size == cell.settings.batch_size for each in others)
            assert all(views_of(items)(each) == views_of(items)(cell.settings) for each in others)
        assert {each.id for cell in merged for each in (cell, *cell.aliases)} == {cell.id for cell in cells}


def test_pages_without_crops_need_no_pan_and_scan() -> None:
    cells = build_cells({"do_pan_and_scan": ["false", "true"]})
    [merged] = merge_equal_work(cells, views_of([page(300, 300)]))
    assert [alias.settings.do_pan_and_scan for alias in merged.aliases] == [True]


def test_vllm_plans_its_memory_by_the_crops_that_are_allowed() -> None:
    cells = build_cells({NAME: ["4", "6"], "runner": ["vllm"]})
    assert merge_equal_work(cells, views_of([page(300, 300)])) == cells


def test_settings_that_cannot_be_planned_stay_cells_of_their_own() -> None:
    """Crops without pixels: the sweep skips them, each with its reason."""
    cells = build_cells({NAME: ["4", "6"], "min_crop_size": ["1"]})
    assert merge_equal_work(cells, views_of([page(1, 9)])) == cells


def test_one_row_has_all_names_wherever_it_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*LINE, *CROPS, "--dry-run"]) == 0
    assert "4 or 6" in capsys.readouterr().out
    assert run([*LINE, *CROPS]) == 0
    said = capsys.readouterr()
    assert "2 cells (1 more with the same views)" in said.err
    assert "4 or 6" in said.out
    assert "Measured once for up to 4 or 6 crops and up to 6 crops" in " ".join(said.out.split())

    measured = only_run(folder)
    assert [cell[NAME] for cell in measured.cells.values()] == [2, 4]
    [(cell, [alias])] = measured.aliases.items()
    assert (measured.cells[cell][NAME], alias.settings[NAME]) == (4, 6)
    assert {key[0] for key in measured.repeats} == set(measured.cells)
    with (measured.path.parent / "summary.csv").open(newline="") as file:
        assert [row["aliases"] for row in csv.DictReader(file)] == ["", json.dumps([{NAME: 6}])]
    page = page_of(measured)
    assert "Measured once for up to 4 or 6 crops" in section(page, "cells").text
    assert "4 or 6" in section(page, "curves").text

    place = str(measured.path.parent)
    assert run(["report", place, "--format", "md"]) == 0
    said = capsys.readouterr()
    assert "| up to 4 or 6 crops |" in said.out.replace("*", "") and "and up to 6 crops" in said.out
    assert run(["recommend", place, "--allow-different", cell, "--max-p95-ms", "1e9"]) == 0
    assert "up to 4 or 6 crops" in capsys.readouterr().out
    chosen = next(line for line in (folder / "preset.yaml").read_text().splitlines() if line.startswith("# same work"))
    assert "up to 6 crops" in chosen


def test_a_resumed_run_keeps_its_aliases_and_an_older_one_its_cells(folder: Path) -> None:
    assert run([*LINE, *CROPS, "--no-verify"]) == 0
    measured = only_run(folder)
    place = measured.path.parent
    assert run(["bench", "--resume", str(place)]) == 0
    assert only_run(folder).aliases == measured.aliases
    # As a version wrote it that knew no aliases: all three are cells, and none but the first was measured yet.
    header, *lines = measured.path.read_text().splitlines()
    older = json.loads(header)
    older["cells"] += [alias for cell in older["cells"] for alias in cell.pop("aliases", [])]
    measured.path.write_text("\n".join([json.dumps(older), *lines]) + "\n")
    assert run(["bench", "--resume", str(place)]) == 0
    found = only_run(folder)
    assert [cell[NAME] for cell in found.cells.values()] == [2, 4, 6] and not found.aliases
    assert {key[0] for key in found.repeats} == set(found.cells)


def test_cells_pair_by_their_aliases(folder: Path) -> None:
    """Whichever of the equal settings was measured, and against a run that measured only one of them."""
    runs = []
    for place, grid in enumerate(("2,4,6", "2,6,4", "2,6")):
        line = [*LINE, "--grid-max-crops", grid, "--min-crop-size", "50", "--no-verify", "--output-dir", str(place)]
        assert run(line) == 0
        runs.append(read_run(next((folder / str(place)).iterdir())))
    for a, b in permutations(runs, 2):
        comparison = compare_runs(a, b)
        assert [pair.settings[NAME] for pair in comparison.pairs] == [cell[NAME] for cell in a.cells.values()]
        assert [b.cells[pair.cells[1]][NAME] for pair in comparison.pairs] == [cell[NAME] for cell in b.cells.values()]
        assert not comparison.alone
