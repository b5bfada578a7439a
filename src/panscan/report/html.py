"""``report.html``: one file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from itertools import accumulate
from math import inf

from panscan.analysis import accuracy
from panscan.analysis.floors import compared
from panscan.analysis.levels import VERIFY_HINT
from panscan.records import scores
from panscan.records.fields import STAGES
from panscan.records.load_runs import LEAST_STEADY
from panscan.records.metrics import LEAST_SAMPLES
from panscan.report import draw
from panscan.report.charts import attainment
from panscan.report.formatting import templates
from panscan.report.load import LoadReport
from panscan.report.sweep import ReportCell, SweepReport
from panscan.report.table import measured
from panscan.verdict import judgement

_FLOORED = ("vision", "prefill", "decode", "E2E")
_SIGNS = {"exact": "✓", "close": "≈", "different": "✗", "unverified": "?"}


def render_html(facts: SweepReport | LoadReport) -> str:
    """Return the page of a run. The same facts give the same text."""
    names = {
        "light": draw.LIGHT,
        "dark": draw.DARK,
        "chart": draw.chart_markup,
        "key": draw.key_markup,
        "least_steady": LEAST_STEADY,
        "samples": ", ".join(f"{least} for p{percent}" for percent, least in LEAST_SAMPLES.items()),
    }
    if isinstance(facts, LoadReport):
        page = templates().get_template("load.html.j2")
        return page.render(facts=facts, verify_hint=VERIFY_HINT, attainment=attainment, measured=measured, **names)
    points = [] if facts.front is None else facts.front.points
    best = sorted((point for point in points if not point.hollow), key=lambda point: -point.at)
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            stages=STAGES,
            floored_stages=_FLOORED,
            signs=_SIGNS,
            longest=max((cell.e2e or 0.0 for cell in facts.cells), default=0.0),
            front_cells=[facts.cells[point.cell - 1] for point in best],
            bar=_bar,
            floor_of=_floor_of,
            verdict=judgement,
            scores=scores,
            accuracy=accuracy,
            max_loss=accuracy.max_loss_of(facts.run),
            **names,
        )
    )


def _bar(cell: ReportCell, longest: float) -> list[tuple[int, float, float]]:
    """Return the stages of a cell as (stage, left, width), in percent of the longest E2E of any cell."""
    widths = [100 * (value or 0.0) / (longest or inf) for value in cell.stages]
    lefts = accumulate(widths, initial=0.0)
    return [(index, left, width) for index, (left, width) in enumerate(zip(lefts, widths, strict=False)) if width]


def _floor_of(cell: ReportCell) -> list[tuple[float | None, float | None, float | None]]:
    """Return (floor, measured, ratio) of vision, prefill, decode, E2E and throughput, without ratios below 1."""
    if cell.floor is None:
        return []
    return [
        (floor, value, None if name in cell.too_quick else cell.ratios.get(name))
        for name, (floor, value) in compared(cell.floor, cell.row.metrics).items()
    ]
