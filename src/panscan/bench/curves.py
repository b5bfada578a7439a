"""Small curves of a run in the terminal: throughput and latency over each swept number, or bars. Plain when piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from panscan.bench.records import Run
from panscan.bench.rows import Row, distinguishing, label, measured_rows, number_text, print_line, safe_text, shown
from panscan.bench.series import Sweep, speed, sweeps

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
    numeric = [sweep for sweep in sweeps(rows) if sweep.numeric]
    for sweep in numeric:
        _curve(sweep, console)
    if not numeric:
        _bars(rows, distinguishing([row.settings for row in rows]), console)


def _curve(sweep: Sweep, console: Console) -> None:
    from rich.table import Table

    chosen = dict(list(sweep.series.items())[:_MOST_SERIES])
    console.print()
    left_out = f", {len(chosen)} fastest of {len(sweep.series)}" if len(chosen) < len(sweep.series) else ""
    print_line(console, f"Over {sweep.name}" + left_out)
    if len(sweep.series) > 1:
        for marker, name in zip(_MARKERS, chosen, strict=False):
            print_line(console, f"{marker} {name}")
    panels = Table.grid(padding=(0, 1, 0, 0))
    panels.add_row(
        *(
            safe_text(console, _panel(sweep, chosen.values(), metric, title, (console.width - 2) // 2))
            for metric, title in (("request_throughput", "req/s"), ("p95_e2el_ms", "E2E p95 ms"))
        )
    )
    console.print(panels)


def _panel(sweep: Sweep, series: Iterable[Sequence[Row]], metric: str, title: str, width: int) -> str:
    """One plot as text."""
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _PANEL_LINES)
    figure.title(title)
    heights: list[float] = []
    for marker, rows in zip(_MARKERS, series, strict=False):
        found = [(sweep.at(row), row.metrics.values[metric]) for row in rows]
        points = [(at, value) for at, value in found if value is not None]
        heights += [value for _, value in points]
        if points:
            figure.draw(figure.signal(*zip(*points, strict=True), marker=marker).lines())
    figure.ruler("x").ticks(list(range(len(sweep.values))), [shown(value) for value in sweep.values])
    if heights:
        low, high = min(heights), max(heights)
        marks = [low + (high - low) * i / 3 for i in range(4)] if high > low else [low]
        figure.ruler("y").ticks(marks, [number_text(mark) for mark in marks])
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _bars(rows: Sequence[Row], varying: Sequence[str], console: Console) -> None:
    from rich.table import Table

    speeds = [speed(row) for row in rows]
    longest = max(*speeds, 1e-9)
    room = console.width // 2
    console.print()
    print_line(console, "req/s")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for row, each in zip(rows, speeds, strict=True):
        described = label({name: row.settings.get(name) for name in varying})
        name = ", ".join(filter(None, (row.preset, described))) or row.cell
        table.add_row(
            *(safe_text(console, text) for text in (name, "█" * round(room * each / longest), number_text(each)))
        )
    console.print(table)
