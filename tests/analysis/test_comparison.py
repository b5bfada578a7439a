import copy
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.analysis.noisy_runs import CELLS, in_memory, noisy_records, noisy_run
from tests.records.load_runs import START, level, level_records, load_header, load_request
from tests.records.synthetic import verdict, write_run

from panscan.analysis.cells import cell_metrics
from panscan.analysis.comparison import Report, as_json, build_report
from panscan.analysis.differences import METRICS, Difference, differences, evaluate, measured, parse_condition
from panscan.analysis.pairing import Comparison, compare_runs, pair_requests
from panscan.core import RecordsError
from panscan.records.intervals import ALPHA
from panscan.records.schema import CellRecord, RunSettings
from panscan.records.store import Run
from panscan.report.comparison import markdown_text, print_comparison


def words(report: Report) -> set[str]:
    return {difference.word for block in report.differences for pair in block for difference in pair.values()}


def held(report: Report) -> set[str]:
    return {finding.condition for finding in report.findings if finding.holds}


def text(report: Report, width: int = 80) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    print_comparison(report, console)
    return console.export_text()


@pytest.mark.parametrize("batches", [1, 24])
def test_a_run_does_not_differ_from_itself(batches: int) -> None:
    run = noisy_run(1, batches=batches, scores={"exact_match": 1.0})
    every = [f"{metric}{'<' if 'throughput' in metric else '>'}0%" for metric in METRICS]
    report = build_report([run, run], [*every, "exact_match<0%"])
    assert report.findings == ()
    for pair in report.differences[0]:
        assert pair.pop("exact_match").change == 0
        assert len(pair) == len(METRICS)
        assert {(metric.change, metric.word, metric.p_value) for metric in pair.values()} == {(0.0, "identical", 1.0)}
        assert {metric.interval for metric in pair.values()} <= {(0.0, 0.0), None}


def test_an_exact_slowdown_is_shown_as_it_is_and_thresholds_below_it_hold() -> None:
    """The same noise on both sides, times 1.1: the interval is that point, and a tenth is not more than a tenth."""
    report = build_report([noisy_run(1), noisy_run(1, factor=1.1)], ["p95_e2el>9.9%", "p95_e2el>10.1%"])
    for pair in report.differences[0]:
        for name, change in (("p95_e2el_ms", 0.1), ("request_throughput", 1 / 1.1 - 1)):
            assert (pair[name].change, pair[name].interval) == (pytest.approx(change), pytest.approx((change, change)))
    assert held(report) == {"p95_e2el>9.9%"}


def test_equal_noise_raises_no_more_false_alarms_than_stated() -> None:
    """Words and conditions of 100 comparisons are a family each, at 5%: more than 12 have a chance of 0.2%.

    The batches of a repeat share most of the noise: taken as independent, they would alarm in most comparisons.
    """
    alarms = {"words": 0, "conditions": 0}
    for seed in range(100):
        shape: dict[str, Any] = {"noise": 0.05, "between": 0.05, "spread": 0.4, "cells": CELLS[:2], "batches": 6}
        runs = [noisy_run(2 * seed + side, **shape) for side in (0, 1)]
        report = build_report(runs, ["p95_e2el>0%", "request_throughput<0%"])
        alarms["words"] += bool(words(report) - {"within noise"})
        alarms["conditions"] += bool(held(report))
    assert max(alarms.values()) <= 12
    assert ALPHA == 0.05


@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["alike", "documents of many sizes"])
def test_a_tenth_is_found_under_three_percent_of_noise(spread: float) -> None:
    detections = dict.fromkeys(("request_throughput", "median_ttft_ms", "p95_e2el_ms"), 0)
    for seed in range(20):
        a, b = noisy_run(2 * seed, spread=spread), noisy_run(2 * seed + 1, spread=spread, factor=1.1)
        for pair in build_report([a, b]).differences[0]:
            for name in detections:
                detections[name] += pair[name].word == "slower"
    assert min(detections.values()) >= 0.9 * 60


def test_a_threshold_is_not_crossed_by_a_change_that_only_touches_it() -> None:
    """5% slower is not "more than 5%": at the threshold itself any of 16 cells alarms as rarely as stated.

    Their intervals alone would alarm in every third comparison.
    """
    cells, alarms = tuple({"batch_size": 1, "top_k": top_k} for top_k in range(16)), 0
    for seed in range(30):
        a, b = (noisy_run(2 * seed + side, factor=1 + side / 20, cells=cells, repeats=1) for side in (0, 1))
        alarms += bool(evaluate([parse_condition("mean_e2el>5%")], [compare_runs(a, b)]))
    assert alarms <= 6  # more have a chance of 0.3%


