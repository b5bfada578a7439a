"""Tables of summaries and their comparison, on the terminal and as one HTML page that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from string import ascii_uppercase
from typing import Any

from panscan.core.groups import grouped
from panscan.core.text import clean, number_text, percent, times
from panscan.inspect.trace.cpu import Filler
from panscan.inspect.trace.steps import StepTime
from panscan.inspect.trace.summary import Summary, cut_middle, milliseconds, per_step, short_name
from panscan.report.formatting import templates
from panscan.report.table import Content, Table, TableCell, share_cell, table_of

# Fields of the mean step and of a GPU, by their names in tables; counts are per step.
_STEP_TIMES = {"wall time": "step_ms", "busy": "busy_ms", "idle": "idle_ms", "longest idle stretch": "gap_ms"}
_STEP_COUNTS = {
    "kernel launches": "kernel_launches",
    "graph launches": "graph_launches",
    "kernels": "kernels",
    "copies and fills": "copies",
}
_GPU_TIMES = {"span": "span_ms", "busy": "busy_ms", "idle": "idle_ms", "idle: host wait": "host_wait_ms"}
_SMALLEST_SHARE = 0.05  # of the idle time: functions on the stack with less are not shown
_FILLERS = 10
_MOST_COMPARED = 15  # rows of kernels and of functions
_SMALLEST = 0.01  # part of the largest row of a compared table


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of all traces.

    Args:
        group: table it belongs to.
        name: name of the figure.
        values: one per trace; None: the trace does not have it. Milliseconds, or a count per step.
        full: whole name where ``name`` is shortened.
    """

    group: str
    name: str
    values: tuple[float | None, ...]
    full: str = ""

    @property
    def difference(self) -> float | None:
        """Last value minus the first; None if either is missing."""
        first, last = self.values[0], self.values[-1]
        return None if first is None or last is None else last - first


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Traces side by side.

    Args:
        names: one per trace.
        headline: one sentence: what changed most from the first trace to the last.
        figures: all compared figures, by group.
    """

    names: tuple[str, ...]
    headline: str
    figures: tuple[ComparedFigure, ...]


def tables_of(summary: Summary, *, top: int | None = None) -> Iterator[Table[Any]]:
    """Yield the tables of a summary that have rows.

    Args:
        summary: summary of one trace.
        top: number of rows of kernels; None: all rows of the summary.
    """
    steps = summary.steps
    tables = (
        _phase_table(summary),
        *([_step_table(summary, steps)] if steps is not None and steps.name != "trace" else ()),
        _gpu_table(summary),
        *(_idle_tables(summary, steps) if steps is not None else ()),
        _kernel_table(summary, top),
    )
    yield from (table for table in tables if table.rows)


def _phase_table(summary: Summary) -> Table[Any]:
    device = "GPU" if summary.gpus else "CPU"
    rows = [
        (
            *(phase.name, phase.count, phase.total_ms, phase.busy_ms, phase.idle_ms),
            share_cell(phase.idle_ms, phase.total_ms),
            phase.launches,
        )
        for phase in summary.phases
    ]
    titles = ("phase", "ranges", "ms", f"{device} busy ms", f"{device} idle ms", "idle", "launches")
    return table_of(titles, rows, title="Time by phase")


def _step_table(summary: Summary, steps: StepTime) -> Table[Any]:
    figures = [(name, milliseconds(getattr(steps, field))) for name, field in _STEP_TIMES.items()]
    if summary.gpus:
        figures += [(name, number_text(getattr(steps, field))) for name, field in _STEP_COUNTS.items()]
    return table_of(("", "mean"), figures, title=f"Mean {steps.name} of {steps.count}")


def _gpu_table(summary: Summary) -> Table[Any]:
    rows = [
        (
            *(f"GPU {gpu.device}", gpu.span_ms, gpu.busy_ms, gpu.idle_ms),
            share_cell(gpu.idle_ms, gpu.span_ms),
            gpu.host_wait_ms,
        )
        for gpu in summary.gpus
    ]
    title = "GPU time from the first to the last activity"
    return table_of(("ms", "span", "busy", "idle", "idle", "host wait"), rows, title=title)


def _idle_tables(summary: Summary, steps: StepTime) -> list[Table[Any]]:
    """Return the innermost functions in idle time, and those on the stack that call others."""
    per = "" if steps.name == "trace" else f" per {steps.name}"
    title = f"CPU while the GPU is idle{per}" if summary.gpus else f"CPU outside operators{per}"
    inner = [filler for filler in steps.fillers if filler.self_ms >= 0.005 * steps.idle_ms > 0][:_FILLERS]
    callers = [filler for filler in steps.fillers if filler.name and filler.total_ms > filler.self_ms]
    callers = [filler for filler in callers if filler.total_ms >= _SMALLEST_SHARE * steps.idle_ms > 0]
    callers = sorted(callers, key=lambda filler: (-filler.total_ms, filler.depth))[: 2 * _FILLERS]

    def row(filler: Filler, ms: float, suffix: str = "") -> tuple[Content, ...]:
        name = TableCell(f"{_filler_name(filler)}{suffix}", full=filler.name)
        return name, ms, share_cell(ms, steps.idle_ms)

    outside = {"annotation": " (outside operators)"}
    titles = ("function", "ms", "of the idle")
    inner_rows = [row(filler, filler.self_ms, outside.get(filler.kind, "")) for filler in inner]
    caller_rows = [row(filler, filler.total_ms) for filler in callers]
    return [
        table_of(titles, inner_rows, title=f"{title}: innermost function"),
        table_of(titles, caller_rows, title=f"{title}: functions with what they call"),
    ]


def _filler_name(filler: Filler) -> str:
    return short_name(filler.name) if filler.name else "(nothing recorded)"


def _kernel_table(summary: Summary, top: int | None) -> Table[Any]:
    kernels = summary.kernels[:top]
    names = short_names(kernel.name for kernel in kernels)
    rows = [
        (
            TableCell(names[kernel.name], full=kernel.name),
            *(kernel.count, kernel.total_ms, kernel.mean_us),
            TableCell(percent(kernel.share), kernel.share),
        )
        for kernel in kernels
    ]
    others = summary.other_kernels_ms + sum(kernel.total_ms for kernel in summary.kernels[len(kernels) :])
    note = f"All others: {milliseconds(others)}." if others > 1e-6 else ""
    title = "Kernels by total time" if summary.gpus else "CPU operators by self time"
    titles = ("kernel" if summary.gpus else "operator", "count", "ms", "mean us", "share")
    return table_of(titles, rows, title=title, note=note)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short names that differ: where they would not, names with their template arguments, cut in the middle."""
    short = {name: short_name(name) for name in names}
    seen = Counter(short.values())
    return {
        name: text if seen[text] == 1 else cut_middle(clean(name).removeprefix("void ")) for name, text in short.items()
    }


