"""A finished run on the terminal: the table of cells, remarks on it, and throughput curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from panscan.analysis.candidates import cell_names
from panscan.analysis.cells import (
    MeasuredCell,
    Sweep,
    alias_lines,
    count,
    decimal_places,
    measured_rows,
    memory_metric,
    number_text,
    queueing_note,
    shared_settings,
    speed,
    speedup_lines,
    sweeps,
    unmeasured,
)
from panscan.analysis.quantization import tradeoff_table
from panscan.analysis.recommend import recommend
from panscan.analysis.setting_words import label, setting_title
from panscan.analysis.significance import compare_with_baseline
from panscan.analysis.task_cost import TITLE, cost_lines, costs_of_cells
from panscan.core import RecordsError
from panscan.records.load_runs import is_load_run
from panscan.records.metrics import Metrics
from panscan.records.quality import empty_answers, metric_title, quality_of
from panscan.records.store import Run
from panscan.records.summary import replica_shares
from panscan.records.verdict import verdict_lines
from panscan.report.formatting import percent, print_line, safe_text
from panscan.report.load_data import load_report_of
from panscan.report.load_terminal import print_load_curves, print_load_summary

if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["print_curves", "print_decision", "print_summary"]

_NARROWEST_NAME, _WIDE_NAME = 16, 36  # characters; narrower columns of names are hard to read, wider ones fold
_SPARE = ("image\ntokens", "views", "RSS\nGiB", "GPU\nGiB")
_TRADEOFFS = ("weights", "weights GiB", "req/s", "KL answers", "KL images", "top-1", "vs unquantised")
_LATENCIES = {"TTFT\nms": "median_ttft_ms", "TPOT\nms": "median_tpot_ms", "E2E p95\nms": "p95_e2el_ms"}


def print_summary(run: Run, console: Console) -> None:
    """Print the measured cells as a table, then the others with their reasons; for a load run, its levels and result.

    Settings that all cells share are on one line above.

    Raises:
        RecordsError: see :func:`panscan.records.summary.cell_metrics`.
    """
    if is_load_run(run):
        print_load_summary(load_report_of(run), console)
        return
    rows, names = measured_rows(run), cell_names(run)
    constant = shared_settings([row.display_settings for row in rows] or list(run.cells.values()))
    if constant:
        print_line(console, label(constant))
    if rows:
        _table(run, rows, names, console)
        _legend(rows, console)
        for line in alias_lines(run, names):
            print_line(console, line)
        for line in _answers(run, rows, names):
            print_line(console, line)
        for line in verdict_lines(run, [row.cell for row in rows]):
            print_line(console, line)
        _tradeoffs(run, rows, console)
        for line in [*_replicas(run, rows, names), *speedup_lines(rows)]:
            print_line(console, line)
    else:
        print_line(console, "Nothing was measured.")
    for line in _not_measured(run):
        print_line(console, line)
    failed = sum(int(row.metrics.values["failed"] or 0) for row in rows)
    if failed:
        print_line(console, f"{count(failed, 'request')} failed and {'is' if failed == 1 else 'are'} excluded.")
    for note in run.notes:
        print_line(console, f"Note: {note}")


def print_decision(run: Run, console: Console) -> None:
    """Print the recommendation of a sweep in one sentence; why there is none, if several settings were measured."""
    if is_load_run(run):
        return
    try:
        text = recommend(run).decision
    except RecordsError as error:
        text = f"No recommendation: {str(error).removeprefix(f'{run.path}: ')}."
    print_line(console, "")
    console.print(safe_text(console, " ".join(text.split())), style="bold")


def _table(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str], console: Console) -> None:
    """Print a row per setting. Names are folded; where that leaves them too narrow, they are listed below."""
    from rich import box
    from rich.table import Table

    headings, numbers = _measured(run, rows)
    settings = [names[row.cell] for row in rows]
    widest = max(map(len, (*settings, "setting")))
    least = min(widest, _NARROWEST_NAME)
    headings, numbers = _within(console.width - min(widest, _WIDE_NAME) - 1, headings, numbers)
    room = console.width - sum(_widths(headings, numbers)) - len(headings) - 1  # ASCII writes ± as two characters
    fits = room >= least
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    if fits:
        table.add_column("setting", overflow="fold", width=min(widest, room))
    else:
        table.add_column("#")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (name, cells) in enumerate(zip(settings, numbers, strict=True), 1):
        table.add_row(*(safe_text(console, cell) for cell in (name if fits else str(index), *cells)))
    console.print(table)
    for index, name in enumerate(settings if not fits else (), 1):
        print_line(console, f"{index}: {name}")


def _tradeoffs(run: Run, rows: Sequence[MeasuredCell], console: Console) -> None:
    """Print the quantisation trade-offs, without columns that the table of settings already shows."""
    from rich import box
    from rich.table import Table

    found = tradeoff_table(run, rows)
    if found is None:
        return
    print_line(console, "")
    print_line(console, "Quantisation trade-offs")
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    chosen = [at for at, heading in enumerate(found.headings) if heading in _TRADEOFFS]
    for at in chosen:
        table.add_column(found.headings[at].replace(" ", "\n", 1), justify="right" if at else "left", overflow="fold")
    for texts in found.rows:
        table.add_row(*(safe_text(console, texts[at]) for at in chosen))
    console.print(table)
    print_line(console, found.note)


def _within(width: int, headings: list[str], numbers: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns without those that a narrow terminal has no room for."""
    for spare in _SPARE:
        if sum(_widths(headings, numbers)) + len(headings) + 1 <= width:
            break
        if spare in headings:
            at = headings.index(spare)
            headings, numbers = headings[:at] + headings[at + 1 :], [row[:at] + row[at + 1 :] for row in numbers]
    return headings, numbers


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, (*heading.split("\n"), *cells))) for heading, *cells in zip(headings, *rows, strict=True)]


