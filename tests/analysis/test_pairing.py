import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.noisy_runs import in_memory, noisy_records, noisy_run

from panscan.analysis.cells import cell_metrics
from panscan.analysis.comparison import build_report
from panscan.analysis.differences import METRICS, Difference, differences, measured
from panscan.analysis.pairing import Comparison, compare_runs, pair_requests
from panscan.core import RecordsError
from panscan.records.schema import CellRecord, RunSettings

SMALL: dict[str, Any] = {"cells": ({"batch_size": 1}, {"batch_size": 2}), "batches": 3}


def table(comparison: Comparison) -> list[dict[str, Difference]]:
    return differences([comparison], METRICS)[0]


def shuffled(records: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same run with its cells and lines in another order."""
    head, *lines = copy.deepcopy(records)
    draw = random.Random(seed)
    draw.shuffle(head["cells"])
    draw.shuffle(lines)
    lines.sort(key=lambda line: line["type"] != "request")  # a repeat line says that its requests are there
    return [head, *lines]


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(0, 99))
def test_the_order_of_records_and_cells_changes_nothing(seed: int, order: int) -> None:
    a, b = noisy_records(seed, **SMALL), noisy_records(seed + 1, factor=1.2, **SMALL)
    plain = compare_runs(in_memory(a), in_memory(b))
    other = compare_runs(in_memory(shuffled(a, order)), in_memory(shuffled(b, order + 1)))
    by_cell = dict(zip((pair.cells for pair in other.pairs), table(other), strict=True))
    assert [by_cell[pair.cells] for pair in plain.pairs] == table(plain)


@settings(max_examples=15)
@given(st.integers(0, 99), st.booleans())
def test_cells_without_a_partner_change_nothing_and_are_said(seed: int, in_a: bool) -> None:
    more = {**SMALL, "cells": (*SMALL["cells"], {"batch_size": 8})}
    plain = compare_runs(noisy_run(seed, **SMALL), noisy_run(seed + 1, **SMALL))
    a, b = noisy_run(seed, **(more if in_a else SMALL)), noisy_run(seed + 1, **(SMALL if in_a else more))
    extra = compare_runs(a, b)
    assert table(extra) == table(plain)
    here, there = "AB" if in_a else "BA"
    assert extra.alone == (f"1 cell of {here} without a partner in {there} (not in it): batch size 8 (c2)",)
    assert (extra.unpaired, plain.unpaired, plain.alone) == (int(in_a), 0, ())


@settings(max_examples=15)
@given(st.integers(0, 99), st.floats(0.8, 1.3))
def test_swapping_a_and_b_turns_every_difference_round(seed: int, factor: float) -> None:
    a, b = noisy_run(seed, batches=12, cells=({},)), noisy_run(seed + 1, factor=factor, batches=12, cells=({},))
    [one], [other] = table(compare_runs(a, b)), table(compare_runs(b, a))
    turned = {"faster": "slower", "slower": "faster"}
    for name in METRICS:
        assert (one[name].a, one[name].b) == (other[name].b, other[name].a)
        assert (one[name].change or 0) * (other[name].change or 0) <= 0
        assert one[name].p_value == pytest.approx(other[name].p_value)
        assert turned.get(one[name].word, one[name].word) == other[name].word


@settings(max_examples=15)
@given(st.integers(0, 99), st.floats(0, 1))
def test_values_of_whole_runs_are_the_cells_metrics(seed: int, spread: float) -> None:
    a, b = noisy_run(seed, spread=spread, batches=5), noisy_run(seed + 1, spread=spread, batches=5)
    comparison = compare_runs(a, b)
    for pair, row in zip(comparison.pairs, table(comparison), strict=True):
        for side, run in enumerate((a, b)):
            metrics = cell_metrics(run, pair.cells[side])
            for name in METRICS:
                assert (row[name].a, row[name].b)[side] == pytest.approx(metrics.values[name])
                assert row[name].certified == (name not in metrics.uncertified)


def test_settings_that_differ_as_a_whole_are_said_and_left_out_of_the_pairing() -> None:
    a = noisy_run(1, cells=({"attention": "eager", "batch_size": 1}, {"attention": "eager", "batch_size": 2}))
    b = noisy_run(2, cells=({"attention": "sdpa", "batch_size": 2}, {"attention": "sdpa", "batch_size": 1}))
    comparison = compare_runs(a, b)
    assert comparison.apart == {"attention": ("eager", "sdpa")}
    assert [pair.cells for pair in comparison.pairs] == [("c0", "c1"), ("c1", "c0")]


def test_what_a_version_did_not_know_has_its_default() -> None:
    old, new = noisy_run(1, cells=({},)), noisy_run(2, cells=({"equal_views": False, "attention": "sdpa"},))
    assert compare_runs(old, new).apart == {}
    other = noisy_run(2, cells=({"equal_views": True},))
    assert compare_runs(old, other).apart == {"equal_views": (False, True)}


def test_crop_settings_without_pan_and_scan_do_not_keep_cells_apart() -> None:
    a, b = (
        ({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4}, {"do_pan_and_scan": False, **idle})
        for idle in ({"pan_and_scan_max_num_crops": 4}, {"pan_and_scan_max_num_crops": 8})
    )
    comparison = compare_runs(noisy_run(1, cells=a), noisy_run(2, cells=b))
    assert (len(comparison.pairs), comparison.apart, comparison.alone) == (2, {}, ())
    fewer = noisy_run(2, cells=({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}, b[1]))
    assert compare_runs(noisy_run(1, cells=a), fewer).apart == {"pan_and_scan_max_num_crops": (4, 2)}


def test_a_cell_that_failed_on_the_other_side_is_said_with_its_reason() -> None:
    a, b = noisy_run(1), noisy_run(2)
    b.outcomes["c1"] = CellRecord(cell="c1", outcome="oom", reason="no room", repeat=None)
    for key in [key for key in b.repeats if key[0] == "c1"]:
        del b.repeats[key], b.requests[key]
    comparison = compare_runs(a, b)
    assert comparison.alone == ("1 cell of A without a partner in B (oom: no room): sdpa attention, batch size 2 (c1)",)
    assert comparison.unpaired == 1


@pytest.mark.parametrize("extra", [1, 2, 12, 13, 20])
@pytest.mark.parametrize("in_a", [True, False])
def test_cells_without_a_partner_are_named_up_to_a_dozen(extra: int, in_a: bool) -> None:
    many = tuple({"batch_size": size} for size in range(1, extra + 2))
    runs = [noisy_run(seed, batches=1, repeats=1, cells=cells) for seed, cells in ((1, many), (2, many[:1]))]
    here, there = "AB" if in_a else "BA"
    names = [f"batch size {number + 1} (c{number})" for number in range(1, extra + 1)]
    head = f"{extra} cell{'s' * (extra > 1)} of {here} without a partner in {there} (not in it):"
    rest = [f"- and {extra - 12} more"] if extra > 12 else []
    listed = [f"{head} {names[0]}"] if extra == 1 else [head, *(f"- {name}" for name in names[:12]), *rest]
    assert compare_runs(*(runs if in_a else runs[::-1])).alone == tuple(listed)


def test_repeats_and_requests_without_a_partner_are_counted() -> None:
    a, b = noisy_run(1, cells=({},), batches=4, repeats=3), noisy_run(2, cells=({},), batches=5, repeats=2)
    b.requests["c0", 0][0].error = "it broke"
    comparison = compare_runs(a, b)
    assert len(comparison.pairs[0].requests.pairs) == 7
    assert comparison.alone == (
        "requests of A without a partner: 5",
        "requests of B without a partner: 2",
        "requests of B that failed: 1",
    )


@pytest.mark.parametrize("field", ["request", "image_sha256", "prompt_sha256", "repeat", "replica"])
def test_requests_pair_only_with_the_same_question_at_the_same_turn(field: str) -> None:
    a, b = noisy_run(1, cells=({},), batches=3, repeats=1), noisy_run(2, cells=({},), batches=3, repeats=1)
    odd = {"image_sha256": ["ff"], "repeat": 7, "replica": 1}.get(field, "ff")
    setattr(b.requests["c0", 0][1], field, odd)
    found = pair_requests(a, "c0", b, "c0")
    assert ([pair.a.request for pair in found.pairs], found.alone) == (["q0.0", "q2.0"], (1, 1))


def test_a_cluster_holds_whole_batches_of_both() -> None:
    """A's batches of two and B's of three questions: nothing smaller than six questions can be swapped."""
    a, b = noisy_run(1, cells=({},), batches=12, repeats=1), noisy_run(2, cells=({},), batches=12, repeats=1)
    for run, size in ((a, 2), (b, 3)):
        for number, record in enumerate(run.requests["c0", 0]):
            record.batch = number // size
    found = pair_requests(a, "c0", b, "c0")
    assert {pair.cluster for pair in found.pairs} == {0, 1}
    assert found.work[:, :, 0].sum(axis=1).tolist() == [12, 12]
    for side, run in enumerate((a, b)):
        line = run.repeats["c0", 0]
        assert found.work[side, :, 2].sum() == pytest.approx(line.ended - line.started)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=16))
def test_clusters_are_the_smallest_sets_of_batches_that_no_pair_leaves(batches: list[tuple[int, int]]) -> None:
    """Against a naive closure, whatever batches the requests of both sides were in."""
    a, b = (noisy_run(seed, cells=({},), batches=len(batches), repeats=1) for seed in (1, 2))
    for side, run in enumerate((a, b)):
        for record, both in zip(run.requests["c0", 0], batches, strict=True):
            record.batch = both[side]
    found = pair_requests(a, "c0", b, "c0")
    clusters = {pair.a.request: pair.cluster for pair in found.pairs}
    together = [{number} for number in range(len(batches))]
    for _ in batches:
        for one in together:
            one |= {
                other
                for other, both in enumerate(batches)
                if any(both[side] == batches[member][side] for member in one for side in (0, 1))
            }
    for number, members in enumerate(together):
        cluster = clusters[f"q{number}.0"]
        assert {name for name, at in clusters.items() if at == cluster} == {f"q{member}.0" for member in members}
    assert found.clusters == len(set(clusters.values()))


def test_repeats_of_one_question_are_no_more_evidence_about_answers() -> None:
    right = noisy_run(1, cells=({},), batches=4, repeats=5, scores={"exact_match": 1.0})
    wrong = noisy_run(2, cells=({},), batches=4, repeats=5, scores={"exact_match": 0.0})
    for records in (*right.requests.values(), *wrong.requests.values()):
        for record in records:
            record.prompt_sha256 = record.request
    [pair] = compare_runs(right, wrong).pairs
    score = measured(pair, ["exact_match"])["exact_match"]
    assert (score.clusters, score.levels()) == (4, (1.0, 0.0))
    assert measured(pair, ["request_throughput"])["request_throughput"].clusters == 5, (
        "repeats, which share their noise"
    )
    for repeats, clusters in ((2, 2), (1, 12)):
        [few] = compare_runs(*(noisy_run(seed, repeats=repeats, cells=({},)) for seed in (1, 2))).pairs
        for test in measured(few, ["request_throughput", "p95_e2el_ms"]).values():
            assert test.clusters == clusters, "batches, where there is one repeat"


def test_environment_and_workload_are_compared() -> None:
    a, b = noisy_run(1), noisy_run(2)
    shared = {"cpu": "x", "packages": {"torch": "2.11", "transformers": "5.17", "pillow": "12"}}
    a.header.environment = shared | {"gpus": [{"name": "NVIDIA H200"}], "commit": "abc"}
    b.header.environment = shared | {"gpus": [], "packages": {"torch": "2.13", "transformers": "5.17"}}
    a.header.settings, b.header.settings = RunSettings(seed=0, requests=5), RunSettings(seed=0, requests=6)
    assert compare_runs(a, b).differences == {
        "gpus": ("NVIDIA H200", None),
        "commit": ("abc", None),
        "torch": ("2.11", "2.13"),
        "requests": (5, 6),
    }


BUNDLED_WEIGHTS = [
    ("mini", ({"mini": "aa"}, {"mini": "bb"}), ("aa", "bb")),
    ("mini", (None, {"mini": "bb"}), (None, "bb")),
    ("mini", ({"mini": "bb"}, {"mini": "bb", "tiny": "cc"}), None),
    ("mini", (None, None), None),
    ("google/gemma-3-4b-it", ({"mini": "aa"}, {"mini": "bb"}), None),  # of cells that were not measured
]


@pytest.mark.parametrize(("model", "weights", "differs"), BUNDLED_WEIGHTS)
def test_bundled_models_that_changed_are_another_model(
    model: str, weights: tuple[Any, Any], differs: tuple[Any, Any] | None
) -> None:
    runs = [noisy_run(seed, cells=({"model": model},)) for seed in (1, 2)]
    for run, kept in zip(runs, weights, strict=True):
        run.header.environment = {"cpu": "x"} if kept is None else {"cpu": "x", "bundled": kept}
    assert compare_runs(*runs).differences == ({} if differs is None else {"mini weights": differs})
    said = "Different model: these numbers compare different jobs."
    assert build_report(runs).warning(0) == (None if differs is None else said)


def test_nothing_that_pairs_is_an_error_that_says_why() -> None:
    swept = noisy_run(2, cells=({"attention": "sdpa"}, {"attention": "flex_attention"}))
    with pytest.raises(RecordsError, match="no cell pairs: attention is eager in A and sdpa, flex_attention in B"):
        compare_runs(noisy_run(1, cells=({"attention": "eager"},)), swept)
    with pytest.raises(RecordsError, match="cells pair, but no request does"):
        compare_runs(noisy_run(1), noisy_run(2, prompt_sha256="ff"))
    with pytest.raises(RecordsError, match="no cell was measured"):
        compare_runs(noisy_run(1), in_memory(noisy_records(2)[:1]))
