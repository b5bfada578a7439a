"""Reports of load runs: known figures in every form, foreign text, runs without a result."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.records import load_runs as loads
from tests.records.synthetic import in_memory, write_run
from tests.report.report_page import Element, parse, section
from tests.report.test_terminal import in_ascii, shown

from panscan.analysis.levels import levels_of
from panscan.core import RecordsError
from panscan.records.load_runs import load_settings
from panscan.records.store import Run
from panscan.report import write_pictures, write_report
from panscan.report.charts import latency_curves, throughput_curves
from panscan.report.load import LoadReport
from panscan.report.terminal import print_curves, print_summary

HEADLINE = "8 req/s meets TTFT ≤ 100 ms and TPOT ≤ 20 ms for 80% of requests"
HOSTILE = "<script>alert(1)</script> \x1b[31m | `x` @someone {{ 7 * 7 }} \u202eevil"


def page(run: Run, directory: Path) -> Element:
    path = directory / "report.html"
    write_report(run, path)
    return parse(path.read_text())


def terminal(run: Run, width: int = 100) -> str:
    return shown(print_summary, run, width) + shown(print_curves, run, width)


def broken_records() -> list[dict[str, Any]]:
    """Return a run with failures, a busy load generator, a probe's warning and a level without a result."""
    lines = [loads.load_request("rate-2", n, loads.START + n / 2, 0.05, 0.01, queued=0.02 * n) for n in range(12)]
    lines.append(loads.failed_request("rate-2", 12, loads.START + 6, HOSTILE, HOSTILE))
    settings: dict[str, Any] = {"server": HOSTILE, "scenario": HOSTILE, "goodput": {}, "image_reuse": 0.25}
    settings["metric_percentiles"] = [50, 99.9]
    return [
        loads.load_header({"rate-2": loads.level(2.0), "rate-4": loads.level(4.0)}, **settings),
        *loads.level_records("rate-2", lines, client=loads.CLIENT | {"limited": True, "reason": HOSTILE}),
        loads.probe(model=HOSTILE, image_prompt_tokens=10, warnings=[HOSTILE]),
    ]


def test_the_page_leads_with_the_result_and_has_no_words_of_sweeps(tmp_path: Path) -> None:
    lines = [row | {"cached_tokens": 5} if row["type"] == "request" else row for row in loads.load_run(attainment=0.8)]
    root = page(write_run(tmp_path, lines), tmp_path)
    assert next(section(root, "result").all("h2")).text == HEADLINE
    assert "20.0 tokens on average, 25% of the tokens cached" in section(root, "settings").text
    assert not list(root.all("script"))
    assert not {"cell", "cells", "verdict", "unverified"} & set(re.findall(r"\w+", next(root.all("main")).text.lower()))
    assert "panscan verify URL" in root.text


def test_curves_hold_every_level_and_their_limits_and_are_pictures(tmp_path: Path) -> None:
    written = write_pictures(write_run(tmp_path, loads.load_run()), tmp_path)
    names = ("ttft", "tpot", "e2el", "throughput", "attainment")
    assert [path.name for path in written] == [f"report-load-{name}.png" for name in names]
    run = write_run(tmp_path, loads.load_run(metric_percentiles=[50, 99.9], percentile_metrics=["ttft", "itl"]))
    levels, settings = levels_of(run), load_settings(run)
    [ttft] = latency_curves(levels, settings)
    assert ([series.label for series in ttft.series], ttft.limit) == (["median", "p99.9"], 100.0)
    assert [point.value.value for point in ttft.series[0].points][:2] == pytest.approx([50.0, 80.0])
    assert [point.at for point in ttft.series[0].points] == [4.0, 8.0, 16.0], "an overloaded level does not fold back"
    throughput, attainment = throughput_curves(levels, settings)
    assert [point.at for point in throughput.series[0].points] == [4.0, 8.0, 16.0]
    assert [point.value.value for point in attainment.series[0].points] == [100.0, 100.0, 5.0]
    assert attainment.limit == 95.0


@pytest.mark.parametrize("limited", [False, True])
def test_a_search_that_the_load_generator_stopped_is_not_told_by_the_headline_alone(limited: bool) -> None:
    levels = [{"rate": 8.0, "attainment": 1.0}, {"rate": 16.0, "attainment": 0.5, "limited": limited}]
    note = "the load generator is too slow for 16 req/s"
    search = {"type": "search", "rate": 8.0, "attainment": 1.0, "note": note, "levels": levels}
    report = LoadReport(in_memory([*loads.load_run(attainment=0.8), search]))
    assert report.headline.startswith("8 req/s meets")
    assert report.search == (note if limited else "")


def test_levels_at_one_rate_are_curves_of_one_percentile(tmp_path: Path) -> None:
    """Two rates with two limits of concurrency each: joined, the four levels would be a zigzag."""
    settings = {f"{rate}-{limit}": loads.level(float(rate), limit) for rate in (4, 8) for limit in (2, 16)}
    lines = [
        line for cell in settings for line in loads.steady(cell, float(cell[0]), 0.05 if cell.endswith("16") else 0.2)
    ]
    run = write_run(tmp_path, [loads.load_header(settings), *lines])
    levels = levels_of(run)
    ttft, *_ = latency_curves(levels, load_settings(run))
    assert (ttft.title, ttft.legend) == ("TTFT p95", ("concurrency 2", "concurrency 16"))
    heights = [[(point.at, round(point.height)) for point in series.points] for series in ttft.series]
    assert heights == [[(4.0, 200), (8.0, 200)], [(4.0, 50), (8.0, 50)]]
    assert all(panel.legend == ttft.legend for panel in throughput_curves(levels, load_settings(run)))
    assert "concurrency 16" in section(page(run, tmp_path), "throughput").text


def test_a_narrow_terminal_of_ascii_shows_all_figures() -> None:
    text = in_ascii(in_memory(loads.load_run()))
    assert "TTFT <= 100 ms" in text and "8.00+-" in text
    assert "Without one, they are of the whole level: 16 req/s." in " ".join(text.split())


def test_a_run_without_levels_is_reported_and_has_no_pictures(tmp_path: Path) -> None:
    run = write_run(tmp_path, loads.load_run()[:1])
    assert "No result: no level was measured" in page(run, tmp_path).text
    assert "4 req/s: unfinished" in terminal(run)
    with pytest.raises(RecordsError, match="no level was measured"):
        write_pictures(run, tmp_path)
