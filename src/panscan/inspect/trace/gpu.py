"""GPU time with the definitions of HolisticTraceAnalysis, and the calls that launch GPU activities."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from panscan.inspect.trace.columns import KERNEL, OPERATOR, RUNTIME, Columns
from panscan.inspect.trace.figures import GpuTime, IdleSplit
from panscan.inspect.trace.intervals import Floats, Ints, Spans

KINDS = ("compute", "communication", "memory")
_COMPUTE, _COMMUNICATION, _MEMORY = range(3)
_COLLECTIVE = re.compile(
    r"^(nccl|rccl|hccl)|nccl(Dev)?Kernel|cross_device_reduce|(one|two)_shot_all_?reduce|multimem_(all|one_shot)|nvshmem",
    re.IGNORECASE,
)
_COPY = re.compile(r"^(hip)?mem(cpy|set)", re.IGNORECASE)
_LAUNCH = re.compile(r"^(cuda|cu|hip|hipModule|hipExt|hipExtModule|xpu)LaunchKernel|^cudaLaunchCooperativeKernel")
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
_KERNEL_WAIT_US = 30.0  # HolisticTraceAnalysis's consecutive_kernel_delay, which it compares with microseconds


def activity_kinds(columns: Columns) -> Ints:
    """Return the kind of each GPU activity, as indices into :data:`KINDS`."""
    by_name = np.array([_kind(name) for name in columns.names] or [0], dtype=np.int64)
    return np.where(columns.gpu.kind == KERNEL, by_name[columns.gpu.name], _MEMORY)


def _kind(name: str) -> int:
    if _COLLECTIVE.search(name):
        return _COMMUNICATION
    return _MEMORY if _COPY.match(name) else _COMPUTE


def gpu_times(columns: Columns, kinds: Ints) -> tuple[GpuTime, ...]:
    """Return the breakdown of each GPU, in the order of their first activity.

    Args:
        columns: events of the trace.
        kinds: kind of each activity (:func:`activity_kinds`).
    """
    lanes = columns.gpu.lanes
    calls = launch_calls(columns)
    launched = np.full(len(calls), np.nan)
    launched[calls >= 0] = columns.cpu.start[calls[calls >= 0]]
    found = []
    for device in sorted({device for device, _ in lanes}, key=lambda text: (len(text), text)):
        own = [index for index, (lane, _) in enumerate(lanes) if lane == device]
        rows = np.flatnonzero(np.isin(columns.gpu.lane, own))
        found.append(_gpu_time(columns, device, rows, kinds[rows], launched[rows]))
    return tuple(found)


def _gpu_time(columns: Columns, device: str, rows: Ints, kinds: Ints, launched: Floats) -> GpuTime:
    start, end, lane = columns.gpu.start[rows], columns.gpu.end[rows], columns.gpu.lane[rows]
    busy = Spans.union(start, end)
    compute = Spans.union(start[kinds == _COMPUTE], end[kinds == _COMPUTE])
    both = Spans.union(start[kinds != _MEMORY], end[kinds != _MEMORY])
    span = float(busy.end[-1] - busy.start[0])
    streams = {columns.gpu.lanes[index][1]: lane == index for index in np.unique(lane).tolist()}
    return GpuTime(
        device=device,
        streams=len(streams),
        activities=len(rows),
        span_ms=span / 1e3,
        compute_ms=compute.total / 1e3,
        communication_ms=(both.total - compute.total) / 1e3,
        memory_ms=(busy.total - both.total) / 1e3,
        idle_ms=(span - busy.total) / 1e3,
        idle=_idle_of_gpu(start, launched, busy),
        idle_by_stream={name: _idle_of_stream(start[own], end[own], launched[own]) for name, own in streams.items()},
    )


def _idle_of_gpu(start: Floats, launched: Floats, busy: Spans) -> IdleSplit:
    """Split the gaps between busy intervals; the activity that ends a gap decides its cause."""
    ends_gap = np.searchsorted(start, busy.start[1:], side="left")  # activities are ordered by start
    return _idle_split(busy.start[1:] - busy.end[:-1], launched[ends_gap] > busy.end[:-1])


def _idle_of_stream(start: Floats, end: Floats, launched: Floats) -> IdleSplit:
    """Split the gaps between the consecutive activities of one stream."""
    return _idle_split(start[1:] - end[:-1], launched[1:] > end[:-1])


def _idle_split(gaps: Floats, host_wait: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> IdleSplit:
    kernel_wait = ~host_wait & (gaps < _KERNEL_WAIT_US)
    other = ~host_wait & ~kernel_wait
    return IdleSplit(*(float(gaps[cause].sum()) / 1e3 for cause in (host_wait, kernel_wait, other)))


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernel and graph launches by the CPU, as indices into the CPU columns, in order of their start."""

    kernels: Ints
    graphs: Ints


def launches_of(columns: Columns) -> Launches:
    """Return the runtime calls that launch kernels and graphs."""
    kernel = np.array([bool(_LAUNCH.match(name)) for name in columns.names] or [False])
    graph = np.array([bool(_GRAPH_LAUNCH.match(name)) for name in columns.names] or [False])
    runtime = columns.cpu.kind == RUNTIME

    def ordered(wanted: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Ints:
        rows = np.flatnonzero(runtime & wanted[columns.cpu.name])
        return rows[np.argsort(columns.cpu.start[rows], kind="stable")]

    return Launches(ordered(kernel), ordered(graph))


def launch_calls(columns: Columns) -> Ints:
    """Return the runtime call that launched each activity, as indices into the CPU columns; -1: not in the trace."""
    calls = np.flatnonzero(columns.cpu.correlation >= 0)
    calls = calls[np.argsort(columns.cpu.correlation[calls], kind="stable")]
    ids = columns.cpu.correlation[calls]
    if not len(ids):
        return np.full(len(columns.gpu.start), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(ids, columns.gpu.correlation), len(ids) - 1)
    return np.where(ids[at] == columns.gpu.correlation, calls[at], -1)


def main_thread(columns: Columns, launches: Launches) -> int | None:
    """Return the thread with the most kernel and graph launches, else the one that is longest in operators."""
    cpu = columns.cpu
    if not len(cpu.start):
        return None
    for rows in (np.concatenate((launches.kernels, launches.graphs)), np.flatnonzero(cpu.kind == RUNTIME)):
        if len(rows):
            return int(np.bincount(cpu.thread[rows]).argmax())
    rows = np.flatnonzero(cpu.kind == OPERATOR)
    if not len(rows):
        rows = np.arange(len(cpu.start))
    return int(np.bincount(cpu.thread[rows], (cpu.end - cpu.start)[rows]).argmax())
