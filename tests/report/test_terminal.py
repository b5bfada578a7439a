import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from tests.records.load_runs import load_run
from tests.records.synthetic import batches_of, header, outcome, record_of, write_run
from tests.report.report_known import NUMBERS, known_run
from tests.report.report_page import parse, rows_of, section

from panscan.analysis.levels import MeasuredLevel
from panscan.records.store import Run
from panscan.report.html import render_html
from panscan.report.load import LoadReport
from panscan.report.markdown import render_markdown
from panscan.report.sweep import ReportCell, SweepReport
from panscan.report.table import Column, Measured, Medium, Table, TableCell, print_table, with_interval
from panscan.report.terminal import print_curves, print_summary

BASE = {"model": "tiny", "pan_and_scan_max_num_crops": 4, "attention": "sdpa", "batch_size": 1, "do_pan_and_scan": True}


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


def test_piped_to_a_terminal_without_unicode(tmp_path: Path) -> None:
    text = in_ascii(known_run(tmp_path))
    assert "3.90+-" in text and not {"\x1b", "?"} & {*text}


def test_memory_is_the_gpu_s_only_where_every_cell_has_it(tmp_path: Path) -> None:
    records = [header({"c": BASE, "d": BASE | {"batch_size": 2}})]
    for cell in ("c", "d"):
        part = batches_of(cell, [1.0])
        part[-2]["peak_allocated_bytes"] = 3 * 2**30
        records += part
    records[2]["peak_allocated_bytes"] = None
    text = shown(print_summary, write_run(tmp_path / "mixed", records))
    assert re.search(r"RSS(.|\n)*GiB(.|\n)* unverified .* 1\.00\n", text)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(tmp_path: Path, width: int) -> None:
    """Columns that matter less are left out, and names are folded; the throughput and the verdict are always there."""
    run = known_run(tmp_path, scores=True)
    run.outcomes["absent"] = record_of(outcome("absent", "failed", "why " * 60))
    text = shown(print_summary, run, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert re.search(r"\nflash_attention_.* 3\.90±0\.00 .*different( |\n)", text)


# Tables: every writer on one small table, and a new column of a sweep and of a load level in all of them.


COLUMNS: tuple[Column[int], ...] = (
    Column("name", lambda row: "a_b | *c*" * row, text=Medium.ALL),
    Column("size ms", lambda row: with_interval(Measured(row / 3, row / 4, row / 2)), markdown="size ms (95%)"),
    Column("rows", lambda row: row, terminal="n"),
    Column("empty", lambda row: None, optional=Medium.TERMINAL | Medium.HTML),
    Column("page", lambda row: TableCell("p", markdown="**p**"), on=Medium.PAGES),
)


def printed(table: Table[Any], width: int = 80, **options: Any) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    print_table(table, console, **options)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_each_writer_has_its_headings_cells_and_columns() -> None:
    table = Table(COLUMNS, (1, 2), aligned=True)
    head, rule, *rows = table.markdown().splitlines()
    assert (head, rule) == ("| name | size ms (95%) | rows | empty | page |", "| --- | --: | --: | --: | --: |")
    assert rows[0] == r"| a_b \| \*c\* | 0.333 (0.250–0.500) | 1 | - | **p** |"
    assert MarkdownIt("commonmark").enable("table").render(table.markdown()).count("<td") == 10
    assert list(csv.reader(io.StringIO(table.csv())))[1] == ["a_b | *c*", str(1 / 3), "1", "-"]
    assert [column.title for column in table.html.columns] == ["name", "size ms", "rows", "page"]
    lines = printed(table)
    assert [line.split() for line in lines[:2]] == [["size"], ["name", "ms", "n"]]
    assert lines[3].split() == ["a_b", "|", "*c*", "0.333±0.125", "1"]


def test_a_wide_interval_has_bounds_and_an_uncertified_figure_a_mark() -> None:
    assert Measured(1.0, 0.1, 1.2).half == "1.00 (0.100–1.20)"
    assert Measured(1.0, 0.9, 1.1, uncertified=True).half == "~1.00±0.10"
    assert Measured(None).half == "-"


def test_a_narrow_terminal_loses_spare_columns_first_and_then_folds_the_names() -> None:
    columns = [
        Column("setting", lambda row: row[0], text=Medium.ALL),
        Column("figure", lambda row: row[1]),
        Column("more", lambda row: row[1], spare=2),
        Column("most", lambda row: row[1], spare=1),
    ]
    table: Table[Sequence[str]] = Table(columns, [("a setting of some length", "123456789")])
    wide, middle, narrow = (printed(table, width, fit=True, gap=0) for width in (80, 48, 20))
    assert wide[0].split() == ["setting", "figure", "more", "most"]
    assert middle[0].split() == ["setting", "figure", "more"]
    assert narrow[0].split() == ["setting", "figure"]
    assert [line.split() for line in narrow[2:4]] == [["a", "setting", "123456789"], ["of", "some"]]


class WiderSweep(SweepReport):
    """A sweep with one more column: its line is all that a new column takes."""

    @property
    def columns(self) -> tuple[Column[ReportCell], ...]:  # type: ignore[override]
        return (*super().columns, Column("mean E2E ms", lambda cell: cell.measured("mean_e2el_ms")))


def test_a_new_column_of_a_sweep_is_one_line(tmp_path: Path, without_charts: None) -> None:
    facts = WiderSweep(known_run(tmp_path))
    expected = facts.cells[NUMBERS["fast"] - 1].measured("mean_e2el_ms")
    page = rows_of(next(section(parse(render_html(facts)), "cells").all("table")))
    assert page[0]["mean E2E ms"].text.startswith(expected.text)
    markdown = render_markdown(facts)
    assert "| verdict | mean E2E ms |" in markdown
    assert f"| exact | {expected.text} |" in markdown
    assert next(csv.DictReader(io.StringIO(facts.whole_table.csv())))["mean E2E ms"] == str(expected.value)
    terminal = printed(facts.whole_table, 160, fit=True, gap=0)
    assert any(expected.text in line.split() for line in terminal)


class WiderLoad(LoadReport):
    """A load run with one more column."""

    @property
    def columns(self) -> list[Column[MeasuredLevel]]:
        return [*super().columns, Column("answered", lambda level: level.goodput.sent - level.failed)]


def test_a_new_column_of_a_load_level_is_one_line(tmp_path: Path, without_charts: None) -> None:
    facts = WiderLoad(write_run(tmp_path, load_run()))
    page = rows_of(next(section(parse(render_html(facts)), "levels").all("table")))
    assert [row["answered"].text for row in page] == ["20", "20", "20"]
    assert "| lag ms | answered |" in render_markdown(facts)
    assert [row["answered"] for row in csv.DictReader(io.StringIO(facts.whole_table.csv()))] == ["20", "20", "20"]
    assert printed(facts.whole_table)[1].split()[-1] == "answered"
