"""A run in the terminal: one table, what was not measured and why, and small curves. Plain when piped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any

from panscan.bench.metrics import CellMetrics, cell_metrics
from panscan.bench.records import Run
from panscan.bench.summary import outcome_of
from panscan.runners.settings import axes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["print_curves", "print_summary"]

_PANEL_LINES = 11
_MOST_SERIES = 4
_WIDEST_SETTING = 9  # characters; longer ones are folded
_MARKERS = "ox+*"
_ASCII = str.maketrans({"±": "+-", "█": "#", "─": "-", "│": "|"} | dict.fromkeys("┌┐└┘├┤┬┴┼", "+"))
_WORDS = {"oom": "out of memory"}
_MARKABLE = {"median_ttft_ms", "median_tpot_ms", "p95_e2el_ms"}


@dataclass(frozen=True, slots=True)
class _Row:
    cell: str
    settings: Mapping[str, Any]
    metrics: CellMetrics


def print_summary(run: Run, console: Console) -> None:
    """Print the measured cells as a table, then the others with their reasons.

    Settings that differ between the shown cells are columns, the others one line above. Raises RecordsError as
    :func:`panscan.bench.metrics.cell_metrics` does.
    """
    rows = _rows(run)
    shown = [row.settings for row in rows] or list(run.cells.values())
    varying = _varying(shown)
    constant = {name: value for name, value in (shown[0] if shown else {}).items() if name not in varying}
    constant = {name: value for name, value in constant.items() if _telling(name, value)}
    if constant:
        _line(console, _label(constant))
    if rows:
        _table(rows, varying, console)
        _legend(rows, console)
    else:
        _line(console, "No cell was measured.")
    for line in _not_measured(run):
        _line(console, line)
    failed = [int(row.metrics.values["failed"] or 0) for row in rows]
    if any(failed):
        _line(console, f"{_count(sum(failed), 'request')} failed and {'is' if sum(failed) == 1 else 'are'} left out.")
    for note in run.notes:
        _line(console, f"Note: {note}")


def print_curves(run: Run, console: Console) -> None:
    """Print throughput and p95 latency over each numeric setting that was swept; without one, a bar for each cell.

    The other swept settings make a curve for each of their combinations, at most the four fastest.
    """
    rows = [row for row in _rows(run) if row.metrics.values["request_throughput"] is not None]
    if not rows:
        return
    varying = _varying([row.settings for row in rows])
    axes = [name for name in varying if len(_ticks(rows, name)) > 1]
    for axis in axes:
        _curve(rows, axis, [name for name in varying if name != axis], console)
    if not axes:
        _bars(rows, varying, console)


def _rows(run: Run) -> list[_Row]:
    measured = ((cell, settings, cell_metrics(run, cell)) for cell, settings in run.cells.items())
    return [_Row(cell, settings, metrics) for cell, settings, metrics in measured if metrics is not None]


def _varying(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for cell in cells for name in cell)
    return [name for name in names if len({_shown(cell.get(name)) for cell in cells}) > 1]


def _telling(name: str, value: Any) -> bool:
    """Whether a setting that is the same everywhere is worth saying: the model, and what is not the default."""
    return name == "model" or name not in axes() or value != axes()[name].default


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(name: str) -> str:
    return name.removeprefix("pan_and_scan_")


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{_short(name)}={_shown(value)}" for name, value in settings.items())


def _decimals(value: float) -> int:
    """Decimals that show three digits."""
    return max(0, 2 - floor(log10(abs(value)))) if value else 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{_decimals(value)}f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text(console: Console, text: str) -> Text:
    """Never markup, and only what the console can encode: names and reasons come from outside."""
    from rich.text import Text

    return Text(text.translate(_ASCII) if console.options.ascii_only else text)


def _line(console: Console, text: str) -> None:
    console.print(_text(console, " ".join(text.split())))


def _table(rows: Sequence[_Row], varying: Sequence[str], console: Console) -> None:
    """Where the settings leave no room for whole numbers, rows are numbered and their settings listed below."""
    from rich import box
    from rich.table import Table

    headings, numbers = _measured(rows)
    settings = [[_shown(row.settings.get(name)) for name in varying] for row in rows]
    labels = [_short(name).replace("_", "\n") for name in varying]
    narrow = [min(width, _WIDEST_SETTING) for width in _widths(labels, settings)]
    widths = [*narrow, *_widths(headings, numbers)]
    fits = sum(widths) + len(widths) <= console.width  # gaps, and one to spare: ASCII writes ± as two characters
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for label, width in zip(labels, narrow, strict=True) if fits else ():
        table.add_column(_text(console, label), overflow="fold", width=width)
    if not fits:
        table.add_column("#")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (values, cells) in enumerate(zip(settings, numbers, strict=True), 1):
        table.add_row(*(_text(console, cell) for cell in (*(values if fits else [str(index)]), *cells)))
    console.print(table)
    for index, row in enumerate(rows if not fits else (), 1):
        _line(console, f"{index}: " + _label({name: row.settings.get(name) for name in varying}))


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, (*heading.split("\n"), *cells))) for heading, *cells in zip(headings, *rows, strict=True)]


def _measured(rows: Sequence[_Row]) -> tuple[list[str], list[list[str]]]:
    """(headings, cells of each row) of the measured columns."""
    memory, name = _memory(rows)
    headings = ["req/s", "TTFT\nms", "TPOT\nms", "E2E p95\nms", "views", "image\ntokens", name]
    numbers = []
    for row in rows:
        values = row.metrics.values
        peak = values[memory]
        numbers.append(
            [
                _throughput(row.metrics),
                *(_marked(row.metrics, each) for each in ("median_ttft_ms", "median_tpot_ms", "p95_e2el_ms")),
                *(_shown(values[each]) for each in ("mean_views", "mean_image_tokens")),
                _number(None if peak is None else peak / 2**30),
            ]
        )
    return headings, numbers


def _memory(rows: Sequence[_Row]) -> tuple[str, str]:
    """(metric, heading): the GPU's peak, or the process's where a cell ran without a GPU."""
    if all(row.metrics.values["peak_allocated_bytes"] is not None for row in rows):
        return "peak_allocated_bytes", "GPU\nGiB"
    return "peak_rss_bytes", "RSS\nGiB"


def _throughput(metrics: CellMetrics) -> str:
    value, interval = metrics.values["request_throughput"], metrics.intervals.get("request_throughput")
    if value is None or interval is None:
        return _number(value)
    return f"{_number(value)}±{(interval[1] - interval[0]) / 2:,.{_decimals(value)}f}"


def _marked(metrics: CellMetrics, name: str) -> str:
    return ("~" if name in metrics.uncertified else "") + _number(metrics.values[name])


def _legend(rows: Sequence[_Row], console: Console) -> None:
    legend = "TTFT and TPOT are medians."
    if any("request_throughput" in row.metrics.intervals for row in rows):
        legend += " ± is half of the 95% interval."
    if any(set(row.metrics.uncertified) & _MARKABLE for row in rows):
        legend += " ~ has too few samples for 99% confidence."
    _line(console, legend)


def _not_measured(run: Run) -> list[str]:
    """One line for each outcome and reason of cells that are not done, with the swept settings that they share."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for cell, settings in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        if outcome != "done":
            groups[outcome, reason].append(settings)
    swept = _varying(list(run.cells.values()))
    lines = []
    for (outcome, reason), cells in groups.items():
        apart = set(_varying(cells))
        shared = _label({name: cells[0].get(name) for name in swept if name not in apart})
        line = f"{_count(len(cells), 'cell')} {_WORDS.get(outcome, outcome)}"
        lines.append(line + (f": {reason}" if reason else "") + (f" ({shared})" if shared else ""))
    return lines


