"""What four kinds of runs show, compared with files: every table on the terminal, as markdown and as HTML.

``PANSCAN_RENEW_SNAPSHOTS=1 pytest tests/report/test_snapshots.py`` writes the files again, for a change that is meant.
"""

import io
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from rich.console import Console
from tests.analysis.noisy_runs import noisy_records
from tests.analysis.test_accuracy import BASE, cell_records
from tests.conftest import Panscan
from tests.inspect.trace.kineto import busy_trace, decode_trace
from tests.records import synthetic
from tests.records.load_runs import load_run as load_records
from tests.report import report_known
from tests.report.report_known import SHAPE, requests_of, settings_of
from tests.report.report_page import page_of
from tests.report.test_load_report import broken_records
from tests.report.test_terminal import shown

from panscan.analysis.comparison import build_report
from panscan.analysis.summary import write_summary
from panscan.core import escape_controls
from panscan.inspect.trace.output import lines, page
from panscan.inspect.trace.summary import summarize
from panscan.records.store import Run
from panscan.report import to_markdown, write_report
from panscan.report.comparison import markdown_text, print_comparison
from panscan.report.terminal import print_curves, print_decision, print_summary

SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = "PANSCAN_RENEW_SNAPSHOTS"
WIDTHS = (80, 160)


STORED = {"weights": "int4, groups of 64", "base_model": "mini", "weight_bytes": 2**30}
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "plain": ({}, {"weight_bytes": 4 * 2**30}, "exact", 2),
    "other": ({"batch_size": 4}, {"weight_bytes": 4 * 2**30}, "exact", 0),
    "int8": ({"quantization": "int8"}, {"weights": "int8", "weight_bytes": 2**31}, "different", 2),
    "stored": ({"model": "out/", "revision": "r"}, STORED, "different", 12),
    "cache": ({"quantization": "int8", "kv_cache_dtype": "int8"}, {"weights": "int8"}, "different", 2),
    "alone": ({"quantization": "int8", "max_new_tokens": 64}, {"weights": "int8"}, "different", 2),
}
"""By id: settings, fields of the load, verdict, and questions answered wrongly."""


def quantized_records() -> list[dict[str, Any]]:
    """Return a sweep of quantised and unquantised weights."""
    header = synthetic.header({cell: {**BASE, **settings} for cell, (settings, *_) in QUANTIZED.items()})
    records = [header, synthetic.truth()]
    for cell, (_, load, word, wrong) in QUANTIZED.items():
        records += [synthetic.load([cell], None, **load), *cell_records(cell, word, wrong)]
    return records


def replica_records() -> list[dict[str, Any]]:
    """Return a run of two replicas: one answers a request a second, the other one in two seconds."""
    records = [synthetic.header({"c": {"model": "tiny", "runner": "engine"}})]
    for replica, step in ((0, 1.0), (1, 2.0)):
        for batch in range(int(10 / step)):
            tokens = [batch * step + step * (1 + index) / 4 for index in range(4)]
            request = synthetic.request("c", f"{replica}.{batch}", batch * step, tokens, batch=batch, replica=replica)
            records.append(request)
    windows = [{"replica": n, "started": 0.0, "ended": 10.0, "device": f"cuda:{n}"} for n in range(2)]
    return [*records, synthetic.repeat("c", 0, 0.0, 10.0, replicas=windows), synthetic.outcome("c", "done")]


RUNS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sweep": lambda: report_known.records_of(scores=True),  # with every verdict and outcome
    "quantized": quantized_records,
    "replicas": replica_records,
    "load": load_records,
    "load-faulty": broken_records,
}


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, tmp_path: Path) -> None:
    run = synthetic.write_run(tmp_path, RUNS[name]())
    for width in WIDTHS:
        compare(f"{name}-{width}.txt", terminal(run, width))
    compare(f"{name}.md", to_markdown(run))
    write_summary(run, tmp_path / "summary.csv")
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.6g}", (tmp_path / "summary.csv").read_text())
    compare(f"{name}.csv", rounded)
    write_report(run, tmp_path / "report.html")
    compare(f"{name}.html", without_pictures((tmp_path / "report.html").read_text("utf-8")))


