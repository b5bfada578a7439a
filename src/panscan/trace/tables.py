"""The tables of a summary, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from panscan.analysis.cells import number_text
from panscan.report.formatting import percent
from panscan.trace.figures import GpuTime, KernelTime, StepTime, Summary
from panscan.trace.wording import bandwidth, ceiling, filler_name, milliseconds, rate, short_name, short_names

__all__ = ["FigureTable", "TableCell", "tables_of"]

_SMALLEST_SHARE = 0.05  # of the idle time: functions on the stack with less are not shown
_FILLERS = 10


@dataclass(frozen=True, slots=True)
class TableCell:
    """One cell of a table.

    Args:
        text: displayed text.
        full: the whole name where ``text`` is shortened; empty: it is not.
        value: sort key in a sortable table; None: the text.
    """

    text: str
    full: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class FigureTable:
    """One table: the first column is text, all others are figures.

    Args:
        title: heading above it.
        headings: headings of the columns.
        rows: cells, as many per row as there are headings.
        note: one sentence below it; empty: none.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""


def tables_of(summary: Summary, *, top: int | None = None) -> Iterator[FigureTable]:
    """Yield the tables of a summary that have rows.

    Args:
        summary: summary of one trace.
        top: number of rows of kernels, matrix multiplications and operators; None: all rows of the summary.
    """
    for table in (
        _phases(summary),
        _steps(summary),
        _gpus(summary.gpus),
        _fillers(summary),
        _callers(summary),
        _kernels(summary, top),
        _products(summary, top),
        _operators(summary, top),
    ):
        if table.rows:
            yield table


def _ms(value: float) -> TableCell:
    return TableCell(number_text(value), value=value)


def _count(value: int) -> TableCell:
    return TableCell(str(value), value=value)


def _share(part: float, whole: float) -> TableCell:
    share = part / whole if whole > 0 else 0.0
    return TableCell(percent(share), value=share)


def _phases(summary: Summary) -> FigureTable:
    on = "GPU" if summary.gpus else "CPU"
    rows = tuple(
        (
            TableCell(phase.name),
            _count(phase.count),
            _ms(phase.total_ms),
            _ms(phase.busy_ms),
            _ms(phase.idle_ms),
            _share(phase.idle_ms, phase.total_ms),
            _count(phase.launches),
        )
        for phase in summary.phases
    )
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
    return FigureTable(title, ("", "mean"), tuple((TableCell(name), TableCell(text)) for name, text in pairs))


def _gpus(gpus: Sequence[GpuTime]) -> FigureTable:
    rows = tuple(
        (
            TableCell(f"GPU {gpu.device}"),
            _ms(gpu.span_ms),
            _ms(gpu.compute_ms),
            _ms(gpu.communication_ms),
            _ms(gpu.memory_ms),
            _ms(gpu.idle_ms),
            _share(gpu.idle_ms, gpu.span_ms),
            _ms(gpu.idle.host_wait_ms),
            _ms(gpu.idle.kernel_wait_ms),
            _ms(gpu.idle.other_ms),
        )
        for gpu in gpus
    )
    headings = (
        "ms",
        "span",
        "compute",
        "communication",
        "memory",
        "idle",
        "idle",
        "host wait",
        "kernel wait",
        "other",
    )
    note = "Host wait, kernel wait and other are the parts of the idle time."
    return FigureTable("GPU time from the first to the last activity", headings, rows, note)


def _fillers(summary: Summary) -> FigureTable:
    steps = summary.steps
    if steps is None:
        return FigureTable("", (), ())
    named = [each for each in steps.fillers if each.self_ms >= 0.005 * steps.idle_ms > 0][:_FILLERS]
    rows = tuple(
        (TableCell(filler_name(each), full=each.name), _ms(each.self_ms), _share(each.self_ms, steps.idle_ms))
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
        (
            TableCell(filler_name(each).removesuffix(" (outside operators)"), full=each.name),
            _ms(each.total_ms),
            _share(each.total_ms, steps.idle_ms),
        )
        for each in large
    )
    title = f"{_idle_title(summary, steps)}: functions with what they call"
    return FigureTable(title, ("function", "ms", "of the idle"), rows)


def _idle_title(summary: Summary, steps: StepTime) -> str:
    per = "" if steps.name == "trace" else f" per {steps.name}"
    return f"CPU while the GPU is idle{per}" if summary.gpus else f"CPU outside operators{per}"


def _kernels(summary: Summary, top: int | None) -> FigureTable:
    known = any(each.bytes_per_s or each.flops_per_s for each in summary.kernels[:top])
    rates = ("GB/s", "TFLOP/s", "of the limit") if known else ()
    headings = ("kernel", "type", "count", "ms", "mean us", "share", *rates)
    labels = short_names(each.name for each in summary.kernels[:top])
    rows = tuple(_kernel(each, labels[each.name], known) for each in summary.kernels[:top])
    others = summary.other_kernels_ms + sum(each.total_ms for each in summary.kernels[len(rows) :])
    note = f"All others: {milliseconds(others)}." if others > 1e-6 else ""
    return FigureTable("Kernels by total time", headings, rows, note)


def _kernel(each: KernelTime, label: str, known: bool) -> tuple[TableCell, ...]:
    cells = (
        TableCell(label, full=each.name),
        TableCell(each.kind),
        _count(each.count),
        _ms(each.total_ms),
        _ms(each.mean_us),
        TableCell(percent(each.share), value=each.share),
    )
    if not known:
        return cells
    figures = (bandwidth(each.bytes_per_s), rate(each.flops_per_s), ceiling(each.ceiling_share))
    return cells + tuple(TableCell(text.partition(" ")[0]) for text in figures)


def _products(summary: Summary, top: int | None) -> FigureTable:
    rows = tuple(
        (
            TableCell(each.label),
            _count(each.count),
            _ms(each.total_ms),
            _ms(each.bytes_per_s / 1e9),
            _ms(each.flops_per_s / 1e12),
            TableCell(each.bound or ""),
            TableCell(ceiling(each.ceiling_share)),
        )
        for each in summary.products[:top]
    )
    headings = ("product", "count", "ms", "GB/s", "TFLOP/s", "bound", "of the limit")
    note = f"Limits: data sheet of {summary.limits}." if any(each.bound for each in summary.products) else ""
    return FigureTable("Matrix products, from recorded shapes", headings, rows, note)


def _operators(summary: Summary, top: int | None) -> FigureTable:
    rows = tuple(
        (TableCell(short_name(each.name), full=each.name), _count(each.count), _ms(each.self_ms), _ms(each.total_ms))
        for each in summary.operators[:top]
    )
    cpu = summary.cpu
    note = ""
    if cpu is not None:
        note = (
            f"Thread {cpu.thread}: busy for {milliseconds(cpu.busy_ms)} of {milliseconds(cpu.span_ms)}, "
            f"idle for {milliseconds(cpu.idle_ms)}."
        )
    return FigureTable("CPU operators by self time", ("operator", "count", "self ms", "total ms"), rows, note)
