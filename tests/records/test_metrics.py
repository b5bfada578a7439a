"""Metrics of cells by hand and by properties, their intervals against independent computations."""

from itertools import pairwise
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from tests.records.synthetic import batches_of, record_of, repeat, request, run_of, stamps
from tests.report.test_terminal import shown

from panscan.analysis.cells import cell_metrics
from panscan.core import RecordsError
from panscan.records import intervals
from panscan.records.fields import STAGES
from panscan.records.metrics import COLUMNS, INTERVALS, shares_of
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.report.terminal import print_summary


def known_answer() -> Run:
    """Two repeats. Repeat 0: a batch of two (0 to 2 s) and one alone (2 to 6 s). Repeat 1: one alone (10 to 12 s)."""
    first = {"loaded": 0.1, "preprocessed": 0.3, "vision_start": 0.4, "vision": 0.6, "end": 2.3}
    return run_of(
        request("c", "q0", 0.0, [1.0, 1.5, 2.0], stamps=stamps(0.0, [1.0, 1.5, 2.0], **first), views=5, crops=4),
        request("c", "q1", 0.0, [1.0, 1.25], stamps=stamps(0.0, [1.0, 1.25], **first), image_tokens=20),
        request("c", "q2", 2.0, [6.0], batch=1, prompt_tokens=50),
        request("c", "bad", 6.0, [], batch=2, error="boom", views=99),
        repeat("c", 0, 0.0, 7.0, peak_allocated_bytes=5, peak_rss_bytes=70),
        request("c", "q0", 10.0, [11.0, 11.5, 12.0], repeat=1),
        repeat("c", 1, 10.0, 13.0, peak_allocated_bytes=9, peak_rss_bytes=60),
    )


def test_every_number_of_a_small_run_is_the_one_computed_by_hand() -> None:
    metrics = cell_metrics(known_answer(), "c")
    statistics = ("mean", "median", "p90", "p95", "p99")
    times = [f"{statistic}_{time}_ms" for time in ("ttft", "tpot", "itl", "e2el") for statistic in statistics]
    by_time = (
        (1750, 1000, 3100, 3550, 3910),  # to the first token: 1, 1, 4, 1
        (1250 / 3, 500, 500, 500, 500),  # per output token: 0.5, 0.25, none, 0.5
        (450, 500, 500, 500, 500),  # gaps, pooled: 0.5, 0.5, 0.25, 0.5, 0.5
        (2312.5, 2000, 3400, 3700, 3940),  # to the last token, not to the end: 2, 1.25, 4, 2
    )
    expected = {
        # batches last 2, 4 and 2 seconds and give 5, 1 and 3 tokens
        "latency_p50_ms": 2000,
        "latency_p95_ms": 3800,
        "throughput_req_s": 0.4,
        "tokens_per_s_mean": (2.5 + 0.25 + 1.5) / 3,
        "measured_repeats": 2,
        "measured_batches": 3,
        "completed": 4,
        "failed": 1,
        "duration": 10,
        "total_input_tokens": 20 + 20 + 50 + 20,
        "total_output_tokens": 9,
        "request_throughput": 0.4,
        "output_throughput": 0.9,
        **dict(zip(times, (value for row in by_time for value in row), strict=True)),
        # stages: two requests have all of them, two have only prefill (4 and 1) and decode (0 and 1)
        "mean_load_ms": 50,
        "mean_preprocess_ms": 100,
        "mean_queue_ms": None,
        "mean_vision_ms": 100,
        "mean_prefill_ms": (0.5 + 0.5 + 4 + 1) / 4 * 1e3,
        "mean_decode_ms": (1 + 0.25 + 0 + 1) / 4 * 1e3,
        "mean_views": 3.5,
        "mean_crops": 2.5,
        "mean_image_tokens": 14,
        "mean_prompt_tokens": 27.5,
        "mean_output_tokens": 2.25,
        "peak_allocated_bytes": 9,
        "peak_reserved_bytes": None,
        "peak_rss_bytes": 70,
    }
    assert tuple(metrics.values) == COLUMNS == tuple(expected)
    assert metrics.values == pytest.approx(expected)
    assert set(metrics.intervals) == set(INTERVALS)


def stages_of(record: RequestRecord) -> list[float | None]:
    seconds = record.stamps.stages()
    return [seconds[stage] for stage in STAGES]