def terminal(run: Run, width: int) -> str:
    """What a terminal shows, which gets no control characters."""
    return escape_controls("".join(shown(show, run, width) for show in (print_summary, print_curves, print_decision)))


def test_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, records in (
        ("a", noisy_records(1, scores={"exact_match": 1.0})),
        ("b", noisy_records(2, factor=1.1, scores={"exact_match": 0.5})),
        ("load-a", load_records()),
        ("load-b", load_records(goodput={"ttft": 50.0}, image_reuse=0.5, endpoint="http://other/v1")),
    ):
        synthetic.write_run(Path(name), records)
    for kind, names in (("sweeps", ("a", "b", "a")), ("loads", ("load-a", "load-b"))):
        report = build_report([synthetic.read_run(Path(name)) for name in names], ["p95_e2el>5%"])
        for width in WIDTHS:
            console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
            print_comparison(report, console)
            compare(f"compare-{kind}-{width}.txt", console.export_text())
        compare(f"compare-{kind}.md", markdown_text(report))


def test_traces() -> None:
    traces = {"first": decode_trace(), "second": decode_trace(prepare=400, graph=True), "busy": busy_trace(kernels=40)}
    summaries = [summarize(trace.events, name=name) for name, trace in traces.items()]
    for width in WIDTHS:
        compare(f"traces-{width}.txt", "\n".join(lines(summaries, width=width)) + "\n")
        text = "\n\n".join("\n".join(lines([summary], width=width)) for summary in summaries)
        compare(f"trace-{width}.txt", text + "\n")
    compare("traces.html", without_pictures(page(summaries, title="Three", top=5)))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan(width: int, monkeypatch: pytest.MonkeyPatch, panscan: Panscan) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    printed = panscan("plan --model google/gemma-3-27b-it --gpu a100-40gb --count 8").out
    compare(f"plan-{width}.txt", printed)


def without_pictures(html: str) -> str:
    """Return a page with one tag a line; without drawings, styles and scripts, which have tests of their own."""
    html = re.sub(r"<(svg|style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r">\s*<", ">\n<", re.sub(r"\s+", " ", html)).strip() + "\n"


def compare(name: str, text: str) -> None:
    """Compare a text with its file; write the file if the environment says so."""
    path = SNAPSHOTS / name
    if os.environ.get(RENEW):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{path} differs; {RENEW}=1 writes it again"


# Runs that lack what a report is made of, or have a lot of it: all have a sensible page, whose words are kept.


NOTE = "These weights are random: times are real, answers are noise."
Records = list[dict[str, Any]]
CROPS = {"model": "m", "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 448}
DRAWN = {"model": "mini", "random_weights": True, "model_shape": "4b"}
MINI = {"bundled": {"mini": "0123456789ab"}}


def measured(*cells: dict[str, Any], seconds: int = 1, **head: Any) -> Records:
    """Return the records of cells ``a``, ``b`` ...; each takes a second longer than the one before."""
    named = dict(zip(ascii_letters, cells, strict=False))
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
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
SWEPT = itertools.product(ATTENTION, ("bf16", "fp16", "fp32"), (1, 2, 4))
MANY = [{"attention": attention, "dtype": dtype, "batch_size": size} for attention, dtype, size in SWEPT]
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
    "forty-five cells": measured(*MANY, seconds=2),
    "presets that differ in several settings": measured(*({"batch_size": n, "attention": str(n)} for n in range(20))),
}


@pytest.mark.usefixtures("without_charts")
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
        for width in (60, 80):
            narrow = shown(print_summary, run, width) + shown(print_curves, run, width)
            assert max(map(len, narrow.splitlines())) <= width, name
        texts.append("\n".join([f"## {name}", *lines, terminal]))
        assert str(tmp_path) not in parts["recommendation"]
    compare("odd-runs.txt", "\n".join(texts).replace(str(tmp_path), "FOLDER"))
