"""Grids: every combination once, flags over file over presets; what a dry run predicts; settings of equal work."""

import csv
import json
import os
import shlex
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import Panscan, noise, only_run
from tests.report.report_page import page_of, section

from panscan.analysis.pairing import compare_runs
from panscan.bench.grid import Cell, build_cells, merge_equal_work
from panscan.bench.plan import SweepPlan
from panscan.bench.predict import Prediction, predict, shape_of
from panscan.bench.run import start
from panscan.cli.main import run
from panscan.cli.progress import SweepProgress
from panscan.core import BUNDLED, SettingError
from panscan.core.activity import activity
from panscan.model.shapes import SHAPES
from panscan.settings import Settings
from panscan.settings.preset_files import preset_names, read_grid_file, single_preset
from panscan.workload.requests import DocumentFile, Item, Source, load_workload, views_of

FIELDS = {
    "batch_size": st.integers(1, 8),
    "pan_and_scan_max_num_crops": st.integers(1, 8),
    "do_pan_and_scan": st.booleans(),
    "attention": st.sampled_from(["eager", "sdpa"]),
}
GRIDS = st.fixed_dictionaries({}, optional={name: st.lists(v, min_size=1, max_size=4) for name, v in FIELDS.items()})


@given(GRIDS)
def test_cells_are_the_product_without_duplicates(grid: dict[str, list[object]]) -> None:
    crops_meant = True in grid.get("do_pan_and_scan", [True])
    if not crops_meant and "pan_and_scan_max_num_crops" in grid:
        with pytest.raises(SettingError, match="no crops with --no-pan-and-scan"):
            build_cells(grid)
        return
    cells = build_cells(grid)
    ids = [cell.id for cell in cells]
    assert len(ids) == len(set(ids))
    with_crops = len(set(grid.get("pan_and_scan_max_num_crops", [4]))) if crops_meant else 0
    without = False in grid.get("do_pan_and_scan", [])
    others = len(set(grid.get("batch_size", [1]))) * len(set(grid.get("attention", ["sdpa"])))
    assert len(cells) == others * (with_crops + without)


def test_the_id_of_a_cell_never_changes() -> None:
    """Runs of different days name their cells by these ids, so a new setting with a default must not change them."""
    assert Cell.of(Settings()).id == "44136fa355"
    assert Cell.of(Settings(batch_size=4, attention="eager")).id == "1c17a84359"


def test_flags_win_over_the_file_and_the_file_over_presets(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"max_num_crops": [7, 8], "batch-size": 2}))
    [first, second] = build_cells({"batch_size": ["3"]}, file=read_grid_file(path), presets=["balanced"])
    assert [cell.settings.pan_and_scan_max_num_crops for cell in (first, second)] == [7, 8]
    assert first.settings.batch_size == 3
    assert first.settings.pan_and_scan_min_ratio_to_activate == 2.0


def test_presets_are_the_documented_ones() -> None:
    assert preset_names() == ["balanced", "baseline", "document", "throughput"]
    by_name = {name: build_cells({}, presets=[name])[0].settings for name in preset_names()}
    assert not by_name["baseline"].do_pan_and_scan
    for name, expected in {"balanced": (2.0, 6, 448), "document": (1.6, 10, 448), "throughput": (2.5, 4, 448)}.items():
        views = by_name[name].pan_and_scan
        assert (views.min_ratio_to_activate, views.max_num_crops, views.min_crop_size) == expected
    assert by_name["balanced"].max_new_tokens == 256


