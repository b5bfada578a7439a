"""Every number of a report's charts: in the tables beside them, in the drawings and on their points."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.records import synthetic
from tests.report.report_known import SECONDS, known_run, throughput
from tests.report.report_page import Element, page_of, rows_of, section

from panscan.records.store import Run
from panscan.report.charts import Panel, Point, Series
from panscan.report.draw import LIGHT, panel_figure, tips
from panscan.report.sweep import SweepReport
from panscan.report.table import Measured


def test_the_drawings_hold_the_same_numbers(known: tuple[Run, Element]) -> None:
    """The points of matplotlib's axes, and the tooltip of each point in the page."""
    facts = SweepReport(known[0])
    shown_tips = [next(group.all("title")).text for group in known[1].all("g") if list(group.all("title"))]
    for panel in [panel for block in (facts.decision, *facts.comparisons, facts.latency) for panel in block.panels]:
        axes = panel_figure(panel, LIGHT).axes[0]
        drawn = {line.get_gid(): line for line in axes.lines if line.get_gid()}
        points = {
            f"{panel.name}-{i}-{j}": (series, point)
            for i, series in enumerate(panel.series)
            for j, point in enumerate(series.points)
        }
        assert drawn.keys() == points.keys()
        for gid, (series, point) in points.items():
            [(x, y)] = np.asarray(drawn[gid].get_xydata(), float)
            assert (x if panel.kind == "dots" else y) == point.value.value
            assert panel.kind == "dots" or round(x) == point.at
            hollow = drawn[gid].get_markerfacecolor() == LIGHT["page"]
            assert hollow == point.hollow
            assert point.note.endswith("requests") or hollow == (point.note in ("different", "unverified"))
            tick = panel.ticks[int(point.at)]
            place = tick if panel.kind == "dots" else f"{panel.axis} {tick}"
            wanted = ", ".join(filter(None, (place, series.label))) + f": {point.value.text}"
            assert any(tip.startswith(wanted) for tip in shown_tips), wanted
        low = axes.get_xlim()[0] if panel.kind == "dots" else axes.get_ylim()[0]
        assert low == 0, "speeds and times begin at zero"
    drawn = {line.get_gid(): line for line in panel_figure(facts.front, LIGHT).axes[0].lines if line.get_gid()}
    shown = [tuple(map(float, np.asarray(drawn[f"front-0-{i}"].get_xydata(), float)[0])) for i in range(4)]
    ratios = {"fast": 1.25, "plain": 1.5, "wrong": 1540.0, "near": 5.25}
    assert shown == [(pytest.approx(throughput(cell)), pytest.approx(ratio)) for cell, ratio in ratios.items()]


def test_an_interval_far_above_all_values_does_not_set_the_scale() -> None:
    points = (Point(1.0, Measured(1.0, 0.5, 1e4), "a"), Point(2.0, Measured(3.0, 2.0, 4.0), "b"))
    for kind in ("curve", "dots"):
        panel = Panel("load", kind, "Throughput", "", "requests/s", (Series("", points),), ("", "a", "b"))
        axes = panel_figure(panel, LIGHT).axes[0]
        assert 3 < (axes.get_xlim() if kind == "dots" else axes.get_ylim())[1] < 10
        assert all(text.xy[0] < 10 and text.xy[1] < 200 for text in axes.texts)


def test_the_front_by_distance_from_the_reference(known: tuple[Run, Element]) -> None:
    facts, box = SweepReport(known[0]), section(known[1], "front")
    assert [point.cell for point in facts.front.points if point.chosen] == [1]
    assert {point.cell: not point.hollow for point in facts.front.points} == {1: True, 2: False, 3: True, 4: False}
    assert "On the front: flash_attention_2 attention, batch size 2 (3.90 requests/s); balanced, sdpa" in box.text
    assert "1 setting without this figure is not shown" in box.text
    assert "exact up to 2x" in box.text and "close up to 10x" in box.text
    assert [item.text for item in box.of_class("legend")[0].all("li")] == ["exact", "close", "different"]


def test_the_front_by_quality(tmp_path: Path) -> None:
    run = known_run(tmp_path, scores=True)
    facts, box = SweepReport(run), section(page_of(run), "front")
    assert not facts.front.logarithmic
    assert [point.cell for point in facts.front.points if not point.hollow] == [1, 3], "the others are slower"
    assert [point.value.value for point in facts.front.points] == [0.75] * 5
    assert "exact match" in box.text


@pytest.mark.parametrize("cells", [1, 2, 9, 10])
def test_a_front_compares_and_its_names_do_not_pile_up(tmp_path: Path, cells: int) -> None:
    """Cell 0 is exact and the slowest, the last one the fastest and closest after it: these two are on the front."""
    header = synthetic.header({str(number): {"batch_size": number} for number in range(cells)})
    records = [header]
    for number in range(cells):
        records += synthetic.batches_of(str(number), [20.0 - number] * 2)
        records.append(synthetic.verdict(str(number), "close" if number else "exact", 20.0 - number if number else 1.0))
    front = SweepReport(synthetic.write_run(tmp_path, records)).front
    if cells == 1:
        assert front is None
        return
    assert len(tips(front)) == cells
    chosen = cells // 2
    points = tuple(replace(point, chosen=point.cell == chosen) for point in front.points)
    axes = panel_figure(replace(front, series=(Series("", points),)), LIGHT).axes[0]
    named = {text.get_text() for text in axes.texts}
    if cells >= 10:
        assert {name for name in named if name.isdigit()} == {"1", str(chosen), str(cells)}
    else:
        names = {name for name in named if name.startswith("batch size")}
        assert {"batch size 0", f"batch size {chosen - 1}"} <= names <= {f"batch size {n}" for n in range(cells)}


def test_answers_that_are_all_wrong_make_no_front(tmp_path: Path) -> None:
    """As a model with random weights gives: then the distance from the reference is what can be shown."""
    run = known_run(tmp_path, scores=True)
    for records in run.requests.values():
        for record in records:
            record.scores = {"exact_match": 0.0}
    facts = SweepReport(run)
    assert facts.front.logarithmic
    assert facts.cells[0].row.quality is not None


def test_bars_of_stages_are_as_long_as_their_times(known: tuple[Run, Element]) -> None:
    starts, widths = [0, 5, 15, 40, 60], [5, 10, 25, 20, 40]
    for row, seconds in zip(rows_of(next(section(known[1], "stages").all("table"))), SECONDS.values(), strict=True):
        share = seconds / max(SECONDS.values())
        for name, due in (("x", starts), ("width", widths)):
            values = [float(bar.attributes[name]) for bar in row["bar"].all("rect")]
            assert values == pytest.approx([share * percent for percent in due], abs=3e-3)


def test_limits_come_from_the_code(known: tuple[Run, Element], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panscan.verdict.judgement.EXACT_RATIO", 3.5)
    definitions = section(page_of(known[0]), "definitions").text
    assert "at most 3.5x the noise" in definitions
    assert "Student's distribution over repeats; none of a single repeat" in definitions
