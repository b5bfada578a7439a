"""Summaries of traces as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from panscan.report.formatting import clean, percent, templates
from panscan.trace.compare import compare, comparison_tables, letters
from panscan.trace.figures import Summary
from panscan.trace.tables import TableCell, tables_of
from panscan.trace.wording import milliseconds

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["page"]

_COLOURS = {"compute": "s0", "communication": "s1", "memory": "s2", "busy": "s0", "idle": "grid"}


def page(summaries: Sequence[Summary], *, title: str = "", top: int | None = None) -> str:
    """Return one page: for several traces, a comparison first. The same summaries give the same text.

    Args:
        summaries: one per trace.
        title: heading; empty: the names of the traces.
        top: number of rows of kernels, matrix multiplications and operators; None: all rows of the summaries.
    """
    from panscan.report import draw

    several = len(summaries) > 1
    comparison = compare(summaries) if several else None
    return (
        _environment()
        .get_template("trace.html.j2")
        .render(
            title=title or ", ".join(summary.name for summary in summaries),
            summaries=summaries,
            comparison=comparison,
            letters=letters(comparison) if comparison else (),
            compared=list(comparison_tables(comparison)) if comparison else [],
            tables=[list(tables_of(summary, top=top)) for summary in summaries],
            bars=[_bars(summary) for summary in summaries],
            colours=_COLOURS,
            light=draw.LIGHT,
            dark=draw.DARK,
        )
    )


def _environment() -> Environment:
    from jinja2 import ChoiceLoader, PackageLoader

    environment = templates()
    own = PackageLoader("panscan.trace")
    environment.loader = ChoiceLoader([own, environment.loader] if environment.loader else [own])
    environment.filters.update(percent=percent, milliseconds=milliseconds, clean=clean, sort_value=_sort_value)
    return environment


def _sort_value(cell: TableCell) -> str:
    return cell.text if cell.value is None else repr(cell.value)


def _bars(summary: Summary) -> list[tuple[str, float, list[tuple[str, float, float]]]]:
    """Return (label, ms, parts) of each bar; parts are (name, ms, width in percent of the longest bar)."""
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    steps = summary.steps
    if steps is not None and steps.name != "trace":
        rows.append((f"mean {steps.name}", [("busy", steps.busy_ms), ("idle", steps.idle_ms)]))
        return _scaled(rows)
    for gpu in summary.gpus:
        parts = [("compute", gpu.compute_ms), ("communication", gpu.communication_ms), ("memory", gpu.memory_ms)]
        rows.append((f"GPU {gpu.device}", [*parts, ("idle", gpu.idle_ms)]))
    return _scaled(rows)


def _scaled(rows: list[tuple[str, list[tuple[str, float]]]]) -> list[tuple[str, float, list[tuple[str, float, float]]]]:
    longest = max((sum(value for _, value in parts) for _, parts in rows), default=0.0)
    return [
        (
            label,
            sum(value for _, value in parts),
            [(name, value, 100 * value / longest) for name, value in parts if value > 0],
        )
        for label, parts in rows
        if longest > 0
    ]
