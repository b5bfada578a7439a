"""A comparison of runs as a terminal table or as markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from panscan.analysis.comparison import Report, Row
from panscan.analysis.pairing import CellPair
from panscan.report.formatting import print_line, safe_text
from panscan.report.table import Column, Medium, Table, TableCell, plain_text, print_table

if TYPE_CHECKING:
    from rich.console import Console


_BAD, _GOOD = ("slower", "worse", "loss"), ("faster", "better", "gain")
_STYLES = dict.fromkeys(_BAD, "bold red") | dict.fromkeys(_GOOD, "green")


class _MetricRow(NamedTuple):
    """One metric of a pair of cells; ``title`` and ``verdict`` are empty but for the first metric, and are markdown."""

    title: str
    verdict: str
    texts: Row


def print_comparison(report: Report, console: Console) -> None:
    """Print one block for each other run: what differs as a whole, then a small table for each pair of cells."""
    for line in report.head():
        print_line(console, line)
    for index in range(len(report.comparisons)):
        console.print()
        if len(report.comparisons) > 1:
            print_line(console, f"A and {report.name(index)}")
        for line in report.lines(index):
            print_line(console, line)
        for pair, rows in report.pairs(index):
            title = safe_text(console, f"{pair.title}: {pair.extent}")
            if not report.of_load:
                title.append(", verdict ").append(pair.verdict, style="bold red" if "->" in pair.verdict else None)
            console.print()
            console.print(title)
            print_table(_pairs_table(report, index, [(pair, rows)]), console, frame="none")
    console.print()
    for line in report.legend():
        print_line(console, line)


def markdown_text(report: Report) -> str:
    """The same for an issue, a pull request or a job's summary."""
    parts = ["### Comparison", _bullet_list(report.head())]
    for index in range(len(report.comparisons)):
        if len(report.comparisons) > 1:
            parts.append(f"#### A and {report.name(index)}")
        parts += [_bullet_list(report.lines(index)), _pairs_table(report, index, report.pairs(index)).markdown()]
    parts += map(plain_text, report.legend())
    parts.append(_bullet_list([f"{condition}: {outcome}" for condition, outcome in report.outcomes()]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _pairs_table(report: Report, number: int, pairs: Iterable[tuple[CellPair, list[Row]]]) -> Table[_MetricRow]:
    """Return the table of some pairs of cells; their titles and verdicts are columns in markdown only."""
    rows = []
    for pair, metrics in pairs:
        verdict = "-" if report.of_load else pair.verdict
        first = (
            plain_text(f"{pair.title}; {pair.extent}"),
            f"**{plain_text(verdict)}**" if "->" in verdict else verdict,
        )
        for index, texts in enumerate(metrics):
            rows.append(_MetricRow(*(("", "") if index else first), texts))
    columns: list[Column[_MetricRow]] = [
        Column("cell", lambda row: TableCell("", markdown=row.title), on=Medium.MARKDOWN, text=Medium.ALL),
        Column("verdict", lambda row: TableCell("", markdown=row.verdict), on=Medium.MARKDOWN, text=Medium.ALL),
        Column("", lambda row: row.texts[0], markdown="metric", text=Medium.ALL),
        Column("A", lambda row: row.texts[1]),
        Column(report.name(number), lambda row: row.texts[2]),
        Column("change", lambda row: row.texts[3]),
        Column("95% interval", lambda row: row.texts[4]),
        Column("", _word, text=Medium.ALL),
    ]
    return Table(columns, rows, aligned=True)


def _word(row: _MetricRow) -> TableCell:
    word = row.texts[5]
    return TableCell(word, style=_STYLES.get(word, ""), markdown=f"**{word}**" if word in _STYLES else "")


def _bullet_list(lines: list[str]) -> str:
    """A line that is an item already belongs to the line above it."""
    return "\n".join(("  " if line.startswith("- ") else "- ") + plain_text(line) for line in lines)
