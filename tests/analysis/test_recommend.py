"""The rules of a recommendation, each on a run in which it alone decides, and properties on random runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import synthetic
from tests.records.synthetic import batches_of, header, in_memory, outcome, repeat, scored, verdict
from tests.report.test_snapshots import compare

from panscan.analysis.cache_room import cache_advice
from panscan.analysis.recommend import Recommendation, recommend
from panscan.core import RecordsError
from panscan.model.shapes import SHAPES
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
        lines: list[dict[str, Any]] = []
        for number, noise in enumerate(self.noise):
            *requests, line, _ = batches_of(cell, [self.seconds * noise] * count, views=self.views)
            requests = scored(requests, self.scores) if self.scores else requests
            lines += [record | {"repeat": number} for record in requests]
            lines.append(line | {"repeat": number, "peak_rss_bytes": int(self.gib * 2**30)})
        lines.append(outcome(cell, self.outcome, None if self.outcome == "done" else "no room"))
        return lines if self.word is None else [*lines, verdict(cell, self.word, self.times)]


def run_with(**cells: Cell) -> Run:
    known = {name: {"pan_and_scan_max_num_crops": cell.crops, "attention": name} for name, cell in cells.items()}
    return in_memory([header(known), *(record for name, cell in cells.items() for record in cell.records(name))])


def chosen(limits: dict[str, Any] | None = None, **cells: Cell) -> Recommendation:
    return recommend(run_with(**cells), **limits or {})


RIGHT = (1.0,) * 70 + (0.0,) * 30
FEW_RIGHT = (1.0,) * 11 + (0.0,)
WRONG = {"right": Cell(1.0), "wrong": Cell(0.2, "different", 37.0)}
P95 = {"fast": Cell(2.31), "slow": Cell(3.0), "wrong": Cell(0.1, "different", 37.0)}
UNEVEN = Cell(1.0, noise=(1.0,) * 3 + (1.5,))
QUALITY = {
    "many": Cell(1.0, scores=(1.0,) * 38 + (0.0,) * 2),
    "few": Cell(0.3, views=1, crops=1, scores=(1.0,) * 30 + (0.0,) * 10),
}
ACCURATE = {
    "many": Cell(1.0, scores=RIGHT),
    "some": Cell(0.8, views=2, crops=2, scores=(1.0,) * 90 + (0.0,) * 10),
    "few": Cell(0.3, views=1, crops=1, scores=RIGHT),
}
MEMORY = {
    "fast": Cell(1.0, gib=6.1, scores=(1.0, 0.0) * 20),
    "lean": Cell(1.2, gib=2.0, scores=(1.0, 1.0, 1.0, 0.0) * 10),
}
UNFINISHED = {word: Cell(0.1, outcome=word) for word in ("skipped", "failed", "oom")}


def both(different: Sequence[float], baseline: Sequence[float] = RIGHT) -> dict[str, Cell]:
    """A trusted cell, and one with other answers that is five times as fast."""
    return {"right": Cell(1.0, scores=baseline), "wrong": Cell(0.2, "different", 37.0, scores=different)}


def fewer(scores: Sequence[float], baseline: Sequence[float]) -> dict[str, Cell]:
    """A baseline, and a cell that is faster because it computes fewer views."""
    return {"many": Cell(1.0, scores=baseline), "few": Cell(0.3, views=1, crops=1, scores=scores)}


EXACT, CLOSE, UNKNOWN = Cell(1.0), Cell(0.995, "close", 3.0, noise=OTHER), Cell(0.2, None)
WORSE = Cell(1.0, "different", 50.0)
SLOW = Cell(1.0, scores=FEW_RIGHT)
SLOWER, CLOSE_BUT_WORSE = Cell(1.0, scores=RIGHT), Cell(0.3, "close", 3.0, scores=(1.0,) * 40 + (0.0,) * 60)
LUCKY = Cell(0.3, views=2, crops=2, scores=(1.0,) * 12)
CASES: dict[str, tuple[Any, ...]] = {
    "the fastest of exact and close": ("fast", {"slow": EXACT, "fast": Cell(0.5, "close", 3.1)}),
    "within the noise, exact comes before close": ("exact", {"exact": EXACT, "close": CLOSE}),
    "of equals, the faster": ("two", {"one": EXACT, "two": replace(CLOSE, word="exact")}),
    "a close cell that is measurably faster": ("close", {"exact": EXACT, "close": replace(CLOSE, seconds=0.8)}),
    "a different cell is not taken": ("right", WRONG),
    "but by name": ("wrong", WRONG, {"allow": ["wrong"]}),
    "nothing but different cells": ("", {"wrong": WRONG["wrong"], "worse": WORSE}),
    "equal scores over 200 questions show that nothing is lost": ("wrong", both(RIGHT * 2, RIGHT * 2)),
    "so does a gain": ("wrong", both((1.0,) * 90 + (0.0,) * 10)),
    "equal scores over 100 questions do not": ("right", both(RIGHT)),
    "a loss": ("right", both((1.0,) * 50 + (0.0,) * 50)),
    "no answer is right on either side": ("right", both((0.0,) * 200, (0.0,) * 200)),
    "no dataset": ("right", both((), ())),
    "the same computation needs few questions": ("exact", {"slow": SLOW, "exact": replace(SLOW, seconds=0.3)}),
    "and no luck": ("close", {"slow": SLOW, "close": Cell(0.3, "close", 3.0, scores=(*FEW_RIGHT[1:], 0.0))}),
    "a close cell that answers worse": ("exact", {"exact": SLOWER, "close": CLOSE_BUT_WORSE}),
    "other views need more, whatever their luck": ("slow", {"slow": SLOW, "lucky": LUCKY}),
    "so do cells that were not compared": ("slow", {"slow": replace(SLOW, word=None), "b": replace(SLOW, word=None)}),
    "an unverified cell is not taken where another is verified": ("right", {"right": EXACT, "unknown": UNKNOWN}),
    "but by name, too": ("unknown", {"right": EXACT, "unknown": UNKNOWN}, {"allow": ["unknown"]}),
    "and where none is": ("unknown", {"unknown": replace(UNKNOWN, word="unverified"), "slower": Cell(1.0, None)}),
    "not where one is different": ("", {"wrong": WORSE, "unknown": UNKNOWN}),
    "cells that did not finish are none": ("right", {"right": EXACT, **UNFINISHED}),
    "no cell is finished": ("", UNFINISHED),
    "a limit on p95": ("fast", P95, {"max_p95_ms": 2500}),
    "a limit that none meets": ("", P95, {"max_p95_ms": 2000}),
    "a p95 whose interval passes the limit": ("one", {"one": UNEVEN}, {"max_p95_ms": 1600}),
    "a p95 whose interval does not": ("one", {"one": UNEVEN}, {"max_p95_ms": 4000}),
    "a limit on quality": ("many", QUALITY, {"min_quality": 0.8}),
    "a lower limit on quality affords fewer views": ("few", QUALITY, {"min_quality": 0.59}),
    "a limit on quality that none meets": ("", QUALITY, {"min_quality": 0.9}),
    "fewer views are no faster computation": ("many", fewer((), ())),
    "what a limit on p95 affords, and what that costs": ("few", fewer((), ()), {"max_p95_ms": 500}),
    "answers can show that fewer views lose nothing": ("few", fewer(RIGHT * 2, RIGHT * 2)),
    "or that they lose": ("many", fewer((1.0,) * 40 + (0.0,) * 60, RIGHT)),
    "equal scores over few questions are undecided": ("many", fewer((1.0,) * 11, (1.0,) * 11)),
    "accuracy decides before speed and before views": ("some", ACCURATE),
    "more memory is a cost": ("fast", MEMORY, {"min_quality": 0.3}),
    "one repeat has no interval": ("one", {"one": Cell(1.0, noise=(1.0,))}),
}
"""By what they show: the cell that is chosen, the cells, and limits."""


def test_each_rule_chooses_its_cell_and_says_why() -> None:
    """Decision, reason, costs and rejected cells are kept in a file; see :mod:`tests.report.test_snapshots`."""
    texts = []
    for name, (taken, cells, *limits) in CASES.items():
        try:
            choice = chosen(*limits, **cells)
        except RecordsError as refusal:
            assert taken == "", name
            texts.append(f"{name}:\n  {refusal}\n")
            continue
        assert choice.cell == taken, name
        rejected = [f"rejected {cell}: {why}" for cell, why in choice.rejected.items()]
        lines = (choice.decision, choice.reason, f"runner-up {choice.runner_up}", *choice.cost, *rejected)
        texts.append("\n  ".join([f"{name}:", *lines]) + "\n")
    compare("recommendations.txt", "".join(texts))


def test_the_decision_compares_with_pan_and_scan_switched_off() -> None:
    scores = {"off": [1.0] * 20 + [0.0] * 10, "on": [1.0] * 30}
    records: list[dict[str, Any]] = [header({"off": {"do_pan_and_scan": False}, "on": {"do_pan_and_scan": True}})]
    for cell, took, views in (("off", 0.5, 1), ("on", 1.0, 4)):
        *requests, _, done = batches_of(cell, [took * factor for factor in NOISE * 8][:30], views=views)
        total = sum(took * factor for factor in (NOISE * 8)[:30])
        records += [*scored(requests, scores[cell]), repeat(cell, 0, 0.0, total), done, verdict(cell, "exact", 1.0)]
    choice = recommend(in_memory(records))
    alternative = "without pan and scan, 67% at 2.00 requests/s."
    assert choice.decision == f"Use pan and scan: 100% of 30 answers right at 1.00 requests/s; {alternative}"


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
        choice = chosen({"max_p95_ms": limit}, **cells)
    except RecordsError:
        possible = [cell for cell in cells.values() if cell.outcome == "done" and cell.word in ("exact", "close")]
        assert all(limit is not None and cell.seconds * 1030 > limit for cell in possible)
        return
    for cell in filter(None, (choice.cell, choice.runner_up)):
        taken = cells[cell]
        assert taken.outcome == "done"
        assert taken.word != "different"
        if taken.word in ("unverified", None):
            others = [cell for cell in cells.values() if cell.outcome == "done"]
            assert all(cell.word in ("unverified", None) for cell in others)
        assert limit is None or taken.seconds * 1030 <= limit
    assert choice.cell != choice.runner_up
    assert not {choice.cell, choice.runner_up} & set(choice.rejected)
    assert all(
        cells[choice.cell].seconds <= cells[name].seconds * 1.02 for name in cells if name not in choice.rejected
    )


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


def test_a_single_setting_is_named_by_what_it_is_and_a_preset_by_its_options() -> None:
    def decision(cells: dict[str, dict[str, Any]], presets: dict[str, str]) -> str:
        head = header(cells)
        head["cells"] = [{**cell, "preset": presets.get(cell["cell"])} for cell in head["cells"]]
        lines = [record for name in cells for record in Cell().records(name)]
        return recommend(in_memory([head, *lines])).decision

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


# When a recommendation names an int8 KV cache.


A100 = {"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_298_834_944}


def run_on(gpu: dict[str, Any], requests: int, loaded: dict[str, Any], cached: int = 0, **settings: Any) -> Run:
    times = [0.1 * (token + 1) for token in range(128)]
    lines = [
        synthetic.request("c", f"q{number}", 0.0, times, prompt_tokens=1102, cached_tokens=cached)
        for number in range(requests)
    ]
    cells = {"c": {"model": "27b", "runner": "engine", **settings}}
    run = synthetic.run_of(*lines, repeat("c", 0, 0.0, 20.0), outcome("c", "done"), cells=cells)
    run.header.environment["gpus"] = [gpu]
    run.loads["c"] = synthetic.record_of(synthetic.load(["c"], asdict(SHAPES["27b"]), **loaded))
    return run


def test_a_card_whose_cache_holds_fewer_requests_than_were_sent() -> None:
    run = run_on(A100, 32, {"weights": "int8"}, quantization="int8")
    text = cache_advice(run, "c")
    assert "of 1,230 tokens at once, and 32 were sent: --kv-cache-dtype int8 (not exact: " in text
    held, held_by_int8 = (int(part.split()[0]) for part in text.split("holds about ")[1:])
    assert 1.8 * held < held_by_int8 < 2.2 * held
    assert f"holds about {held} requests" in " ".join(recommend(run).cost)


def test_requests_share_the_tokens_of_their_page() -> None:
    alone = cache_advice(run_on(A100, 64, {"weights": "int8"}, quantization="int8"), "c")
    shared = cache_advice(run_on(A100, 64, {"weights": "int8"}, cached=800, quantization="int8"), "c")
    assert "of 430 uncached tokens at once, and 64 were sent" in shared
    held_alone, held_shared = (int(text.split("holds about ")[1].split()[0]) for text in (alone, shared))
    assert held_shared > 2 * held_alone


INT8 = {"weights": "int8"}
H200 = {"name": "NVIDIA H200", "memory_bytes": 150_109_880_320}
NO_ADVICE: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "large card": (H200, 32, INT8, {"quantization": "int8"}),
    "few requests": (A100, 4, INT8, {"quantization": "int8"}),
    "8-bit": (A100, 32, INT8, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "stored format": (A100, 32, {"weights": "int4, groups of 128"}, {}),
    "version": (A100, 32, INT8, {"quantization": "int8", "of_another_version": 1}),
    "unknown card": ({"name": "NVIDIA Unheard-Of"}, 32, {}, {}),
    "cpu": (A100, 32, {"device": "cpu"}, {}),
    "generate": (A100, 32, {}, {"runner": "generate"}),
    "few in flight": (A100, 32, INT8, {"quantization": "int8", "max_concurrency": 8}),
    "not a request fits": (A100, 32, INT8, {"quantization": "int8", "kv_cache_gb": 0.5}),
    "three ranks": (A100, 32, INT8, {"quantization": "int8", "tensor_parallel_size": 3}),
}


@pytest.mark.parametrize("case", NO_ADVICE)
def test_no_advice(case: str) -> None:
    gpu, requests, loaded, settings = NO_ADVICE[case]
    assert cache_advice(run_on(gpu, requests, loaded, **settings), "c") == ""
