"""Every number of a report against the known records, by arithmetic that is the test's own."""

from pathlib import Path

import numpy as np
import pytest
from tests.records import synthetic
from tests.report.report_known import (
    SECONDS,
    per_request,
    records_of,
    setting_of,
    throughput,
)
from tests.report.report_page import (
    Element,
    close_to,
    page_of,
    rows_of,
    section,
    value,
)

from panscan.analysis.floors import floor_of
from panscan.records.store import Run


def name_of(cell: str) -> str:
    return f"balanced, {setting_of(cell)}" if cell == "fast" else setting_of(cell)


def test_the_stages_add_up(known: tuple[Run, Element]) -> None:
    shares = {"load": 0.05, "preprocess": 0.10, "vision": 0.25, "prefill": 0.20, "decode": 0.40}
    longest = float(np.mean(per_request("unknown")))
    for row, cell in zip(rows_of(next(section(known[1], "stages").all("table"))), SECONDS, strict=True):
        mean = float(np.mean(per_request(cell)))
        assert row["setting"].text == name_of(cell)
        assert {name: value(row[name].text) for name in shares} == {n: close_to(s * mean) for n, s in shares.items()}
        assert value(row["E2E"].text) == close_to(mean)
        bars = list(row["bar"].all("rect"))
        widths = [float(bar.attributes["width"] or 0) for bar in bars]
        assert widths == [pytest.approx(100 * share * mean / longest, abs=1e-3) for share in shares.values()]
        starts = [float(bar.attributes["x"] or 0) for bar in bars]
        assert starts == [pytest.approx(sum(widths[:index]), abs=3e-3) for index in range(len(widths))]


def test_no_ratio_to_a_floor_that_cannot_be(tmp_path: Path, without_charts: None) -> None:
    """Reading seemed slow, arithmetic did not: only some floors are too high."""
    records = records_of()
    records[1] |= {"flops_per_s": 4e15, "bytes_per_s": 2e10}
    run = synthetic.write_run(tmp_path, records)
    page, withheld = page_of(run), []
    for row, cell in zip(rows_of(next(section(page, "floor").all("table"))), SECONDS, strict=True):
        floor, mean = floor_of(run, cell), float(np.mean(per_request(cell)))
        stages = {
            "vision, ms": (floor.vision_ms, 0.25 * mean),
            "prefill, ms": (floor.prefill_ms, 0.20 * mean),
            "decode, ms": (floor.decode_ms, 0.40 * mean),
            "E2E, ms": (floor.vision_ms + floor.prefill_ms + floor.decode_ms, mean),
            "requests/s": (floor.request_throughput, throughput(cell)),
        }
        for name, (least, seen) in stages.items():
            ratio = least / seen if name == "requests/s" else seen / least
            assert value(row[f"{name}/floor"].text) == close_to(least), name
            assert value(row[f"{name}/measured"].text) == close_to(seen), name
            shown = row[f"{name}/×"].text
            assert shown == "-" if ratio < 1 else value(shown.rstrip("x")) == close_to(ratio), (cell, name)
            withheld.append(ratio < 1)
    assert {*withheld} == {False, True}, "this run has both"
    assert "Some times are below their floor: the machine was busy" in page.text


def test_limits_come_from_the_code(known: tuple[Run, Element], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most 2x the noise" in section(known[1], "definitions").text
    assert "at most 10x the noise, and the reference's top token at every" in section(known[1], "definitions").text
    assert "11 for p50, 64 for p90, 130 for p95, 662 for p99" in section(known[1], "definitions").text
    monkeypatch.setattr("panscan.verdict.judgement.EXACT_RATIO", 3.5)
    assert "at most 3.5x the noise" in section(page_of(known[0]), "definitions").text
