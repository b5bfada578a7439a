"""A comparison of runs as a terminal table or as markdown."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from panscan.analysis.comparison import Report, Row
from panscan.analysis.pairing import CellPair
from panscan.report.formatting import print_line, safe_text
from panscan.report.table import Column, Content, Medium, Table, TableCell, plain_text, print_table

if TYPE_CHECKING:
    from rich.console import Console


_BAD, _GOOD = ("slower", "worse", "loss"), ("faster", "better", "gain")
_STYLES = dict.fromkeys(_BAD, "bold red") | dict.fromkeys(_GOOD, "green")


_Cells: TypeAlias = tuple[Content, ...]


def print_comparison(report: Report, console: Console) -> None:
    """Print one block for each other run: what differs as a whole, then a small table for each pair of cells."""
    for line in report.head():
        print_line(console, line)
    for index, comparison in enumerate(report.comparisons):
        console.print()
        if len(report.comparisons) > 1:
            print_line(console, f"A and {comparison.name}")
        for line in report.lines(comparison):
            print_line(console, line)
        for pair, rows in report.pairs(index):
            title = safe_text(console, f"{pair.title}: {pair.extent}")
            if not report.of_load:
                title.append(", verdict ").append(pair.verdict, style="bold red" if "->" in pair.verdict else None)
            console.print()
            console.print(title)
            print_table(_pairs_table(report, comparison.name, [(pair, rows)]), console, frame="none")
    console.print()
    for line in report.legend():
        print_line(console, line)


def markdown_text(report: Report) -> str:
    """The same for an issue, a pull request or a job's summary."""
    parts = ["### Comparison", _bullet_list(report.head())]
    for index, comparison in enumerate(report.comparisons):
        if len(report.comparisons) > 1:
            parts.append(f"#### A and {comparison.name}")
        table = _pairs_table(report, comparison.name, report.pairs(index))
        parts += [_bullet_list(report.lines(comparison)), table.markdown()]
    parts += map(plain_text, report.legend())
    parts.append(_bullet_list([f"{condition}: {outcome}" for condition, outcome in report.outcomes()]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _pairs_table(report: Report, name: str, pairs: Iterable[tuple[CellPair, list[Row]]]) -> Table[_Cells]:
    """Return the table of some pairs of cells; their titles and verdicts are columns in markdown only."""
    rows: list[_Cells] = []
    for pair, metrics in pairs:
        verdict = "-" if report.of_load else pair.verdict
        bold = f"**{plain_text(verdict)}**" if "->" in verdict else verdict
        titles: _Cells = f"{pair.title}; {pair.extent}", TableCell("", markdown=bold)
        for *texts, word in metrics:
            style = _STYLES.get(word, "")
            rows.append((*titles, *texts, TableCell(word, style=style, markdown=f"**{word}**" if style else "")))
            titles = "", ""
    columns: list[Column[_Cells]] = [
        Column("cell", itemgetter(0), on=Medium.MARKDOWN, text=Medium.ALL),
        Column("verdict", itemgetter(1), on=Medium.MARKDOWN, text=Medium.ALL),
        Column("", itemgetter(2), markdown="metric", text=Medium.ALL),
        Column("A", itemgetter(3)),
        Column(name, itemgetter(4)),
        Column("change", itemgetter(5)),
        Column("95% interval", itemgetter(6)),
        Column("", itemgetter(7), text=Medium.ALL),
    ]
    return Table(columns, rows, aligned=True)


def _bullet_list(lines: Iterable[str]) -> str:
    """A line that is an item already belongs to the line above it."""
    return "\n".join(("  " if line.startswith("- ") else "- ") + plain_text(line) for line in lines)
