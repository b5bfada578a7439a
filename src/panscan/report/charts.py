"""What the charts show, as data: curves over swept numbers, dots over other settings, and the Pareto front. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from panscan.analysis.accuracy import Standings
from panscan.analysis.cells import MeasuredCell, Sweep, sweeps
from panscan.analysis.levels import TIME_NAMES, MeasuredLevel
from panscan.analysis.setting_words import setting_title
from panscan.core.groups import grouped
from panscan.core.text import capitalised, count
from panscan.records.fields import VERDICTS
from panscan.records.intervals import cluster_intervals
from panscan.records.load_records import LoadRunSettings
from panscan.records.metrics import percentile_name
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.report.answers import SHAPES, shape_of
from panscan.report.formatting import FEW
from panscan.report.table import Measured, measured
from panscan.verdict.judgement import EXACT_RATIO

MOST_SERIES = 6
"""More curves in one chart cannot be told apart."""
MOST_NAMED = 9
"""Points of the front that are named; of more, only those on the front and the recommended one."""
LONGEST_NAME = 18
"""Characters of a name beside a point; longer names are replaced by numbers."""
_MOST_DECIDED = 8
_METRICS = (("request_throughput", "Throughput", "requests/s"), ("p95_e2el_ms", "E2E latency, p95", "ms"))
_DOUBTED = ("different", "unverified")
_FAR = 3
"""A limit more than this many times above the highest point would only flatten the curves: it is not drawn."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a chart.

    Args:
        at: horizontal position: a number, or the index of a tick.
        value: the value with its interval.
        name: the setting or the level that was measured.
        note: what else to show in its tooltip and in the table of numbers.
        hollow: whether to draw it hollow: its value needs a caveat, or it is not on the front.
        chosen: whether it is the recommended one.
        cell: the number of its cell, on the front.
        across: ``at`` with its interval, on the front; None elsewhere.
    """

    at: float
    value: Measured
    name: str
    note: str = ""
    hollow: bool = False
    chosen: bool = False
    cell: int = 0
    across: Measured | None = None

    @property
    def height(self) -> float:
        """Return the value, 0 where nothing was measured."""
        return self.value.value or 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, in order."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Args:
        name: name of its file, and prefix of its ids.
        kind: ``steps``: ticks at equal distances from left to right, joined points; ``dots``: a row per tick;
            ``curve``: numbers on both axes, joined points; ``front``: speed against quality, or, on a logarithmic axis,
            against the distance from the reference.
        title: title of the values.
        unit: unit of the values.
        axis: title of the other axis.
        series: at most :data:`MOST_SERIES`.
        ticks: names of the ticks; empty for ``curve``.
        limit: value of a line across the chart; None without one.
        limit_label: text of the limit.
        diagonal: whether to draw the line where both axes are equal.
        logarithmic: whether the axis of values is logarithmic.
    """

    name: str
    kind: Literal["steps", "dots", "curve", "front"]
    title: str
    unit: str
    axis: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    limit: float | None = None
    limit_label: str = ""
    diagonal: bool = False
    logarithmic: bool = False

    @property
    def legend(self) -> tuple[str, ...]:
        """Return the names of several series."""
        return tuple(series.label for series in self.series) if len(self.series) > 1 else ()

    @property
    def points(self) -> list[Point]:
        """Return all points."""
        return [point for series in self.series for point in series.points]

    @property
    def marks(self) -> list[tuple[str, int, Point]]:
        """Return all points, each behind its id in the drawing and the index of its series."""
        return [
            (f"{self.name}-{index}-{number}", index, point)
            for index, series in enumerate(self.series)
            for number, point in enumerate(series.points)
        ]

    @property
    def values(self) -> list[float]:
        """Return all values."""
        return [point.height for point in self.points]

    @property
    def top(self) -> float:
        """Return the highest value, intervals included as far as twice that: wider ones would flatten all others."""
        highest = max(self.values)
        return max(highest, min(2 * highest, max(point.value.high or 0.0 for point in self.points)))

    @property
    def line(self) -> float | None:
        """Return the limit if it is near enough to be drawn."""
        return self.limit if self.limit is not None and self.limit <= _FAR * self.top else None

    @property
    def caption(self) -> str:
        """Return the title with its unit and limit."""
        if self.kind == "front":
            return f"Throughput and {self.title}"
        text = f"{self.title}, {self.unit}"
        if self.limit is None:
            return text
        return f"{text} (dashed: {self.limit_label})" if self.line else f"{text} ({self.limit_label}: above the chart)"

    @property
    def numbered(self) -> bool:
        """Return whether the front shows numbers instead of names."""
        return len(self.points) > MOST_NAMED or any(len(point.name) > LONGEST_NAME for point in self.points)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Return the verdicts of the front's points, the best first."""
        return tuple(word for word in VERDICTS if any(point.note == word for point in self.points))


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """Charts with the same series, and therefore one legend (empty for a single series).

    ``folded`` charts have points of few samples.
    """

    heading: str
    note: str
    legend: tuple[str, ...]
    panels: tuple[Panel, ...]
    folded: bool = False