def test_stages_of_one_request() -> None:
    record = request("c", "q", 0.0, [1.0, 1.5])
    times = {"loaded": 0.1, "preprocessed": 0.3, "scheduled": 0.35, "vision_start": 0.4, "vision": 0.6}
    one = record_of({**record, "stamps": stamps(0.0, [1.0, 1.5], **times)})
    assert stages_of(one) == pytest.approx([0.1, 0.2, 0.05, 0.2, 0.45, 0.5])
    # its preparation began late, it waited for a lock while loading, and was preempted around its first token
    waits = {"preparing": 0.04, "waits": [[0.05, 0.07], [0.9, 1.2]]}
    one = record_of({**record, "stamps": stamps(0.0, [1.0, 1.5], **times, **waits)})
    assert stages_of(one) == pytest.approx([0.04, 0.2, 0.41, 0.2, 0.35, 0.3])
    assert one.tpot == 0.5, "a preempted request's tokens come as late as they come"
    # vision_start unknown: from preprocessed; no loaded: its time is in preprocess
    times = {"preprocessed": 0.3, "vision": 0.6}
    one = record_of({**record, "stamps": stamps(0.0, [1.0, 1.5], **times)})
    assert stages_of(one) == pytest.approx([None, 0.3, None, 0.3, 0.4, 0.5])


def test_one_token_has_no_tpot_and_no_token_stamps_no_times() -> None:
    alone = record_of(request("c", "q", 1.0, [3.0]))
    assert (alone.ttft, alone.e2e, alone.tpot, alone.itl) == (2.0, 2.0, None, [])
    unseen = record_of(request("c", "q", 1.0, [], output_tokens=4))
    assert (unseen.ttft, unseen.e2e, unseen.tpot, unseen.itl) == (None, None, None, [])
    assert unseen.stamps.stages()["decode"] is None
    metrics = cell_metrics(run_of(request("c", "q", 1.0, [], output_tokens=4), repeat("c", 0, 0.0, 2.0)), "c")
    assert metrics.values["output_throughput"] == 2.0
    assert metrics.values["p95_e2el_ms"] is None
    assert metrics.values["latency_p50_ms"] is None
    assert metrics.uncertified == ()


def test_stamps_that_contradict_the_count_are_refused() -> None:
    with pytest.raises(RecordsError, match="'q7': 3 output tokens, 2 token stamps"):
        _ = record_of(request("c", "q7", 0.0, [1.0, 2.0], output_tokens=3)).ttft


def test_cells_without_a_number() -> None:
    run = run_of(request("c", "q", 0.0, [], error="boom"), repeat("c", 0, 0.0, 1.0))
    assert cell_metrics(run, "c") is None
    assert cell_metrics(run_of(), "c") is None
    with pytest.raises(RecordsError, match="no cell 'z'"):
        cell_metrics(run, "z")


def test_a_repeat_whose_requests_all_failed_still_took_its_time() -> None:
    good = [request("c", f"q{i}", i, [i + 0.5, i + 1.0], batch=i) for i in range(10)]
    bad = [request("c", "q0", 10.0, [], repeat=1, error="boom"), repeat("c", 1, 10.0, 20.0)]
    metrics = cell_metrics(run_of(*good, repeat("c", 0, 0.0, 10.0), *bad), "c")
    assert metrics.values["request_throughput"] == 0.5
    assert metrics.values["measured_batches"] == 10
    low, high = metrics.intervals["request_throughput"]
    assert low < 0.5 < high


def test_time_after_the_last_batch_counts_in_the_interval_too() -> None:
    *requests, last, _ = batches_of("c", [1.0] * 10)
    repeats = [
        record | {"repeat": number}
        for number, ended in enumerate((20.0, 25.0))
        for record in (*requests, last | {"ended": ended})
    ]
    metrics = cell_metrics(run_of(*repeats), "c")
    low, high = metrics.intervals["request_throughput"]
    assert low < (metrics.values["request_throughput"] or 0.0) < high and low < 0.4


LEAST = {"median": 11, "p90": 64, "p95": 130, "p99": 662}


@pytest.mark.parametrize(("batches", "size"), [(6, 2), *((n - k, 1) for n in LEAST.values() for k in (0, 1))])
def test_percentiles_are_certified_from_the_least_number_of_their_own_samples(batches: int, size: int) -> None:
    """Each request has three tokens, so two gaps."""
    metrics = cell_metrics(run_of(*batches_of("c", [1.0] * batches, size=size)), "c")
    samples = {"ttft": 1, "tpot": 1, "itl": 2, "e2el": 1}
    few = {f"{name}_{time}_ms" for name in LEAST for time in samples if batches * size * samples[time] < LEAST[name]}
    few |= {name for name, least in (("latency_p50_ms", 11), ("latency_p95_ms", 130)) if batches < least}
    assert {*metrics.uncertified} == few


