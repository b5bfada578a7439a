"""The tables of a summary and of a comparison, for the terminal and the page alike: a new column is a line here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from panscan.core.text import number_text, percent, times
from panscan.inspect.trace.compare import STEP_COUNTS, STEP_TIMES, ComparedFigure, TraceComparison, letters
from panscan.inspect.trace.figures import (
    Filler,
    GpuTime,
    KernelTime,
    OperatorTime,
    PhaseTime,
    ProductTime,
    StepTime,
    Summary,
)
from panscan.inspect.trace.wording import filler_name, milliseconds, short_name, short_names
from panscan.report.table import Column, Content, Table, TableCell, share_cell

_SMALLEST_SHARE = 0.05  # of the idle time: functions on the stack with less are not shown
_FILLERS = 10

_Figure: TypeAlias = tuple[str, str]
"""Name and text of one figure of the mean step."""

_GPUS: tuple[Column[GpuTime], ...] = (
    Column("ms", lambda gpu: f"GPU {gpu.device}"),
    Column("span", lambda gpu: gpu.span_ms),
    Column("compute", lambda gpu: gpu.compute_ms),
    Column("communication", lambda gpu: gpu.communication_ms),
    Column("memory", lambda gpu: gpu.memory_ms),
    Column("idle", lambda gpu: gpu.idle_ms),
    Column("idle", lambda gpu: share_cell(gpu.idle_ms, gpu.span_ms)),
    Column("host wait", lambda gpu: gpu.idle.host_wait_ms),
    Column("kernel wait", lambda gpu: gpu.idle.kernel_wait_ms),
    Column("other", lambda gpu: gpu.idle.other_ms),
)
_PRODUCTS: tuple[Column[ProductTime], ...] = (
    Column("product", lambda product: product.label),
    Column("count", lambda product: product.count),
    Column("ms", lambda product: product.total_ms),
    Column("GB/s", lambda product: product.bytes_per_s / 1e9),
    Column("TFLOP/s", lambda product: product.flops_per_s / 1e12),
    Column("bound", lambda product: product.bound or ""),
    Column("of the limit", lambda product: _limit_share(product.ceiling_share)),
)
_OPERATORS: tuple[Column[OperatorTime], ...] = (
    Column("operator", lambda operator: TableCell(short_name(operator.name), full=operator.name)),
    Column("count", lambda operator: operator.count),
    Column("self ms", lambda operator: operator.self_ms),
    Column("total ms", lambda operator: operator.total_ms),
)
_KERNEL_RATES: tuple[Column[KernelTime], ...] = (
    Column("GB/s", lambda kernel: _rate(kernel.bytes_per_s, 1e9)),
    Column("TFLOP/s", lambda kernel: _rate(kernel.flops_per_s, 1e12)),
    Column("of the limit", lambda kernel: _limit_share(kernel.ceiling_share)),
)


def tables_of(summary: Summary, *, top: int | None = None) -> Iterator[Table[Any]]:
    """Yield the tables of a summary that have rows.

    Args:
        summary: summary of one trace.
        top: number of rows of kernels, matrix multiplications and operators; None: all rows of the summary.
    """
    limits = f"Limits: data sheet of {summary.limits}." if any(product.bound for product in summary.products) else ""
    waits = "Host wait, kernel wait and other are the parts of the idle time."
    products = "Matrix products, from recorded shapes"
    operators = "CPU operators by self time"
    steps = summary.steps
    tables = (
        _phase_table(summary),
        *([_step_table(summary, steps)] if steps is not None and steps.name != "trace" else ()),
        Table(_GPUS, summary.gpus, "GPU time from the first to the last activity", waits),
        *(_idle_tables(summary, steps) if steps is not None else ()),
        _kernel_table(summary, top),
        Table(_PRODUCTS, summary.products[:top], products, limits),
        Table(_OPERATORS, summary.operators[:top], operators, _thread_note(summary)),
    )
    yield from (table for table in tables if table.rows)


def _rate(value: float | None, unit: float) -> Content:
    return "" if value is None else value / unit


def _limit_share(share: float | None) -> Content:
    """Return the achieved part of the GPU's limit; empty if unknown."""
    return "" if share is None else TableCell(percent(share), share)


def _phase_table(summary: Summary) -> Table[PhaseTime]:
    device = "GPU" if summary.gpus else "CPU"
    columns: tuple[Column[PhaseTime], ...] = (
        Column("phase", lambda phase: phase.name),
        Column("ranges", lambda phase: phase.count),
        Column("ms", lambda phase: phase.total_ms),
        Column(f"{device} busy ms", lambda phase: phase.busy_ms),
        Column(f"{device} idle ms", lambda phase: phase.idle_ms),
        Column("idle", lambda phase: share_cell(phase.idle_ms, phase.total_ms)),
        Column("launches", lambda phase: phase.launches),
    )
    return Table(columns, summary.phases, "Time by phase")