BAD_GRIDS = [
    ("- a\n- b\n", "expected lines"),
    ("batch_size: [1, 2\n", "not YAML"),
    ("batch_size: []\n", "no value"),
    ("attention: sdpa\nattn_impl: eager\n", "set twice"),
    ("batch_size: {a: 1}\n", "batch_size: expected a value or a list of values"),
    ("", "the file is empty"),
    ("batch_size: 1\ndtype: fp32\nbatch_size: 2\n", "'batch_size' is set twice in .*, line 3"),
    ("batch_size: 2026-01-01\n", "takes a whole number from 1 to 65536; got '2026-01-01'"),
    ("batch_size: !!python/object/apply:os.getpid []\n", "line 1: anchors, aliases and tags are not supported"),
    ("!!omap batch_size: 1\n", "line 1: anchors, aliases and tags are not supported"),
    ("batch_size: " + "9" * 6000, "takes a whole number from 1 to 65536; got '999"),
    ("batch_size: " + "[" * 5000, "line 1: nested too deeply"),
    ("batch_size:\n- &a [1]\n- *a\n", "line 2: anchors, aliases"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "line 1: anchors, aliases"),
    ("? [a, b]\n: 1\n", "line 1, .*found unhashable key"),
    ("batch_size: 1\n---\nbatch_size: 2\n", "not YAML: expected a single document .* line 2"),
    ("batch_size: [" + "1, " * 30_000 + "]", "larger than 65,536 bytes"),
    ("\0", "not UTF-8 text"),
]


@pytest.mark.parametrize(("text", "message"), BAD_GRIDS)
def test_bad_grid_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message) as caught:
        read_grid_file(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_values_stay_text_until_a_setting_types_them(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("revision: 2026-01-01\nequal_views: [yes, off]\nkv-cache-gb: [null, ~, 'none', 1e-1]\ntop_k: 1_0\n")
    assert read_grid_file(path) == {
        "revision": ["2026-01-01"],
        "equal_views": [True, False],
        "kv_cache_gb": [None, None, None, 0.1],
        "top_k": [10],
    }


@pytest.mark.parametrize("name", ["folder.yaml", "/dev/zero", "fifo.yaml", f"{'n' * 5000}.yaml"])
def test_a_grid_that_is_no_regular_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(SettingError, match=r"not a regular file|Is a directory|File name too long"):
        read_grid_file(tmp_path / name)


def test_a_single_preset_is_one_set_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({"grid_max_crops": "2", "batch-size": [2, 4], "runner": "engine"}))
    name = "pan_and_scan_max_num_crops"
    assert single_preset(str(path), [name, "runner"]) == ({name: 2, "runner": "engine"}, ["batch_size"])
    assert single_preset(str(path), []) == ({}, ["batch_size", name, "runner"])
    for takes in ([name, "batch_size"], ["batch_size"]):
        with pytest.raises(SettingError, match="one batch_size is wanted, not 2"):
            single_preset(str(path), takes)
    assert single_preset("baseline", ["do_pan_and_scan"]) == ({"do_pan_and_scan": False}, [])


def test_a_swept_setting_that_is_off_leaves_out_what_it_governs() -> None:
    cells = build_cells({"temperature": ["0", "0.8"], "top_k": ["20", "40"]})
    pairs = sorted((cell.settings.temperature, cell.settings.top_k or 0) for cell in cells)
    assert pairs == [(0, 0), (0.8, 20), (0.8, 40)]
    placed = build_cells({"device_map": ["none", "auto"], "max_memory": ["0=3GiB"]})
    assert [cell.settings.max_memory for cell in placed] == [None, "0=3GiB"]


def test_group_sizes_are_swept_for_int4_alone() -> None:
    cells = build_cells({"quantization": ["none", "int8", "int4"], "quantization_group_size": ["64", "32"]})
    pairs = [(cell.settings.quantization, cell.settings.quantization_group_size) for cell in cells]
    assert pairs == [(None, None), ("int8", None), ("int4", 64), ("int4", 32)]


# Predictions against what a run then measures.


PAGE = Item("0", (DocumentFile("a.png", 1240, 1754, ""),), "What is the total?")


def one(**settings: Any) -> Prediction:
    """The prediction of one cell for a page."""
    axes = {"device": ["cpu"], "dtype": ["fp32"], **{name: [value] for name, value in settings.items()}}
    [prediction] = predict(SweepPlan(cells=build_cells(axes), items=[PAGE], source=Source(prompt="x", no_images=True)))
    return prediction


def test_views_batches_and_tokens_are_those_measured(tmp_path: Path) -> None:
    for name, size in {"a.png": (260, 800), "b.png": (700, 300), "c.png": (300, 300)}.items():
        noise(*size).save(tmp_path / name)
    source = Source(images=(str(tmp_path),), prompt="What is the total?")
    axes: dict[str, list[Any]] = {"model": ["tiny"], "device": ["cpu"], "max_new_tokens": [1], "batch_size": [2]}
    axes |= {"equal_views": [True], "do_pan_and_scan": [True, False], NAME: [2, 4]}
    items = load_workload(source, on_problem=pytest.fail).items
    plan = SweepPlan(cells=build_cells(axes), items=items, source=source, warmup=0)
    with activity("measuring") as step:
        progress = SweepProgress(plan, set(), step)
        measured = start(plan, tmp_path / "run", [], progress)
    predictions = predict(plan)
    assert [prediction.cell for prediction in predictions] == list(measured.cells)
    assert len({prediction.views for prediction in predictions}) == 3
    for prediction in predictions:
        records = measured.requests[prediction.cell, 0]
        assert prediction.skipped is None
        assert prediction.views == sum(record.views for record in records)
        assert prediction.image_tokens == sum(record.image_tokens for record in records)
        assert prediction.batches == len({record.batch for record in records})
        assert prediction.prompt_tokens == pytest.approx(sum(record.prompt_tokens for record in records), rel=0.15)


@pytest.mark.parametrize("size", ["4b", "27b"])
def test_seconds_grow_with_tokens_views_and_the_model(size: str) -> None:
    model = f"google/gemma-3-{size}-it"
    seconds = [one(model=model, max_new_tokens=count).seconds for count in (1, 2, 100, 1000)]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3]
    uncropped = one(model=model, max_new_tokens=1, do_pan_and_scan=False)
    cropped = one(model=model, max_new_tokens=1)
    assert (uncropped.views, cropped.views) == (1, 3)
    assert uncropped.seconds < cropped.seconds
    assert one(max_new_tokens=1).seconds < seconds[0]


