"""A load run on the terminal: the result, the levels, their latencies, and the throughput-latency curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from panscan.analysis.cells import decimal_places, number_text
from panscan.analysis.levels import VERIFY_HINT
from panscan.report.charts import Panel, Series
from panscan.report.formatting import print_line, safe_text
from panscan.report.load_data import LevelRow, LoadReport

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_load_curves", "print_load_summary"]

_PANEL_LINES = 12
_MARKERS = "ox"


def print_load_summary(facts: LoadReport, console: Console) -> None:
    """Print the settings, the levels, their latencies, errors and warnings, and the result as the last line."""
    for name, text in facts.settings:
        print_line(console, f"{name}: {text}")
    if facts.rows:
        console.print()
        _table(console, *_levels(facts))
        console.print()
        _table(console, *_latencies(facts))
        _legend(facts, console)
    for line in facts.unfinished:
        print_line(console, f"Without a result: {line}")
    for group in facts.errors:
        print_line(console, f"Errors ({group.kind}): {group.requests} at {', '.join(group.levels)}: {group.example}")
    for warning in facts.warnings:
        console.print(safe_text(console, f"Warning: {warning}"), style="yellow")
    print_line(console, VERIFY_HINT)
    if facts.search:
        print_line(console, f"Search: {facts.search}")
    console.print()
    console.print(safe_text(console, f"{facts.result.headline}."), style="bold")
    for note in facts.result.notes:
        print_line(console, f"{note}.")


def _table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> None:
    """Print a table whose first ``texts`` columns are text, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(
            safe_text(console, heading),
            justify="left" if index < texts else "right",
            no_wrap=index >= texts,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(safe_text(console, cell) for cell in row))
    console.print(table)


def _levels(facts: LoadReport) -> tuple[list[str], list[list[str]], int]:
    """Return headings, rows and the number of text columns. Columns that no row fills are left out."""
    columns: list[tuple[str, list[str]]] = [
        ("level", [_name(row) for row in facts.rows]),
        ("offered\nreq/s", [row.offered.text for row in facts.rows]),
        ("answered\nreq/s", [_with_half(row) for row in facts.rows]),
        ("output\ntok/s", [row.output.text for row in facts.rows]),
        ("goodput\nreq/s", [row.goodput.text for row in facts.rows]),
        ("within\nlimits", [f"{row.attainment.text}%" if facts.limits else "-" for row in facts.rows]),
        ("failed", [f"{row.failed}" for row in facts.rows]),
        ("keeps\nup", [row.keeps_up for row in facts.rows]),
        ("queued\nms", [row.queued.text for row in facts.rows]),
        ("lag ms\np50 / p99", [row.lag for row in facts.rows]),
    ]
    filled = [(heading, cells) for heading, cells in columns if any(cell not in ("-", "0") for cell in cells)]
    rows = [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]
    return [heading for heading, _ in filled], rows, 1


def _name(row: LevelRow) -> str:
    return f"{row.name}{' *' if row.chosen else ''}{' !' if row.limited else ''}"


def _with_half(row: LevelRow) -> str:
    """Return answered requests per second ± half of the 95% interval, or with the bounds of a wide interval."""
    value = row.achieved
    if value.value is None or value.low is None or value.high is None:
        return value.text
    if value.high - value.low > value.value:  # too wide and lopsided for a half
        return value.whole
    return f"{value.text}±{(value.high - value.low) / 2:,.{decimal_places(value.value)}f}"


def _latencies(facts: LoadReport) -> tuple[list[str], list[list[str]], int]:
    headings = ["level", "ms", "mean", *facts.percentiles]
    rows = []
    for row in facts.rows:
        for index, (time, name) in enumerate(facts.times):
            figures = (row.means[time], *row.times[time])
            rows.append(["" if index else row.name, name, *(each.text for each in figures)])
    return headings, rows, 2


def _legend(facts: LoadReport, console: Console) -> None:
    parts = ["* the result."] if any(row.chosen for row in facts.rows) else []
    if any(row.limited for row in facts.rows):
        parts.append("! limited by the load generator.")
    if any(row.achieved.low is not None for row in facts.rows):
        parts.append("± is half of the 95% interval; brackets hold a wide one.")
    if any(each.uncertified for row in facts.rows for time, _ in facts.times for each in row.times[time]):
        parts.append("~ has too few samples for 99% confidence.")
    if parts:
        print_line(console, " ".join(parts))


def print_load_curves(facts: LoadReport, console: Console) -> None:
    """Print the lowest and highest percentile of each time over the answered requests per second.

    Fewer than two levels make no curve. More percentiles would hide each other.
    """
    from rich.table import Table

    curves = [curve for curve in facts.latency if len(curve.series[0].points) > 1]
    if not curves:
        return
    console.print()
    names = [series.label for series in _ends(curves[0])]
    keys = ", ".join(f"{marker} {name}" for marker, name in zip(_MARKERS, names, strict=False))
    print_line(console, f"Latency (ms) over answered req/s: {keys}")
    for pair in (curves[index : index + 2] for index in range(0, len(curves), 2)):
        panels = Table.grid(padding=(0, 1, 0, 0))
        panels.add_row(*(safe_text(console, _panel(curve, (console.width - 2) // 2)) for curve in pair))
        console.print(panels)


def _ends(curve: Panel) -> list[Series]:
    return [curve.series[0], curve.series[-1]] if len(curve.series) > 1 else list(curve.series)


def _panel(curve: Panel, width: int) -> str:
    """Return one plot as text; a limit within it is a horizontal line."""
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _PANEL_LINES)
    figure.title(f"{curve.title}, {curve.limit_label}" if curve.limit_label else curve.title)
    shown = _ends(curve)
    points = [point for series in shown for point in series.points]
    heights = [point.value.value or 0.0 for point in points]
    if curve.limit is not None and curve.limit <= max(heights):
        ends = [min(point.at for point in points), max(point.at for point in points)]
        figure.draw(figure.signal(ends, [curve.limit] * 2, marker="-").lines())
    for marker, series in reversed(list(zip(_MARKERS, shown, strict=False))):  # the median on top
        xs, ys = [point.at for point in series.points], [point.value.value or 0.0 for point in series.points]
        figure.draw(figure.signal(xs, ys, marker=marker).lines())
    figure.ruler("y").lim(0, max(heights) or 1.0)
    for axis, values in (("x", [point.at for point in points]), ("y", [0.0, *heights])):
        marks = _marks(values)
        figure.ruler(axis).ticks(marks, [number_text(mark) for mark in marks])
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _marks(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [low + (high - low) * index / 3 for index in range(4)] if high > low else [low]
