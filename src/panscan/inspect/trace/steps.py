"""Phases and decode steps of a trace: where they begin and end, and how busy the GPU is in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from panscan.inspect.trace.columns import ANNOTATION, KERNEL, Columns
from panscan.inspect.trace.cpu import idle_fillers, thread_name
from panscan.inspect.trace.figures import Filler, PhaseTime, StepTime
from panscan.inspect.trace.gpu import Launches, launch_calls
from panscan.inspect.trace.intervals import Floats, Ints, Spans

PHASE = "panscan."
"""Prefix of the ranges that name phases."""

_REQUEST, _DECODE = "panscan.request", "panscan.decode"
_AUTOMATIC = ((_DECODE, "decode step"), ("ProfilerStep", "step"), ("prepare_inputs_for_generation", "decode step"))
_CAUSE_SHARE = 0.5  # of the idle time
_ALWAYS = 0.98  # of the time of the steps


@dataclass(frozen=True, slots=True)
class Windows:
    """Time windows of all steps.

    Args:
        name: name of one step.
        start, end: bounds of each window.
    """

    name: str
    start: Floats
    end: Floats

    @property
    def spans(self) -> Spans:
        """All windows together."""
        return Spans.union(self.start, self.end)


def phase_times(columns: Columns, busy: Spans, launches: Launches) -> tuple[PhaseTime, ...]:
    """Return the time of each phase, in the order of their first start.

    Args:
        columns: events of the trace.
        busy: when a GPU is active, or the main thread is in an operator if there is no GPU.
        launches: kernel and graph launches.
    """
    cpu = columns.cpu
    begins = np.sort(cpu.start[np.concatenate((launches.kernels, launches.graphs))])
    found: list[tuple[float, PhaseTime]] = []
    for index, name in enumerate(columns.names):
        if not name.startswith(PHASE):
            continue
        rows = np.flatnonzero((cpu.name == index) & (cpu.kind == ANNOTATION))
        if not len(rows):
            continue
        start, end = cpu.start[rows], cpu.end[rows]
        total, active = float((end - start).sum()), float(busy.overlap(start, end).sum())
        count = int((np.searchsorted(begins, end) - np.searchsorted(begins, start)).sum())
        phase = PhaseTime(name.removeprefix(PHASE), len(rows), total / 1e3, active / 1e3, (total - active) / 1e3, count)
        found.append((float(start.min()), phase))
    return tuple(phase for _, phase in sorted(found, key=lambda pair: (pair[0], -pair[1].total_ms)))


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
        None if no range has the name.
    """
    for name, title in _AUTOMATIC if step is None else ((step, "step"),):
        indices = [index for index, other in enumerate(columns.names) if _has_name(other, name)]
        rows = np.flatnonzero(np.isin(columns.cpu.name, indices)) if indices else np.empty(0, dtype=np.int64)
        if len(rows):
            return _windows(columns, rows, title)
    return None


def _has_name(name: str, ending: str) -> bool:
    """Return whether a range has this name, or is a Python function ``file(line): name`` with it."""
    return name == ending or name.endswith(f": {ending}")


def _windows(columns: Columns, rows: Ints, title: str) -> Windows:
    cpu = columns.cpu
    rows = rows[cpu.thread[rows] == np.bincount(cpu.thread[rows]).argmax()]
    rows = rows[np.argsort(cpu.start[rows], kind="stable")]
    start, end = cpu.start[rows], cpu.end[rows]
    outer = np.concatenate(([True], start[1:] >= np.maximum.accumulate(end)[:-1]))  # not inside another step
    start, end = start[outer], end[outer]
    if len(start) == 1:
        return Windows(title, start, end)
    others = [i for i, name in enumerate(columns.names) if name.startswith(PHASE) and name not in (_DECODE, _REQUEST)]
    between = np.sort(cpu.start[np.isin(cpu.name, others) & (cpu.thread == cpu.thread[rows[0]])])
    follows = np.searchsorted(between, start) > np.concatenate(([0], np.searchsorted(between, end[:-1])))
    start, end, following = start[:-1], end[:-1], start[1:]
    interrupted = np.searchsorted(between, following) > np.searchsorted(between, end)
    running = Spans.union(columns.gpu.start, columns.gpu.end).overlap(start, start + 1e-3) > 0
    kept = ~(follows[:-1] & running)  # the GPU still computes the phase before
    if not kept.any():
        kept[:] = True
    return Windows(title, start[kept], np.where(interrupted, end, following)[kept])