def _measured(run: Run, rows: Sequence[MeasuredCell]) -> tuple[list[str], list[list[str]]]:
    """Return (headings, cells of each row): accuracy, throughput, latency, verdict, then what a wide terminal shows."""
    memory, place = memory_metric(rows)
    columns: dict[str, list[str]] = {}
    qualities = [quality_of(run, row.cell) for row in rows]
    if any(qualities):
        columns[metric_title(run).replace(" ", "\n")] = [
            "-" if each is None else f"{percent(each.mean)} ({100 * each.low:.0f}-{100 * each.high:.0f})"
            for each in qualities
        ]
    costs = costs_of_cells(run)
    if any(row.cell in costs for row in rows):
        columns[TITLE.replace(" ", "\n", 1)] = [costs[row.cell].text if row.cell in costs else "-" for row in rows]
    columns["req/s"] = [_throughput(row.metrics) for row in rows]
    for heading, name in (
        ("TTFT\nms", "median_ttft_ms"),
        ("TPOT\nms", "median_tpot_ms"),
        ("E2E p95\nms", "p95_e2el_ms"),
    ):
        columns[heading] = [_marked(row.metrics, name) for row in rows]
    columns["verdict"] = [row.verdict.word for row in rows]
    for heading, name in (("views", "mean_views"), ("image\ntokens", "mean_image_tokens")):
        columns[heading] = [_mean(row.metrics.values[name]) for row in rows]
    peaks = [row.metrics.values[memory] for row in rows]
    columns[f"{place}\nGiB"] = [number_text(None if peak is None else peak / 2**30) for peak in peaks]
    return list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.1f}"


def _answers(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]) -> list[str]:
    """Return lines on a dataset's questions, and on each cell's answers against those of the cell with most views."""
    facts = run.header.settings.dataset
    lines = [] if facts is None else [f"Dataset {facts.text}."]
    views = {row.cell: row.metrics.values["mean_views"] or 0.0 for row in rows}
    empty = sum(empty_answers(run, row.cell) for row in rows)
    lines += [f"{count(empty, 'empty answer')} ({'it counts' if empty == 1 else 'they count'} as wrong)."] * bool(empty)
    lines += cost_lines({cell: cost for cell, cost in costs_of_cells(run).items() if cell in views})
    compared = compare_with_baseline(run, list(views), views.__getitem__)
    if compared is None:
        return lines
    baseline, others = compared
    lines.append(f"{metric_title(run)} against {names[baseline]} (the most views):")
    return [*lines, *(f"{names[each.cell]}: {each.text}" for each in others)]


