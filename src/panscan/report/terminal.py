"""A finished run on the terminal: its tables, remarks on them, and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from panscan.analysis.cells import shared_settings
from panscan.analysis.levels import VERIFY_HINT
from panscan.analysis.setting_words import label
from panscan.core.text import count, number_text
from panscan.records.load_runs import is_load_run
from panscan.records.quality import empty_answers
from panscan.records.store import Run
from panscan.report.charts import Panel, comparisons
from panscan.report.formatting import print_line, safe_text
from panscan.report.load import LoadReport
from panscan.report.sweep import SweepReport, unmeasured_text
from panscan.report.table import print_table
from panscan.verdict.judgement import verdict_lines

if TYPE_CHECKING:
    from rich.console import Console


_UNCERTIFIED = "~ has too few samples for 99% confidence."
_PLOT_LINES = 12
_LEAST_POINTS = 3  # of a curve
_MARKERS = "ox+*#@"


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
    """Print the charts over each swept number with three or more values; of a load run, the latencies over the load."""
    if is_load_run(run):
        panels = [panel for panel in LoadReport(run).latency if len(panel.series[0].points) > 1]
        # The first and the last series: more would hide each other.
        panels = [replace(panel, series=panel.series[:: max(1, len(panel.series) - 1)]) for panel in panels]
        if panels:
            _print_charts(f"Latency over {panels[0].axis}", panels, console)
        return
    for group in comparisons(SweepReport(run).rows):
        panels = [panel for panel in group.panels if panel.kind == "steps" and len(panel.ticks) >= _LEAST_POINTS]
        if panels:
            _print_charts(". ".join(filter(None, (group.heading, group.note))), panels, console)


def _print_charts(heading: str, panels: Sequence[Panel], console: Console) -> None:
    from rich.table import Table

    console.print()
    print_line(console, heading)
    for marker, name in zip(_MARKERS, panels[0].legend, strict=False):
        print_line(console, f"{marker} {name}")
    plots = [safe_text(console, _plot(panel, (console.width - 2) // 2)) for panel in panels]
    for index in range(0, len(plots), 2):
        pair = Table.grid(padding=(0, 1, 0, 0))
        pair.add_row(*plots[index : index + 2])
        console.print(pair)


def _plot(panel: Panel, width: int) -> str:
    """Return a chart as lines of text; a limit within it is a horizontal line."""
    from plotext import figure

    places, top = [point.at for point in panel.points], max(panel.values) or 1.0
    lines = [
        (marker, [(point.at, point.height) for point in series.points])
        for marker, series in zip(_MARKERS, panel.series, strict=False)
        if series.points
    ]
    if panel.limit is not None and panel.limit <= top:
        lines.append(("-", [(min(places), panel.limit), (max(places), panel.limit)]))
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _PLOT_LINES)
    figure.title(", ".join(filter(None, (panel.title, panel.unit, panel.limit_label))))
    for marker, points in reversed(lines):  # the first one on top
        figure.draw(figure.signal(*zip(*points, strict=True), marker=marker).lines())
    figure.ruler("y").lim(0, top)
    figure.ruler("x").ticks(
        *_ticks(min(places), max(places)) if not panel.ticks else (range(len(panel.ticks)), panel.ticks)
    )
    figure.ruler("y").ticks(*_ticks(0.0, top))
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Return four positions over a range, and their names."""
    positions = [low + (high - low) * index / 3 for index in range(4)]
    return positions, list(map(number_text, positions))