def test_an_unknown_shape_has_counts_but_no_time() -> None:
    prediction = one(model="someone/finetune")
    assert (prediction.views, prediction.image_tokens, prediction.batches) == (3, 3 * 256, 1)
    assert (prediction.seconds, prediction.skipped) == (None, None)


def test_a_cell_that_cannot_run_costs_nothing() -> None:
    prediction = one(attention="flash_attention_2")
    assert "makes Gemma 3's image tokens causal (sdpa does not), and needs an NVIDIA GPU" in (prediction.skipped or "")
    assert (prediction.batches, prediction.views, prediction.image_tokens, prediction.seconds) == (0, 0, 0, None)


def test_a_checkpoints_name_tells_its_shape() -> None:
    for size, shape in SHAPES.items():
        published = (f"google/gemma-3-{size}-it", f"/models/Gemma-3-{size.upper()}-pt")
        for name in (size,) if size in BUNDLED else published:
            assert shape_of(Settings(model=name)) is shape
        assert shape_of(Settings(random_weights=True, model_shape=size)) is shape
    assert shape_of(Settings()) is SHAPES["mini"]
    assert shape_of(Settings(model="mistral-4b")) is None


# Settings that lead to the same views are one cell, which is shown with all of them, everywhere.


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


def test_equal_views_and_equal_settings_are_one_cell() -> None:
    cells = build_cells({NAME: ["2", "4", "6"], "min_crop_size": ["50"], "batch_size": ["1", "2"]})
    for items, crops in (
        ([page(260, 800)], {2: [], 4: [6]}),
        ([page(260, 800), page(100, 900)], {2: [], 4: [], 6: []}),
        ([page(300, 300)], {2: [4, 6]}),
    ):
        merged = merge_equal_work(cells, views_of(items))
        pairs = [(cell.settings.batch_size, cell.settings.pan_and_scan_max_num_crops) for cell in merged]
        assert sorted(pairs) == [(size, most) for size in (1, 2) for most in crops]
        for cell in merged:
            others = [alias.settings for alias in cell.aliases]
            assert [settings.pan_and_scan_max_num_crops for settings in others] == crops[
                cell.settings.pan_and_scan_max_num_crops
            ]
            assert all(settings.batch_size == cell.settings.batch_size for settings in others)
            assert all(views_of(items)(settings) == views_of(items)(cell.settings) for settings in others)
        assert {member.id for cell in merged for member in (cell, *cell.aliases)} == {cell.id for cell in cells}


