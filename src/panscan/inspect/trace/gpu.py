"""The GPU's side of a trace: busy and idle time, and kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from panscan.inspect.trace.columns import Columns
from panscan.inspect.trace.cpu import Stack, calls_on, launch_calls
from panscan.inspect.trace.intervals import Spans


@dataclass(frozen=True, slots=True)
class GpuTime:
    """One GPU from its first to its last activity.

    Args:
        device: number of the GPU.
        span_ms: time from the start of the first activity to the end of the last.
        busy_ms: time with a kernel, copy or fill.
        idle_ms: the rest.
        host_wait_ms: idle time before an activity that was launched only after the last one had ended.
    """

    device: str
    span_ms: float
    busy_ms: float
    idle_ms: float
    host_wait_ms: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All GPU activities of one name; without a GPU: all calls of one operator on the main thread.

    Args:
        name: name of the kernel, copy, fill or operator.
        count: number of activities.
        total_ms: sum of their durations; of an operator the time outside other operators that it calls.
        mean_us: mean of these in microseconds.
        share: part of the sum over all activities.
    """

    name: str
    count: int
    total_ms: float
    mean_us: float
    share: float


def gpu_name(devices: object) -> str | None:
    """Return the name of the first of a trace's ``deviceProperties``; None if there is none."""
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def gpu_times(columns: Columns) -> tuple[GpuTime, ...]:
    """Return the time of each GPU, by number."""
    calls = launch_calls(columns)
    launched = np.full(len(calls), np.nan)
    launched[calls >= 0] = columns.cpu.start[calls[calls >= 0]]
    times = []
    for index, device in sorted(enumerate(columns.gpu.lanes), key=lambda item: (len(item[1]), item[1])):
        rows = np.flatnonzero(columns.gpu.lane == index)
        start = columns.gpu.start[rows]
        busy = Spans.union(start, columns.gpu.end[rows])
        span, gaps = float(busy.end[-1] - busy.start[0]), busy.start[1:] - busy.end[:-1]
        ends_gap = np.searchsorted(start, busy.start[1:], side="left")  # activities are ordered by start
        host_wait = float(gaps[launched[rows][ends_gap] > busy.end[:-1]].sum())
        times.append(GpuTime(device, span / 1e3, busy.total / 1e3, (span - busy.total) / 1e3, host_wait / 1e3))
    return tuple(times)


def kernel_times(columns: Columns, thread: int | None, most: int) -> tuple[tuple[KernelTime, ...], float]:
    """Return the names that take longest, and the milliseconds of all others.

    Args:
        columns: events of the trace.
        thread: the main thread, whose operators stand for kernels in a trace without GPU events.
        most: number of names.
    """
    if columns.gpu or thread is None:
        name, time = columns.gpu.name, columns.gpu.end - columns.gpu.start
    else:
        stack = Stack.of(columns, calls_on(columns, thread))
        name, time = stack.name, stack.without_children(stack.end - stack.start)
    size = len(columns.names)
    total, count = np.bincount(name, time, size), np.bincount(name, minlength=size)
    every = float(total.sum())
    kernels = tuple(
        KernelTime(columns.names[index], calls, us / 1e3, us / calls, us / max(every, 1e-9))
        for index in np.argsort(-total, kind="stable")[:most].tolist()
        for calls, us in [(int(count[index]), float(total[index]))]
        if calls
    )
    return kernels, every / 1e3 - sum(kernel.total_ms for kernel in kernels)
