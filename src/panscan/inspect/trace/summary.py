"""From the events of a trace to its summary: times, the most important figure as a sentence, and names to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from panscan.core import InputError, SettingError
from panscan.core.text import clean, count, number_text, percent
from panscan.inspect.trace.columns import PYTHON, RUNTIME, Columns, collect
from panscan.inspect.trace.cpu import NOTHING, calls_on, launches_of, main_thread
from panscan.inspect.trace.gpu import GpuTime, KernelTime, gpu_name, gpu_times, kernel_times
from panscan.inspect.trace.intervals import Spans
from panscan.inspect.trace.read import TraceFile
from panscan.inspect.trace.steps import PHASE, PhaseTime, StepTime, Windows, phase_times, step_time, step_windows
from panscan.settings import nearest

_LONGEST = 60  # characters of a name
_IDLE_WORTH_WORDS = 0.05  # share of the step
_COMPILED = re.compile(r"Call CompiledFxGraph|Torch-Compiled Region")
_PYTHON = re.compile(r"^(?P<path>.*[\\/])?(?P<file>[^\\/]+)\((?P<line>\d+)\): (?P<function>.+)$")
_FUNCTOR = re.compile(r"\b(\w*Functor\w*|\w+_kernel_(?:cuda|impl)|\w+Ops)\b")
_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")
_WAITS = re.compile(r"(Synchronize|EventQuery|StreamQuery|aten::item|aten::_local_scalar_dense)")


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one trace; times in milliseconds unless a name says otherwise.

    Args:
        name: name of the file.
        headline: one sentence: the most important figure.
        notes: missing parts of the trace, and how to record them.
        span_ms: time from the first to the last event.
        events: number of timed events.
        gpu_name: name of the first GPU, if the trace has it.
        gpus: one per GPU; empty: no GPU events.
        phases: by phase, in the order of their start; empty: no ``panscan.*`` ranges.
        steps: the mean decode step.
        kernels: GPU activities by name, longest total first; without a GPU: operators on the main thread.
        other_kernels_ms: time of all others.
    """

    name: str
    headline: str
    notes: tuple[str, ...]
    span_ms: float
    events: int
    gpu_name: str | None
    gpus: tuple[GpuTime, ...]
    phases: tuple[PhaseTime, ...]
    steps: StepTime | None
    kernels: tuple[KernelTime, ...]
    other_kernels_ms: float


def summarize(
    events: TraceFile | Iterable[Mapping[str, Any]],
    *,
    name: str | None = None,
    step: str | None = None,
    top: int = 20,
) -> Summary:
    """Return the summary of a trace; reads it once.

    Args:
        events: a trace file, or events in Chrome's format.
        name: name of the trace; None: that of the file.
        step: name of the range that begins each step; None: ``panscan.decode`` and others
            (:func:`panscan.inspect.trace.steps.step_windows`).
        top: number of kernels.

    Raises:
        InputError: the file cannot be read, or holds no trace or no timed events.
        SettingError: no range or function is named ``step``.
    """
    file = events if isinstance(events, TraceFile) else None
    title = name or (file.path.name if file else "trace")
    columns = collect(events)
    if not columns.gpu and not columns.cpu:
        raise InputError(f"{file.path if file else title}: the trace has no timed events: profile at least one step")
    launches = launches_of(columns)
    thread = main_thread(columns, launches)
    rows = calls_on(columns, -1 if thread is None else thread)
    if columns.gpu:
        busy = Spans.union(columns.gpu.start, columns.gpu.end)
    else:
        busy = Spans.union(columns.cpu.start[rows], columns.cpu.end[rows])
    windows = _windows_of(columns, step, busy, title)
    kernels, others = kernel_times(columns, thread, top)
    summary = Summary(
        name=title,
        headline="",
        notes=_notes(columns, windows),
        span_ms=_last_end(columns) / 1e3,
        events=len(columns.gpu) + len(columns.cpu),
        gpu_name=gpu_name(file.devices if file else None),
        gpus=gpu_times(columns),
        phases=phase_times(columns, busy, launches),
        steps=None if thread is None else step_time(columns, windows, busy, thread, launches, top),
        kernels=kernels,
        other_kernels_ms=others,
    )
    return replace(summary, headline=_headline(summary))


def _windows_of(columns: Columns, step: str | None, busy: Spans, title: str) -> Windows:
    """Return the windows of the steps; without steps, one from the first to the last activity."""
    if (windows := step_windows(columns, step)) is not None:
        return windows
    if step is not None:
        functions = {columns.names[index].rpartition(": ")[2] for index in np.unique(columns.cpu.name)}
        raise SettingError(f"--step: no range or function of {title} is named {step!r}{nearest(step, functions)}")
    if not len(busy.start):
        return Windows("trace", np.zeros(1), np.array([_last_end(columns)]))
    return Windows("trace", busy.start[:1], busy.end[-1:])


