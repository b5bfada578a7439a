"""The throughput-latency curves of a load run, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from panscan.analysis.levels import TIME_NAMES, MeasuredLevel
from panscan.records.load_runs import LoadRunSettings
from panscan.records.metrics import percentile_name
from panscan.report.charts import MOST_SERIES
from panscan.report.formatting import Measured, measured

__all__ = ["Curve", "CurvePoint", "CurveSeries", "latency_curves", "throughput_curves"]

_LOGARITHMIC = 30
"""The ratio of the largest to the least value from which an axis is logarithmic."""
_FAR = 3
"""A limit more than this many times above the highest point would only flatten the curves: it is not drawn."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A level in a chart.

    Args:
        x: on the horizontal axis.
        y: on the vertical axis.
        level: the name of the level.
        hollow: whether the load generator limited the level.
    """

    x: float
    y: Measured
    level: str
    hollow: bool


@dataclass(frozen=True, slots=True)
class CurveSeries:
    """One statistic over all levels, in their order."""

    label: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart with numbers on both axes.

    Args:
        name: of its file, and the start of its ids.
        title: of the vertical axis.
        unit: of the vertical axis.
        axis: title of the horizontal axis.
        series: at most :data:`panscan.report.charts.MOST_SERIES`.
        limit: a horizontal line; None without one. ``limit_label`` is its text.
        diagonal: whether to draw where both axes are equal.
        logarithmic: whether the vertical axis is.
    """

    name: str
    title: str
    unit: str
    axis: str
    series: tuple[CurveSeries, ...]
    limit: float | None = None
    limit_label: str = ""
    diagonal: bool = False
    logarithmic: bool = False

    @property
    def values(self) -> list[float]:
        """Return all values."""
        return [point.y.value or 0.0 for series in self.series for point in series.points]

    @property
    def top(self) -> float:
        """Return the highest value, intervals included."""
        bounds = [point.y.high for series in self.series for point in series.points if point.y.high is not None]
        return max([*self.values, *bounds])

    @property
    def line(self) -> float | None:
        """Return the limit if it is near enough to be drawn."""
        return self.limit if self.limit is not None and self.limit <= _FAR * self.top else None

    @property
    def caption(self) -> str:
        """Return the title with its unit and limit."""
        text = f"{self.title}, {self.unit}"
        if self.limit is None:
            return text
        return f"{text} (dashed: {self.limit_label})" if self.line else f"{text} ({self.limit_label}: above the chart)"


def latency_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Curve]:
    """Return a chart for each time that the run shows but ITL: its percentiles over the answered requests per second.

    ITL has the scale of TPOT, and would only repeat it. A chart without a point is left out.
    """
    percents = sorted(settings.metric_percentiles)[:MOST_SERIES]
    curves = []
    for time in settings.percentile_metrics:
        if time == "itl":
            continue
        series = [_percentiles(levels, time, percent) for percent in percents]
        series = [each for each in series if each.points]
        limit = settings.goodput.get(time)
        values = [point.y.value or 0.0 for each in series for point in each.points]
        if series:
            curves.append(
                Curve(
                    f"load-{time}",
                    TIME_NAMES[time],
                    "ms",
                    "answered req/s",
                    tuple(series),
                    limit,
                    "" if limit is None else f"limit {limit:g} ms",
                    logarithmic=min(values) > 0 and max(values) > _LOGARITHMIC * min(values),
                )
            )
    return curves


def _percentiles(levels: Sequence[MeasuredLevel], time: str, percent: float) -> CurveSeries:
    name = percentile_name(percent)
    points = [
        CurvePoint(level.achieved, measured(level.metrics, f"{name}_{time}_ms"), level.name, level.client_limited)
        for level in levels
        if level.metrics is not None and level.metrics.values[f"{name}_{time}_ms"] is not None
    ]
    return CurveSeries(name, tuple(points))


def throughput_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Curve]:
    """Return answered requests per second, and the share that meets the limits, over the offered requests per second.

    Without offered rates, over the concurrency; without either, nothing.
    """
    places = [(level.offered, level) for level in levels if level.offered is not None]
    axis, open_loop = "offered req/s", True
    if not places:
        places = [(float(level.concurrency), level) for level in levels if level.concurrency is not None]
        axis, open_loop = "concurrency", False
    if not places:
        return []
    answered = [
        CurvePoint(x, measured(level.metrics, "request_throughput"), level.name, level.client_limited)
        for x, level in places
        if level.metrics is not None
    ]
    curves = [Curve("load-throughput", "Throughput", "req/s", axis, _one(answered), diagonal=open_loop)]
    if settings.goodput:
        shares = [CurvePoint(x, _attainment(level), level.name, level.client_limited) for x, level in places]
        target = 100 * settings.attainment
        curves.append(
            Curve(
                "load-attainment",
                "Requests that meet the limits",
                "%",
                axis,
                _one(shares),
                target,
                f"target {target:.4g}%",
            )
        )
    return [curve for curve in curves if curve.series]


def _one(points: Sequence[CurvePoint]) -> tuple[CurveSeries, ...]:
    return (CurveSeries("", tuple(points)),) if points else ()


def _attainment(level: MeasuredLevel) -> Measured:
    low, high = level.goodput.interval
    return Measured(100 * level.goodput.attainment, 100 * low, 100 * high)