def _throughput(metrics: Metrics) -> str:
    value, interval = metrics.values["request_throughput"], metrics.intervals.get("request_throughput")
    if value is None or interval is None:
        return number_text(value)
    if interval[1] - interval[0] > value:  # too wide and lopsided for a half
        return f"{number_text(value)} ({number_text(interval[0])}-{number_text(interval[1])})"
    return f"{number_text(value)}±{(interval[1] - interval[0]) / 2:,.{decimal_places(value)}f}"


def _marked(metrics: Metrics, name: str) -> str:
    return ("~" if name in metrics.uncertified else "") + number_text(metrics.values[name])


def _legend(rows: Sequence[MeasuredCell], console: Console) -> None:
    legend = "TTFT and TPOT are medians."
    if any("request_throughput" in row.metrics.intervals for row in rows):
        legend += " ± is half of the 95% interval."
    if any(set(row.metrics.uncertified) & {*_LATENCIES.values()} for row in rows):
        legend += " ~ has too few samples for 99% confidence."
    print_line(console, " ".join(filter(None, (legend, queueing_note(rows)))))


def _replicas(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]) -> list[str]:
    """Return each replica's throughput, a line per cell; nothing for a run of one process."""
    lines = []
    for row in rows:
        shares = replica_shares(run, row.cell)
        parts = [
            f"{each.replica} on {each.device} {number_text(each.request_throughput)}"
            + ("" if each.share is None else f" ({each.share:.0%})")
            for each in shares
        ]
        if len(shares) > 1:
            setting = "" if names[row.cell] == row.cell else f", {names[row.cell]}"
            lines.append(f"req/s of each replica{setting}: " + ", ".join(parts))
    return ["Throughput is measured over the time in which all replicas worked.", *lines] if lines else []


def _not_measured(run: Run) -> list[str]:
    """One line for each outcome and reason of cells that are not done, with the swept settings that they share."""
    return [
        f"{count(len(group.cells), 'setting')} {group.outcome}"
        + (f": {group.reason}" if group.reason else "")
        + (f" ({group.shared})" if group.shared else "")
        for group in unmeasured(run)
    ]


_PANEL_LINES = 11
_MOST_SERIES = 4
_LEAST_POINTS = 3  # of a curve
_MARKERS = "ox+*"


def print_curves(run: Run, console: Console) -> None:
    """Print throughput and p95 latency over each numeric setting with three or more values; else a bar for each cell.

    Of a load run, print the throughput-latency curves.

    The other swept settings make a curve for each of their combinations, at most the four fastest.
    """
    if is_load_run(run):
        print_load_curves(load_report_of(run), console)
        return
    rows = [row for row in measured_rows(run) if row.metrics.values["request_throughput"] is not None]
    if not rows:
        return
    curves = [sweep for sweep in sweeps(rows) if sweep.numeric and len(sweep.values) >= _LEAST_POINTS]
    for sweep in curves:
        _curve(sweep, console)
    if not curves:
        _bars(rows, cell_names(run), console)


def _curve(sweep: Sweep, console: Console) -> None:
    from rich.table import Table

    chosen = sweep.fastest(_MOST_SERIES)
    console.print()
    left_out = f", {len(chosen)} fastest of {len(sweep.series)}" if len(chosen) < len(sweep.series) else ""
    print_line(console, f"By {setting_title(sweep.name)}" + left_out)
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


def _panel(sweep: Sweep, series: Iterable[Sequence[MeasuredCell]], metric: str, title: str, width: int) -> str:
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
    figure.ruler("x").ticks(list(range(len(sweep.values))), list(sweep.ticks))
    if heights:
        low, high = min(heights), max(heights)
        marks = [low + (high - low) * i / 3 for i in range(4)] if high > low else [low]
        figure.ruler("y").ticks(marks, [number_text(mark) for mark in marks])
    text: str = figure.build().string(colorless=True)
    figure.clear()
    return text.rstrip()


def _bars(rows: Sequence[MeasuredCell], names: Mapping[str, str], console: Console) -> None:
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
        table.add_row(
            *(
                safe_text(console, text)
                for text in (names[row.cell], "█" * round(room * each / longest), number_text(each))
            )
        )
    console.print(table)