def step_time(columns: Columns, windows: Windows, busy: Spans, thread: int, launches: Launches) -> StepTime:
    """Return the mean step and what the CPU does in its idle time.

    Args:
        columns: events of the trace.
        windows: steps.
        busy: when a GPU is active, or the main thread is in an operator if there is no GPU.
        thread: the thread that launches most, or has most operators.
        launches: kernel and graph launches.
    """
    gpu, cpu, count = columns.gpu, columns.cpu, len(windows.start)
    lengths = windows.end - windows.start
    active = busy.overlap(windows.start, windows.end)
    every = busy.gaps(float(windows.start[0]), max(float(windows.end[-1]), float(cpu.end.max())))
    fillers = tuple(_per_step(filler, count) for filler in _fillers(columns, windows, every, thread))

    def mean(times: Floats) -> float:
        times = np.sort(times)
        inside = np.searchsorted(times, windows.end) - np.searchsorted(times, windows.start)
        return float(inside.sum()) / count

    return StepTime(
        name=windows.name,
        count=count,
        step_ms=float(lengths.mean()) / 1e3,
        busy_ms=float(active.mean()) / 1e3,
        idle_ms=float((lengths - active).mean()) / 1e3,
        gap_ms=_longest_gaps(windows, every) / 1e3,
        kernels=mean(gpu.start[gpu.kind == KERNEL]),
        kernel_launches=mean(cpu.start[launches.kernels]),
        graph_launches=mean(cpu.start[launches.graphs]),
        copies=mean(gpu.start[gpu.kind != KERNEL]),
        thread=thread_name(columns, thread),
        fillers=fillers,
        cause=_cause(fillers, float(lengths.mean()) / 1e3),
    )


def _fillers(columns: Columns, windows: Windows, idle: Spans, thread: int) -> list[Filler]:
    """Return what the CPU does in idle time within the windows, most self time first.

    A gap belongs to the thread that launches the activity after it, or to ``thread`` if that is unknown.
    """
    following = np.searchsorted(columns.gpu.start, idle.end, side="left")
    known = following < len(columns.gpu.start)
    calls = np.full(len(following), -1, dtype=np.int64)
    calls[known] = launch_calls(columns)[following[known]]
    threads = np.where(calls >= 0, columns.cpu.thread[calls], thread)
    found: dict[str, Filler] = {}
    for number in np.unique(threads).tolist():
        own = Spans(idle.start[threads == number], idle.end[threads == number]).within(windows.spans)
        for filler in idle_fillers(columns, number, own, windows.spans):
            found[filler.name] = _sum(found[filler.name], filler) if filler.name in found else filler
    return sorted(found.values(), key=lambda filler: -filler.self_ms)


def _sum(one: Filler, other: Filler) -> Filler:
    """Return the same function on two threads as one."""
    larger = max(one, other, key=lambda filler: filler.total_ms)
    return replace(
        larger,
        self_ms=one.self_ms + other.self_ms,
        total_ms=one.total_ms + other.total_ms,
        stack_ms=max(one.stack_ms, other.stack_ms),
    )


def _per_step(filler: Filler, count: int) -> Filler:
    times = {name: getattr(filler, name) / count for name in ("self_ms", "total_ms", "stack_ms")}
    return replace(filler, **times)


def _longest_gaps(windows: Windows, idle: Spans) -> float:
    """Return the mean over all windows of the longest idle interval that begins in each, in microseconds.

    An interval may end in the next window: that is the gap between two steps.
    """
    longest = np.zeros(len(windows.start))
    at = np.searchsorted(windows.start, idle.start, side="right") - 1
    inside = idle.start < windows.end[at]
    np.maximum.at(longest, at[inside], (idle.end - idle.start)[inside])
    return float(longest.mean())


def _cause(fillers: tuple[Filler, ...], step_ms: float) -> Filler | None:
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
