"""The tables of a summary, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from panscan.analysis.cells import number_text
from panscan.report.formatting import percent
from panscan.trace.figures import GpuTime, KernelTime, StepTime, Summary
from panscan.trace.wording import bandwidth, ceiling, filler_name, milliseconds, rate, short_name

__all__ = ["Cell", "FigureTable", "tables_of"]

_SMALLEST_SHARE = 0.05  # of the idle time: functions on the stack with less are not shown
_FILLERS = 10


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Args:
        text: what is shown.
        full: the whole name where ``text`` is shortened; empty: it is not.
        value: what a sortable table sorts by; None: the text.
    """

    text: str
    full: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class FigureTable:
    """One table: the first column is text, all others are figures.

    Args:
        title: heading above it.
        headings: of the columns.
        rows: cells, as many per row as there are headings.
        note: one sentence below it; empty: none.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def tables_of(summary: Summary, *, top: int | None = None) -> Iterator[FigureTable]:
    """Yield the tables of a summary that have rows.

    Args:
        summary: of one trace.
        top: number of rows of kernels, products and operators; None: all that the summary holds.
    """
    for table in (
        _phases(summary), _steps(summary), _gpus(summary.gpus), _fillers(summary), _callers(summary),
        _kernels(summary, top), _products(summary, top), _operators(summary, top),
    ):  # fmt: skip
        if table.rows:
            yield table


def _ms(value: float) -> Cell:
    return Cell(number_text(value), value=value)


def _share(part: float, whole: float) -> Cell:
    share = part / whole if whole > 0 else 0.0
    return Cell(percent(share), value=share)


def _phases(summary: Summary) -> FigureTable:
    on = "GPU" if summary.gpus else "CPU"
    rows = tuple(
        (
            Cell(phase.name), Cell(str(phase.count), value=phase.count), _ms(phase.total_ms), _ms(phase.busy_ms),
            _ms(phase.idle_ms), _share(phase.idle_ms, phase.total_ms), Cell(str(phase.launches), value=phase.launches),
        )
        for phase in summary.phases
    )  # fmt: skip
    headings = ("phase", "ranges", "ms", f"{on} busy ms", f"{on} idle ms", "idle", "launches")
    return FigureTable("Time by phase", headings, rows)


def _steps(summary: Summary) -> FigureTable:
    steps = summary.steps
    if steps is None or steps.name == "trace":
        return FigureTable("", (), ())
    pairs = [
        ("wall time", milliseconds(steps.step_ms)),
        ("busy", milliseconds(steps.busy_ms)),
        ("idle", f"{milliseconds(steps.idle_ms)}"),
        ("longest idle stretch", milliseconds(steps.gap_ms)),
    ]
    if summary.gpus:
        pairs += [
            ("kernel launches", number_text(steps.kernel_launches)),
            ("graph launches", number_text(steps.graph_launches)),
            ("kernels", number_text(steps.kernels)),
            ("copies and fills", number_text(steps.copies)),
        ]
    title = f"Mean {steps.name} of {steps.count}"
    return FigureTable(title, ("", "mean"), tuple((Cell(name), Cell(text)) for name, text in pairs))


def _gpus(gpus: Sequence[GpuTime]) -> FigureTable:
    rows = tuple(
        (
            Cell(f"GPU {gpu.device}"), _ms(gpu.span_ms), _ms(gpu.compute_ms), _ms(gpu.communication_ms),
            _ms(gpu.memory_ms), _ms(gpu.idle_ms), _share(gpu.idle_ms, gpu.span_ms), _ms(gpu.idle.host_wait_ms),
            _ms(gpu.idle.kernel_wait_ms), _ms(gpu.idle.other_ms),
        )
        for gpu in gpus
    )  # fmt: skip
    headings = (
        "ms", "span", "compute", "communication", "memory", "idle", "idle", "host wait", "kernel wait", "other",
    )  # fmt: skip
    note = "Host wait, kernel wait and other are the parts of the idle time."
    return FigureTable("GPU time from the first to the last activity", headings, rows, note)


def _fillers(summary: Summary) -> FigureTable:
    steps = summary.steps
    if steps is None:
        return FigureTable("", (), ())
    named = [each for each in steps.fillers if each.self_ms >= 0.005 * steps.idle_ms > 0][:_FILLERS]
    rows = tuple(
        (Cell(filler_name(each), full=each.name), _ms(each.self_ms), _share(each.self_ms, steps.idle_ms))
        for each in named
    )
    return FigureTable(f"{_idle_title(summary, steps)}: innermost function", ("function", "ms", "of the idle"), rows)


def _callers(summary: Summary) -> FigureTable:
    steps = summary.steps
    if steps is None:
        return FigureTable("", (), ())
    large = [each for each in steps.fillers if each.depth >= 0 and each.name and each.total_ms > each.self_ms]
    large = [each for each in large if each.total_ms >= _SMALLEST_SHARE * steps.idle_ms > 0]
    large = sorted(large, key=lambda each: (-each.total_ms, each.depth))[: 2 * _FILLERS]
    rows = tuple(
        (Cell(filler_name(each).removesuffix(" (outside operators)"), full=each.name), _ms(each.total_ms),
         _share(each.total_ms, steps.idle_ms))
        for each in large
    )  # fmt: skip
    title = f"{_idle_title(summary, steps)}: functions with what they call"
    return FigureTable(title, ("function", "ms", "of the idle"), rows)


def _idle_title(summary: Summary, steps: StepTime) -> str:
    per = "" if steps.name == "trace" else f" per {steps.name}"
    return f"CPU while the GPU is idle{per}" if summary.gpus else f"CPU outside operators{per}"


def _kernels(summary: Summary, top: int | None) -> FigureTable:
    known = any(each.bytes_per_s or each.flops_per_s for each in summary.kernels[:top])
    rates = ("GB/s", "TFLOP/s", "of the limit") if known else ()
    headings = ("kernel", "type", "count", "ms", "mean us", "share", *rates)
    rows = tuple(_kernel(each, known) for each in summary.kernels[:top])
    others = summary.other_kernels_ms + sum(each.total_ms for each in summary.kernels[len(rows) :])
    note = f"All others: {milliseconds(others)}." if others > 1e-6 else ""
    return FigureTable("Kernels with most time", headings, rows, note)


def _kernel(each: KernelTime, known: bool) -> tuple[Cell, ...]:
    cells = (
        Cell(short_name(each.name), full=each.name), Cell(each.kind), Cell(str(each.count), value=each.count),
        _ms(each.total_ms), _ms(each.mean_us), Cell(percent(each.share), value=each.share),
    )  # fmt: skip
    if not known:
        return cells
    figures = (bandwidth(each.bytes_per_s), rate(each.flops_per_s), ceiling(each.ceiling_share))
    return cells + tuple(Cell(text.partition(" ")[0]) for text in figures)


def _products(summary: Summary, top: int | None) -> FigureTable:
    rows = tuple(
        (
            Cell(each.label), Cell(str(each.count), value=each.count), _ms(each.total_ms),
            _ms(each.bytes_per_s / 1e9), _ms(each.flops_per_s / 1e12), Cell(each.bound or ""),
            Cell(ceiling(each.ceiling_share)),
        )
        for each in summary.products[:top]
    )  # fmt: skip
    headings = ("product", "count", "ms", "GB/s", "TFLOP/s", "bound", "of the limit")
    note = f"Limits: data sheet of {summary.gpu_name}." if any(each.bound for each in summary.products) else ""
    return FigureTable("Matrix products, from recorded shapes", headings, rows, note)


def _operators(summary: Summary, top: int | None) -> FigureTable:
    rows = tuple(
        (Cell(short_name(each.name), full=each.name), Cell(str(each.count), value=each.count), _ms(each.self_ms),
         _ms(each.total_ms))
        for each in summary.operators[:top]
    )  # fmt: skip
    cpu = summary.cpu
    note = ""
    if cpu is not None:
        note = (
            f"Thread {cpu.thread}: busy for {milliseconds(cpu.busy_ms)} of {milliseconds(cpu.span_ms)}, "
            f"idle for {milliseconds(cpu.idle_ms)}."
        )
    return FigureTable("CPU operators by self time", ("operator", "count", "self ms", "total ms"), rows, note)
