"""The GPU's side of a trace: busy and idle time, kernels, and matrix multiplications against the GPU's limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from panscan.inspect.trace.columns import OPERATOR, Columns, Product
from panscan.inspect.trace.cpu import Stack, calls_on, launch_calls
from panscan.inspect.trace.intervals import Spans
from panscan.plan.gpus import Gpu, reported_gpu


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


@dataclass(frozen=True, slots=True)
class ProductTime:
    """All calls of one matrix multiplication with recorded shapes.

    Args:
        label: operator, sizes and type.
        count: number of calls.
        total_ms: time of their kernels; without a GPU: of the operators.
        flops_per_s: achieved rate.
        bytes_per_s: achieved bandwidth, each factor and the result counted once.
        bound: "compute" or "bandwidth", what limits it on this GPU; None: unknown GPU.
        ceiling_share: least time at the GPU's limits over the measured time; None: unknown GPU.
    """

    label: str
    count: int
    total_ms: float
    flops_per_s: float
    bytes_per_s: float
    bound: str | None
    ceiling_share: float | None


def gpu_of(devices: object) -> tuple[str | None, Gpu | None]:
    """Return the name of the first of a trace's ``deviceProperties`` and its data sheet, as far as known."""
    first = devices[0] if isinstance(devices, list) and devices else None
    if not isinstance(first, dict) or not isinstance(name := first.get("name"), str):
        return None, None
    return name, reported_gpu(name, first.get("totalGlobalMem"))


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
    if len(columns.gpu.start) or thread is None:
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


def product_times(columns: Columns, gpu: Gpu | None, most: int) -> tuple[ProductTime, ...]:
    """Return the slowest matrix multiplications; on a trace without GPU events, the time of the operators.

    Args:
        columns: events of the trace.
        gpu: limits to compare with; without GPU events they are not used.
        most: number of matrix multiplications.
    """
    events, size = columns.gpu if len(columns.gpu.start) else columns.cpu, len(columns.products)
    product, time = columns.product_indices(events), events.end - events.start
    if events is columns.cpu:
        gpu, product = None, np.where(events.kind == OPERATOR, product, size)
    rows = np.flatnonzero(product < size)
    calls = np.unique(np.stack((product[rows], events.external[rows])), axis=1)[0]
    total, count = np.bincount(product[rows], time[rows], size), np.bincount(calls, minlength=size)
    order = [index for index in np.argsort(-total, kind="stable")[:most].tolist() if total[index] > 0]
    return tuple(_product_time(columns.products[i], int(count[i]), float(total[i]) / 1e6, gpu) for i in order)


def _product_time(product: Product, count: int, seconds: float, gpu: Gpu | None) -> ProductTime:
    """Return the rates of a product, and the one that limits it: the one that takes longer at the GPU's limits."""
    bound, least = None, None
    if gpu is not None and product.dtype in gpu.flops_per_s:
        bandwidth, compute = product.bytes / gpu.bytes_per_s, product.flops / gpu.flops_per_s[product.dtype]
        bound, least = ("compute", compute) if compute >= bandwidth else ("bandwidth", bandwidth)
    return ProductTime(
        label=product.label,
        count=count,
        total_ms=seconds * 1e3,
        flops_per_s=count * product.flops / seconds,
        bytes_per_s=count * product.bytes / seconds,
        bound=bound,
        ceiling_share=None if least is None else count * least / seconds,
    )
