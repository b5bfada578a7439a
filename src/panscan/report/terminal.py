"""A finished run on the terminal: its tables, remarks on them, and its curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from panscan.analysis.cells import Sweep, shared_settings, sweeps
from panscan.analysis.levels import VERIFY_HINT
from panscan.analysis.setting_words import label, setting_title
from panscan.core.text import count, number_text
from panscan.records.load_runs import is_load_run
from panscan.records.quality import empty_answers
from panscan.records.store import Run
from panscan.report.charts import Panel, Series
from panscan.report.formatting import print_line, safe_text
from panscan.report.load import LoadReport
from panscan.report.sweep import SweepReport, unmeasured_text
from panscan.report.table import print_table
from panscan.verdict.judgement import verdict_lines

if TYPE_CHECKING:
    from rich.console import Console


_UNCERTIFIED = "~ has too few samples for 99% confidence."
_SWEEP_LINES, _LOAD_LINES = 11, 12  # of a plot
_MOST_SERIES = 4
_LEAST_POINTS = 3  # of a curve
_MARKERS = "ox+*"


def print_summary(run: Run, console: Console) -> None:
    """Print the measured cells as a table, then the others with their reasons; for a load run, its levels and result.

    Settings that all cells share are on one line above.

    Raises:
        RecordsError: see :func:`panscan.analysis.summary.cell_metrics`.
    """
    if is_load_run(run):
        _print_load(LoadReport(run), console)
        return
    facts = SweepReport(run)
    constant = shared_settings(facts.settings)
    if constant:
        print_line(console, label(constant))
    if facts.rows:
        print_table(facts.whole_table, console, gap=0, fit=True)
        for line in _remarks(facts):
            print_line(console, line)
    else:
        print_line(console, "Nothing was measured.")
    for line in (
        *_replica_lines(facts),
        *facts.speedups,
        *map(unmeasured_text, facts.unmeasured),
        *filter(None, [facts.failures]),
        *(f"Note: {note}" for note in run.notes),
    ):
        print_line(console, line)


def print_decision(run: Run, console: Console) -> None:
    """Print the recommendation of a sweep in one sentence; why there is none, if several settings were measured."""
    if is_load_run(run):
        return
    print_line(console, "")
    print_line(console, SweepReport(run).recommendation, "bold")


def _remarks(facts: SweepReport) -> list[str]:
    """Return the lines below the table of cells."""
    legend = ["TTFT and TPOT are medians."]
    if any("request_throughput" in row.metrics.intervals for row in facts.rows):
        legend.append("± is half of the 95% interval.")
    legend += [_UNCERTIFIED] * facts.uncertified
    lines = [" ".join(filter(None, (*legend, facts.queueing))), *facts.aliases, *filter(None, [facts.dataset])]
    if empty := sum(empty_answers(facts.run, row.cell) for row in facts.rows):
        lines.append(f"{count(empty, 'empty answer')} ({'it counts' if empty == 1 else 'they count'} as wrong).")
    answers = facts.answers
    if answers is not None and answers.baseline is not None:
        lines.append(f"{facts.quality_title} against {answers.baseline} (exact or close, the most views):")
        lines += [f"{cell.name}: {cell.against}" for cell in answers.cells if cell.against]
    return [*lines, *verdict_lines(facts.run, [row.cell for row in facts.rows])]


def _replica_lines(facts: SweepReport) -> list[str]:
    """Return each replica's throughput, a line per cell; nothing for a run of one process."""
    lines = []
    for cell in facts.cells:
        parts = [
            f"{replica.replica} on {replica.device} {number_text(replica.request_throughput)}"
            + ("" if replica.share is None else f" ({replica.share:.0%})")
            for replica in cell.replicas
        ]
        if len(parts) > 1:
            setting = "" if len(facts.cells) == 1 else f", {cell.name}"
            lines.append(f"req/s of each replica{setting}: " + ", ".join(parts))
    return ["Throughput is measured over the time in which all replicas worked.", *lines] if lines else []


def _print_load(facts: LoadReport, console: Console) -> None:
    """Print the settings, the levels, their latencies, errors and warnings, and the result as the last line."""
    for name, text in facts.shared:
        print_line(console, f"{name}: {text}")
    if facts.rows:
        for table in (facts.whole_table, facts.latencies):
            console.print()
            print_table(table, console)
        legend = {
            "* the result.": facts.best is not None,
            "! limited by the load generator.": any(level.client_limited for level in facts.rows),
            "± is half of the 95% interval.": any(
                level.metrics is not None and "request_throughput" in level.metrics.intervals for level in facts.rows
            ),
            _UNCERTIFIED: facts.uncertified,
        }
        if any(legend.values()):
            print_line(console, " ".join(text for text, applies in legend.items() if applies))
        print_line(console, facts.steadiness)
    for line in facts.unfinished:
        print_line(console, f"Without a result: {line}")
    for group in facts.errors:
        print_line(console, f"Errors ({group.kind}): {group.requests} at {', '.join(group.levels)}: {group.example}")
    for warning in facts.warnings:
        print_line(console, f"Warning: {warning}", "yellow")
    print_line(console, VERIFY_HINT)
    if facts.search:
        print_line(console, f"Search: {facts.search}")
    console.print()
    print_line(console, f"{facts.headline}.", "bold")
    for note in facts.notes:
        print_line(console, f"{note}.")