def test_what_slows_only_quick_requests_is_no_slower_tail() -> None:
    """Every test sees that the runs differ; p95 is called slower only if its own interval says so."""
    shape: dict[str, Any] = {"spread": 0.5, "cells": ({},), "batches": 48, "repeats": 1}
    a, b = noisy_run(1, **shape), noisy_run(2, factor=[1.2] * 32 + [1.0] * 16, **shape)
    report = build_report([a, b], ["p95_e2el>0%", "median_e2el>0%"])
    [row] = report.differences[0]
    assert (row["median_e2el_ms"].word, row["p95_e2el_ms"].word) == ("slower", "within noise")
    assert row["p95_e2el_ms"].p_value < 0.001
    assert held(report) == {"median_e2el>0%"}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("conditions", [1, 8], ids=["the table needs more", "the conditions need more"])
def test_one_number_of_repeats_is_named_everywhere(conditions: int, batches: int) -> None:
    """Table and conditions are families of different sizes: the number that is named is enough for both.

    A throughput can be told from fewer batches than latencies: its test knows how noise is distributed.
    """
    typed = [f"p95_e2el>{percent}%" for percent in range(1, conditions + 1)]
    shape: dict[str, Any] = {"batches": batches, "cells": ({},)}
    few = build_report([noisy_run(1, repeats=1, **shape), noisy_run(2, repeats=1, factor=3.0, **shape)], typed)
    told = ["request_throughput"] if batches > 1 else []
    assert [name for name, difference in few.differences[0][0].items() if difference.word == "slower"] == told
    assert {change.word for name, change in few.differences[0][0].items() if name not in told} == {"too few batches"}
    assert not held(few)
    said = "\n".join([text(few), *(outcome for _, outcome in few.outcomes())])
    assert re.findall(r"--repeats (\d+)", said) == [str(few.repeats)] * (1 + conditions)
    assert {finding["repeats"] for finding in as_json(few)["fail_on"]} == {few.repeats}
    sides = [noisy_run(seed, factor=factor, repeats=few.repeats, **shape) for seed, factor in ((1, 1.0), (2, 3.0))]
    report = build_report(sides, typed)
    assert report.repeats is None
    assert (words(report), held(report)) == ({"slower"}, set(typed))


def test_repeats_are_no_advice_where_questions_are_too_few() -> None:
    """All requests ask one question: however often it is repeated, its answers tell nothing about others."""
    runs = [noisy_run(side, cells=({},), scores={"exact_match": float(side)}) for side in (0, 1)]
    report = build_report(runs, ["exact_match>5%"])
    score = report.differences[0][0]["exact_match"]
    assert (score.word, score.change, score.clusters) == ("undecided", 1.0, 1)
    [finding] = report.findings
    assert (finding.reason, finding.repeats) == ("1 questions are too few to tell (tests: 1)", None)
    assert report.repeats is None
    assert f"about {score.needed:,} different questions" in " ".join(text(report).split())
    assert "--repeats" not in text(report)


def test_a_worse_verdict_holds_and_an_unknown_one_cannot_be_told() -> None:
    def run(*words: str) -> Any:
        cells = ({"batch_size": 1}, {"batch_size": 2})
        verdicts = [verdict(f"c{i}", word, None) for i, word in enumerate(words)]
        return in_memory([*noisy_records(1, cells=cells), *verdicts])

    report = build_report([run("exact", "close"), run("different", "exact")], ["verdict"])
    [finding] = report.findings
    assert (finding.pair, finding.holds, finding.reason) == (0, True, "exact in A, different in B")
    assert "verdict exact -> different" in text(report, 120)
    assert "**exact -\\> different**" in markdown_text(report)
    unknown = build_report([run("exact", "close"), run("exact", "unverified")], ["verdict"])
    assert [(finding.pair, finding.holds) for finding in unknown.findings] == [(1, False)]


def test_lost_answers_are_found() -> None:
    def run(seed: int, wrong: int) -> Any:
        run = noisy_run(seed, cells=({},), batches=40)
        for records in run.requests.values():
            for number, record in enumerate(records):
                record.prompt_sha256, record.scores = record.request, {"exact_match": float(number >= wrong)}
        return run

    report = build_report([run(1, 2), run(2, 12)], ["exact_match<-5%"])
    score = report.differences[0][0]["exact_match"]
    assert (score.word, score.change) == ("loss", -0.25)
    assert "-25.0 points" in text(report)
    assert held(report) == {"exact_match<-5%"}
    assert held(build_report([run(1, 2), run(2, 3)], ["exact_match<-5%"])) == set()


