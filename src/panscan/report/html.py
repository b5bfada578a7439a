"""``report.html``: one file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from panscan.analysis.cells import count, number_text
from panscan.analysis.task_cost import TITLE
from panscan.records.schema import STAGES
from panscan.report import draw
from panscan.report.charts import ChartGroup, Panel
from panscan.report.formatting import percent, templates, times, verdict_figures
from panscan.report.report_data import ReportCell, ReportData

__all__ = ["render_html"]

_FLOORED = ("vision", "prefill", "decode", "E2E")
_SIGNS = {"exact": "✓", "close": "≈", "different": "✗", "unverified": "?"}


def render_html(facts: ReportData) -> str:
    """Return the page of a run. The same facts give the same text."""
    environment = templates()
    environment.filters.update(number=number_text, percent=percent, times=times, count=count)
    return environment.get_template("report.html.j2").render(
        facts=facts,
        stages=STAGES,
        cost_title=TITLE,
        floored_stages=_FLOORED,
        signs=_SIGNS,
        light=draw.LIGHT,
        dark=draw.DARK,
        longest=max((cell.e2e or 0.0 for cell in facts.cells), default=0.0),
        front_cells=_front_cells(facts),
        figures_of=verdict_figures,
        chart=draw.chart_markup,
        key=draw.key_markup,
        bar=_bar,
        rows_of=_rows_of,
        floor_of=_floor_of,
    )


def _bar(cell: ReportCell, longest: float) -> list[tuple[int, float, float]]:
    """Return the stages of a cell as (stage, left, width), in percent of the longest E2E of any cell."""
    found, left = [], 0.0
    for index, value in enumerate(cell.stages):
        if value and longest:
            width = 100 * value / longest
            found.append((index, left, width))
            left += width
    return found


def _rows_of(comparison: ChartGroup, panel: Panel) -> list[tuple[str, ...]]:
    """Return the numbers of a chart: series (if there are several), tick, value, interval, note."""
    return [
        ((series.label,) if comparison.legend else ())
        + (panel.ticks[int(point.at)], point.value.text, point.value.bounds or "-", point.note)
        for series in panel.series
        for point in series.points
    ]


def _front_cells(facts: ReportData) -> list[ReportCell]:
    """Return the cells on the front, the fastest first."""
    points = () if facts.front is None else facts.front.points
    best = sorted((point for point in points if point.on_front), key=lambda point: -(point.speed.value or 0.0))
    return [facts.numbered(point.cell) for point in best]


def _floor_of(cell: ReportCell) -> list[tuple[float | None, float | None, float | None]]:
    """Return (floor, measured, ratio) of vision, prefill, decode, E2E and throughput, without ratios below 1.

    Vision that was not timed is part of prefill.
    """
    floor = cell.floor
    ratios = {name: ratio for name, ratio in cell.ratios.items() if name not in cell.too_quick}
    if floor is None:
        return []
    stages = dict(zip(STAGES, cell.stages, strict=True))
    seen = stages["vision"] is not None
    vision, prefill = (floor.vision_ms, floor.prefill_ms) if seen else (None, floor.vision_ms + floor.prefill_ms)
    return [
        (vision, stages["vision"], ratios.get("mean_vision_ms")),
        (prefill, stages["prefill"], ratios.get("mean_prefill_ms")),
        (floor.decode_ms, stages["decode"], ratios.get("mean_decode_ms")),
        (floor.e2e_ms, cell.e2e, ratios.get("mean_e2el_ms")),
        (floor.request_throughput, cell.throughput.value, ratios.get("request_throughput")),
    ]