def print_curves(run: Run, console: Console) -> None:
    """Print throughput and p95 latency over each numeric setting with three or more values; else a bar for each cell.

    Of a load run, print the latencies over the load.

    The other swept settings make a curve for each of their combinations, at most the four fastest.
    """
    if is_load_run(run):
        _print_load_curves(LoadReport(run).latency, console)
        return
    facts = SweepReport(run)
    rows = [row for row in facts.rows if row.metrics.values["request_throughput"] is not None]
    curves = [sweep for sweep in sweeps(rows) if sweep.numeric and len(sweep.values) >= _LEAST_POINTS]
    for sweep in curves:
        _print_sweep(sweep, console)
    if rows and not curves:
        _print_bars([(row.name, row.speed) for row in rows], console)


def _print_sweep(sweep: Sweep, console: Console) -> None:
    chosen = sweep.fastest(_MOST_SERIES)
    console.print()
    left_out = f", {len(chosen)} fastest of {len(sweep.series)}" if len(chosen) < len(sweep.series) else ""
    print_line(console, f"By {setting_title(sweep.name)}" + left_out)
    if len(sweep.series) > 1:
        for marker, name in zip(_MARKERS, chosen, strict=False):
            print_line(console, f"{marker} {name}")
    ticks = [(float(index), tick) for index, tick in enumerate(sweep.ticks)]
    plots = []
    for metric, title in (("request_throughput", "req/s"), ("p95_e2el_ms", "E2E p95 ms")):
        series = [
            [(float(sweep.index(row)), value) for row in rows if (value := row.metrics.values[metric]) is not None]
            for rows in chosen.values()
        ]
        heights = [value for points in series for _, value in points]
        plots.append(_plot(title, zip(_MARKERS, series, strict=False), ticks, heights, _width(console)))
    _print_side_by_side(plots, console)


def _print_load_curves(curves: Sequence[Panel], console: Console) -> None:
    """Print the first and the last series of each time over the load.

    Fewer than two levels make no curve. More series would hide each other.
    """
    curves = [curve for curve in curves if len(curve.series[0].points) > 1]
    if not curves:
        return
    console.print()
    names = [series.label for series in _end_series(curves[0])]
    keys = ", ".join(f"{marker} {name}" for marker, name in zip(_MARKERS, names, strict=False))
    print_line(console, f"Latency (ms) over {curves[0].axis}: {keys}")
    plots = [_load_plot(curve, _width(console)) for curve in curves]
    for index in range(0, len(plots), 2):
        _print_side_by_side(plots[index : index + 2], console)


def _end_series(curve: Panel) -> list[Series]:
    return [curve.series[0], curve.series[-1]] if len(curve.series) > 1 else list(curve.series)


def _load_plot(curve: Panel, width: int) -> str:
    """Return one plot as text; a limit within it is a horizontal line."""
    series = [[(point.at, point.value.value or 0.0) for point in shown.points] for shown in _end_series(curve)]
    places, heights = (list(values) for values in zip(*(point for points in series for point in points), strict=True))
    lines = list(reversed(list(zip(_MARKERS, series, strict=False))))  # the median on top
    if curve.limit is not None and curve.limit <= max(heights):
        lines.insert(0, ("-", [(min(places), curve.limit), (max(places), curve.limit)]))
    title = f"{curve.title}, {curve.limit_label}" if curve.limit_label else curve.title
    return _plot(title, lines, _marks(places), [0.0, *heights], width, top=max(heights) or 1.0)


def _plot(
    title: str,
    series: Iterable[tuple[str, Sequence[tuple[float, float]]]],
    ticks: Sequence[tuple[float, str]],
    heights: Sequence[float],
    width: int,
    *,
    top: float | None = None,
) -> str:
    """Return a plot as text.

    Args:
        title: above it.
        series: markers with their points.
        ticks: positions on the horizontal axis, with their names.
        heights: values that the ticks of the vertical axis span.
        width: columns.
        top: upper end of the vertical axis, which then begins at zero; None: as the points need.
    """
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _SWEEP_LINES if top is None else _LOAD_LINES)
    figure.title(title)
    for marker, points in series:
        if points:
            figure.draw(figure.signal(*zip(*points, strict=True), marker=marker).lines())
    if top is not None:
        figure.ruler("y").lim(0, top)
    for axis, marks in (("x", ticks), ("y", _marks(heights))):
        if marks:
            figure.ruler(axis).ticks(*(list(part) for part in zip(*marks, strict=True)))
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _marks(values: Sequence[float]) -> list[tuple[float, str]]:
    """Return up to four positions over a range with their names."""
    if not values:
        return []
    low, high = min(values), max(values)
    marks = [low + (high - low) * index / 3 for index in range(4)] if high > low else [low]
    return [(mark, number_text(mark)) for mark in marks]


def _width(console: Console) -> int:
    return (console.width - 2) // 2


def _print_side_by_side(plots: Sequence[str], console: Console) -> None:
    from rich.table import Table

    panels = Table.grid(padding=(0, 1, 0, 0))
    panels.add_row(*(safe_text(console, plot) for plot in plots))
    console.print(panels)


def _print_bars(speeds: Sequence[tuple[str, float]], console: Console) -> None:
    """Print a bar for each name."""
    from rich.table import Table

    longest = max(1e-9, *(value for _, value in speeds))
    room = console.width // 2
    console.print()
    print_line(console, "req/s")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in speeds:
        texts = (name, "█" * round(room * value / longest), number_text(value))
        table.add_row(*(safe_text(console, text) for text in texts))
    console.print(table)
