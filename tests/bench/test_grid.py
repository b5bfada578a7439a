"""Grids: every combination once, flags over file over presets."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from panscan.bench.grid import Cell, build_cells
from panscan.core import SettingError
from panscan.settings import Settings
from panscan.settings.preset_files import preset_names, read_grid_file, single_preset

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
    found = {name: build_cells({}, presets=[name])[0].settings for name in preset_names()}
    assert not found["baseline"].do_pan_and_scan
    for name, expected in {"balanced": (2.0, 6, 448), "document": (1.6, 10, 448), "throughput": (2.5, 4, 448)}.items():
        views = found[name].pan_and_scan
        assert (views.min_ratio_to_activate, views.max_num_crops, views.min_crop_size) == expected
    assert found["balanced"].max_new_tokens == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected lines"),
        ("batch_size: [1, 2\n", "not YAML"),
        ("bach_size: 1\n", "did you mean 'batch_size'"),
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
        ("\0", "not YAML"),
    ],
)
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
    with pytest.raises(SettingError, match=r"not a regular file|File name too long"):
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
    found = sorted((cell.settings.temperature, cell.settings.top_k or 0) for cell in cells)
    assert found == [(0, 0), (0.8, 20), (0.8, 40)]
    placed = build_cells({"device_map": ["none", "auto"], "max_memory": ["0=3GiB"]})
    assert [cell.settings.max_memory for cell in placed] == [None, "0=3GiB"]
    with pytest.raises(SettingError, match="temperature above 0"):
        build_cells({"temperature": ["0"], "top_k": ["20"]})


def test_group_sizes_are_swept_for_int4_alone() -> None:
    cells = build_cells({"quantization": ["none", "int8", "int4"], "quantization_group_size": ["64", "32"]})
    found = [(cell.settings.quantization, cell.settings.quantization_group_size) for cell in cells]
    assert found == [(None, None), ("int8", None), ("int4", 64), ("int4", 32)]
    with pytest.raises(SettingError, match="only int4 has groups"):
        build_cells({"quantization": ["none", "int8"], "quantization_group_size": ["64"]})
