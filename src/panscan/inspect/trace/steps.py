"""Phases and decode steps of a trace: where they begin and end, and how busy the GPU is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from panscan.inspect.trace.columns import ANNOTATION, KERNEL, Columns
from panscan.inspect.trace.cpu import Filler, Launches, idle_fillers, launch_calls
from panscan.inspect.trace.intervals import Floats, Ints, Spans

PHASE = "panscan."
"""Prefix of the ranges that name phases."""

_REQUEST, _DECODE = "panscan.request", "panscan.decode"
_AUTOMATIC = ((_DECODE, "decode step"), ("ProfilerStep", "step"), ("prepare_inputs_for_generation", "decode step"))
_CAUSE_SHARE = 0.5  # of the idle time
_ALWAYS = 0.98  # of the time of the steps


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """All ranges of one phase.

    Args:
        name: name of the phase without ``panscan.``.
        count: number of ranges.
        total_ms: wall time of all ranges.
        busy_ms: part of it with activity on any GPU; without a GPU: in an operator on the main thread.
        idle_ms: the rest of ``total_ms``.
        launches: kernel and graph launches that began in the ranges.
    """

    name: str
    count: int
    total_ms: float
    busy_ms: float
    idle_ms: float
    launches: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step: from the start of one to the start of the next. Without steps: the whole trace as one.

    Args:
        name: "decode step", "step" or "trace".
        count: number of steps.
        step_ms: mean wall time.
        busy_ms: part of it with activity on any GPU; without a GPU: in an operator on the main thread.
        idle_ms: the rest.
        gap_ms: mean of the longest idle stretch that begins in each step; it may end in the next one.
        kernels: GPU kernels that start in a step.
        kernel_launches: kernel launches by the CPU per step.
        graph_launches: CUDA graph launches per step.
        copies: copies and fills on the GPU per step.
        thread: the thread that launches, or the one with most operators.
        fillers: CPU activity during the idle time, on the thread whose launch ends it; most self time first.
        cause: the innermost function with at least half of the idle time that does not run all the time; None: there
            is none.
    """

    name: str
    count: int
    step_ms: float
    busy_ms: float
    idle_ms: float
    gap_ms: float
    kernels: float
    kernel_launches: float
    graph_launches: float
    copies: float
    thread: str
    fillers: tuple[Filler, ...]
    cause: Filler | None


@dataclass(frozen=True, slots=True)
class Windows:
    """Time windows of all steps: the name of one step, and the bounds of each window."""

    name: str
    start: Floats
    end: Floats


def phase_times(columns: Columns, busy: Spans, launches: Launches) -> tuple[PhaseTime, ...]:
    """Return the time of each phase, in the order of their first start.

    Args:
        columns: events of the trace.
        busy: when a GPU is active, or the main thread is in an operator if there is no GPU.
        launches: kernel and graph launches.
    """
    cpu = columns.cpu
    begins = np.sort(cpu.start[np.concatenate(launches)])
    phases: list[tuple[float, PhaseTime]] = []
    for index, name in enumerate(columns.names):
        rows = np.flatnonzero((cpu.name == index) & (cpu.kind == ANNOTATION)) if name.startswith(PHASE) else ()
        if not len(rows):
            continue
        start, end = cpu.start[rows], cpu.end[rows]
        total, active = float((end - start).sum()), float(busy.overlap(start, end).sum())
        count = int((np.searchsorted(begins, end) - np.searchsorted(begins, start)).sum())
        phase = PhaseTime(name.removeprefix(PHASE), len(rows), total / 1e3, active / 1e3, (total - active) / 1e3, count)
        phases.append((float(start.min()), phase))
    return tuple(phase for _, phase in sorted(phases, key=lambda pair: (pair[0], -pair[1].total_ms)))


def step_windows(columns: Columns, step: str | None) -> Windows | None:
    """Return the windows of the steps, each from its start to the start of the next one.

    A step before another phase on its thread ends with its range. A first step after another phase is left out if the
    GPU still computes that phase when it starts, unless no step would remain. The last step is left out, unless it is
    the only one: the trace does not show what follows it.

    Args:
        columns: events of the trace.
        step: name of the ranges or Python functions that begin the steps; None: ``panscan.decode``,
            ``ProfilerStep#N`` or Transformers' ``prepare_inputs_for_generation``, the first that the trace has.

    Returns:
        None if no range has the name, and no Python function ``file(line): name``.
    """
    for name, title in _AUTOMATIC if step is None else ((step, "step"),):
        named = [index for index, other in enumerate(columns.names) if other == name or other.endswith(f": {name}")]
        rows = np.flatnonzero(np.isin(columns.cpu.name, named))
        if len(rows):
            return _windows(columns, rows, title)
    return None


