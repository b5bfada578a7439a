"""Summaries of traces on the terminal, and as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence

from panscan.core.text import clean
from panscan.inspect.trace.compare import compare, letters
from panscan.inspect.trace.figures import Summary
from panscan.inspect.trace.tables import comparison_tables, tables_of
from panscan.inspect.trace.wording import milliseconds
from panscan.report.formatting import templates

_COLOURS = {"compute": "s0", "communication": "s1", "memory": "s2", "busy": "s0", "idle": "grid"}


def lines(summary: Summary, *, width: int) -> list[str]:
    """Return a summary as lines of text without control characters.

    Args:
        summary: summary of one trace.
        width: columns of the terminal; long names are cut.
    """
    found = [f"{summary.headline}."]
    for table in tables_of(summary):
        found += ["", *table.lines(width)]
    return found + _note_lines([summary])


def comparison_lines(summaries: Sequence[Summary], *, width: int) -> list[str]:
    """Return several summaries side by side as lines of text: the headlines, then one table per group of figures."""
    comparison = compare(summaries)
    found = [f"{comparison.headline}."]
    found += [
        f"{letter}: {clean(name)}: {summary.headline}."
        for letter, name, summary in zip(letters(comparison), comparison.names, summaries, strict=True)
    ]
    for table in comparison_tables(comparison):
        found += ["", *table.lines(width)]
    return found + _note_lines(summaries)


def _note_lines(summaries: Sequence[Summary]) -> list[str]:
    notes = dict.fromkeys(f"note: {note}" for summary in summaries for note in summary.notes)
    return ["", *notes] if notes else []


def page(summaries: Sequence[Summary], *, title: str = "", top: int | None = None) -> str:
    """Return one page: for several traces, a comparison first. The same summaries give the same text.

    Args:
        summaries: one per trace.
        title: heading; empty: the names of the traces.
        top: number of rows of kernels, matrix multiplications and operators; None: all rows of the summaries.
    """
    from jinja2 import ChoiceLoader, PackageLoader

    from panscan.report import draw

    comparison = compare(summaries) if len(summaries) > 1 else None
    environment = templates()
    environment.loader = ChoiceLoader([PackageLoader("panscan.inspect.trace"), PackageLoader("panscan.report")])
    environment.filters.update(milliseconds=milliseconds)
    return environment.get_template("trace.html.j2").render(
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


def _bars(summary: Summary) -> list[tuple[str, float, list[tuple[str, float, float]]]]:
    """Return (label, ms, parts) of each bar; parts are (name, ms, width in percent of the longest bar)."""
    steps = summary.steps
    if steps is not None and steps.name != "trace":
        rows = {f"mean {steps.name}": {"busy": steps.busy_ms, "idle": steps.idle_ms}}
    else:
        rows = {
            f"GPU {gpu.device}": {
                "compute": gpu.compute_ms,
                "communication": gpu.communication_ms,
                "memory": gpu.memory_ms,
                "idle": gpu.idle_ms,
            }
            for gpu in summary.gpus
        }
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    return [
        (
            label,
            sum(parts.values()),
            [(name, value, 100 * value / longest) for name, value in parts.items() if value > 0],
        )
        for label, parts in rows.items()
        if longest > 0
    ]