def _last_end(columns: Columns) -> float:
    return float(max(events.end.max() for events in (columns.gpu, columns.cpu) if events))


def _notes(columns: Columns, windows: Windows) -> tuple[str, ...]:
    """Return what the trace lacks, and what to record to get it."""
    cpu, on_gpu = columns.cpu, bool(columns.gpu)
    launched = bool(((cpu.kind == RUNTIME) & (cpu.correlation >= 0)).any())
    lacking = {
        "no GPU events: busy means that the main thread is in an operator": not on_gpu,
        "no runtime calls: host wait is unknown; profile with CPU activity too": on_gpu and not launched,
        "no panscan.* ranges, so no table of phases: panscan profile records them": not any(
            name.startswith(PHASE) for name in columns.names
        ),
        "no steps found: --step NAME takes the range or function that begins each step": windows.name == "trace",
        "no Python functions: profile with stacks to name the code between operators": not (cpu.kind == PYTHON).any(),
        f"{count(columns.skipped, 'event')} ignored: no usable time": columns.skipped > 0,
    }
    return tuple(note for note, applies in lacking.items() if applies)


def _headline(summary: Summary) -> str:
    """Return the most important figure of a trace as one sentence."""
    steps, kernels, one = summary.steps, summary.kernels, len(summary.gpus) == 1
    if steps is None:
        active = sum(gpu.busy_ms for gpu in summary.gpus)
        return f"GPU events only: {milliseconds(active)} of activity in {milliseconds(summary.span_ms)}"
    span = f"{milliseconds(steps.step_ms)} {per_step(steps)}"
    if not summary.gpus:
        most = f"; most self time in the trace: {kernels[0].name} ({milliseconds(kernels[0].total_ms)})" * bool(kernels)
        return f"Without GPU events: the main thread is in operators for {milliseconds(steps.busy_ms)} of {span}{most}"
    if steps.idle_ms < _IDLE_WORTH_WORDS * steps.step_ms:
        most = f"; longest kernel in total: {short_name(kernels[0].name)}" if kernels else ""
        share = percent(steps.busy_ms / max(steps.step_ms, 1e-12))
        return f"{'The' if one else 'A'} GPU is busy for {share} of {span}{most}"
    text = f"{'The GPU is' if one else 'All GPUs are'} idle for {milliseconds(steps.idle_ms)} of {span}"
    if (cause := steps.cause) is not None:
        verb = "waits in" if _WAITS.search(cause.name) else "runs"
        return f"{text}; {milliseconds(cause.total_ms)} of that while the CPU {verb} {_function(cause.name)}"
    if not steps.fillers:
        return text
    first = steps.fillers[0]
    part = f"{text}; {milliseconds(first.self_ms)} of that"
    if first.name == NOTHING:
        return f"{part} with no CPU event recorded"
    where = " itself" if first.kind in ("annotation", "python") else ""
    return f"{part} in {_function(first.name)}{where}, more than in any other function"


def per_step(steps: StepTime) -> str:
    """Return what a mean step is the mean of, in words."""
    return f"per {steps.name}" if steps.name != "trace" else "from the first to the last activity"


def milliseconds(value: float) -> str:
    """Return milliseconds with their unit; microseconds below 0.1 ms."""
    return f"{number_text(value)} ms" if value >= 0.1 or value == 0 else f"{number_text(1e3 * value)} us"


def _function(name: str) -> str:
    """Return a Python function's name without its file; other names unchanged, shortened."""
    match = _PYTHON.match(name)
    return clean(match["function"] if match else short_name(name))


def short_name(name: str) -> str:
    """Return a name to read: no paths, template arguments or parameters, except for the functor of a generic kernel."""
    name = clean(name)
    if _COMPILED.search(name):
        return "compiled graph"  # what the compiler calls it is a hash of its code
    if match := _PYTHON.match(name):
        return f"{match['function']} ({match['file']}:{match['line']})"
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    if not name.startswith(("Memcpy", "Memset", "<", "nn.Module")):
        before = ""
        while before != plain:
            before, plain = plain, _BRACKETS.sub("", plain)
        plain = plain.rpartition("at::native::")[2]
    functors = _FUNCTOR.findall(name.partition("<")[2])
    if functors and functors[-1] not in plain:
        plain = f"{cut_middle(plain, _LONGEST - 24)} ({functors[-1][:24]})"
    return cut_middle(plain.strip() or name)


def cut_middle(text: str, most: int = _LONGEST) -> str:
    """Shorten a text to a number of characters; an ellipsis replaces the middle."""
    return text if len(text) <= most else f"{text[: 2 * most // 3]}…{text[-(most - 2 * most // 3 - 1) :]}"