def test_a_metric_or_cell_that_cannot_be_compared_is_no_pass() -> None:
    a, b = noisy_run(1), noisy_run(2, cells=({"batch_size": 1}, {"batch_size": 2, "attention": "eager"}))
    for records in b.requests.values():
        for record in records:
            record.stamps.tokens = []
    report = build_report([a, b], ["p95_e2el>5%"])
    assert [(finding.pair, finding.holds, finding.reason) for finding in report.findings] == [
        (0, False, "not measured on both sides"),
        (1, False, "not measured on both sides"),
        (None, False, "cells of A that were not compared: 1"),
    ]


def test_a_condition_reads_as_typed() -> None:
    for metric in METRICS:
        for name in (metric, metric.removesuffix("_ms"), metric.replace("_", "-")):
            condition = parse_condition(f" {name} > 2.5 % ")
            assert (condition.metric, condition.larger, condition.factor) == (metric, True, 1.025)
    assert parse_condition("request_throughput<-5%").factor == 0.95
    assert parse_condition("exact_match<-1%", ["exact_match"]).metric == "exact_match"
    assert parse_condition("verdict").metric == "verdict"


def test_json_has_the_figures_of_the_terminal() -> None:
    a, b = noisy_run(1, cells=({},)), noisy_run(2, factor=1.2, cells=({"attention": "eager"},))
    report = build_report([a, b], ["p95_e2el>5%"])
    data = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert data["fail_on"][0]["condition"] == "p95_e2el>5%"
    [cell] = data["comparisons"][0]["cells"]
    assert [metric["metric"] for metric in cell["metrics"]] == ["request_throughput", "median_ttft_ms", "p95_e2el_ms"]
    for metric in cell["metrics"]:
        low, high = metric["interval"]
        for figure in (f"{metric['change']:+.1%}", f"{low:+.1%} to {high:+.1%}", metric["word"]):
            assert figure in text(report)


def test_names_from_outside_are_not_markup() -> None:
    cells = ({"attention": "a|b/<i>[x]"}, {"attention": "sdpa"})
    report = build_report([noisy_run(1, cells=cells), noisy_run(2, cells=cells)])
    assert "a\\|b/\\<i\\>\\[x\\] attention" in markdown_text(report)
    assert "a|b/<i>[x] attention" in text(report)


def test_a_pair_is_named_by_its_ids_and_what_varies_in_either_run() -> None:
    cells = tuple({"batch_size": size, "attention": name} for size in (1, 2) for name in ("sdpa", "eager"))
    one = ({"batch_size": 2, "attention": "eager"},)
    a, b = noisy_run(1, cells=cells, batches=3), noisy_run(2, cells=one, batches=3)
    for runs, ids in (((a, b), "c3 / c0"), ((b, a), "c0 / c3")):
        report = build_report(runs)
        assert report.comparisons[0].pairs[0].title == f"eager attention, batch size 2 ({ids})"
        for form in (text(report), markdown_text(report)):
            assert report.comparisons[0].pairs[0].title in form
    assert build_report([a, a]).comparisons[0].pairs[1].title == "eager attention, batch size 1 (c1)"
    assert build_report([b, b]).comparisons[0].pairs[0].title == "cell c0"


DRAWN = {"random_weights": True, "model_shape": "4b"}
OTHER_JOBS = [
    ({}, {}, {}, None),
    ({"model": "4b"}, {}, {}, "Different model: these numbers compare different jobs."),
    ({}, {"gpus": [{"name": "NVIDIA H200"}]}, {}, "Different machine: this alone may explain all changes."),
    ({}, {"commit": "abc"}, {"workload_sha256": None}, None),
    ({}, {}, {"workload_sha256": "b"}, "Different workload: these numbers compare different jobs."),
    (
        DRAWN,
        {"cpu": "x"},
        {"workload_sha256": "b"},
        "Different model, machine and workload: these numbers compare different jobs.",
    ),
]


