"""Throughput of several replicas: what they did in the time in which all of them worked."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.records.synthetic import repeat, request, run_of
from tests.report.test_terminal import shown

from panscan.analysis.cells import cell_metrics
from panscan.records.metrics import shares_of
from panscan.report.terminal import print_summary

Lane = tuple[float, list[tuple[float, int]]]
"""One replica's work: when it started, and (seconds, requests) of each batch."""


def lines_of(lanes: list[Lane], number: int = 0) -> list[dict[str, Any]]:
    """A repeat as replicas leave it, each batch of a lane right after the one before."""
    requests, replicas = [], []
    for replica, (start, lane) in enumerate(lanes):
        at = start
        for batch, (seconds, size) in enumerate(lane):
            for i in range(size):
                name, times = f"q{batch}.{i}", [at + seconds / 2, at + seconds]
                requests.append(
                    request("c", name, at, times, repeat=number, batch=100 * replica + batch, replica=replica)
                )
            at += seconds
        replicas.append({"replica": replica, "started": start, "ended": at, "device": f"cuda:{replica}"})
    window = max(each["started"] for each in replicas), min(each["ended"] for each in replicas)
    return [*requests, repeat("c", number, *window, replicas=replicas)]


def test_work_over_the_windows_edge_counts_by_its_part_inside() -> None:
    # Replica 0 from 0 to 8 s, replica 1 from 1 to 5 s: 4 s in which both work.
    # Replica 0: [0, 2] counts half, [2, 4] whole, [4, 8] a quarter of 4 requests. Replica 1: all of its two batches.
    run = run_of(*lines_of([(0.0, [(2.0, 1), (2.0, 1), (4.0, 4)]), (1.0, [(3.0, 3), (1.0, 1)])]))
    metrics = cell_metrics(run, "c")
    assert metrics.values["duration"] == 4
    assert metrics.values["request_throughput"] == pytest.approx((0.5 + 1 + 1 + 3 + 1) / 4)
    assert metrics.values["output_throughput"] == pytest.approx(2 * (0.5 + 1 + 1 + 3 + 1) / 4)
    assert metrics.values["completed"] == 10, "every request is counted, and its latency kept"
    shares = shares_of(run.repeats_of("c"))
    assert [(each.replica, each.device) for each in shares] == [(0, "cuda:0"), (1, "cuda:1")]
    assert [each.request_throughput for each in shares] == pytest.approx([2.5 / 4, 4 / 4])
    assert [each.share for each in shares] == pytest.approx([2.5 / 6.5, 4 / 6.5])
    text = "req/s of each replica: 0 on cuda:0 0.625 (38%), 1 on cuda:1 1.00 (62%)\n"
    assert text in shown(print_summary, run, 100)


def test_replicas_in_parallel_add_up_and_so_does_the_interval() -> None:
    once = lines_of([(0.0, [(0.5, 2)] * 6)] * 3)
    run = run_of(*(record | {"repeat": number} for number in (0, 1) for record in once))
    metrics = cell_metrics(run, "c")
    assert metrics.values["request_throughput"] == pytest.approx(12)
    assert metrics.intervals["request_throughput"] == pytest.approx((12, 12))
    assert metrics.intervals["output_throughput"] == pytest.approx((24, 24))


@st.composite
def lanes(draw: st.DrawFn) -> list[Lane]:
    lane = st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 3)), min_size=1, max_size=6)
    return draw(st.lists(st.tuples(st.floats(0, 3), lane), min_size=1, max_size=4))


@settings(max_examples=100)
@given(repeats=st.lists(lanes(), min_size=1, max_size=2))
@example([[(0.0, [(1.0, 1)]), (2.0, [(1.0, 1)])]])  # a window that never opens
def test_throughput_is_the_integral_of_everybodys_rate_over_the_window(repeats: list[list[Lane]]) -> None:
    run = run_of(*(record for number, each in enumerate(repeats) for record in lines_of(each, number)))
    work, seconds = 0.0, 0.0
    for each in repeats:
        opens, closes = max(start for start, _ in each), min(start + sum(s for s, _ in lane) for start, lane in each)
        if opens < closes:
            seconds += closes - opens
            work += integral(each, opens, closes)
    metrics = cell_metrics(run, "c")
    found = metrics.values["request_throughput"]
    shares = shares_of(run.repeats_of("c"))
    if seconds == 0:
        assert found is None
        assert {(each.request_throughput, each.share) for each in shares} == {(None, None)}
    elif seconds > 1e-3:  # a shorter window is mostly rounding
        assert found == pytest.approx(work / seconds, rel=1e-6)
        assert sum(each.request_throughput or 0.0 for each in shares) == pytest.approx(found)
        assert sum(each.share or 0.0 for each in shares) == pytest.approx(1)


def integral(each: list[Lane], opens: float, closes: float) -> float:
    """Requests done in the window, piece by piece between any two moments at which some batch ends."""
    spans = []
    for start, lane in each:
        at = start
        for seconds, size in lane:
            spans.append((at, at + seconds, size / seconds))
            at += seconds
    inner = sorted({opens, closes, *(edge for low, high, _ in spans for edge in (low, high) if opens < edge < closes)})
    return sum(
        (high - low) * sum(rate for at, until, rate in spans if at <= (low + high) / 2 < until)
        for low, high in pairwise(inner)
    )


def test_a_replica_whose_requests_all_failed_adds_nothing() -> None:
    *requests, line = lines_of([(0.0, [(1.0, 1)] * 4), (0.0, [(2.0, 1)] * 2)])
    broken = [record | ({"error": "boom"} if record["replica"] == 1 else {}) for record in requests]
    run = run_of(*broken, line)
    metrics = cell_metrics(run, "c")
    assert (metrics.values["request_throughput"], metrics.values["failed"]) == (pytest.approx(1.0), 2)
    assert [each.share for each in shares_of(run.repeats_of("c"))] == [1.0, 0.0]


def test_one_process_has_no_shares() -> None:
    run = run_of(request("c", "q", 0.0, [1.0]), repeat("c", 0, 0.0, 1.0))
    assert shares_of(run.repeats_of("c")) == []
    assert "replica" not in shown(print_summary, run, 100)