def decision_charts(rows: Sequence[MeasuredCell], first: Sequence[str], title: str) -> ChartGroup:
    """Return the accuracy and the throughput of each setting; without accuracies, throughput and latency.

    Of many settings, only some are drawn: those in ``first``, then the fastest.

    Args:
        rows: measured cells.
        first: ids of the recommended cell and of those that it is compared with.
        title: name of the run's metric of quality.
    """
    order = [*first, *(row.cell for row in sorted(rows, key=lambda row: -row.speed))]
    cells = list(dict.fromkeys(order))[:_MOST_DECIDED]
    chosen = [row for row in rows if row.cell in cells]
    panels, ticks = list[Panel](), tuple(row.name for row in chosen)
    if any(row.accuracy for row in chosen):
        shares = tuple(
            _point(index, row, Measured(100 * quality.mean, 100 * quality.low, 100 * quality.high), first)
            for index, row in enumerate(chosen)
            if (quality := row.quality) is not None
        )
        panels.append(
            Panel("decision-accuracy", "dots", capitalised(title), "%", "setting", (Series("", shares),), ticks)
        )
    for metric, name, unit in _METRICS[: 2 - len(panels)]:
        if points := _points(list(enumerate(chosen)), metric, first):
            series = (Series("", points),)
            panels.append(Panel(f"decision-{_slug(name)}", "dots", name, unit, "setting", series, ticks))
    note = f"{len(chosen)} of {len(rows)} settings are shown." if len(chosen) < len(rows) else ""
    return ChartGroup("", note, (), tuple(panels))


def comparisons(rows: Sequence[MeasuredCell]) -> list[ChartGroup]:
    """Return throughput and p95 latency over each swept setting: some cells differ in it alone."""
    return [group for group in map(_comparison, sweeps(rows)) if group.panels]


def _comparison(sweep: Sweep) -> ChartGroup:
    chosen = sweep.fastest(MOST_SERIES)
    name = setting_title(sweep.name)
    panels = []
    for metric, title, unit in _METRICS:
        series = tuple(
            Series(label, _points([(sweep.index(row), row) for row in rows], metric)) for label, rows in chosen.items()
        )
        if any(sery.points for sery in series):
            kind: Literal["steps", "dots"] = "steps" if sweep.numeric else "dots"
            panels.append(Panel(_slug(f"{title} {sweep.name}"), kind, title, unit, name, series, sweep.ticks))
    legend = tuple(chosen) if len(chosen) > 1 else ()
    note = f"The {len(chosen)} fastest of {len(sweep.series)} combinations of the other settings."
    return ChartGroup(f"By {name}", note if len(chosen) < len(sweep.series) else "", legend, tuple(panels))


def _points(placed: Sequence[tuple[int, MeasuredCell]], metric: str, first: Sequence[str] = ()) -> tuple[Point, ...]:
    values = ((index, row, measured(row.metrics, metric)) for index, row in placed)
    return tuple(_point(index, row, value, first) for index, row, value in values if value.value is not None)


