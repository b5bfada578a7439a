"""The cells of a run that were skipped, failed, ran out of memory or were not finished, and why. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from panscan.bench.records import Run
from panscan.bench.rows import label, varying_names
from panscan.bench.summary import outcome_of

__all__ = ["Unmeasured", "unmeasured"]

_WORDS = {"oom": "out of memory"}
_NO_ANSWER = "without an answer"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Cells with one fate.

    Args:
        outcome: in words: skipped, failed, out of memory, unfinished, or without an answer (every request failed).
        reason: empty if none is known.
        cells: their ids.
        shared: the swept settings that all of them have, as text; empty if there are none.
    """

    outcome: str
    reason: str
    cells: tuple[str, ...]
    shared: str


def unmeasured(run: Run) -> list[Unmeasured]:
    """One group for each outcome and reason of cells that are not done or have no answer, in the order of the run."""
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for cell, settings in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        if outcome == "done":
            error = _only_error(run, cell)
            outcome, reason = (_NO_ANSWER, error) if error is not None else (outcome, reason)
        if outcome != "done":
            groups[_WORDS.get(outcome, outcome), reason][cell] = settings
    swept = varying_names(list(run.cells.values()))
    found = []
    for (outcome, reason), cells in groups.items():
        apart = set(varying_names(list(cells.values())))
        first = next(iter(cells.values()))
        shared = label({name: first.get(name) for name in swept if name not in apart})
        found.append(Unmeasured(outcome, reason, tuple(cells), shared))
    return found


def _only_error(run: Run, cell: str) -> str | None:
    """The first request's error where no request of a cell was answered; None where one was, or none was sent."""
    requests = [record for key in sorted(run.repeats) if key[0] == cell for record in run.requests[key]]
    if not requests or any(record["error"] is None for record in requests):
        return None
    return f"every request failed, the first with: {requests[0]['error']}"
