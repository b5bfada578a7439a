"""Runs that lack what a report is made of, or have a lot of it: all have a sensible page."""

from pathlib import Path

import pytest
from tests.records import synthetic
from tests.report.report_page import page_of, section, settings_of_page
from tests.report.test_terminal import shown

from panscan.core import RecordsError
from panscan.report import write_pictures
from panscan.report.terminal import print_curves, print_summary

pytestmark = pytest.mark.usefixtures("without_charts")


def test_a_run_without_a_measured_cell(tmp_path: Path) -> None:
    run = synthetic.write_run(tmp_path, [synthetic.header({"c": {}}), synthetic.outcome("c", "failed", "boom")])
    page = page_of(run)
    assert "Nothing was measured." in section(page, "cells").text
    assert section(page, "recommendation").text.startswith("No recommendation: no cell is finished")
    assert str(tmp_path) not in section(page, "recommendation").text
    assert shown(print_curves, run) == "" and "Nothing was measured." in shown(print_summary, run)
    assert "1 setting failed: boom" in section(page, "not-measured").text
    assert not list(page.of_class("chart"))
    with pytest.raises(RecordsError, match="no curve to draw"):
        write_pictures(run, tmp_path)


def test_one_cell_of_one_batch(tmp_path: Path) -> None:
    """No interval, nothing to compare with, one output token and so no TPOT."""
    records = [synthetic.header({"c": {"model": "m"}}), synthetic.request("c", "q", 0.0, [0.5])]
    records += [synthetic.repeat("c", 0, 0.0, 0.5), synthetic.outcome("c", "done")]
    page = page_of(synthetic.write_run(tmp_path, records))
    [row] = settings_of_page(page)
    shown = {name: cell.text for name, cell in row.items()}
    assert (shown["requests/s"], shown["TPOT ms"], shown["p95 E2E ms"]) == ("2.00", "-", "~500")
    assert [name for name in ("curves", "front", "requests", "floor") if page.by_id(name) is not None] == []
    assert section(page, "verdict").text == "Verdict No setting was compared with the reference."


def test_cells_whose_requests_all_failed_are_named(tmp_path: Path) -> None:
    records = synthetic.batches_of("a", [1.0]) + synthetic.batches_of("b", [1.0, 1.0])
    records[0]["error"] = "out of luck"
    records[3]["error"] = "once"
    cells = {"a": {"batch_size": 1}, "b": {"batch_size": 2}}
    run = synthetic.write_run(tmp_path, [synthetic.header(cells), *records])
    page = page_of(run)
    assert "1 setting without an answer: every request failed, the first with: out of luck" in page.text
    assert [row["id"].text for row in settings_of_page(page)] == ["b"]
    assert "2 requests failed and are excluded." in page.text
    assert "2 requests failed and are excluded." in shown(print_summary, run)


def test_sixty_cells(tmp_path: Path) -> None:
    cells = {
        f"{attention}-{dtype}-{size}": {"attention": attention, "dtype": dtype, "batch_size": size}
        for attention in ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
        for dtype in ("bf16", "fp16", "fp32")
        for size in (1, 2, 4, 8)
    }
    records = [synthetic.header(cells)]
    for number, cell in enumerate(cells):
        records += synthetic.batches_of(cell, [1.0 + number, 1.2 + number])
        records.append(synthetic.verdict(cell, "exact", 1.0, 0.5 + number / 100))
    page = page_of(synthetic.write_run(tmp_path, records))
    assert [row["id"].text for row in settings_of_page(page)] == list(cells)
    blocks = section(page, "curves").of_class("compare")
    assert [next(block.all("h3")).text for block in blocks] == ["By attention", "By dtype", "By batch size"]
    assert "The 6 fastest of 15 combinations of the other settings." in blocks[2].text
    for block in blocks:
        assert len(list(block.of_class("legend")[0].all("li"))) <= 6
    assert len(list(section(page, "stages").all("tr"))) == 61


