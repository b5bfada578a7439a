"""The rules of a recommendation, each on a run in which it alone decides, and properties on random runs."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records.synthetic import batches_of, header, outcome, repeat, scored, verdict, write_run

from panscan.analysis.recommend import Recommendation, recommend
from panscan.core import RecordsError, SettingError
from panscan.records.store import Run

NOISE = (0.97, 1.0, 1.03, 1.0)
OTHER = (1.0, 1.03, 1.0, 0.97)
"""Latencies of a cell's repeats, over its own: cells with other noise are apart if they differ by 20%, not by 1%."""


@dataclass(frozen=True)
class Cell:
    """A cell whose batches take ``seconds`` each, give or take noise, ``times`` the rounding noise off."""

    seconds: float = 1.0
    word: str | None = "exact"
    times: float | None = 1.0
    outcome: str = "done"
    views: int = 3
    crops: int = 4
    scores: Sequence[float] = ()
    gib: float = 1.0
    noise: Sequence[float] = NOISE

    def records(self, cell: str) -> list[dict[str, Any]]:
        count = max(3, len(self.scores))
        found: list[dict[str, Any]] = []
        for number, noise in enumerate(self.noise):
            *requests, line, _ = batches_of(cell, [self.seconds * noise] * count, views=self.views)
            requests = scored(requests, self.scores) if self.scores else requests
            found += [record | {"repeat": number} for record in requests]
            found.append(line | {"repeat": number, "peak_rss_bytes": int(self.gib * 2**30)})
        found.append(outcome(cell, self.outcome, None if self.outcome == "done" else "no room"))
        return found if self.word is None else [*found, verdict(cell, self.word, self.times)]


def run_with(**cells: Cell) -> Run:
    known = {name: {"pan_and_scan_max_num_crops": cell.crops, "attention": name} for name, cell in cells.items()}
    records = [header(known), *(record for name, cell in cells.items() for record in cell.records(name))]
    with tempfile.TemporaryDirectory() as directory:
        return write_run(Path(directory), records)


def chosen(limits: dict[str, Any] | None = None, **cells: Cell) -> Recommendation:
    return recommend(run_with(**cells), **limits or {})


def refusal(limits: dict[str, Any] | None = None, **cells: Cell) -> str:
    with pytest.raises(RecordsError) as caught:
        chosen(limits, **cells)
    return str(caught.value)


def cost(found: Recommendation) -> str:
    return "\n".join(found.cost)


def test_the_highest_throughput_wins_among_exact_and_close() -> None:
    found = chosen(slow=Cell(1.0), fast=Cell(0.5, "close", 3.1))
    assert (found.cell, found.runner_up) == ("fast", "slow")
    assert found.reason.startswith("2.00 requests/s (95%: ")
    assert "fastest of 2 settings with trusted answers and the most views" in found.reason
    assert found.decision == "Use fast attention: 2.00 requests/s; with slow attention, 1.00 requests/s."
    assert "close (KL 3.10x the rounding noise), not exact" in cost(found)
    assert "not measurably" not in cost(found)


def test_within_the_noise_exact_comes_before_close_and_then_the_faster() -> None:
    found = chosen(exact=Cell(1.0), close=Cell(0.995, "close", 3.0, noise=OTHER))
    assert found.cell == "exact"
    assert "within noise of the fastest of 2 settings" in found.reason
    assert "not measurably faster than the runner-up, close attention" in cost(found)
    assert chosen(one=Cell(1.0), two=Cell(0.995, noise=OTHER)).cell == "two", "of equals, the faster"
    assert chosen(exact=Cell(1.0), close=Cell(0.8, "close", 3.0)).cell == "close"


def test_a_different_cell_is_taken_only_by_name() -> None:
    cells = {"right": Cell(1.0), "wrong": Cell(0.2, "different", 37.0)}
    found = chosen(**cells)
    assert (found.cell, found.runner_up) == ("right", None)
    assert found.rejected["wrong"].startswith("different from the reference")
    assert "faster but rejected: wrong attention, 5.00 requests/s" in cost(found)
    found = chosen({"allow": ["wrong"]}, **cells)
    assert found.cell == "wrong"
    assert "DIFFERENT from the reference (KL 37.0x the rounding noise); allowed by --allow-different" in found.reason
    assert " requests/s (its answers differ from the reference's)" in found.decision
    message = refusal(wrong=Cell(0.2, "different", 37.0), worse=Cell(1.0, "different", 50.0))
    assert "the fastest is wrong attention" in message
    assert "--allow-different wrong" in message


RIGHT = (1.0,) * 70 + (0.0,) * 30