@pytest.mark.parametrize(("shape", "machine", "workload", "says"), OTHER_JOBS)
def test_other_jobs_are_said_first(shape: Any, machine: Any, workload: Any, says: str | None) -> None:
    a, b = noisy_run(1, cells=({},), batches=3), noisy_run(2, cells=(shape,), batches=3)
    a.header.settings, b.header.settings = (RunSettings(**{"workload_sha256": "a"} | more) for more in ({}, workload))
    b.header.environment = machine
    report = build_report([a, b])
    assert as_json(report)["comparisons"][0]["warning"] == says
    assert (text(report).splitlines()[2] or None) == says
    assert ("- " + str(says) in markdown_text(report).splitlines()[4]) == (says is not None)
    more = build_report([a, a, b]).head()
    assert more[3:] == ([f"A and C: {says}"] if says else [])


def test_a_third_run_is_c_and_names_stay_what_they_are() -> None:
    a, c = (noisy_run(1, cells=cells, batches=3) for cells in (({"model": "best of B"}, {}), ({},)))
    report = build_report([a, a, c])
    lines = report.lines(report.comparisons[1])
    assert lines == ["1 cell of A without a partner in C (not in it): best of B (c0)"]
    assert as_json(report)["comparisons"][1]["without_partner"] == lines


def test_the_pages_example_is_what_compare_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text("utf-8")
    cells = ({"batch_size": 4},)
    runs = [
        in_memory([*noisy_records(seed, factor=factor, spread=0.5, cells=cells), verdict("c0", word, None)], name)
        for seed, factor, word, name in ((1, 1.0, "exact", "runs/before"), (2, 1.08, "different", "runs/after"))
    ]
    printed = "\n".join(line.rstrip() for line in text(build_report(runs)).splitlines())
    assert f"```\n{printed}\n```" in page


def queued(directory: Path, seed: int, *, service: float = 0.1, rates: tuple[float, ...] = (6.0,), **load: Any) -> Run:
    """Write a run against one server that answers in turn: neighbours in the queue share their latency.

    Arrivals are the same for every seed, service times are not.
    """
    arrivals, draws = random.Random(0), random.Random(seed)
    records = [load_header({f"rate-{rate:g}": level(rate) for rate in rates}, **load)]
    for rate in rates:
        at, free, lines = START, START, []
        for number in range(120):
            at += arrivals.expovariate(rate)
            begins = max(at, free)
            free = begins + service * draws.uniform(0.5, 1.5)
            lines.append(load_request(f"rate-{rate:g}", number, at, free - at, 0.005))
        records += level_records(f"rate-{rate:g}", lines)
    return write_run(directory, records)


def test_queues_that_differ_by_chance_raise_few_false_alarms(tmp_path: Path) -> None:
    """A server that is busy 95% of the time. Tests of single requests, which share its queue, alarm in 9 of these 12
    comparisons of equal servers."""
    runs = [queued(tmp_path / str(seed), seed, rates=(9.5,)) for seed in range(24)]
    alarms = 0
    for a, b in zip(runs[::2], runs[1::2], strict=True):
        [row] = build_report([a, b]).differences[0]
        alarms += any(difference.word in ("faster", "slower", "better", "worse") for difference in row.values())
    assert alarms <= 3


def test_a_slower_server_is_found_level_by_level(tmp_path: Path) -> None:
    rates = (4.0, 8.0)
    runs = [queued(tmp_path / "a", 1, rates=rates), queued(tmp_path / "b", 2, service=0.115, rates=rates)]
    report = build_report(runs, ["median_ttft>5%"])
    assert [row["median_ttft_ms"].word for row in report.differences[0]] == ["slower", "slower"]
    assert [row["attainment"].word for row in report.differences[0]][1] in ("worse", "within noise")
    assert {finding.holds for finding in report.findings} == {True}
    shown = text(report, 100)
    assert "level 4 req/s: 120 paired requests in 20 batches" in shown
    assert "panscan verify" in shown
    assert not {"cell", "unverified", "verdict"} & set(shown.replace(":", " ").split())
    assert "level 8 req/s" in markdown_text(report)
    assert as_json(report)["comparisons"][0]["cells"][0]["verdicts"] is None


def test_levels_of_other_rates_do_not_pair(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="no level pairs: request_rate is 6 in A and 3 in B"):
        build_report([queued(tmp_path / "a", 1), queued(tmp_path / "b", 1, rates=(3.0,))])


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


