"""A comparison of runs as a terminal table or as markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from panscan.analysis.comparison import HEADINGS, Report, Row
from panscan.report.formatting import print_line, safe_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["markdown_text", "print_comparison"]

_STYLES = {"slower": "bold red", "worse": "bold red", "faster": "green", "better": "green"}


def print_comparison(report: Report, console: Console) -> None:
    """Print one block for each other run: what differs as a whole, then a small table for each pair of cells."""
    for line in report.head():
        print_line(console, line)
    blocks = [
        [report.rows(at, pair_index) for pair_index in range(len(comparison.pairs))]
        for at, comparison in enumerate(report.comparisons)
    ]
    every = [HEADINGS, *(row for block in blocks for rows in block for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(HEADINGS))]
    for at, block in enumerate(blocks):
        console.print()
        if len(blocks) > 1:
            print_line(console, f"A and {report.name(at)}")
        for line in report.lines(at):
            print_line(console, line)
        for pair_index, rows in enumerate(block):
            _cell(report, at, pair_index, rows, widths, console)
    console.print()
    for line in report.legend():
        print_line(console, line)


def _cell(report: Report, at: int, pair_index: int, rows: list[Row], widths: list[int], console: Console) -> None:
    from rich.table import Table

    verdict, differ = report.verdict(at, pair_index)
    line = safe_text(console, f"{report.title(at, pair_index)}: {report.extent(at, pair_index)}")
    if verdict:
        line.append(", verdict ").append(verdict, style="bold red" if differ else None)
    console.print()
    console.print(line)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for index, (heading, width) in enumerate(zip(_headings(report, at), widths, strict=True)):
        edge = index in (0, len(widths) - 1)
        table.add_column(heading, width=width, justify="left" if edge else "right", no_wrap=not edge, overflow="fold")
    for row in rows:
        texts = [safe_text(console, cell) for cell in row]
        texts[-1].stylize(_STYLES.get(row[-1], ""))
        table.add_row(*texts)
    console.print(table)


def markdown_text(report: Report) -> str:
    """The same for an issue, a pull request or a job's summary."""
    parts = ["### Comparison", _list(report.head())]
    for at, comparison in enumerate(report.comparisons):
        if len(report.comparisons) > 1:
            parts.append(f"#### A and {report.name(at)}")
        parts.append(_list(report.lines(at)))
        headings = ("cell", "verdict", "metric", *_headings(report, at)[1:])
        lines = [_line(headings), _line(["---", "---", "---", "--:", "--:", "--:", "--:", "---"])]
        for pair_index in range(len(comparison.pairs)):
            verdict, differ = report.verdict(at, pair_index)
            verdict = f"**{_plain(verdict)}**" if differ else verdict or "-"
            first = [_plain(f"{report.title(at, pair_index)}; {report.extent(at, pair_index)}"), verdict]
            for index, (*values, word) in enumerate(report.rows(at, pair_index)):
                strong = f"**{word}**" if word in _STYLES else word
                lines.append(_line([*(["", ""] if index else first), *map(_plain, values), strong]))
        parts.append("\n".join(lines))
    parts += map(_plain, report.legend())
    parts.append(_list([f"{condition}: {outcome}" for condition, outcome in report.outcomes()]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _headings(report: Report, at: int) -> list[str]:
    return [report.name(at) if heading == "B" else heading for heading in HEADINGS]


def _list(lines: list[str]) -> str:
    """A line that is an item already belongs to the line above it."""
    return "\n".join(("  " if line.startswith("- ") else "- ") + _plain(line) for line in lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Names and paths come from outside: nothing in them is markup."""
    return re.sub(r"([\\|<>`*~\[\]])", r"\\\1", " ".join(text.split()))