@settings(max_examples=100)
@given(
    steps=st.lists(st.floats(0, 5), min_size=8, max_size=11),
    missing=st.sets(st.integers(0, 5)),
    waited=st.lists(st.floats(0, 1), max_size=4),
)
def test_stages_add_up_to_the_whole(steps: list[float], missing: set[int], waited: list[float]) -> None:
    preparing, loaded, preprocessed, scheduled, entered, vision, *tokens = np.cumsum(steps).tolist()
    times: list[float | None] = [preparing, loaded, preprocessed, scheduled, entered, vision]
    for index in missing:
        times[index] = None
    names = ("preparing", "loaded", "preprocessed", "scheduled", "vision_start", "vision")
    waits = list(pairwise(tokens[0] + share * (tokens[-1] - tokens[0]) for share in sorted(waited)))[::2]
    given = dict(zip(names, times, strict=True)) | {"waits": waits}
    record = request("c", "q", 0.0, tokens, stamps=stamps(0.0, tokens, **given))
    one = record_of(record)
    assert sum(seconds or 0.0 for seconds in stages_of(one)) == pytest.approx(one.e2e)
    metrics = cell_metrics(run_of(record, repeat("c", 0, 0.0, 60.0)), "c")
    stages = sum(metrics.values[f"mean_{stage}_ms"] or 0.0 for stage in STAGES)
    assert stages == pytest.approx(metrics.values["mean_e2el_ms"])


def test_one_repeat_has_no_interval_however_many_batches_it_has() -> None:
    metrics = cell_metrics(run_of(*batches_of("c", [1.0, 2.0, 4.0], size=4)), "c")
    assert metrics.intervals == {}


# Throughput of several replicas: what they did in the time in which all of them worked.


Lane = tuple[float, list[tuple[float, int]]]
"""One replica's work: when it started, and (seconds, requests) of each batch."""


def lines_of(lanes: list[Lane], number: int = 0) -> list[dict[str, Any]]:
    """A repeat as replicas leave it, each batch of a lane right after the one before."""
    requests, replicas = [], []
    for replica, (start, lane) in enumerate(lanes):
        at = start
        for batch, (seconds, size) in enumerate(lane):
            for i in range(size):
                fields = {"repeat": number, "batch": 100 * replica + batch, "replica": replica}
                requests.append(request("c", f"q{batch}.{i}", at, [at + seconds / 2, at + seconds], **fields))
            at += seconds
        replicas.append({"replica": replica, "started": start, "ended": at, "device": f"cuda:{replica}"})
    window = max(line["started"] for line in replicas), min(line["ended"] for line in replicas)
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
    assert [(share.replica, share.device) for share in shares] == [(0, "cuda:0"), (1, "cuda:1")]
    assert [share.request_throughput for share in shares] == pytest.approx([2.5 / 4, 4 / 4])
    assert [share.share for share in shares] == pytest.approx([2.5 / 6.5, 4 / 6.5])
    text = "req/s of each replica: 0 on cuda:0 0.625 (38%), 1 on cuda:1 1.00 (62%)\n"
    assert text in shown(print_summary, run, 100)
    apart = run_of(*lines_of([(0.0, [(2.0, 1)]), (3.0, [(1.0, 1)])]))
    assert "req/s of each replica: 0 on cuda:0 -, 1 on cuda:1 -\n" in shown(print_summary, apart, 100)


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
    run = run_of(*(record for number, lanes in enumerate(repeats) for record in lines_of(lanes, number)))
    work, seconds = 0.0, 0.0
    for lanes in repeats:
        opens, closes = max(start for start, _ in lanes), min(start + sum(s for s, _ in lane) for start, lane in lanes)
        if opens < closes:
            seconds += closes - opens
            work += integral(lanes, opens, closes)
    metrics = cell_metrics(run, "c")
    throughput = metrics.values["request_throughput"]
    shares = shares_of(run.repeats_of("c"))
    if seconds == 0:
        assert throughput is None
        assert {(share.request_throughput, share.share) for share in shares} == {(None, None)}
    elif seconds > 1e-3:  # a shorter window is mostly rounding
        assert throughput == pytest.approx(work / seconds, rel=1e-6)
        assert sum(share.request_throughput or 0.0 for share in shares) == pytest.approx(throughput)
        assert sum(share.share or 0.0 for share in shares) == pytest.approx(1)


