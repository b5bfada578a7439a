"""The finished cells of a run as a recommendation sees them: speed with its interval, input, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.bench.intervals import Interval
from panscan.bench.quality import Quality, quality_of
from panscan.bench.records import Run
from panscan.bench.rows import Row, cell_title, distinguishing, meant, measured_rows
from panscan.bench.summary import outcome_of

__all__ = ["Candidate", "candidates_of", "cell_name"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished cell. ``views`` is the mean of a request, ``crops`` the settings that it follows from."""

    row: Row
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
        """Of E2E."""
        return self.row.metrics.values["p95_e2el_ms"]

    @property
    def interval(self) -> Interval:
        """95% of the throughput; the value itself where one batch gave no interval."""
        return self.row.metrics.intervals.get("request_throughput", (self.throughput, self.throughput))

    def overlaps(self, other: Candidate) -> bool:
        """Whether the intervals of both throughputs have a value in common."""
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def candidates_of(run: Run) -> tuple[list[Candidate], dict[str, str]]:
    """The finished cells of a run, and why each of the others is none, by cell id.

    Raises:
        RecordsError: see :func:`panscan.bench.metrics.cell_metrics`.
    """
    rows = {row.cell: row for row in measured_rows(run)}
    views: dict[tuple[tuple[str, Any], ...], float] = {}
    for row in rows.values():
        crops = _crops(row.settings)
        views[crops] = max(views.get(crops, 0.0), row.metrics.values["mean_views"] or 0.0)
    found, others = [], {}
    for cell in run.cells:
        outcome, reason = outcome_of(run, cell)
        if outcome != "done":
            others[cell] = f"{outcome}: {reason}" if reason else outcome
        elif cell not in rows or not (throughput := rows[cell].metrics.values["request_throughput"]):
            others[cell] = "no request of it succeeded in measurable time"
        else:
            row, crops = rows[cell], _crops(rows[cell].settings)
            found.append(Candidate(row, cell_name(run, cell), crops, views[crops], throughput, quality_of(run, cell)))
    return found, others


def cell_name(run: Run, cell: str) -> str:
    """A cell's id, and its settings that differ from other cells'."""
    every: Sequence[Mapping[str, Any]] = [meant(settings) for settings in run.cells.values()]
    return cell_title(cell, meant(run.cells[cell]), distinguishing(every))


def _crops(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, value) for name, value in settings.items() if "pan_and_scan" in name))
