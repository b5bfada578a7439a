import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.records.synthetic import batches_of, header, outcome, record_of, write_run
from tests.report.report_known import known_run

from panscan.records.store import Run
from panscan.report.terminal import print_curves, print_summary

BASE = {"model": "tiny", "pan_and_scan_max_num_crops": 4, "attention": "sdpa", "batch_size": 1, "do_pan_and_scan": True}


def build(directory: Path, grid: list[dict[str, Any]], latency: Callable[[dict[str, Any]], float]) -> Run:
    """Cells of six repeats, early or late, of two batches, which take ``latency(settings)`` and a tenth more."""
    cells = {f"c{number}": BASE | point for number, point in enumerate(grid)}
    records = [header(cells)]
    for cell, settings in cells.items():
        took = latency(settings)
        for number in range(6):
            *requests, line, _ = batches_of(cell, [took, took * 1.1], size=settings["batch_size"])
            waited = line | {"started": took / 50 * (-1) ** number}
            records += [record | {"repeat": number} for record in (*requests, waited)]
        records.append(outcome(cell, "done"))
    return write_run(directory, records)


def shown(draw: Callable[[Run, Console], None], run: Run, width: int = 80) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    draw(run, console)
    return console.export_text()


def in_ascii(run: Run) -> str:
    """What a terminal without Unicode shows."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    for draw in (print_summary, print_curves):
        draw(run, Console(file=stream, width=80))
    return stream.buffer.getvalue().decode("ascii")


@pytest.fixture
def swept(tmp_path: Path) -> Run:
    grid = [{"attention": name, "batch_size": size} for name in ("sdpa", "eager") for size in (1, 2, 4)]
    return build(tmp_path, grid, lambda cell: (1.0 if cell["attention"] == "sdpa" else 2.0) * cell["batch_size"] ** 0.5)


def test_piped_to_a_terminal_without_unicode(swept: Run) -> None:
    text = in_ascii(swept)
    assert "1.90+-" in text and not {"\x1b", "?"} & {*text}


def test_memory_is_the_gpu_s_only_where_every_cell_has_it(tmp_path: Path) -> None:
    records = [header({"c": BASE, "d": BASE | {"batch_size": 2}})]
    for cell in ("c", "d"):
        part = batches_of(cell, [1.0])
        part[-2]["peak_allocated_bytes"] = 3 * 2**30
        records += part
    assert re.search(
        r"GPU(.|\n)*GiB(.|\n)* unverified .* 3\.00\n", shown(print_summary, write_run(tmp_path / "gpu", records))
    )
    records[2]["peak_allocated_bytes"] = None
    assert re.search(
        r"RSS(.|\n)*GiB(.|\n)* unverified .* 1\.00\n", shown(print_summary, write_run(tmp_path / "mixed", records))
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    grid = [
        {"attention": name, "batch_size": size, "pan_and_scan_max_num_crops": crops, "dtype": dtype}
        for name in ("sdpa", "flash_attention_2_with_a_long_name")
        for size in (1, 16)
        for crops in (2, 4, 8)
        for dtype in ("bf16", "fp32")
    ]
    run = build(tmp_path, grid, lambda cell: 1.0 + cell["pan_and_scan_max_num_crops"])
    run.outcomes["c0"] = record_of(outcome("c0", "failed", "why " * 60))
    for draw in (print_summary, print_curves):
        lines = shown(draw, run, width).splitlines()
        assert lines
        assert max(map(len, lines)) <= width
    row = re.compile(
        r" \d+\.\d+±\d+\.\d+ +[\d,]+ +[\d,]+ +~?[\d,]+ +unverified( +3)?( +12)?( +1\.00)?"
    )  # no number is cut or folded
    text = shown(print_summary, run, width)
    assert len(row.findall(text)) == len(grid)
    numbered = "16: up to 8 crops"
    assert numbered not in text, "names are folded"
    assert "flash_attention" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_figure_is_cut_where_a_dataset_adds_columns(tmp_path: Path, width: int) -> None:
    """Columns that matter less are left out; the throughput and the verdict never are."""
    run = known_run(tmp_path, scores=True)
    text = shown(print_summary, run, width)
    assert "…" not in text
    assert re.search(r"\nflash_attention_.* 3\.90±0\.00 .*different( |\n)", text)
