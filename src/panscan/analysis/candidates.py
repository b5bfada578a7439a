"""Finished cells as a recommendation sees them: speed with its interval, views and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.analysis.cells import (
    MeasuredCell,
    display_settings_of,
    distinguishing_names,
    effective_settings,
    measured_rows,
    preset_of,
)
from panscan.analysis.setting_words import label
from panscan.records.intervals import Interval
from panscan.records.quality import Quality, quality_of
from panscan.records.store import Run, outcome_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished cell. ``views``: mean views per request; ``crops``: pan-and-scan settings that determine them."""

    row: MeasuredCell
    name: str
    crops: tuple[tuple[str, Any], ...]
    views: float
    throughput: float
    quality: Quality | None

    @property
    def cell(self) -> str:
        return self.row.cell

    @property
    def verdict(self) -> str:
        return self.row.verdict.word

    @property
    def p95_ms(self) -> float | None:
        """95th percentile of E2E, in milliseconds; None if it was not measured."""
        return self.row.metrics.values["p95_e2el_ms"]

    @property
    def interval(self) -> Interval:
        """95% interval of the throughput; the throughput twice if one batch gave no interval."""
        return self.row.metrics.intervals.get("request_throughput", (self.throughput, self.throughput))

    def overlaps(self, other: Candidate) -> bool:
        """Whether the intervals of both throughputs have a value in common."""
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def candidates_of(run: Run) -> tuple[list[Candidate], dict[str, str]]:
    """Return the finished cells of a run, and why each of the others is not one, by cell id.

    Raises:
        RecordsError: see :func:`panscan.analysis.summary.cell_metrics`.
    """
    rows = {row.cell: row for row in measured_rows(run)}
    views: dict[tuple[tuple[str, Any], ...], float] = {}
    for row in rows.values():
        crops = _crops(row.settings)
        views[crops] = max(views.get(crops, 0.0), row.metrics.values["mean_views"] or 0.0)
    found, others, names = [], {}, cell_names(run)
    for cell in run.cells:
        outcome, reason = outcome_of(run, cell)
        if outcome != "done":
            others[cell] = f"{outcome}: {reason}" if reason else outcome
        elif cell not in rows or not (throughput := rows[cell].metrics.values["request_throughput"]):
            others[cell] = "no request succeeded in measurable time"
        else:
            row, crops = rows[cell], _crops(rows[cell].settings)
            found.append(Candidate(row, names[cell], crops, views[crops], throughput, quality_of(run, cell)))
    return found, others


def pareto_front(merits: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other is at least as good in both merits and better in one.

    Args:
        merits: two of each point, such as speed and quality; larger is better. Equal points do not beat each other.
    """

    def beats(other: tuple[float, float], own: tuple[float, float]) -> bool:
        return other != own and other[0] >= own[0] and other[1] >= own[1]

    return [not any(beats(other, own) for other in merits) for own in merits]


def cell_names(run: Run) -> dict[str, str]:
    """Return each cell's preset and settings in words, without those that all cells share; by cell id.

    A cell's id follows where these words would not tell it from another cell, and stands alone where there are none.
    """
    every = {cell: display_settings_of(run, cell) for cell in run.cells}
    varying = distinguishing_names(list(every.values()))
    words = {}
    for cell, settings in every.items():
        names = list(varying)
        if run.aliases.get(cell):  # name what the choice leaves open, even if all cells do
            names += [name for name, value in settings.items() if value != effective_settings(run.cells[cell])[name]]
        words[cell] = label({name: settings.get(name) for name in dict.fromkeys(names)})
        words[cell] = ", ".join(filter(None, (preset_of(run, cell), words[cell])))
    times = Counter(words.values())
    return {
        cell: cell if not text else text if times[text] == 1 else f"{text} ({cell})" for cell, text in words.items()
    }


def _crops(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, value) for name, value in settings.items() if "pan_and_scan" in name))