CROPS = "pan_and_scan_max_num_crops"
ON, OFF = {"do_pan_and_scan": True, CROPS: 4}, {"do_pan_and_scan": False, CROPS: 4}
EAGER, SDPA = ([{"attention": name, "batch_size": size} for size in (1, 2)] for name in ("eager", "sdpa"))
APART = [
    (EAGER, SDPA[::-1], {"attention": ("eager", "sdpa")}),
    ([{}], [{"equal_views": False, "attention": "sdpa"}], {}),  # what a version did not know has its default
    ([{}], [{"equal_views": True}], {"equal_views": (False, True)}),
    ([ON, OFF], [ON, OFF | {CROPS: 8}], {}),  # nothing is cropped
    ([ON, OFF], [ON | {CROPS: 2}, OFF], {CROPS: (4, 2)}),
]


@pytest.mark.parametrize(("a", "b", "apart"), APART)
def test_settings_that_differ_as_a_whole_are_said_and_left_out_of_the_pairing(a: Any, b: Any, apart: Any) -> None:
    comparison = compare_runs(noisy_run(1, cells=a), noisy_run(2, cells=b))
    assert (comparison.apart, comparison.alone) == (apart, ())
    cells = [f"c{number}" for number in range(len(a))]
    assert [pair.cells for pair in comparison.pairs] == [*zip(cells, cells[::-1] if a is EAGER else cells, strict=True)]


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
    report = build_report(runs if in_a else runs[::-1])
    assert as_json(report)["comparisons"][0]["without_partner"] == listed
    assert "\n".join(listed) in text(report, 120)
    assert "\n".join([f"- {listed[0]}", *(f"  {line}" for line in listed[1:])]) in markdown_text(report)


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
    paired = pair_requests(a, "c0", b, "c0")
    assert ([pair.a.request for pair in paired.pairs], paired.alone) == (["q0.0", "q2.0"], (1, 1))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=16))
def test_clusters_are_the_smallest_sets_of_batches_that_no_pair_leaves(batches: list[tuple[int, int]]) -> None:
    """Against a naive closure, whatever batches the requests of both sides were in."""
    a, b = (noisy_run(seed, cells=({},), batches=len(batches), repeats=1) for seed in (1, 2))
    for side, run in enumerate((a, b)):
        for record, both in zip(run.requests["c0", 0], batches, strict=True):
            record.batch = both[side]
    paired = pair_requests(a, "c0", b, "c0")
    clusters = {pair.a.request: pair.cluster for pair in paired.pairs}
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
    assert paired.clusters == len(set(clusters.values()))
    for side, run in enumerate((a, b)):
        line = run.repeats["c0", 0]
        assert paired.work[side, :, 0].sum() == len(batches)
        assert paired.work[side, :, 2].sum() == pytest.approx(line.ended - line.started)


def test_repeats_of_one_question_are_no_more_evidence_about_answers() -> None:
    right = noisy_run(1, cells=({},), batches=4, repeats=5, scores={"exact_match": 1.0})
    wrong = noisy_run(2, cells=({},), batches=4, repeats=5, scores={"exact_match": 0.0})
    for records in (*right.requests.values(), *wrong.requests.values()):
        for record in records:
            record.prompt_sha256 = record.request
    [pair] = compare_runs(right, wrong).pairs
    score = measured(pair, ["exact_match"])["exact_match"]
    assert (score.clusters, score.levels()) == (4, (1.0, 0.0))
    assert measured(pair, ["request_throughput"])["request_throughput"].clusters == 5, "repeats share their noise"
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
def test_bundled_models_that_changed_are_another_model(model: str, weights: Any, differs: Any) -> None:
    runs = [noisy_run(seed, cells=({"model": model},)) for seed in (1, 2)]
    for run, bundled in zip(runs, weights, strict=True):
        run.header.environment = {"cpu": "x"} if bundled is None else {"cpu": "x", "bundled": bundled}
    assert compare_runs(*runs).differences == ({} if differs is None else {"mini weights": differs})
    said = "Different model: these numbers compare different jobs."
    report = build_report(runs)
    assert report.warning(report.comparisons[0]) == (None if differs is None else said)


def test_nothing_that_pairs_is_an_error_that_says_why() -> None:
    swept = noisy_run(2, cells=({"attention": "sdpa"}, {"attention": "flex_attention"}))
    with pytest.raises(RecordsError, match="no cell pairs: attention is eager in A and sdpa, flex_attention in B"):
        compare_runs(noisy_run(1, cells=({"attention": "eager"},)), swept)
    with pytest.raises(RecordsError, match="cells pair, but no request does"):
        compare_runs(noisy_run(1), noisy_run(2, prompt_sha256="ff"))
