"""Latency by what a request brought: its number of views, and the shape of its images. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from panscan.analysis.cells import MeasuredCell, count, speed
from panscan.records.intervals import cluster_intervals
from panscan.records.schema import RequestRecord
from panscan.records.store import Run
from panscan.report.charts import MOST_SERIES, ChartGroup, Panel, Point, Series
from panscan.report.formatting import FEW, Measured

__all__ = ["ASPECTS", "aspect_of", "by_request"]

ASPECTS = (1.0, 1.2, 1.6, 2.0, 2.5, 4.0)
"""Lower ends of the groups of longer over shorter side; from 1.2 Gemma 3's processor crops, the presets begin later."""

Key = Callable[[RequestRecord], float | None]


def by_request(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]) -> ChartGroup:
    """Return the median E2E latency of the fastest cells by view count and by aspect ratio.

    A panel is omitted where all requests are alike, or where the sizes of their images were not recorded.

    Args:
        run: the run.
        rows: measured cells.
        names: settings in words by cell id.
    """
    fastest = sorted(rows, key=lambda row: -speed(row))[:MOST_SERIES]
    chosen = [row for row in rows if row in fastest]
    panels, few = [], False
    for name, title, key, label in (
        ("views", "Median E2E latency by view count", _views, _plain),
        ("aspect", "Median E2E latency by aspect ratio", aspect_of, _aspect_label),
    ):
        grouped = {row.cell: _grouped(run, row.cell, key) for row in chosen}
        values = sorted({value for groups in grouped.values() for value in groups})
        if len(values) < 2:
            continue
        few |= any(len(times) < FEW for row in chosen for times in grouped[row.cell].values())
        series = tuple(
            Series(names[row.cell], tuple(_point(names[row.cell], row, values, each) for each in found))
            for row in chosen
            if (found := sorted(grouped[row.cell].items()))
        )
        axis = "views per request" if name == "views" else "longer side / shorter side"
        ticks = tuple(map(label, values))
        panels.append(Panel(f"latency-{name}", "steps", title, "ms", axis, series, ticks))
    note = f"The {len(chosen)} fastest of {count(len(rows), 'setting')}." if len(chosen) < len(rows) else ""
    legend = tuple(names[row.cell] for row in chosen) if panels and len(chosen) > 1 else ()
    return ChartGroup("By view count and aspect ratio", note, legend, tuple(panels), folded=few)


def _views(request: RequestRecord) -> float:
    return float(request.views or 0)


def aspect_of(request: RequestRecord) -> float | None:
    """The group of :data:`ASPECTS` of a request's longest image; None where no size was kept."""
    sides = [size for size in request.image_size if min(size) > 0]
    longest = max((max(size) / min(size) for size in sides), default=None)
    return None if longest is None else max(low for low in ASPECTS if low <= longest)


def _plain(value: float) -> str:
    return f"{value:g}"


def _aspect_label(low: float) -> str:
    above = [end for end in ASPECTS if end > low]
    return f"{low:g}–{above[0]:g}" if above else f"≥{low:g}"


_Times = list[tuple[float, tuple[int, int, int]]]
"""Milliseconds, and the (replica, repeat, batch) they come from."""


def _grouped(run: Run, cell: str, key: Key) -> dict[float, _Times]:
    groups: dict[float, _Times] = defaultdict(list)
    for request in run.answered(cell):
        value, seconds = key(request), request.e2e
        if value is not None and seconds is not None:
            groups[value].append((seconds * 1e3, (request.replica, request.repeat, request.batch)))
    return groups


def _point(name: str, row: MeasuredCell, values: Sequence[float], group: tuple[float, _Times]) -> Point:
    value, times = group
    milliseconds = [time for time, _ in times]
    found = cluster_intervals(milliseconds, [batch for _, batch in times], (50,), seed=0)
    low, high = found[1] if found else (None, None)
    median = Measured(float(np.percentile(milliseconds, 50)), low, high)
    samples = count(len(times), "request")
    return Point(values.index(value), median, name, samples, row.verdict.word in ("different", "unverified"))
