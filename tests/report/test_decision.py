"""One decision: the terminal, the page, markdown and the preset name the same cell in the same sentence."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.analysis.test_recommend import Cell, run_with
from tests.report.report_page import page_of, section
from tests.report.test_terminal import shown

from panscan.analysis.recommend import preset_text, recommend
from panscan.core import RecordsError
from panscan.report import to_markdown
from panscan.report.table import plain_text
from panscan.report.terminal import print_decision

cells = st.builds(
    Cell,
    seconds=st.sampled_from([0.25, 0.5, 0.505, 1.0]),
    word=st.sampled_from(["exact", "exact", "close", "different", "unverified"]),
    views=st.sampled_from([1, 3]),
    crops=st.sampled_from([1, 4]),
    scores=st.sampled_from([(), (1.0,) * 12, (1.0,) * 10 + (0.0,) * 2, (0.0,) * 12]),
)


@pytest.mark.usefixtures("without_charts")
@example([Cell(word="different")])
@given(st.lists(cells, min_size=1, max_size=4))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_form_names_the_same_cell(drawn: list[Cell]) -> None:
    run = run_with(**{f"owner/c{number}": cell for number, cell in enumerate(drawn)})
    page, markdown, terminal = page_of(run), to_markdown(run), shown(print_decision, run, 400).strip()
    headline = next(section(page, "recommendation").all("h1")).text
    rows = [row.text for row in section(page, "cells").of_class("chosen")]
    try:
        found = recommend(run)
    except RecordsError:
        assert terminal.startswith("No recommendation: ") and headline.startswith("No recommendation: ")
        assert "**No recommendation:**" in markdown and rows == []
        return
    assert terminal == headline == found.decision
    assert f"**{plain_text(found.decision)}**" in markdown
    assert len(rows) == 1 and found.name in rows[0]
    preset = preset_text(run, found)
    assert f"# decision: {found.decision}\n# cell: {found.cell}\n" in preset
    assert f"attention: {found.cell}\n" in preset, "the settings of that cell"