def _point(index: int, row: MeasuredCell, value: Measured, first: Sequence[str] = ()) -> Point:
    verdict = row.verdict.word
    return Point(index, value, row.name, verdict, verdict in _DOUBTED, row.cell in first[:1])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def front_of(rows: Sequence[MeasuredCell], recommended: str | None, title: str, standings: Standings) -> Panel | None:
    """Return speed against quality if any cell answers anything right, else against the verdict's ratio.

    Args:
        rows: measured cells, numbered from 1.
        recommended: id of the recommended cell.
        title: name of the run's metric of quality.
        standings: the cells' accuracy against the baseline's: what it does not tell apart is equal on the front.

    Returns:
        None if fewer than two cells could be drawn.
    """
    by_quality = any(row.accuracy > 0 for row in rows)
    placed: list[tuple[int, MeasuredCell, Measured]] = []
    for number, row in enumerate(rows, 1):
        quality, value = row.quality, Measured(row.verdict.ratio)
        if by_quality:
            value = Measured(None) if quality is None else Measured(quality.mean, quality.low, quality.high)
        if value.value is not None and row.metrics.values["request_throughput"] is not None:
            placed.append((number, row, value))
    if len(placed) < 2:
        return None
    # Larger is better. Ratios within the limit of exact are equal: what differs there is noise.
    merits = [
        (row.speed, float(standings.rank(row)) if by_quality else -max(value.value or 0.0, EXACT_RATIO))
        for _, row, value in placed
    ]
    points = tuple(
        Point(
            at=row.speed,
            value=value,
            name=row.name,
            note=row.verdict.word,
            # Beaten: another is at least as good in both merits, and better in one.
            hollow=any(other != merit and other[0] >= merit[0] and other[1] >= merit[1] for other in merits),
            chosen=row.cell == recommended,
            cell=number,
            across=measured(row.metrics, "request_throughput"),
        )
        for (number, row, value), merit in zip(placed, merits, strict=True)
    )
    measure = title if by_quality else "distance from the reference"
    return Panel("front", "front", measure, "", "requests/s", (Series("", points),), logarithmic=not by_quality)


_TAIL = 95  # the percentile of which levels are compared
_LOGARITHMIC = 30
"""The ratio of the largest to the least value from which an axis is logarithmic."""


_Places: TypeAlias = list[tuple[float, MeasuredLevel]]
"""Levels behind their horizontal positions."""


def _level_series(levels: Sequence[MeasuredLevel]) -> tuple[str, dict[str, _Places]]:
    """Return the axis of a load run's charts, and the levels on it; by their other settings where some share a place.

    The axis is the offered rate; without any, the concurrency. Answered requests per second would fold the curves back
    where an endpoint is overloaded.
    """
    places = [(level.offered, level) for level in levels if level.offered is not None]
    axis = "offered requests/s" if places else "concurrency"
    if not places:
        places = [(float(level.concurrency), level) for level in levels if level.concurrency is not None]
    if len({place for place, _ in places}) == len(places):
        return axis, {"": places} if places else {}
    series = grouped((level.name.partition(", ")[2] or "no limit", (place, level)) for place, level in places)
    return axis, dict(list(series.items())[:MOST_SERIES])


def latency_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Panel]:
    """Return a chart for each time that the run shows but ITL, over the load: its percentiles, or one percentile of
    levels that differ in another setting, too.

    ITL has the scale of TPOT, and would only repeat it. A chart without a point is left out.
    """
    axis, groups = _level_series(levels)
    percents = sorted(settings.metric_percentiles)[:MOST_SERIES]
    if len(groups) > 1:
        percents = [min(percents, key=lambda percent: abs(percent - _TAIL))]
    panels = []
    for time in settings.percentile_metrics:
        series = [
            Series(label or percentile_name(percent), points)
            for label, places in groups.items()
            for percent in percents
            if (points := _level_points(places, f"{percentile_name(percent)}_{time}_ms"))
        ]
        if time == "itl" or not series:
            continue
        limit = settings.goodput.get(time)
        text = "" if limit is None else f"limit {limit:g} ms"
        title = f"{TIME_NAMES[time]} {percentile_name(percents[0])}" if len(percents) == 1 else TIME_NAMES[time]
        panel = Panel(f"load-{time}", "curve", title, "ms", axis, tuple(series))
        low, high = min(panel.values), max(panel.values)
        logarithmic = low > 0 and high > _LOGARITHMIC * low
        panels.append(replace(panel, limit=limit, limit_label=text, logarithmic=logarithmic))
    return panels


