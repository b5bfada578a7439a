"""The CPU's side of a trace: its main thread, the functions on the stack of each thread, and the calls that launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from panscan.inspect.trace.columns import OPERATOR, RUNTIME, Columns
from panscan.inspect.trace.intervals import Flags, Floats, Ints, Spans, nesting

NOTHING = ""
"""Name of the filler for idle time without any CPU event."""
_KIND_NAMES = ("operator", "runtime", "annotation", "python")
_LAUNCH = re.compile(r"^(cuda|cu|hip|hipModule|hipExt|hipExtModule|xpu)LaunchKernel|^cudaLaunchCooperativeKernel")
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")


class Launches(NamedTuple):
    """Kernel and graph launches by the CPU, as indices into the CPU columns, in order of their start."""

    kernels: Ints
    graphs: Ints


@dataclass(frozen=True, slots=True)
class Filler:
    """A CPU function that runs while the GPU is idle; per step if the trace has steps.

    Args:
        name: operator, Python function, runtime call or annotation; empty: nothing was recorded.
        kind: "operator", "runtime", "annotation", "python" or "" (nothing recorded).
        self_ms: idle time while this function is innermost.
        total_ms: idle time while it is on the stack.
        stack_ms: time on the stack, whether the GPU is idle or not.
        depth: mean number of functions around it.
    """

    name: str
    kind: str
    self_ms: float
    total_ms: float
    stack_ms: float
    depth: float


def launches_of(columns: Columns) -> Launches:
    """Return the runtime calls that launch kernels and graphs."""

    def calls_of(pattern: re.Pattern[str]) -> Ints:
        wanted = np.array([bool(pattern.match(name)) for name in columns.names] or [False])
        rows = np.flatnonzero((columns.cpu.kind == RUNTIME) & wanted[columns.cpu.name])
        return rows[np.argsort(columns.cpu.start[rows], kind="stable")]

    return Launches(calls_of(_LAUNCH), calls_of(_GRAPH_LAUNCH))


def launch_calls(columns: Columns) -> Ints:
    """Return the runtime call that launched each GPU activity, as indices into the CPU columns; -1: unknown."""
    calls = np.flatnonzero((columns.cpu.kind == RUNTIME) & (columns.cpu.correlation >= 0))
    calls = calls[np.argsort(columns.cpu.correlation[calls], kind="stable")]
    ids = columns.cpu.correlation[calls]
    if not len(ids):
        return np.full(len(columns.gpu), -1, dtype=np.int64)
    nearest = np.minimum(np.searchsorted(ids, columns.gpu.correlation), len(ids) - 1)
    return np.where(ids[nearest] == columns.gpu.correlation, calls[nearest], -1)


def main_thread(columns: Columns, launches: Launches) -> int | None:
    """Return the thread with the most kernel and graph launches, else the one that is longest in operators."""
    cpu = columns.cpu
    for rows in (np.concatenate(launches), np.flatnonzero(cpu.kind == RUNTIME)):
        if len(rows):
            return int(np.bincount(cpu.lane[rows]).argmax())
    rows = np.flatnonzero(cpu.kind == OPERATOR)
    rows = rows if len(rows) else np.arange(len(cpu))
    return int(np.bincount(cpu.lane[rows], (cpu.end - cpu.start)[rows]).argmax()) if len(rows) else None


def calls_on(columns: Columns, thread: int) -> Ints:
    """Return the operators and runtime calls of a thread, as indices into the CPU columns."""
    return np.flatnonzero((columns.cpu.lane == thread) & (columns.cpu.kind <= RUNTIME))


@dataclass(frozen=True, slots=True)
class Stack:
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
    outermost: Flags

    @classmethod
    def of(cls, columns: Columns, rows: Ints) -> Stack:
        """Return the stack of one thread's ranges, given as indices into the CPU columns."""
        cpu = columns.cpu
        rows = rows[np.lexsort((-cpu.end[rows], cpu.start[rows]))]
        start, name = cpu.start[rows], cpu.name[rows]
        parent, depth, end = nesting(start, cpu.end[rows])
        outermost = np.ones(len(name), dtype=bool)
        ancestor = parent.copy()
        while (inner := np.flatnonzero(ancestor >= 0)).size:  # once per level of nesting
            outermost[inner] &= name[ancestor[inner]] != name[inner]
            ancestor[inner] = parent[ancestor[inner]]
        return cls(start, end, name, cpu.kind[rows], parent, depth, outermost)

    def without_children(self, values: Floats) -> Floats:
        """Return a value of each range less the values of its children."""
        child = np.flatnonzero(self.parent >= 0)
        return values - np.bincount(self.parent[child], values[child], len(values))


def idle_fillers(columns: Columns, idle: Spans, threads: Ints, windows: Spans, steps: int) -> tuple[Filler, ...]:
    """Return what the CPU does in idle time: every function with idle time, most self time first.

    Idle time without any CPU event is a filler without a name. A function on several threads is one filler.

    Args:
        columns: events of the trace.
        idle: idle intervals.
        threads: the thread that each interval belongs to.
        windows: intervals in which time counts.
        steps: number by which times are divided.
    """
    size, nothing = len(columns.names), 0.0
    kind = np.zeros(size, dtype=np.int64)
    self_us, total_us, stack_us, depth, most = np.zeros((5, size))
    for thread in np.unique(threads).tolist():
        gaps = Spans(idle.start[threads == thread], idle.end[threads == thread]).within(windows)
        stack = Stack.of(columns, np.flatnonzero(columns.cpu.lane == thread))
        shared, outermost = gaps.overlap(stack.start, stack.end), stack.outermost
        inner, total, on_stack, levels = (
            np.bincount(stack.name[rows], values[rows], size)
            for rows, values in (
                (slice(None), stack.without_children(shared)),
                (outermost, shared),
                (outermost, windows.overlap(stack.start, stack.end)),
                (outermost, shared * stack.depth),
            )
        )
        kinds = kind.copy()
        kinds[stack.name] = stack.kind
        larger = total > most
        kind, depth = np.where(larger, kinds, kind), np.where(larger, levels / np.maximum(total, 1e-9), depth)
        self_us, total_us, most = self_us + inner, total_us + total, np.maximum(most, total)
        stack_us = np.maximum(stack_us, on_stack)
        nothing += gaps.total - float(inner.sum())
    fillers = []
    for name in np.flatnonzero(total_us > 0).tolist():
        inner_ms, total_ms, stack_ms = (float(times[name]) / 1e3 / steps for times in (self_us, total_us, stack_us))
        kind_name = _KIND_NAMES[kind[name]]
        fillers.append(Filler(columns.names[name], kind_name, inner_ms, total_ms, stack_ms, float(depth[name])))
    if nothing > 1e-3:
        rest = nothing / 1e3 / steps
        fillers.append(Filler(NOTHING, "", rest, rest, rest, 0.0))
    return tuple(sorted(fillers, key=lambda filler: -filler.self_ms))