def test_presets_that_differ_in_several_settings_have_no_curves(tmp_path: Path) -> None:
    cells = {f"c{n}": {"batch_size": n, "attention": str(n)} for n in range(40)}
    header = synthetic.header(cells)
    header["cells"][7]["preset"] = "balanced"
    records = [header]
    for number, cell in enumerate(cells):
        records += synthetic.batches_of(cell, [1.0 + number])
    page = page_of(synthetic.write_run(tmp_path, records))
    assert page.by_id("curves") is None
    assert "8 of 40 settings are shown." in page.text
    assert "balanced, batch size 7, 7 attention" in section(page, "cells").text


def test_only_random_weights_are_called_random(tmp_path: Path) -> None:
    note = "These weights are random: times are real, answers are noise."
    drawn = {"model": "mini", "random_weights": True, "model_shape": "4b"}
    models: list[tuple[list[dict[str, object]], dict[str, object], bool]] = [
        ([{"model": "tiny"}, drawn], {}, True),
        ([{"model": "tiny"}, {"model": "google/gemma-3-4b-it"}], {}, False),
        ([{"model": "mini"}], {"bundled": {"mini": "0123456789ab"}}, False),
        ([{"model": "tiny"}, {"model": "mini"}], {"bundled": {"mini": "0123456789ab"}}, False),
        ([drawn], {"bundled": {}}, True),
        ([{"model": "mini"}], {}, True),  # of a version whose mini model was random
    ]
    for cells, environment, said in models:
        header = synthetic.header({str(number): settings for number, settings in enumerate(cells)})
        header["environment"] = environment
        records = [record for number in range(len(cells)) for record in synthetic.batches_of(str(number), [1.0])]
        assert (note in page_of(synthetic.write_run(tmp_path, [header, *records])).text) == said
        assert (note in page_of(synthetic.write_run(tmp_path, [header])).text) == said, "nothing measured yet"


def test_crop_settings_are_said_only_of_cells_with_crops(tmp_path: Path) -> None:
    crops = {"pan_and_scan_min_crop_size": 448}
    on, off = {"model": "m", "do_pan_and_scan": True, **crops}, {"model": "m", "do_pan_and_scan": False, **crops}
    records = [*synthetic.batches_of("a", [1.0]), *synthetic.batches_of("b", [1.0])]
    for other, wanted in (
        (on, "m, crops of at least 448 pixels"),
        (off, "m; crops of at least 448 pixels with pan and scan"),
    ):
        run = synthetic.write_run(tmp_path, [synthetic.header({"a": on, "b": other}), *records])
        assert f"All settings: {wanted}." in section(page_of(run), "cells").text


def test_schema_1_and_settings_of_other_versions(tmp_path: Path) -> None:
    header = synthetic.header({"a": {"novel": {"x": [1]}}, "b": {"novel": float("inf")}, "c": {"novel": None}})
    header |= {"schema": 1, "environment": {"novel": {"deep": [1]}}}
    records = [record for cell in "abc" for record in synthetic.batches_of(cell, [1.0])]
    page = page_of(synthetic.write_run(tmp_path, [header, *records]))
    assert [row["setting"].text for row in settings_of_page(page)] == ["novel {'x': [1]}", "novel inf", "no novel"]
    assert all(row["verdict"].text == "? unverified" for row in settings_of_page(page))
    assert "measured by a panscan that did not compare answers yet" in page.of_class("warnings")[0].text
    assert "By novel" in section(page, "curves").text
    assert "deep" in section(page, "environment").text


def test_no_verify_is_said_first_and_notes_too(tmp_path: Path) -> None:
    header = synthetic.header({"c": {}})
    header["settings"]["verify"] = False
    run = synthetic.write_run(tmp_path, [header, *synthetic.batches_of("c", [1.0, 1.0])])
    run.notes.append("the last line is torn")
    page = page_of(run)
    assert page.of_class("warnings")[0].text.startswith("No setting was compared with the reference: --no-verify.")
    assert "The last line is torn." in page.of_class("warnings")[0].text
    assert "Note: the last line is torn" in shown(print_summary, run)
    assert "doubtful" in (section(page, "recommendation").attributes["class"] or "")
