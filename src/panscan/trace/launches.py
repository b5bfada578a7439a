"""Runtime calls that launch GPU activities, and the threads that make them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from panscan.trace.columns import OPERATOR, RUNTIME, Columns
from panscan.trace.intervals import Ints

__all__ = ["Launches", "launch_calls", "launches_of", "main_thread"]

_LAUNCH = re.compile(r"^(cuda|cu|hip|hipModule|hipExt|hipExtModule|xpu)LaunchKernel|^cudaLaunchCooperativeKernel")
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")


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