def integral(lanes: list[Lane], opens: float, closes: float) -> float:
    """Requests done in the window, piece by piece between any two moments at which some batch ends."""
    spans = []
    for start, lane in lanes:
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
    assert [share.share for share in shares_of(run.repeats_of("c"))] == [1.0, 0.0]


def test_one_process_has_no_shares() -> None:
    run = run_of(request("c", "q", 0.0, [1.0]), repeat("c", 0, 0.0, 1.0))
    assert shares_of(run.repeats_of("c")) == []
    assert "replica" not in shown(print_summary, run, 100)


# Intervals against independent computations, and how often they hold the truth.


def test_the_bootstrap_is_the_plain_one_that_draws_batches() -> None:
    """Against a loop that builds every resample and asks numpy."""
    rng = np.random.default_rng(5)
    clusters = np.repeat(np.arange(7), [1, 4, 2, 3, 1, 2, 5])
    values = rng.lognormal(size=len(clusters))
    draws = np.random.default_rng(0).multinomial(7, np.full(7, 1 / 7), size=1_000)
    plain = []
    for row in draws:
        drawn = np.repeat(values, row[clusters])
        plain.append([drawn.mean(), *np.percentile(drawn, [50, 95, 90])])
    expected = np.percentile(np.array(plain), [2.5, 97.5], axis=0).T
    clustered = intervals.cluster_intervals(values.tolist(), clusters.tolist(), (50, 95, 90))
    assert clustered == [pytest.approx(tuple(pair)) for pair in expected]


@pytest.mark.parametrize("batches", [1, 4])
def test_intervals_cover_what_other_repeats_would_give(batches: int) -> None:
    """Five repeats of one batch (the engine) or several (``generate()``): 95% nominal, here of 150 cells.

    Documents take different times, the same in each repeat; the machine is faster in some repeats than in others.
    Batches as clusters would take the spread of documents for noise, or overlook that of repeats.
    """
    rng = np.random.default_rng(11)
    work = rng.lognormal(0, 0.5, batches)
    expected = {"request_throughput": batches / work.sum(), "mean_e2el_ms": 1e3 * work.mean()}
    hits = dict.fromkeys(expected, 0)
    for _ in range(150):
        repeats = []
        for number in range(5):
            took = work * rng.lognormal(0, 0.03) * rng.lognormal(0, 0.02, batches)
            records = batches_of("c", took.tolist())[:-1]
            repeats += [record | {"repeat": number} for record in records]
        metrics = cell_metrics(run_of(*repeats), "c")
        for name, truth in expected.items():
            low, high = metrics.intervals[name]
            hits[name] += low <= truth <= high
            assert low <= (metrics.values[name] or 0.0) <= high
    assert all(0.9 <= count / 150 <= 0.99 for count in hits.values()), hits


@given(st.integers(1, 60), st.floats(0.0, 30.0))
def test_students_distribution(freedom: int, statistic: float) -> None:
    assert intervals.student_p_value(statistic, freedom) == pytest.approx(2 * stats.t.sf(statistic, freedom), abs=1e-12)
    for alpha in (0.05, 0.04):
        quantile = stats.t.ppf(1 - alpha / 2, freedom)
        assert intervals.student_quantile(freedom, alpha) == pytest.approx(quantile, rel=1e-9)


@pytest.mark.parametrize(("wins", "losses", "count"), [(3, 1, 10), (0, 0, 50), (0, 7, 100), (25, 25, 1000)])
def test_the_ends_of_a_paired_interval_have_tangos_statistic(wins: int, losses: int, count: int) -> None:
    """The standard error is that of the maximum-likelihood shares with this difference, found numerically."""
    counts = (wins, losses, count - wins - losses)
    for end in intervals.paired_interval(wins, losses, count):

        def likelihood(share: float, end: float = end) -> float:
            shares = (share + end, share, 1 - 2 * share - end)
            return -sum(n * log(max(p, 1e-300)) for n, p in zip(counts, shares, strict=True) if n)

        bounds = max(0.0, -end), (1 - end) / 2
        fit = optimize.minimize_scalar(likelihood, bounds=bounds, options={"xatol": 1e-12}, method="bounded")
        error = sqrt((2 * fit.x + end - end**2) / count)
        assert abs((wins - losses) / count - end) / error == pytest.approx(1.959964, rel=2e-3)


def test_one_cluster_has_no_interval() -> None:
    assert intervals.ratio_interval([1.0], [1.0]) is None
    assert intervals.cluster_intervals([1.0, 2.0], ["a", "a"], (50,)) is None