@pytest.mark.parametrize(
    ("baseline", "different", "taken", "why"),
    [
        (RIGHT * 2, RIGHT * 2, True, ""),
        (RIGHT, (1.0,) * 90 + (0.0,) * 10, True, ""),
        (RIGHT, RIGHT, False, "reference; the same score on all 100 questions; about 190 questions needed"),
        (RIGHT, (1.0,) * 50 + (0.0,) * 50, False, "reference; loss: -20.0 points"),
        ((0.0,) * 200, (0.0,) * 200, False, "undecided: no answer to 200 questions is right"),
        ((), (), False, "only a labelled dataset can show the accuracy cost"),
    ],
)
def test_answers_can_show_that_a_different_cell_loses_nothing(
    baseline: Sequence[float], different: Sequence[float], taken: bool, why: str
) -> None:
    found = chosen(right=Cell(1.0, scores=baseline), wrong=Cell(0.2, "different", 37.0, scores=different))
    assert found.cell == ("wrong" if taken else "right")
    assert why in found.rejected.get("wrong", "")
    assert ("points" in found.reason or "the same score" in found.reason) == taken


def test_cells_that_compute_the_same_need_no_more_questions_and_no_luck() -> None:
    """Few questions decide nothing: a verified cell with the same views is chosen by its speed, others are not."""
    right = (1.0,) * 11 + (0.0,)
    slow = Cell(1.0, scores=right)
    assert chosen(slow=slow, exact=Cell(0.3, scores=right)).cell == "exact"
    assert chosen(slow=slow, close=Cell(0.3, "close", 3.0, scores=(*right[1:], 0.0))).cell == "close"
    assert chosen(slow=slow, lucky=Cell(0.3, views=2, crops=2, scores=(1.0,) * 12)).cell == "slow"
    assert chosen(slow=Cell(1.0, None, scores=right), unknown=Cell(0.3, None, scores=right)).cell == "slow"


@pytest.mark.parametrize("word", ["unverified", None])
def test_an_unverified_cell_is_taken_only_where_none_is_verified_or_by_name(word: str | None) -> None:
    unknown = Cell(0.2, word)
    assert chosen(right=Cell(1.0), unknown=unknown).cell == "right"
    assert chosen(right=Cell(1.0), unknown=unknown).rejected["unknown"].startswith("unverified")
    assert chosen({"allow": ["unknown"]}, right=Cell(1.0), unknown=unknown).cell == "unknown"
    found = chosen(unknown=unknown, slower=Cell(1.0, word))
    assert found.cell == "unknown"
    assert "UNVERIFIED: not compared with the reference" in found.reason
    assert "no cell gives the reference's answers" in refusal(wrong=Cell(1.0, "different", 37.0), unknown=unknown)


@pytest.mark.parametrize("word", ["skipped", "failed", "oom"])
def test_cells_that_did_not_finish_are_none(word: str) -> None:
    found = chosen(right=Cell(1.0), other=Cell(0.1, outcome=word))
    assert (found.cell, found.rejected["other"]) == ("right", f"{word}: no room")
    assert "no cell is finished" in refusal(other=Cell(0.1, outcome=word))


def test_the_limit_on_p95_and_the_nearest_miss() -> None:
    cells = {"fast": Cell(2.31), "slow": Cell(3.0), "wrong": Cell(0.1, "different", 37.0)}
    found = chosen({"max_p95_ms": 2500}, **cells)
    assert found.cell == "fast"
    assert found.rejected["slow"] == "too slow: p95 E2E 3,090 ms"
    assert "p95 E2E 2,379 ms, within 2500 ms" in found.reason
    assert "p95 over 12 requests: too few" in cost(found)
    assert refusal({"max_p95_ms": 2000}, **cells) == (
        "no cell with trusted answers has p95 E2E <= 2000 ms: the lowest is 2,379 ms with fast attention"
    )


def test_a_p95_whose_interval_passes_the_limit_is_said() -> None:
    uneven = Cell(1.0, noise=(1.0,) * 3 + (1.5,))
    assert " ms, over the limit" in cost(chosen({"max_p95_ms": 1600}, one=uneven))
    assert "over the limit" not in cost(chosen({"max_p95_ms": 4000}, one=uneven))


