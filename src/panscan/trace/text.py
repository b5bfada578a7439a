"""Summaries of traces on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from panscan.report.formatting import clean, cut
from panscan.trace.compare import compare, comparison_tables, letters
from panscan.trace.figures import Summary
from panscan.trace.tables import FigureTable, tables_of

__all__ = ["comparison_lines", "lines", "table_lines"]

_WIDTH = 100
_NARROWEST = 24  # characters of the first column


def lines(summary: Summary, *, width: int = _WIDTH) -> list[str]:
    """Return a summary as lines of text without control characters.

    Args:
        summary: summary of one trace.
        width: columns of the terminal; long names are cut.
    """
    found = [f"{summary.headline}."]
    for table in tables_of(summary):
        found += ["", *table_lines(table, width=width)]
    if summary.notes:
        found += ["", *(f"note: {note}" for note in summary.notes)]
    return found


def comparison_lines(summaries: Sequence[Summary], *, width: int = _WIDTH) -> list[str]:
    """Return several summaries side by side as lines of text: the headlines, then one table per group of figures."""
    comparison = compare(summaries)
    found = [f"{comparison.headline}."]
    found += [
        f"{letter}: {clean(name)}: {summary.headline}."
        for letter, name, summary in zip(letters(comparison), comparison.names, summaries, strict=True)
    ]
    for table in comparison_tables(comparison):
        found += ["", *table_lines(table, width=width)]
    notes = dict.fromkeys(note for summary in summaries for note in summary.notes)
    return found + (["", *(f"note: {note}" for note in notes)] if notes else [])


def table_lines(table: FigureTable, *, width: int = _WIDTH) -> list[str]:
    """Return a table as aligned lines below its title."""
    rows = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    sizes = [max(len(row[at]) for row in rows) for at in range(len(table.headings))]
    spare = width - sum(sizes[1:]) - 2 * (len(sizes) - 1)
    sizes[0] = max(_NARROWEST, min(sizes[0], spare))
    found = [table.title]
    for row in rows:
        first = cut(row[0], sizes[0]).ljust(sizes[0])
        found.append(
            "  ".join([first, *(text.rjust(size) for text, size in zip(row[1:], sizes[1:], strict=True))]).rstrip()
        )
    return found + ([table.note] if table.note else [])