def _ticks(rows: Sequence[_Row], name: str) -> list[float]:
    """Distinct values of a numeric setting, ascending; none if any cell has something else there (None apart)."""
    values: set[Any] = {row.settings.get(name) for row in rows} - {None}
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return sorted(values) if numeric else []


def _curve(rows: Sequence[_Row], axis: str, others: Sequence[str], console: Console) -> None:
    from rich.table import Table

    series: dict[str, list[_Row]] = defaultdict(list)
    for row in sorted((row for row in rows if row.settings.get(axis) is not None), key=lambda row: row.settings[axis]):
        series[_label({name: row.settings.get(name) for name in others})].append(row)
    fastest = sorted(
        series, key=lambda name: -max(row.metrics.values["request_throughput"] or 0 for row in series[name])
    )
    chosen = {name: series[name] for name in fastest[:_MOST_SERIES]}
    console.print()
    _line(console, f"Over {axis}" + (f", {len(chosen)} fastest of {len(series)}" if len(chosen) < len(series) else ""))
    if len(series) > 1:
        for marker, name in zip(_MARKERS, chosen, strict=False):
            _line(console, f"{marker} {name}")
    panels = Table.grid(padding=(0, 1, 0, 0))
    ticks = _ticks(rows, axis)
    panels.add_row(
        *(
            _text(console, _panel(chosen.values(), axis, ticks, metric, title, (console.width - 2) // 2))
            for metric, title in (("request_throughput", "req/s"), ("p95_e2el_ms", "E2E p95 ms"))
        )
    )
    console.print(panels)


def _panel(
    series: Iterable[Sequence[_Row]], axis: str, ticks: Sequence[float], metric: str, title: str, width: int
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
    figure.ruler("x").ticks(list(range(len(ticks))), [_shown(tick) for tick in ticks])
    if heights:
        low, high = min(heights), max(heights)
        marks = [low + (high - low) * i / 3 for i in range(4)] if high > low else [low]
        figure.ruler("y").ticks(marks, [_number(mark) for mark in marks])
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _bars(rows: Sequence[_Row], varying: Sequence[str], console: Console) -> None:
    from rich.table import Table

    speeds = [row.metrics.values["request_throughput"] or 0.0 for row in rows]
    longest = max(*speeds, 1e-9)
    room = console.width // 2
    console.print()
    _line(console, "req/s")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for row, speed in zip(rows, speeds, strict=True):
        label = _label({name: row.settings.get(name) for name in varying}) or row.cell
        table.add_row(*(_text(console, text) for text in (label, "█" * round(room * speed / longest), _number(speed))))
    console.print(table)
