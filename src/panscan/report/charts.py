"""What the charts show, as data: curves over swept numbers, dots over other settings, and the Pareto front. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from panscan.analysis.candidates import pareto_front
from panscan.analysis.cells import MeasuredCell, Sweep, count, short, speed, sweeps
from panscan.records.quality import Quality
from panscan.records.schema import VERDICTS
from panscan.records.verdict import EXACT_RATIO
from panscan.report.formatting import Measured, clean, measured

__all__ = ["MOST_SERIES", "ChartGroup", "Front", "FrontPoint", "Panel", "Point", "Series", "comparisons", "front_of"]

MOST_SERIES = 6
"""More curves in one chart cannot be told apart."""
_MOST_CELLS = 30
_METRICS = (("request_throughput", "Throughput", "req/s"), ("p95_e2el_ms", "p95 E2E latency", "ms"))


@dataclass(frozen=True, slots=True)
class Point:
    """``at`` is the index of its tick; ``cell`` its number in the table; ``note`` says what else a reader must know."""

    at: int
    value: Measured
    cell: int
    word: str
    note: str


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. ``curve``: ticks from left to right, points of a series joined. ``dots``: ticks from top to bottom."""

    name: str
    kind: Literal["curve", "dots"]
    title: str
    unit: str
    axis: str
    ticks: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """Charts with the same series, so with one legend (empty for a single series)."""

    heading: str
    note: str
    legend: tuple[str, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class FrontPoint:
    cell: int
    speed: float
    value: Measured
    word: str
    on_front: bool
    recommended: bool


@dataclass(frozen=True, slots=True)
class Front:
    """Speed (requests per second) against ``measure``: quality, a share that is better when larger, or the ratio to
    the noise, which is better when smaller; ``title`` names it. ``absent``: numbers of measured cells without it."""

    measure: Literal["quality", "ratio"]
    title: str
    points: tuple[FrontPoint, ...]
    absent: tuple[int, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The verdicts of its points, the best first."""
        return tuple(word for word in VERDICTS if any(point.word == word for point in self.points))


def comparisons(rows: Sequence[MeasuredCell], numbers: Mapping[str, int], names: Mapping[str, str]) -> list[ChartGroup]:
    """Throughput and p95 latency over each swept setting; without one, of each cell.

    ``numbers`` and ``names`` (short ones) are of cells by id.
    """
    found = [_comparison(sweep, numbers) for sweep in sweeps(rows)]
    if not found and len(rows) > 1:
        found = [_cells(rows, numbers, names)]
    return [comparison for comparison in found if comparison.panels]


def _comparison(sweep: Sweep, numbers: Mapping[str, int]) -> ChartGroup:
    chosen = dict(list(sweep.series.items())[:MOST_SERIES])
    note = f"The {len(chosen)} fastest of {len(sweep.series)} combinations of the other settings."
    ticks = tuple(map(clean, sweep.ticks))
    panels = []
    for metric, title, unit in _METRICS:
        series = tuple(
            Series(clean(name), _points([(sweep.at(row), row) for row in rows], metric, numbers))
            for name, rows in chosen.items()
        )
        if any(each.points for each in series):
            kind: Literal["curve", "dots"] = "curve" if sweep.numeric else "dots"
            name = clean(short(sweep.name))
            panels.append(Panel(_slug(f"{title} {sweep.name}"), kind, title, unit, name, ticks, series))
    legend = tuple(map(clean, chosen)) if len(chosen) > 1 else ()
    left_out = len(chosen) < len(sweep.series)
    return ChartGroup(f"Over {clean(sweep.name)}", note if left_out else "", legend, tuple(panels))


def _cells(rows: Sequence[MeasuredCell], numbers: Mapping[str, int], names: Mapping[str, str]) -> ChartGroup:
    """Where no two cells differ in one setting alone (presets): one dot per cell, the fastest first."""
    chosen = sorted(rows, key=lambda row: -speed(row))[:_MOST_CELLS]
    ticks = tuple(names[row.cell] for row in chosen)
    panels = []
    for metric, title, unit in _METRICS:
        points = _points(list(enumerate(chosen)), metric, numbers)
        if points:
            panels.append(Panel(_slug(f"{title} cells"), "dots", title, unit, "cell", ticks, (Series("", points),)))
    note = f"The {len(chosen)} fastest of {count(len(rows), 'cell')}." if len(chosen) < len(rows) else ""
    return ChartGroup("Cell by cell", note, (), tuple(panels))


def _points(placed: Sequence[tuple[int, MeasuredCell]], metric: str, numbers: Mapping[str, int]) -> tuple[Point, ...]:
    found = ((at, row, measured(row.metrics, metric)) for at, row in placed)
    return tuple(
        Point(at, value, numbers[row.cell], row.verdict.word, row.verdict.word)
        for at, row, value in found
        if value.value is not None
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def front_of(
    rows: Sequence[MeasuredCell],
    qualities: Mapping[str, Quality | None],
    numbers: Mapping[str, int],
    recommended: int | None,
    title: str,
) -> Front | None:
    """Speed against quality where any cell answers anything right, else against the verdict's ratio.

    ``recommended`` is the number of that cell, ``title`` the name of the metric of quality. None where fewer than two
    cells could be drawn: nothing is compared.
    """
    by_quality = any(quality is not None and quality.mean > 0 for quality in qualities.values())
    placed: list[tuple[MeasuredCell, Measured]] = []
    for row in rows:
        quality = qualities.get(row.cell)
        if by_quality and quality is not None:
            placed.append((row, Measured(quality.mean, quality.low, quality.high)))
        elif not by_quality and row.verdict.ratio is not None:
            placed.append((row, Measured(row.verdict.ratio)))
    placed = [(row, value) for row, value in placed if row.metrics.values["request_throughput"] is not None]
    if len(placed) < 2:
        return None
    merits = [(speed(row), _merit(value, by_quality)) for row, value in placed]
    points = tuple(
        FrontPoint(
            cell=numbers[row.cell],
            speed=own[0],
            value=value,
            word=row.verdict.word,
            on_front=on_front,
            recommended=numbers[row.cell] == recommended,
        )
        for (row, value), own, on_front in zip(placed, merits, pareto_front(merits), strict=True)
    )
    present = {point.cell for point in points}
    absent = tuple(numbers[row.cell] for row in rows if numbers[row.cell] not in present)
    if by_quality:
        return Front("quality", title, points, absent)
    return Front("ratio", "distance from the reference", points, absent)


def _merit(value: Measured, by_quality: bool) -> float:
    """Larger is better. Ratios within the limit of exact are equal: what differs there is noise."""
    known = value.value or 0.0
    return known if by_quality else -max(known, EXACT_RATIO)
