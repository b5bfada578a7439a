"""``report.html`` of a load run: one file that needs neither a network nor a script."""

from __future__ import annotations

from panscan.analysis.cells import count, number_text
from panscan.analysis.levels import VERIFY_HINT
from panscan.report import draw
from panscan.report.formatting import templates
from panscan.report.load_data import LoadReport

__all__ = ["render_load_html"]


def render_load_html(facts: LoadReport) -> str:
    """Return the page of a load run. The same facts give the same text."""
    environment = templates()
    environment.filters.update(number=number_text, count=count)
    return environment.get_template("load.html.j2").render(
        facts=facts,
        best=next((row for row in facts.rows if row.chosen), None),
        verify_hint=VERIFY_HINT,
        light=draw.LIGHT,
        dark=draw.DARK,
        chart=draw.chart_markup,
        key=draw.key_markup,
    )