def throughput_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Panel]:
    """Return answered requests per second, and the share that meets the limits, over the load."""
    axis, groups = _level_series(levels)
    answered = tuple(
        Series(label, points)
        for label, places in groups.items()
        if (points := _level_points(places, "request_throughput"))
    )
    panels = []
    if answered:
        diagonal = axis != "concurrency"
        panels.append(Panel("load-throughput", "curve", "Throughput", "requests/s", axis, answered, diagonal=diagonal))
    if settings.goodput and groups:
        shares = tuple(
            Series(label, tuple(_level_point(x, level, attainment(level)) for x, level in places))
            for label, places in groups.items()
        )
        target = 100 * settings.attainment
        title, text = "Requests that meet the limits", f"target {target:.4g}%"
        panels.append(Panel("load-attainment", "curve", title, "%", axis, shares, limit=target, limit_label=text))
    return panels


def _level_points(places: _Places, metric: str) -> tuple[Point, ...]:
    figures = ((x, level, measured(level.metrics, metric)) for x, level in places)
    return tuple(_level_point(x, level, value) for x, level, value in figures if value.value is not None)


def _level_point(x: float, level: MeasuredLevel, value: Measured) -> Point:
    return Point(x, value, level.name, "", level.client_limited)


def attainment(level: MeasuredLevel) -> Measured:
    """Return the share of a level's requests that meet the limits, in percent."""
    low, high = level.goodput.interval
    return Measured(100 * level.goodput.attainment, 100 * low, 100 * high)


_Times: TypeAlias = list[tuple[float, tuple[int, int, int]]]
"""Milliseconds, and the (replica, repeat, batch) they come from."""


def by_request(run: Run, rows: Sequence[MeasuredCell]) -> ChartGroup:
    """Return the median E2E latency of the fastest cells by view count and by aspect ratio.

    A panel is omitted where all requests are alike, or where the sizes of their images were not recorded.
    """
    fastest = sorted(rows, key=lambda row: -row.speed)[:MOST_SERIES]
    chosen = [row for row in rows if row in fastest]
    panels, few = [], False
    ways: tuple[tuple[str, str, str, Callable[[RequestRecord], Any], Callable[[Any], int]], ...] = (
        ("views", "view count", "views per request", lambda request: request.views or 0, int),
        ("aspect", "aspect ratio", "shape of the image", shape_of, SHAPES.index),
    )
    for name, group, axis, key, order in ways:
        grouped = {row.cell: _times_by(run, row.cell, key) for row in chosen}
        values = sorted({value for groups in grouped.values() for value in groups}, key=order)
        if len(values) < 2:
            continue
        few |= any(len(times) < FEW for groups in grouped.values() for times in groups.values())
        series = tuple(
            Series(
                row.name,
                tuple(_median_point(at, groups[value], row) for at, value in enumerate(values) if value in groups),
            )
            for row in chosen
            if (groups := grouped[row.cell])
        )
        title, ticks = f"Median E2E latency by {group}", tuple(map(str, values))
        panels.append(Panel(f"latency-{name}", "steps", title, "ms", axis, series, ticks))
    legend = tuple(row.name for row in chosen) if panels and len(chosen) > 1 else ()
    note = f"The {len(chosen)} fastest of {count(len(rows), 'setting')}." if len(chosen) < len(rows) else ""
    return ChartGroup("By view count and aspect ratio", note, legend, tuple(panels), folded=few)


def _times_by(run: Run, cell: str, key: Callable[[RequestRecord], Any]) -> dict[Any, _Times]:
    """Return the E2E latencies of a cell's answered requests, in groups."""
    return grouped(
        (value, (seconds * 1e3, (request.replica, request.repeat, request.batch)))
        for request in run.answered(cell)
        if (value := key(request)) is not None and (seconds := request.e2e) is not None
    )


def _median_point(index: int, times: _Times, row: MeasuredCell) -> Point:
    milliseconds = [time for time, _ in times]
    intervals = cluster_intervals(milliseconds, [batch for _, batch in times], (50,))
    low, high = intervals[1] if intervals else (None, None)
    median = Measured(float(np.percentile(milliseconds, 50)), low, high)
    return Point(index, median, row.name, count(len(times), "request"), row.verdict.word in _DOUBTED)
