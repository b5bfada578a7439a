"""CPU time of a trace: the main thread, its operators by self time, and what it does while the GPU is idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from panscan.inspect.trace.columns import ANNOTATION, OPERATOR, PYTHON, RUNTIME, Columns
from panscan.inspect.trace.figures import NOTHING, CpuTime, Filler, OperatorTime
from panscan.inspect.trace.intervals import Floats, Ints, Spans, nesting

_KIND_NAMES = {OPERATOR: "operator", RUNTIME: "runtime", ANNOTATION: "annotation", PYTHON: "python"}


def operator_spans(columns: Columns, thread: int) -> Spans:
    """Return when a thread is in operators and runtime calls."""
    rows = _calls(columns, thread)
    return Spans.union(columns.cpu.start[rows], columns.cpu.end[rows])


def cpu_time(columns: Columns, thread: int) -> CpuTime | None:
    """Return the busy and idle time of a thread; None if it has no operators."""
    busy = operator_spans(columns, thread)
    if not len(busy.start):
        return None
    span = float(busy.end[-1] - busy.start[0])
    return CpuTime(thread_name(columns, thread), span / 1e3, busy.total / 1e3, (span - busy.total) / 1e3)


def thread_name(columns: Columns, thread: int) -> str:
    """Return a thread as ``process/thread``, one number if they are equal."""
    process, name = columns.cpu.threads[thread]
    return name if process == name else f"{process}/{name}"


def operator_times(columns: Columns, thread: int, most: int) -> tuple[OperatorTime, ...]:
    """Return the operators and runtime calls of a thread with most self time."""
    stack = _Stack.of(columns, _calls(columns, thread))
    size = len(columns.names)
    duration = stack.end - stack.start
    own = np.bincount(stack.name, stack.own(duration), size)
    total = np.bincount(stack.name[stack.outermost], duration[stack.outermost], size)
    count = np.bincount(stack.name, minlength=size)
    return tuple(
        OperatorTime(columns.names[name], int(count[name]), float(own[name]) / 1e3, float(total[name]) / 1e3)
        for name in np.argsort(-own, kind="stable")[:most].tolist()
        if count[name]
    )


def idle_fillers(columns: Columns, thread: int, idle: Spans, windows: Spans) -> tuple[Filler, ...]:
    """Return what a thread does in idle intervals: every function with idle time, most self time first.

    Idle time without any CPU event is a filler without a name. Times are sums over all intervals.

    Args:
        columns: events of the trace.
        thread: index of the thread.
        idle: idle intervals, all within ``windows``.
        windows: intervals in which time on the stack counts.
    """
    stack = _Stack.of(columns, np.flatnonzero(columns.cpu.thread == thread))
    size, outermost = len(columns.names), stack.outermost
    outer = stack.name[outermost]
    shared = idle.overlap(stack.start, stack.end)
    self_us = np.bincount(stack.name, stack.own(shared), size)
    total_us = np.bincount(outer, shared[outermost], size)
    stack_us = np.bincount(outer, windows.overlap(stack.start[outermost], stack.end[outermost]), size)
    depth = np.bincount(outer, (shared * stack.depth)[outermost], size) / np.maximum(total_us, 1e-9)
    kind = np.zeros(size, dtype=np.int64)
    kind[stack.name] = stack.kind
    found = []
    for name in np.flatnonzero(total_us > 0).tolist():
        inner, total, on_stack = (float(time[name]) / 1e3 for time in (self_us, total_us, stack_us))
        kind_name = _KIND_NAMES[int(kind[name])]
        found.append(Filler(columns.names[name], kind_name, inner, total, on_stack, float(depth[name])))
    rest = idle.total / 1e3 - sum(filler.self_ms for filler in found)
    if rest > 1e-6:
        found.append(Filler(NOTHING, "", rest, rest, rest, 0.0))
    return tuple(sorted(found, key=lambda filler: -filler.self_ms))


def _calls(columns: Columns, thread: int) -> Ints:
    cpu = columns.cpu
    return np.flatnonzero((cpu.thread == thread) & ((cpu.kind == OPERATOR) | (cpu.kind == RUNTIME)))


@dataclass(frozen=True, slots=True)
class _Stack:
    """Ranges of one thread with their nesting.

    Args:
        outermost: whether no range around it has the same name: recursion is counted once.
    """

    start: Floats
    end: Floats
    name: Ints
    kind: Ints
    parent: Ints
    depth: Ints
    outermost: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @classmethod
    def of(cls, columns: Columns, rows: Ints) -> _Stack:
        cpu = columns.cpu
        rows = rows[np.lexsort((-cpu.end[rows], cpu.start[rows]))]
        start, end, name = cpu.start[rows], cpu.end[rows], cpu.name[rows]
        parent, depth, end = nesting(start, end)
        return cls(start, end, name, cpu.kind[rows], parent, depth, _outermost(name, parent))

    def own(self, values: Floats) -> Floats:
        """Return a value of each range less the values of its children."""
        child = np.flatnonzero(self.parent >= 0)
        return values - np.bincount(self.parent[child], values[child], len(values))


def _outermost(name: Ints, parent: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return whether no ancestor of a range has its name."""
    found = np.ones(len(name), dtype=bool)
    ancestor = parent.copy()
    while (rows := np.flatnonzero(ancestor >= 0)).size:  # once per level of nesting
        found[rows] &= name[ancestor[rows]] != name[rows]
        ancestor[rows] = parent[ancestor[rows]]
    return found