def compare(summaries: Sequence[Summary]) -> TraceComparison:
    """Return the figures of two or more traces side by side, under their names, numbered where they repeat."""
    names = [summary.name for summary in summaries]
    numbered = [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, 1)]
    return TraceComparison(tuple(numbered), _comparison_headline(summaries), tuple(_compared_figures(summaries)))


def _comparison_headline(summaries: Sequence[Summary]) -> str:
    first, last = summaries[0].steps, summaries[-1].steps
    if first is None or last is None or first.name != last.name:
        return "The traces have no steps in common: only totals are compared"
    text = f"{milliseconds(first.step_ms)} {per_step(first)} became {milliseconds(last.step_ms)}"
    if min(first.step_ms, last.step_ms) > 0:
        faster = last.step_ms <= first.step_ms
        ratio = first.step_ms / last.step_ms if faster else last.step_ms / first.step_ms
        text += f" ({times(ratio)} {'faster' if faster else 'slower'})"
    unit = "GPU idle" if summaries[0].gpus and summaries[-1].gpus else "time outside operators"
    return f"{text}; {unit} {milliseconds(first.idle_ms)} became {milliseconds(last.idle_ms)}"


def _compared_figures(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    """Yield the figures: of the mean step, phases, GPUs, functions in idle time, and kernels."""
    steps = [summary.steps for summary in summaries]
    names = {step.name for step in steps if step is not None}
    if len(names) == 1:
        [name] = names
        group = f"Mean {name}" if name != "trace" else "First to last activity"
        fields = (_STEP_TIMES | _STEP_COUNTS).items()
        tables = [{label: getattr(step, field) for label, field in fields} if step else {} for step in steps]
        yield from _figure_rows(f"{group}: ms, and counts", tables)
    phases = [
        [((phase.name, phase.total_ms), (f"{phase.name}, idle", phase.idle_ms)) for phase in summary.phases]
        for summary in summaries
    ]
    yield from _figure_rows("Time by phase, ms", [dict(chain.from_iterable(pairs)) for pairs in phases])
    tables = [
        {name: sum(getattr(gpu, field) for gpu in summary.gpus) for name, field in _GPU_TIMES.items()}
        if summary.gpus
        else {}
        for summary in summaries
    ]
    yield from _figure_rows("GPU time, ms, sum over GPUs", tables)
    if len(names) == 1 and None not in steps:
        fillers = [step.fillers if step else () for step in steps]
        tables = [{filler.name: filler.total_ms for filler in table} for table in fillers]
        titles = {filler.name: _filler_name(filler) for table in fillers for filler in table}
        yield from _largest_rows("CPU functions in idle time, with what they call, ms", tables, titles, 0.0)
    on_gpu = bool(summaries[0].gpus)
    if all(bool(summary.gpus) == on_gpu for summary in summaries):
        tables = [{kernel.name: kernel.total_ms for kernel in summary.kernels} for summary in summaries]
        titles = short_names(dict.fromkeys(name for table in tables for name in table))
        complete = all(summary.other_kernels_ms < 1e-6 for summary in summaries)
        group = "Kernels, ms in the whole trace" if on_gpu else "CPU operators, self ms in the whole trace"
        yield from _largest_rows(group, tables, titles, 0.0 if complete else None)


def _figure_rows(group: str, tables: Sequence[Mapping[str, float]]) -> Iterator[ComparedFigure]:
    """Yield the figures that are not 0 in every trace, in the order of the traces."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(table.get(name) for table in tables)
        if any(values):
            yield ComparedFigure(group, name, values)


def _largest_rows(
    group: str, tables: Sequence[Mapping[str, float]], titles: Mapping[str, str], absent: float | None
) -> Iterator[ComparedFigure]:
    """Yield the rows with the largest values; ``absent`` is the value of a name that a trace lacks."""
    largest = {name: max(table.get(name, 0.0) for table in tables) for name in titles}
    least = _SMALLEST * max(largest.values(), default=0.0)
    for name in sorted(largest, key=lambda name: -largest[name])[:_MOST_COMPARED]:
        if largest[name] >= least > 0:
            yield ComparedFigure(group, titles[name], tuple(table.get(name, absent) for table in tables), full=name)


def comparison_tables(comparison: TraceComparison) -> Iterator[Table[Any]]:
    """Yield one table per group of figures."""
    titles = ("", *ascii_uppercase[: len(comparison.names)], "change", "")
    for group, figures in grouped((figure.group, figure) for figure in comparison.figures).items():
        rows = [
            (TableCell(figure.name, full=figure.full), *figure.values, *_change_cells(figure)) for figure in figures
        ]
        yield table_of(titles, rows, title=group)


def _change_cells(figure: ComparedFigure) -> tuple[TableCell, TableCell]:
    """Return the difference, and the relative change."""
    difference, first = figure.difference, figure.values[0]
    if difference is None or first is None:
        return TableCell(""), TableCell("")
    relative = f"{100 * difference / first:+.1f}%" if first else ""
    if first and difference >= 9 * first:
        relative = times((first + difference) / first)
    if relative in ("+0.0%", "-0.0%"):
        return TableCell("0", difference), TableCell("0%", 0.0)
    return TableCell(f"{'+' if difference > 0 else ''}{number_text(difference)}", difference), TableCell(relative)


def lines(summaries: Sequence[Summary], *, width: int) -> list[str]:
    """Return a summary, or several side by side, as lines of text without control characters.

    Args:
        summaries: one per trace.
        width: columns of the terminal; long names are cut.
    """
    if len(summaries) == 1:
        text, tables = [f"{summaries[0].headline}."], tables_of(summaries[0])
    else:
        comparison = compare(summaries)
        text, tables = [f"{comparison.headline}."], comparison_tables(comparison)
        for letter, name, summary in zip(ascii_uppercase, comparison.names, summaries, strict=False):
            text.append(f"{letter}: {clean(name)}: {summary.headline}.")
    for table in tables:
        text += ["", *table.lines(width)]
    notes = dict.fromkeys(f"note: {note}" for summary in summaries for note in summary.notes)
    return [*text, "", *notes] if notes else text


def page(summaries: Sequence[Summary], *, title: str = "", top: int | None = None) -> str:
    """Return one page: for several traces, a comparison first. The same summaries give the same text.

    Args:
        summaries: one per trace.
        title: heading; empty: the names of the traces.
        top: number of rows of kernels; None: all rows of the summaries.
    """
    from jinja2 import ChoiceLoader, PackageLoader

    from panscan.report import draw

    comparison = compare(summaries) if len(summaries) > 1 else None
    loader = ChoiceLoader([PackageLoader("panscan.inspect.trace"), PackageLoader("panscan.report")])
    environment = templates().overlay(loader=loader)
    environment.filters.update(milliseconds=milliseconds)
    return environment.get_template("trace.html.j2").render(
        title=title or ", ".join(summary.name for summary in summaries),
        summaries=summaries,
        comparison=comparison,
        letters=ascii_uppercase,
        compared=list(comparison_tables(comparison)) if comparison else [],
        tables=[list(tables_of(summary, top=top)) for summary in summaries],
        light=draw.LIGHT,
        dark=draw.DARK,
    )
