"""Several traces side by side, with the change from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from panscan.core.text import times
from panscan.inspect.trace.figures import StepTime, Summary
from panscan.inspect.trace.wording import filler_name, milliseconds, short_name, short_names

STEP_TIMES: dict[str, Callable[[StepTime], float]] = {
    "wall time": lambda step: step.step_ms,
    "busy": lambda step: step.busy_ms,
    "idle": lambda step: step.idle_ms,
    "longest idle stretch": lambda step: step.gap_ms,
}
"""Milliseconds of the mean step, by name."""
STEP_COUNTS: dict[str, Callable[[StepTime], float]] = {
    "kernel launches": lambda step: step.kernel_launches,
    "graph launches": lambda step: step.graph_launches,
    "kernels": lambda step: step.kernels,
    "copies and fills": lambda step: step.copies,
}
"""Counts per step on a GPU, by name."""
_MOST = 15  # rows of kernels and of functions
_SMALLEST = 0.01  # part of the largest row of a table


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


def compare(summaries: Sequence[Summary]) -> TraceComparison:
    """Return the figures of two or more traces side by side."""
    figures = [
        *_steps(summaries),
        *_phases(summaries),
        *_gpus(summaries),
        *_fillers(summaries),
        *_kernels(summaries),
        *_operators(summaries),
    ]
    return TraceComparison(_trace_names(summaries), _headline(summaries), tuple(figures))


def letters(comparison: TraceComparison) -> tuple[str, ...]:
    """Return the column titles of the traces: A, B and so on."""
    return tuple(ascii_uppercase[: len(comparison.names)])


def _trace_names(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """Return the names of the traces, numbered where they repeat."""
    names = [summary.name for summary in summaries]
    return tuple(name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, 1))


def _headline(summaries: Sequence[Summary]) -> str:
    first, last = summaries[0].steps, summaries[-1].steps
    if first is None or last is None or first.name != last.name:
        return "The traces have no steps in common: only totals are compared"
    per = f"per {first.name}" if first.name != "trace" else "from the first to the last activity"
    text = f"{milliseconds(first.step_ms)} {per} became {milliseconds(last.step_ms)}"
    if min(first.step_ms, last.step_ms) > 0:
        faster = last.step_ms <= first.step_ms
        ratio = first.step_ms / last.step_ms if faster else last.step_ms / first.step_ms
        text += f" ({times(ratio)} {'faster' if faster else 'slower'})"
    unit = "GPU idle" if summaries[0].gpus and summaries[-1].gpus else "time outside operators"
    return f"{text}; {unit} {milliseconds(first.idle_ms)} became {milliseconds(last.idle_ms)}"


def _steps(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    steps = [summary.steps for summary in summaries]
    names = {step.name for step in steps if step is not None}
    if len(names) != 1:
        return
    name = names.pop()
    group = f"Mean {name}: ms, and counts" if name != "trace" else "First to last activity: ms, and counts"
    for label, read in (STEP_TIMES | STEP_COUNTS).items():
        values = tuple(None if step is None else read(step) for step in steps)
        if any(values):
            yield ComparedFigure(group, label, values)


def _phases(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    tables = [{phase.name: phase for phase in summary.phases} for summary in summaries]
    for name in dict.fromkeys(name for table in tables for name in table):
        phases = [table.get(name) for table in tables]
        total = tuple(None if phase is None else phase.total_ms for phase in phases)
        idle = tuple(None if phase is None else phase.idle_ms for phase in phases)
        yield ComparedFigure("Time by phase, ms", name, total)
        yield ComparedFigure("Time by phase, ms", f"{name}, idle", idle)


def _gpus(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    parts = ("span_ms", "compute_ms", "communication_ms", "memory_ms", "idle_ms")
    waits = ("host_wait_ms", "kernel_wait_ms", "other_ms")
    for name in (*parts, *waits):
        values = tuple(
            sum(getattr(gpu if name in parts else gpu.idle, name) for gpu in summary.gpus) if summary.gpus else None
            for summary in summaries
        )
        label = f"idle: {_words(name)}" if name in waits else _words(name)
        if any(values):
            yield ComparedFigure("GPU time, ms, sum over GPUs", label, values)


def _words(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ")


def _fillers(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    if len({summary.steps.name if summary.steps else "" for summary in summaries}) != 1:
        return
    titles: dict[str, str] = {}
    tables: list[dict[str, float]] = []
    for summary in summaries:
        fillers = summary.steps.fillers if summary.steps else ()
        tables.append({filler.name: filler.total_ms for filler in fillers})
        titles |= {filler.name: filler_name(filler, outside=False) for filler in fillers}
    yield from _largest("CPU functions in idle time, with what they call, ms", tables, titles, complete=True)


def _kernels(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    tables = [{kernel.name: kernel.total_ms for kernel in summary.kernels} for summary in summaries]
    titles = short_names(dict.fromkeys(name for table in tables for name in table))
    complete = all(summary.other_kernels_ms < 1e-6 for summary in summaries)
    yield from _largest("Kernels, ms in the whole trace", tables, titles, complete=complete)


def _operators(summaries: Sequence[Summary]) -> Iterator[ComparedFigure]:
    tables = [{operator.name: operator.self_ms for operator in summary.operators} for summary in summaries]
    titles = {name: short_name(name) for table in tables for name in table}
    yield from _largest("CPU operators, self ms in the whole trace", tables, titles, complete=False)


def _largest(
    group: str, tables: Sequence[dict[str, float]], titles: dict[str, str], *, complete: bool
) -> Iterator[ComparedFigure]:
    """Yield the rows with the largest values.

    Args:
        complete: whether a name that a trace lacks took no time; else its time is unknown.
    """
    largest = {name: max(table.get(name, 0.0) for table in tables) for name in titles}
    least = _SMALLEST * max(largest.values(), default=0.0)
    for name in sorted(largest, key=lambda name: -largest[name])[:_MOST]:
        if largest[name] >= least > 0:
            values = tuple(table.get(name, 0.0 if complete else None) for table in tables)
            yield ComparedFigure(group, titles[name], values, full=name)
