"""The throughput-latency curves of a load run, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from panscan.analysis.levels import TIME_NAMES, MeasuredLevel
from panscan.records.metrics import percentile_name
from panscan.records.schema import LoadRunSettings
from panscan.report.charts import MOST_SERIES, Panel, Point, Series
from panscan.report.formatting import Measured, measured

__all__ = ["latency_curves", "throughput_curves"]

_LOGARITHMIC = 30
"""The ratio of the largest to the least value from which an axis is logarithmic."""


def latency_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Panel]:
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
        values = [point.value.value or 0.0 for each in series for point in each.points]
        if series:
            curves.append(
                Panel(
                    f"load-{time}",
                    "curve",
                    TIME_NAMES[time],
                    "ms",
                    "completed requests/s",
                    tuple(series),
                    limit=limit,
                    limit_label="" if limit is None else f"limit {limit:g} ms",
                    logarithmic=min(values) > 0 and max(values) > _LOGARITHMIC * min(values),
                )
            )
    return curves


def _percentiles(levels: Sequence[MeasuredLevel], time: str, percent: float) -> Series:
    name = percentile_name(percent)
    points = [
        Point(level.achieved, measured(level.metrics, f"{name}_{time}_ms"), level.name, "", level.client_limited)
        for level in levels
        if level.metrics is not None and level.metrics.values[f"{name}_{time}_ms"] is not None
    ]
    return Series(name, tuple(points))


def throughput_curves(levels: Sequence[MeasuredLevel], settings: LoadRunSettings) -> list[Panel]:
    """Return answered requests per second, and the share that meets the limits, over the offered requests per second.

    Without offered rates, over the concurrency; without either, nothing.
    """
    places = [(level.offered, level) for level in levels if level.offered is not None]
    axis, open_loop = "offered requests/s", True
    if not places:
        places = [(float(level.concurrency), level) for level in levels if level.concurrency is not None]
        axis, open_loop = "concurrency", False
    if not places:
        return []
    answered = [
        Point(x, measured(level.metrics, "request_throughput"), level.name, "", level.client_limited)
        for x, level in places
        if level.metrics is not None
    ]
    curves = [Panel("load-throughput", "curve", "Throughput", "requests/s", axis, _one(answered), diagonal=open_loop)]
    if settings.goodput:
        shares = [Point(x, _attainment(level), level.name, "", level.client_limited) for x, level in places]
        target = 100 * settings.attainment
        curves.append(
            Panel(
                "load-attainment",
                "curve",
                "Requests that meet the limits",
                "%",
                axis,
                _one(shares),
                limit=target,
                limit_label=f"target {target:.4g}%",
            )
        )
    return [curve for curve in curves if curve.series]


def _one(points: Sequence[Point]) -> tuple[Series, ...]:
    return (Series("", tuple(points)),) if points else ()


def _attainment(level: MeasuredLevel) -> Measured:
    low, high = level.goodput.interval
    return Measured(100 * level.goodput.attainment, 100 * low, 100 * high)