def _step_table(summary: Summary, steps: StepTime) -> Table[_Figure]:
    figures = [(name, milliseconds(read(steps))) for name, read in STEP_TIMES.items()]
    if summary.gpus:
        figures += [(name, number_text(read(steps))) for name, read in STEP_COUNTS.items()]
    columns: tuple[Column[_Figure], ...] = (
        Column("", lambda figure: figure[0]),
        Column("mean", lambda figure: figure[1]),
    )
    return Table(columns, figures, f"Mean {steps.name} of {steps.count}")


def _idle_tables(summary: Summary, steps: StepTime) -> Iterator[Table[Filler]]:
    """Yield the innermost functions in idle time, and those on the stack that call others."""
    per = "" if steps.name == "trace" else f" per {steps.name}"
    title = f"CPU while the GPU is idle{per}" if summary.gpus else f"CPU outside operators{per}"
    inner = [filler for filler in steps.fillers if filler.self_ms >= 0.005 * steps.idle_ms > 0][:_FILLERS]
    columns: tuple[Column[Filler], ...] = (
        Column("function", lambda filler: TableCell(filler_name(filler), full=filler.name)),
        Column("ms", lambda filler: filler.self_ms),
        Column("of the idle", lambda filler: share_cell(filler.self_ms, steps.idle_ms)),
    )
    yield Table(columns, inner, f"{title}: innermost function")
    callers = [filler for filler in steps.fillers if filler.depth >= 0 and filler.name]
    callers = [filler for filler in callers if filler.total_ms > filler.self_ms]
    callers = [filler for filler in callers if filler.total_ms >= _SMALLEST_SHARE * steps.idle_ms > 0]
    callers = sorted(callers, key=lambda filler: (-filler.total_ms, filler.depth))[: 2 * _FILLERS]
    columns = (
        Column("function", lambda filler: TableCell(filler_name(filler, outside=False), full=filler.name)),
        Column("ms", lambda filler: filler.total_ms),
        Column("of the idle", lambda filler: share_cell(filler.total_ms, steps.idle_ms)),
    )
    yield Table(columns, callers, f"{title}: functions with what they call")


def _kernel_table(summary: Summary, top: int | None) -> Table[KernelTime]:
    kernels = summary.kernels[:top]
    names = short_names(kernel.name for kernel in kernels)
    known = any(kernel.bytes_per_s or kernel.flops_per_s for kernel in kernels)
    columns: tuple[Column[KernelTime], ...] = (
        Column("kernel", lambda kernel: TableCell(names[kernel.name], full=kernel.name)),
        Column("type", lambda kernel: kernel.kind),
        Column("count", lambda kernel: kernel.count),
        Column("ms", lambda kernel: kernel.total_ms),
        Column("mean us", lambda kernel: kernel.mean_us),
        Column("share", lambda kernel: TableCell(percent(kernel.share), kernel.share)),
        *(_KERNEL_RATES if known else ()),
    )
    others = summary.other_kernels_ms + sum(kernel.total_ms for kernel in summary.kernels[len(kernels) :])
    note = f"All others: {milliseconds(others)}." if others > 1e-6 else ""
    return Table(columns, kernels, "Kernels by total time", note)


def _thread_note(summary: Summary) -> str:
    cpu = summary.cpu
    if cpu is None:
        return ""
    busy, span, idle = map(milliseconds, (cpu.busy_ms, cpu.span_ms, cpu.idle_ms))
    return f"Thread {cpu.thread}: busy for {busy} of {span}, idle for {idle}."


def comparison_tables(comparison: TraceComparison) -> Iterator[Table[ComparedFigure]]:
    """Yield one table per group of figures."""
    columns: list[Column[ComparedFigure]] = [Column("", lambda figure: TableCell(figure.name, full=figure.full))]
    columns += [_value_column(letter, index) for index, letter in enumerate(letters(comparison))]
    if len(comparison.names) > 1:
        columns += [
            Column("change", lambda figure: _change_cells(figure)[0]),
            Column("", lambda figure: _change_cells(figure)[1]),
        ]
    for group in dict.fromkeys(figure.group for figure in comparison.figures):
        yield Table(columns, [figure for figure in comparison.figures if figure.group == group], group)


def _value_column(letter: str, index: int) -> Column[ComparedFigure]:
    return Column(letter, lambda figure: figure.values[index])


def _change_cells(figure: ComparedFigure) -> Sequence[TableCell]:
    """Return the difference, and the relative change."""
    difference, first = figure.difference, figure.values[0]
    if difference is None or first is None:
        return TableCell(""), TableCell("")
    relative = f"{100 * difference / first:+.1f}%" if first else ""
    if first and difference >= 9 * first:
        relative = times((first + difference) / first)
    if relative in ("+0.0%", "-0.0%"):
        return TableCell("0", difference), TableCell("0%", 0.0)
    return TableCell(f"{'+' if difference > 0 else ''}{number_text(difference)}", difference), TableCell(relative)