def test_the_limit_on_quality_decides_between_inputs() -> None:
    few = Cell(0.3, views=1, crops=1, scores=(1.0,) * 30 + (0.0,) * 10)
    cells = {"many": Cell(1.0, scores=(1.0,) * 38 + (0.0,) * 2), "few": few}
    assert chosen({"min_quality": 0.8}, **cells).cell == "many"
    found = chosen({"min_quality": 0.59}, **cells)
    assert found.cell == "few"
    assert "accuracy (exact match) 75.0% (95%: 59.8% to 85.8%), at least 0.59" in found.reason
    assert "accuracy (exact match) against up to 4 crops, many attention: loss: -20.0 points (" in cost(found)
    assert (
        "is shown to have accuracy (exact match) >= 0.9: the nearest has 95.0% (95%: from 83.5%), up to 4 crops, many"
        in refusal({"min_quality": 0.9}, **cells)
    )
    with pytest.raises(SettingError, match="--min-quality: the dataset of this run has no answers"):
        chosen({"min_quality": 0.5}, one=Cell())


def test_fewer_views_are_no_faster_computation() -> None:
    cells = {"many": Cell(1.0), "few": Cell(0.3, views=1, crops=1)}
    found = chosen(**cells)
    assert found.cell == "many"
    assert found.rejected["few"].startswith("fewer views per request (1, not 3); only a labelled dataset")
    assert "faster but rejected: up to 1 crop, few attention, 3.33 requests/s" in cost(found)
    # What the limit affords, and what that costs.
    found = chosen({"max_p95_ms": 500}, **cells)
    assert found.cell == "few"
    assert "fewer views per request (1) than" in cost(found)
    assert "only a labelled dataset can show the accuracy cost" in cost(found)


def test_answers_can_show_that_fewer_views_lose_nothing() -> None:
    right = RIGHT * 2
    assert chosen(many=Cell(1.0, scores=right), few=Cell(0.3, views=1, crops=1, scores=right)).cell == "few"
    worse = (1.0,) * 40 + (0.0,) * 60
    assert chosen(many=Cell(1.0, scores=RIGHT), few=Cell(0.3, views=1, crops=1, scores=worse)).cell == "many"


def test_equal_scores_over_few_questions_are_called_undecided() -> None:
    """The baseline is recommended for want of evidence, which is no evidence against the faster setting."""
    right = (1.0,) * 11
    found = chosen(many=Cell(1.0, scores=right), few=Cell(0.3, views=1, crops=1, scores=right))
    assert found.cell == "many"
    assert "the baseline: no other setting is shown to keep its accuracy" in found.reason
    assert "(accuracy undecided), 100% at 3.33 requests/s" in found.decision
    assert found.rejected["few"].startswith("the same score on all 11 questions; about 640 questions needed to exclude")


def test_accuracy_decides_before_speed_and_before_views() -> None:
    accurate = (1.0,) * 90 + (0.0,) * 10
    cells = {
        "many": Cell(1.0, scores=RIGHT),
        "some": Cell(0.8, views=2, crops=2, scores=accurate),
        "few": Cell(0.3, views=1, crops=1, scores=RIGHT),
    }
    found = chosen(**cells)
    assert found.cell == "some"
    assert "fastest of 2 settings shown to keep the accuracy" in found.reason
    assert found.decision.startswith(
        "Use pan and scan with up to 2 crops, some attention: 90% of 100 answers right at 1.25 requests/s; with up to 1"
    )
    assert found.rejected.keys() == {"few"}


def test_the_decision_compares_with_pan_and_scan_switched_off() -> None:
    scores = {"off": [1.0] * 20 + [0.0] * 10, "on": [1.0] * 30}
    records: list[dict[str, Any]] = [header({"off": {"do_pan_and_scan": False}, "on": {"do_pan_and_scan": True}})]
    for cell, took, views in (("off", 0.5, 1), ("on", 1.0, 4)):
        *requests, _, done = batches_of(cell, [took * each for each in NOISE * 8][:30], views=views)
        total = sum(took * each for each in (NOISE * 8)[:30])
        records += [*scored(requests, scores[cell]), repeat(cell, 0, 0.0, total), done, verdict(cell, "exact", 1.0)]
    with tempfile.TemporaryDirectory() as directory:
        found = recommend(write_run(Path(directory), records))
    theirs = "without pan and scan, 67% at 2.00 requests/s."
    assert found.decision == f"Use pan and scan: 100% of 30 answers right at 1.00 requests/s; {theirs}"


def test_what_the_choice_costs_in_memory_time_and_answers() -> None:
    lean = Cell(1.2, gib=2.0, scores=(1.0, 1.0, 1.0, 0.0) * 10)
    found = chosen({"min_quality": 0.3}, fast=Cell(1.0, gib=6.1, scores=(1.0, 0.0) * 20), lean=lean)
    assert found.cell == "fast"
    assert "4.1 GiB more peak memory (RSS) than lean attention: 6.1 against 2.0" in cost(found)
    assert "p95" not in cost(found)


