"""From the events of a trace to its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from panscan.core import InputError, SettingError
from panscan.inspect.trace.columns import PYTHON, Columns, collect
from panscan.inspect.trace.cpu import cpu_time, operator_spans, operator_times
from panscan.inspect.trace.figures import Filler, StepTime, Summary
from panscan.inspect.trace.gpu import activity_kinds, gpu_times, launches_of, main_thread
from panscan.inspect.trace.intervals import Spans
from panscan.inspect.trace.kernels import gpu_of, kernel_times, product_times
from panscan.inspect.trace.read import TraceFile
from panscan.inspect.trace.steps import PHASE, Windows, phase_times, step_time, step_windows
from panscan.inspect.trace.wording import headline
from panscan.plan.gpus import Gpu
from panscan.settings import nearest

__all__ = ["Summary"]


def summarize(
    events: TraceFile | Iterable[Mapping[str, Any]],
    *,
    name: str | None = None,
    gpu: Gpu | None = None,
    step: str | None = None,
    top: int = 20,
) -> Summary:
    """Return the summary of a trace; reads it once.

    Args:
        events: a trace file (:func:`panscan.inspect.trace.read.open_trace`), or events in Chrome's format.
        name: name of the trace; None: that of the file.
        gpu: limits to compare kernels with; None: those of the GPU that the trace names, where known.
        step: name of the range that begins each step; None: ``panscan.decode`` and others
            (:func:`panscan.inspect.trace.steps.step_windows`).
        top: number of kernels, matrix multiplications and operators.

    Raises:
        InputError: the file cannot be read, or holds no trace or no timed events.
        SettingError: no range or function is named ``step``.
    """
    path = events.path if isinstance(events, TraceFile) else None
    title = name or (path.name if path else "trace")
    columns = collect(events)
    if not len(columns.gpu.start) and not len(columns.cpu.start):
        raise InputError(f"{path or title}: the trace has no timed events: profile at least one step")
    gpu_name, known = gpu_of(events.metadata if isinstance(events, TraceFile) else {})
    if step is not None and step_windows(columns, step) is None:
        functions = {columns.names[index].rpartition(": ")[2] for index in np.unique(columns.cpu.name)}
        raise SettingError(f"--step: no range or function of {title} is named {step!r}{nearest(step, functions)}")
    facts = replace(_summary(columns, gpu or known, step, top), name=title, gpu_name=gpu_name)
    return replace(facts, headline=headline(facts))


def _summary(columns: Columns, gpu: Gpu | None, step: str | None, top: int) -> Summary:
    """Return a summary that lacks the names and the headline."""
    kinds, launches = activity_kinds(columns), launches_of(columns)
    thread = main_thread(columns, launches)
    busy = _busy(columns, thread)
    windows = step_windows(columns, step) or _one_window(columns, busy)
    kernels, others = kernel_times(columns, kinds, gpu, top)
    return Summary(
        name="",
        headline="",
        notes=_notes(columns, windows, gpu),
        span_ms=_end(columns) / 1e3,
        events=len(columns.gpu.start) + len(columns.cpu.start),
        gpu_name=None,
        limits=gpu.label if gpu is not None else None,
        gpus=gpu_times(columns, kinds) if len(columns.gpu.start) else (),
        phases=phase_times(columns, busy, launches),
        steps=None if thread is None else _shorter(step_time(columns, windows, busy, thread, launches), top),
        kernels=kernels,
        other_kernels_ms=others,
        products=product_times(columns, gpu, top),
        cpu=None if thread is None else cpu_time(columns, thread),
        operators=() if thread is None else operator_times(columns, thread, top),
    )


def _busy(columns: Columns, thread: int | None) -> Spans:
    """Return when any GPU is active; without a GPU, when the main thread is in operators."""
    gpu = columns.gpu
    if len(gpu.start) or thread is None:
        return Spans.union(gpu.start, gpu.end)
    return operator_spans(columns, thread)


def _one_window(columns: Columns, busy: Spans) -> Windows:
    """Return one window: from the first to the last activity, or the whole trace if there is none."""
    first, last = (busy.start[:1], busy.end[-1:]) if len(busy.start) else (np.zeros(1), np.array([_end(columns)]))
    return Windows("trace", first, last)


def _end(columns: Columns) -> float:
    return float(max(column.end.max() for column in (columns.gpu, columns.cpu) if len(column.end)))


def _shorter(steps: StepTime, top: int) -> StepTime:
    """Keep the functions with most idle time, by self time and by total."""
    kept = {filler.name for order in ("self_ms", "total_ms") for filler in _most(steps.fillers, order, top)}
    return replace(steps, fillers=tuple(filler for filler in steps.fillers if filler.name in kept))


def _most(fillers: Sequence[Filler], order: str, top: int) -> list[Filler]:
    return sorted(fillers, key=lambda filler: -float(getattr(filler, order)))[:top]


def _notes(columns: Columns, windows: Windows, gpu: Gpu | None) -> tuple[str, ...]:
    """Return what the trace lacks, and what to record to get it."""
    notes = []
    if not len(columns.gpu.start):
        notes.append("no GPU events: busy means that the main thread is in an operator")
    elif not (columns.cpu.correlation >= 0).any():
        notes.append("no runtime calls: host wait is unknown; profile with CPU activity too")
    elif gpu is None:
        notes.append("unknown GPU: name it with --gpu to compare rates with its limits")
    if not any(name.startswith(PHASE) for name in columns.names):
        notes.append("no panscan.* ranges, so no table of phases: panscan profile records them")
    if windows.name == "trace":
        notes.append("no steps found: --step NAME takes the range or function that begins each step")
    if not (columns.cpu.kind == PYTHON).any():
        notes.append("no Python functions: profile with stacks to name the code between operators")
    if columns.skipped or columns.unfinished:
        count = columns.skipped + columns.unfinished
        notes.append(f"{count} event{'s' if count > 1 else ''} ignored: no usable time, or begun and not ended")
    return tuple(notes)
