"""Runs that lack what a report is made of, or have a lot of it: all have a sensible page, whose words are kept."""

from pathlib import Path
from typing import Any

import pytest
from tests.records import synthetic
from tests.report.report_known import SHAPE, requests_of, settings_of
from tests.report.report_page import page_of, section, settings_of_page
from tests.report.test_snapshots import compare
from tests.report.test_terminal import shown

from panscan.core import RecordsError
from panscan.report import write_pictures
from panscan.report.terminal import print_curves, print_summary

pytestmark = pytest.mark.usefixtures("without_charts")

NOTE = "These weights are random: times are real, answers are noise."
Records = list[dict[str, Any]]
CROPS = {"model": "m", "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 448}
DRAWN = {"model": "mini", "random_weights": True, "model_shape": "4b"}
MINI = {"bundled": {"mini": "0123456789ab"}}


def measured(*cells: dict[str, Any], seconds: int = 1, **head: Any) -> Records:
    """Return the records of cells ``a``, ``b`` ...; each takes a second longer than the one before."""
    named = {chr(ord("a") + number): settings for number, settings in enumerate(cells)}
    batches = [synthetic.batches_of(cell, [1.0 + number] * seconds) for number, cell in enumerate(named)]
    return [synthetic.header(named) | head, *(record for lines in batches for record in lines)]


def failed() -> Records:
    """Return a run with a cell whose requests all failed, and one of which one request did."""
    records = measured({"batch_size": 1}, {"batch_size": 2}, seconds=2)
    for number, error in ((1, "out of luck"), (2, "also"), (5, "once")):
        records[number]["error"] = error
    return records


NOVEL = [{"novel": {"x": [1]}}, {"novel": float("inf")}, {"novel": None}]
QUICK = {"flops_per_s": 4e15, "bytes_per_s": 2e13}  # a machine whose ceilings allow every time
UNSEEN = [synthetic.header({"fast": settings_of("fast")}), synthetic.load(["fast"], SHAPE, **QUICK)]
UNSEEN += requests_of("fast", scores=False)
for record in UNSEEN:
    if record["type"] == "request":
        record["stamps"] |= {"vision_start": None, "vision": None}
UNANSWERED = [synthetic.header({"c": {"model": "m"}}), synthetic.request("c", "q", 0.0, [0.5])]
ODD: dict[str, Records] = {
    "no measured cell": [synthetic.header({"c": {}}), synthetic.outcome("c", "failed", "boom")],
    "one cell of one batch": [*UNANSWERED, synthetic.repeat("c", 0, 0.0, 0.5), synthetic.outcome("c", "done")],
    "requests that failed": failed(),
    "crop settings": measured(CROPS, CROPS),
    "crop settings of one cell": measured(CROPS, CROPS | {"do_pan_and_scan": False}),
    "schema 1, and settings of other versions": measured(*NOVEL, schema=1, environment={"novel": {"deep": [1]}}),
    "vision that was not seen: its floor is in prefill": UNSEEN,
    "no verification": measured({}, seconds=2, settings={"verify": False}),
    "random weights": measured({"model": "tiny"}, DRAWN),
    "random weights of a version that knows the bundled models": measured(DRAWN, environment={"bundled": {}}),
    "a mini model of a version in which it was random": measured({"model": "mini"}),
    "random weights that were not measured": measured({"model": "mini"})[:1],
    "weights that are not random": measured({"model": "tiny"}, {"model": "google/gemma-3-4b-it"}),
    "a trained model": measured({"model": "mini"}, environment=MINI),
    "a trained and a random model": measured({"model": "tiny"}, {"model": "mini"}, environment=MINI),
    "presets that differ in several settings": measured(*({"batch_size": n, "attention": str(n)} for n in range(20))),
}


def test_odd_runs_have_the_words_that_were_kept(tmp_path: Path) -> None:
    """Sections of the page and the terminal; see :mod:`tests.report.test_snapshots`."""
    texts = []
    for name, records in ODD.items():
        run = synthetic.write_run(tmp_path / "run", records)
        run.notes += ["the last line is torn"] if name == "no verification" else []
        page = page_of(run)
        parts = {element.attributes["id"]: element.text for element in page.all("section")}
        for usual in ("definitions", "repeat"):
            parts.pop(usual, None)
        lines = [f"{part}: {text}" for part, text in parts.items()] + [one.text for one in page.of_class("warnings")]
        lines.append(f"random weights are noted: {NOTE in page.text}")
        terminal = shown(print_summary, run, 120) + shown(print_curves, run, 120)
        texts.append("\n".join([f"## {name}", *lines, terminal]))
        assert str(tmp_path) not in parts["recommendation"]
    compare("odd-runs.txt", "\n".join(texts).replace(str(tmp_path), "FOLDER"))
    with pytest.raises(RecordsError, match="no curve to draw"):
        write_pictures(synthetic.write_run(tmp_path, ODD["no measured cell"]), tmp_path)


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