def test_one_repeat_has_no_interval_and_says_so() -> None:
    cells = {"c": {}}
    with tempfile.TemporaryDirectory() as directory:
        run = write_run(Path(directory), [header(cells), *batches_of("c", [1.0]), verdict("c", "exact", 1.0)])
    found = recommend(run)
    assert "measured once, so the run-to-run noise is unknown" in cost(found)
    assert found.reason.startswith("1.00 requests/s, the only setting with trusted answers and the most views; exact")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_p95_ms": 0}, "--max-p95-ms"),
        ({"max_p95_ms": float("nan")}, "--max-p95-ms"),
        ({"min_quality": 1.1}, "--min-quality"),
        ({"allow": ["on"]}, "has no cell 'on' \\(did you mean 'one'\\?\\)"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        chosen(limits, one=Cell())


cells = st.builds(
    Cell,
    seconds=st.sampled_from([0.25, 0.5, 0.505, 1.0, 2.0]),
    word=st.sampled_from(["exact", "close", "different", "unverified", None]),
    times=st.sampled_from([1.0, 5.0, 50.0]),
    outcome=st.sampled_from(["done", "done", "done", "oom", "failed"]),
    views=st.just(3),
    gib=st.sampled_from([1.0, 2.0]),
)
runs = st.tuples(st.lists(cells, min_size=1, max_size=5), st.sampled_from([(), (1.0, 0.0, 0.0)])).map(
    lambda drawn: {f"c{i}": replace(cell, scores=drawn[1]) for i, cell in enumerate(drawn[0])}
)
limits = st.sampled_from([None, 300.0, 600.0, 1500.0])


@given(runs, limits)
@settings(max_examples=40)
def test_what_is_recommended_may_be(cells: dict[str, Cell], limit: float | None) -> None:
    try:
        found = chosen({"max_p95_ms": limit}, **cells)
    except RecordsError:
        possible = [cell for cell in cells.values() if cell.outcome == "done" and cell.word in ("exact", "close")]
        assert all(limit is not None and cell.seconds * 1030 > limit for cell in possible)
        return
    for cell in filter(None, (found.cell, found.runner_up)):
        taken = cells[cell]
        assert taken.outcome == "done"
        assert taken.word != "different"
        if taken.word in ("unverified", None):
            others = [each for each in cells.values() if each.outcome == "done"]
            assert all(each.word in ("unverified", None) for each in others)
        assert limit is None or taken.seconds * 1030 <= limit
    assert found.cell != found.runner_up
    assert not {found.cell, found.runner_up} & set(found.rejected)
    assert all(cells[found.cell].seconds <= cells[name].seconds * 1.02 for name in cells if name not in found.rejected)


@given(runs, st.sampled_from(["exact", "close", "different"]), st.booleans())
@settings(max_examples=40)
def test_a_slower_cell_never_changes_the_choice(cells: dict[str, Cell], word: str, done: bool) -> None:
    verified = {name: cell for name, cell in cells.items() if cell.word in ("exact", "close", "different")}
    try:
        before = chosen(**verified).cell if verified else None
    except RecordsError:
        return
    slower = Cell(9.0, word, outcome="done" if done else "oom")
    if before is not None:
        assert chosen(**verified, slower=slower).cell == before


def test_a_single_setting_is_named_by_what_it_is_and_a_preset_by_its_options(tmp_path: Path) -> None:
    def decision(cells: dict[str, dict[str, Any]], presets: dict[str, str]) -> str:
        head = header(cells)
        head["cells"] = [{**cell, "preset": presets.get(cell["cell"])} for cell in head["cells"]]
        lines = [record for name in cells for record in Cell().records(name)]
        return recommend(write_run(tmp_path, [head, *lines])).decision

    crops = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4}
    plain = {"model": "mini", "runner": "engine", **crops}
    assert decision({"c1": plain}, {}).startswith("Use the defaults (pan and scan, up to 4 crops): 1.0")
    assert decision({"c1": {**plain, "max_num_seqs": 16}}, {}).startswith(
        "Use up to 16 sequences, pan and scan, up to 4"
    )
    cells = {"c1": {**plain, "max_num_seqs": 16}, "c2": {**plain, "max_num_seqs": 32, "do_pan_and_scan": False}}
    text = decision(cells, {"c1": "balanced", "c2": "baseline"})
    assert text.startswith("Use --preset balanced --max-num-seqs 16"), text
    assert "with --preset baseline --max-num-seqs 32" in text
