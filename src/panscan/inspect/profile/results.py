"""What profiles show: the summary of each trace, beside the same work timed without the profiler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from panscan.core.files import write_file
from panscan.core.foreign import JsonObject
from panscan.core.text import number_text
from panscan.inspect.profile.run import Profiled
from panscan.inspect.trace.output import lines, page
from panscan.inspect.trace.read import TraceFile
from panscan.inspect.trace.summary import Summary, summarize
from panscan.report.table import Content, table_of

PAGE_NAME, SUMMARY_NAME = "summary.html", "summary.json"
_TOP = 12  # rows of each table
_SLOWED = 1.5  # times; above it, a warning says so
_COMPARED = 1_000  # names to match between traces

_Mode: TypeAlias = tuple[Profiled, Summary]
_TITLES = (
    *("", "TTFT ms", "TPOT ms", "tokens/s"),
    *("profiled TPOT ms", "busy/step ms", "idle/step ms", "launches/step"),
)


def summary_of(profiled: Profiled, *, compared: bool) -> Summary:
    """Return the summary of a profile's trace, under the name of its mode.

    Args:
        profiled: a finished profile.
        compared: keep enough rows to match them with those of other traces.
    """
    return summarize(TraceFile(profiled.trace), name=profiled.mode.name, top=_COMPARED if compared else _TOP)


def printed(modes: Sequence[_Mode], *, width: int) -> list[str]:
    """Return lines for the terminal: the times with and without the profiler, then the summary or the comparison."""
    shown = lines([summary for _, summary in modes], width=width)
    note = "TTFT, TPOT and tokens/s without the profiler, which slows the host down; the rest with it."
    slowed = [note for profiled, _ in modes if (note := slowdown(profiled.mode.label, profiled.facts))]
    times = table_of(_TITLES, [_times(*mode) for mode in modes], title="Time per token", note=note)
    return [*times.lines(width), *slowed, "", *shown]


def _times(profiled: Profiled, summary: Summary) -> tuple[Content, ...]:
    """Return the times of a mode, one for each of :data:`_TITLES`."""
    plain, traced, step = profiled.facts["without_profiler"], profiled.facts["profiled"], summary.steps
    per_step: tuple[float | None, ...] = (None, None, None)
    if step is not None and step.name == "decode step":
        launches = step.kernel_launches + step.graph_launches if summary.gpus else None
        per_step = (step.busy_ms, step.idle_ms, launches)
    return (
        profiled.mode.label,
        *(plain[name] for name in ("ttft_ms", "tpot_ms", "tokens_per_s")),
        traced["tpot_ms"],
        *per_step,
    )


def slowdown(label: str, facts: Mapping[str, Any]) -> str:
    """Return a warning if the profiler slowed the decode steps down so much that their shares mislead; else nothing.

    Args:
        label: the mode in words.
        facts: of a profile.
    """
    plain, traced = facts["without_profiler"]["tpot_ms"], facts["profiled"]["tpot_ms"]
    if plain is None or traced is None or traced <= _SLOWED * plain:
        return ""
    return (
        f"{label}: the profiler makes a step {number_text(traced / plain)} times as long ({number_text(traced)} instead"
        f" of {number_text(plain)} ms): its busy and idle times are those of the slow step"
    )


def to_document(modes: Sequence[_Mode]) -> JsonObject:
    """Return the content of ``summary.json``: by mode, its facts and the summary of its trace."""
    return {
        profiled.mode.name: {"facts": dict(profiled.facts), "summary": asdict(summary)} for profiled, summary in modes
    }


def write_results(folder: Path, modes: Sequence[_Mode], *, title: str) -> Path:
    """Write ``summary.json`` and ``summary.html``; return the path of the page.

    Args:
        folder: existing folder of the profile.
        modes: finished profiles with their summaries.
        title: heading of the page.

    Raises:
        InputError: a file cannot be written.
    """
    write_file(folder / SUMMARY_NAME, json.dumps(to_document(modes), indent=1, allow_nan=False))
    noted = [replace(summary, notes=(_timing_note(profiled), *summary.notes)) for profiled, summary in modes]
    write_file(folder / PAGE_NAME, page(noted, title=title, top=_TOP))
    return folder / PAGE_NAME


def _timing_note(profiled: Profiled) -> str:
    plain, traced = profiled.facts["without_profiler"], profiled.facts["profiled"]
    warning = slowdown(profiled.mode.label, profiled.facts)
    return (
        f"{profiled.mode.label}: without the profiler TTFT {number_text(plain['ttft_ms'])} ms, TPOT"
        f" {number_text(plain['tpot_ms'])} ms, {number_text(plain['tokens_per_s'])} tokens/s; with it TPOT"
        f" {number_text(traced['tpot_ms'])} ms; model loaded in {number_text(profiled.facts['load_s'])} s"
        + (f". {warning}" if warning else "")
    )
