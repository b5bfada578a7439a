"""Small curves of a run in the terminal: throughput and latency over each swept number, or bars. Plain when piped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from panscan.bench.records import Run
from panscan.bench.rows import Row, label, measured_rows, number_text, print_line, safe_text, shown, varying_names

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_curves"]

_PANEL_LINES = 11
_MOST_SERIES = 4
_MARKERS = "ox+*"


def print_curves(run: Run, console: Console) -> None:
    """Print throughput and p95 latency over each numeric setting that was swept; without one, a bar for each cell.

    The other swept settings make a curve for each of their combinations, at most the four fastest.
    """
    rows = [row for row in measured_rows(run) if row.metrics.values["request_throughput"] is not None]
    if not rows:
        return
    varying = varying_names([row.settings for row in rows])
    axes = [name for name in varying if any(len(points) > 1 for points in _series(rows, name, varying).values())]
    for axis in axes:
        _curve(rows, axis, _series(rows, axis, varying), console)
    if not axes:
        _bars(rows, varying, console)


def _ticks(rows: Sequence[Row], name: str) -> list[float]:
    """Distinct values of a numeric setting, ascending; none if any cell has something else there (None apart)."""
    values: set[Any] = {row.settings.get(name) for row in rows} - {None}
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return sorted(values) if numeric else []


def _series(rows: Sequence[Row], axis: str, varying: Sequence[str]) -> dict[str, list[Row]]:
    """Rows along a numeric axis, apart by their other settings; none for an axis that is not numeric."""
    series: dict[str, list[Row]] = defaultdict(list)
    if not _ticks(rows, axis):
        return series
    for row in sorted((row for row in rows if row.settings.get(axis) is not None), key=lambda row: row.settings[axis]):
        series[label({name: row.settings.get(name) for name in varying if name != axis})].append(row)
    return series


def _curve(rows: Sequence[Row], axis: str, series: dict[str, list[Row]], console: Console) -> None:
    from rich.table import Table

    fastest = sorted(
        series, key=lambda name: -max(row.metrics.values["request_throughput"] or 0 for row in series[name])
    )
    chosen = {name: series[name] for name in fastest[:_MOST_SERIES]}
    console.print()
    print_line(
        console, f"Over {axis}" + (f", {len(chosen)} fastest of {len(series)}" if len(chosen) < len(series) else "")
    )
    if len(series) > 1:
        for marker, name in zip(_MARKERS, chosen, strict=False):
            print_line(console, f"{marker} {name}")
    panels = Table.grid(padding=(0, 1, 0, 0))
    ticks = _ticks(rows, axis)
    panels.add_row(
        *(
            safe_text(console, _panel(chosen.values(), axis, ticks, metric, title, (console.width - 2) // 2))
            for metric, title in (("request_throughput", "req/s"), ("p95_e2el_ms", "E2E p95 ms"))
        )
    )
    console.print(panels)


def _panel(
    series: Iterable[Sequence[Row]], axis: str, ticks: Sequence[float], metric: str, title: str, width: int
) -> str:
    """One plot as text. Ticks stand at equal distances: sweeps double more often than they add."""
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _PANEL_LINES)
    figure.title(title)
    heights: list[float] = []
    for marker, rows in zip(_MARKERS, series, strict=False):
        found = [(ticks.index(row.settings[axis]), row.metrics.values[metric]) for row in rows]
        points = [(at, value) for at, value in found if value is not None]
        heights += [value for _, value in points]
        if points:
            figure.draw(figure.signal(*zip(*points, strict=True), marker=marker).lines())
    figure.ruler("x").ticks(list(range(len(ticks))), [shown(tick) for tick in ticks])
    if heights:
        low, high = min(heights), max(heights)
        marks = [low + (high - low) * i / 3 for i in range(4)] if high > low else [low]
        figure.ruler("y").ticks(marks, [number_text(mark) for mark in marks])
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _bars(rows: Sequence[Row], varying: Sequence[str], console: Console) -> None:
    from rich.table import Table

    speeds = [row.metrics.values["request_throughput"] or 0.0 for row in rows]
    longest = max(*speeds, 1e-9)
    room = console.width // 2
    console.print()
    print_line(console, "req/s")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for row, speed in zip(rows, speeds, strict=True):
        name = label({name: row.settings.get(name) for name in varying}) or row.cell
        table.add_row(
            *(safe_text(console, text) for text in (name, "█" * round(room * speed / longest), number_text(speed)))
        )
    console.print(table)