def _windows(columns: Columns, rows: Ints, title: str) -> Windows:
    """Return the windows that begin with some ranges: those of the thread with most of them."""
    cpu = columns.cpu
    rows = rows[cpu.lane[rows] == np.bincount(cpu.lane[rows]).argmax()]
    rows = rows[np.argsort(cpu.start[rows], kind="stable")]
    start, end = cpu.start[rows], cpu.end[rows]
    outer = np.concatenate(([True], start[1:] >= np.maximum.accumulate(end)[:-1]))  # not inside another step
    start, end = start[outer], end[outer]
    if len(start) == 1:
        return Windows(title, start, end)
    others = [i for i, name in enumerate(columns.names) if name.startswith(PHASE) and name not in (_DECODE, _REQUEST)]
    between = np.sort(cpu.start[np.isin(cpu.name, others) & (cpu.lane == cpu.lane[rows[0]])])
    follows = np.searchsorted(between, start) > np.concatenate(([0], np.searchsorted(between, end[:-1])))
    start, end, following = start[:-1], end[:-1], start[1:]
    interrupted = np.searchsorted(between, following) > np.searchsorted(between, end)
    running = Spans.union(columns.gpu.start, columns.gpu.end).overlap(start, start + 1e-3) > 0
    counted = ~(follows[:-1] & running)  # the GPU still computes the phase before
    if not counted.any():
        counted[:] = True
    return Windows(title, start[counted], np.where(interrupted, end, following)[counted])


def step_time(columns: Columns, windows: Windows, busy: Spans, thread: int, launches: Launches, top: int) -> StepTime:
    """Return the mean step and what the CPU does in its idle time.

    Args:
        columns: events of the trace.
        windows: steps.
        busy: when a GPU is active, or the main thread is in an operator if there is no GPU.
        thread: the thread that launches most, or has most operators.
        launches: kernel and graph launches.
        top: number of functions to keep, by self time and by total.
    """
    gpu, cpu, count = columns.gpu, columns.cpu, len(windows.start)
    lengths = windows.end - windows.start
    active = busy.overlap(windows.start, windows.end)
    idle = busy.gaps(float(windows.start[0]), max(float(windows.end[-1]), float(cpu.end.max())))
    # A gap belongs to the thread that launches the activity after it, or to the main thread if that is unknown.
    calls = np.concatenate((launch_calls(columns), [-1]))[np.searchsorted(gpu.start, idle.end, side="left")]
    threads = np.where(calls >= 0, cpu.lane[calls], thread)
    fillers = idle_fillers(columns, idle, threads, Spans.union(windows.start, windows.end), count)
    step_ms = float(lengths.mean()) / 1e3

    def mean(times: Floats) -> float:
        times = np.sort(times)
        inside = np.searchsorted(times, windows.end) - np.searchsorted(times, windows.start)
        return float(inside.sum()) / count

    by_total = sorted(fillers, key=lambda filler: -filler.total_ms)
    shown = {filler.name for filler in (*fillers[:top], *by_total[:top])}
    return StepTime(
        name=windows.name,
        count=count,
        step_ms=step_ms,
        busy_ms=float(active.mean()) / 1e3,
        idle_ms=float((lengths - active).mean()) / 1e3,
        gap_ms=_longest_gaps(windows, idle) / 1e3,
        kernels=mean(gpu.start[gpu.kind == KERNEL]),
        kernel_launches=mean(cpu.start[launches.kernels]),
        graph_launches=mean(cpu.start[launches.graphs]),
        copies=mean(gpu.start[gpu.kind != KERNEL]),
        thread=cpu.lanes[thread],
        fillers=tuple(filler for filler in fillers if filler.name in shown),
        cause=_cause(fillers, step_ms),
    )


def _longest_gaps(windows: Windows, idle: Spans) -> float:
    """Return the mean over all windows of the longest idle interval that begins in each, in microseconds.

    An interval may end in the next window: that is the gap between two steps.
    """
    longest = np.zeros(len(windows.start))
    window = np.searchsorted(windows.start, idle.start, side="right") - 1
    inside = idle.start < windows.end[window]
    np.maximum.at(longest, window[inside], (idle.end - idle.start)[inside])
    return float(longest.mean())


def _cause(fillers: Sequence[Filler], step_ms: float) -> Filler | None:
    """Return the innermost function with at least half of the idle time; None: none has that much.

    Functions that are on the stack all the time, such as the loop over the steps, explain nothing.
    """
    least = _CAUSE_SHARE * sum(filler.self_ms for filler in fillers)
    large = [
        filler
        for filler in fillers
        if filler.name
        and filler.total_ms >= least > 0
        and filler.stack_ms < _ALWAYS * step_ms
        and filler.kind != "annotation"
    ]
    return max(large, key=lambda filler: (filler.depth, filler.total_ms), default=None)