def test_pages_without_crops_need_no_pan_and_scan() -> None:
    cells = build_cells({"do_pan_and_scan": ["false", "true"]})
    [merged] = merge_equal_work(cells, views_of([page(300, 300)]))
    assert [alias.settings.do_pan_and_scan for alias in merged.aliases] == [True]


NOT_MERGED = [
    ({"runner": ["vllm"]}, page(300, 300)),  # vLLM plans its memory by the crops that are allowed
    ({"min_crop_size": ["1"]}, page(1, 9)),  # crops without pixels: the sweep skips them, each with its reason
]


@pytest.mark.parametrize(("axes", "item"), NOT_MERGED)
def test_settings_of_other_memory_or_without_a_plan_stay_cells_of_their_own(axes: Any, item: Item) -> None:
    cells = build_cells({NAME: ["4", "6"], **axes})
    assert merge_equal_work(cells, views_of([item])) == cells


def test_one_row_has_all_names_wherever_it_is_shown(folder: Path, panscan: Panscan) -> None:
    assert "4 or 6" in panscan(*LINE, *CROPS, "--dry-run").out
    said = panscan(*LINE, *CROPS)
    assert "2 cells (1 more with the same views)" in said.err
    assert "4 or 6" in said.out
    assert "Measured once for up to 4 or 6 crops and up to 6 crops" in " ".join(said.out.split())

    measured = only_run(folder)
    assert [[form[NAME] for form in cell.forms] for cell in measured.cells.values()] == [[2], [4, 6]]
    _, cell = measured.cells
    assert {key[0] for key in measured.repeats} == set(measured.cells)
    with (measured.path.parent / "summary.csv").open(newline="") as file:
        assert [row["aliases"] for row in csv.DictReader(file)] == ["", json.dumps([{NAME: 6}])]
    page = page_of(measured)
    assert "Measured once for up to 4 or 6 crops" in section(page, "cells").text
    assert "4 or 6" in section(page, "curves").text

    place = str(measured.path.parent)
    said = panscan("report --format md", place).out
    assert "| up to 4 or 6 crops |" in said.replace("*", "") and "and up to 6 crops" in said
    assert "up to 4 or 6 crops" in panscan("recommend --max-p95-ms 1e9 --allow-different", cell, place).out
    chosen = next(line for line in (folder / "preset.yaml").read_text().splitlines() if line.startswith("# same work"))
    assert "up to 6 crops" in chosen


def test_a_resumed_run_keeps_its_aliases_and_an_older_one_its_cells(folder: Path) -> None:
    assert run([*LINE, *CROPS, "--no-verify"]) == 0
    measured = only_run(folder)
    place = measured.path.parent
    assert run(["bench", "--resume", str(place)]) == 0
    assert only_run(folder).cells == measured.cells
    # As a version wrote it that knew no aliases: all three are cells, and none but the first was measured yet.
    header, *lines = measured.path.read_text().splitlines()
    older = json.loads(header)
    older["cells"] += [alias for cell in older["cells"] for alias in cell.pop("aliases", [])]
    measured.path.write_text("\n".join([json.dumps(older), *lines]) + "\n")
    assert run(["bench", "--resume", str(place)]) == 0
    resumed = only_run(folder)
    assert [[form[NAME] for form in cell.forms] for cell in resumed.cells.values()] == [[2], [4], [6]]
    assert {key[0] for key in resumed.repeats} == set(resumed.cells)


def test_cells_pair_by_their_aliases(folder: Path) -> None:
    """Whichever of the equal settings was measured, and against a run that measured only one of them."""
    runs = []
    for place, grid in enumerate(("2,4,6", "2,6,4", "2,6")):
        line = [*LINE, "--grid-max-crops", grid, "--min-crop-size", "50", "--no-verify", "--output-dir", str(place)]
        assert run(line) == 0
        runs.append(only_run(folder, str(place)))
    for a, b in permutations(runs, 2):
        comparison = compare_runs(a, b)
        assert [pair.settings[NAME] for pair in comparison.pairs] == [cell.settings[NAME] for cell in a.cells.values()]
        partners = [b.cells[pair.cells[1]] for pair in comparison.pairs]
        assert partners == list(b.cells.values())
        assert not comparison.alone
