from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.records import load_runs as loads
from tests.records.synthetic import record_of, records_of, write_run

from panscan.analysis.cells import cell_metrics
from panscan.analysis.levels import measured_level
from panscan.records.goodput import Goodput, goodput_of, highest_rate, missed_limits
from panscan.records.intervals import wilson_interval
from panscan.records.metrics import LEAST_SAMPLES, least_samples

LIMITS = {"ttft": 100.0, "tpot": 20.0, "e2el": 500.0}


def test_times_of_chunks_that_hold_several_tokens() -> None:
    times = record_of(loads.load_request("c", 0, 10.0, 0.5, 0.1, chunks=4, output_tokens=13))
    assert times.ttft == pytest.approx(0.5)
    assert times.itl == pytest.approx([0.1, 0.1, 0.1])
    assert times.tpot == pytest.approx(0.3 / 12)
    assert times.e2e == pytest.approx(0.8)


TIMES = [
    (0.099, 0.019, 5, []),
    (0.101, 0.019, 5, ["ttft"]),
    (0.099, 0.021, 5, ["tpot"]),
    (0.090, 0.019, 30, ["e2el"]),
    (0.101, 0.5, 2, ["ttft", "tpot", "e2el"]),
    (0.099, 0.0, 1, []),  # one token has no TPOT
    (0.0, 0.0, 0, ["ttft", "e2el"]),  # an answer without content
]


@pytest.mark.parametrize(("ttft", "itl", "chunks", "missed"), TIMES)
def test_a_request_meets_its_limits_or_not(ttft: float, itl: float, chunks: int, missed: list[str]) -> None:
    assert missed_limits(record_of(loads.load_request("c", 0, 10.0, ttft, itl, chunks=chunks)), LIMITS) == missed


def test_failed_requests_count_as_missed() -> None:
    lines = [loads.load_request("c", n, loads.START, 0.05 if n else 0.2, 0.01) for n in range(8)]
    lines += [loads.failed_request("c", number, loads.START) for number in (8, 9)]
    goodput = goodput_of(records_of(lines), LIMITS)
    assert (goodput.sent, goodput.met) == (10, 7)
    assert goodput.attainment == pytest.approx(0.7)
    assert goodput.missed == {"ttft": 1, "tpot": 0, "e2el": 0, "failed": 2}


def test_a_wait_for_a_slot_counts_towards_the_limits() -> None:
    late = record_of(loads.load_request("c", 0, 10.0, 0.05, 0.01, queued=0.2))
    assert missed_limits(late, {"ttft": 100.0, "tpot": 20.0, "e2el": 250.0}) == ["ttft", "e2el"]
    assert missed_limits(late, {"ttft": 260.0, "tpot": 20.0, "e2el": 300.0}) == []


def level_of(met: int, sent: int = 100) -> Goodput:
    return Goodput(sent, met, {})


def test_the_highest_rate_stops_at_the_first_that_clearly_falls_short() -> None:
    highest = highest_rate([(8.0, level_of(75)), (2.0, level_of(100)), (4.0, level_of(95)), (16.0, level_of(96))], 0.9)
    assert (highest.rate, highest.short, highest.contrary) == (4.0, 8.0, (16.0,))
    assert highest_rate([(2.0, level_of(80))], 0.9).rate is None
    assert highest_rate([(2.0, level_of(95))], 0.9).short is None
    assert highest_rate([(2.0, level_of(80)), (2.0, level_of(100))], 0.9).rate == 2.0


def test_a_lower_rate_that_falls_short_by_chance_rules_nothing_out() -> None:
    few = highest_rate([(2.0, level_of(18, 20)), (8.0, level_of(20, 20))], 0.95)
    assert (few.rate, few.short, few.contrary) == (8.0, None, (2.0,))
    many = highest_rate([(2.0, level_of(900, 1000)), (8.0, level_of(20, 20))], 0.95)
    assert (many.rate, many.short) == (None, 2.0)


def test_requests_that_share_a_queue_prove_less() -> None:
    """Of 100 requests 95 meet the limits: spread evenly they are 100, in one block of 10 hardly more than one each."""
    times = [0.05] * 95 + [0.2] * 5
    late = records_of([loads.load_request("c", n, loads.START + n, ttft, 0.01) for n, ttft in enumerate(times)])
    spread = [late[n] for n in np.random.default_rng(0).permutation(100)]
    together, apart, single = (
        goodput_of(requests, {"ttft": 100.0}, block=block) for requests, block in ((late, 10), (spread, 10), (late, 1))
    )
    assert single.interval == wilson_interval(0.95, 100)
    pairs = goodput_of(late, {"ttft": 100.0}, block=2)
    assert pairs.interval[0] < single.interval[0]
    assert apart.interval == pytest.approx(single.interval, abs=0.025)
    assert together.interval[0] < single.interval[0] - 0.02
    assert single.proves(0.88) and not single.proves(0.9) and not replace(single, overloaded=True).proves(0.5)


@given(st.integers(1, 400), st.floats(0.5, 0.99))
def test_as_many_requests_as_asked_for_prove_a_target(met: int, target: float) -> None:
    few = level_of(met, met + 1)
    needed = few.requests_to_prove(target)
    assume(needed is not None and needed < 10**6)
    assert level_of(-(-needed * met // (met + 1)), needed).proves(target)
    fewer = needed // 2
    assert not level_of(fewer * met // (met + 1), fewer or 1).proves(target)
    assert level_of(90).requests_to_prove(0.9) is None


def test_a_ramp_has_its_measured_rate_and_a_closed_loop_none_even_among_rates(tmp_path: Path) -> None:
    run = write_run(tmp_path, [loads.load_header({"c": loads.level()}, arrival="ramp"), *loads.steady("c", 5.0, 0.1)])
    assert measured_level(run, "c").offered == pytest.approx(5.0)
    cells = {"rate-4": loads.level(4.0), "concurrency-4": loads.level(None, 4)}
    lines = [*loads.steady("rate-4", 4.0, 0.1), *loads.steady("concurrency-4", 5.0, 0.1)]
    run = write_run(tmp_path, [loads.load_header(cells, arrival="poisson"), *lines])
    levels = [measured_level(run, cell) for cell in cells]
    assert [(one.offered, one.keeps_up) for one in levels] == [(4.0, True), (None, None)]


def test_requests_in_flight_together_share_a_block(tmp_path: Path) -> None:
    """Eight requests start and end together: blocks of fewer would have all of their time or none of it."""
    lines = [loads.load_request("c", n, loads.START + n // 8, 0.98, 0.005) for n in range(80)]
    cells = {"c": loads.level(None, 8)}
    run = write_run(tmp_path, [loads.load_header(cells, arrival="closed"), *loads.level_records("c", lines)])
    metrics = cell_metrics(run, "c")
    assert metrics.intervals["request_throughput"] == pytest.approx((8.0, 8.0), rel=1e-6)


def test_certified_percentiles_follow_the_binomial_distribution() -> None:
    assert LEAST_SAMPLES == {50: 11, 90: 64, 95: 130, 99: 662}
    for percent in (75, 99.9):
        share, least = percent / 100, least_samples(percent)
        tails = [share**n + n * share ** (n - 1) * (1 - share) for n in (least - 1, least)]
        assert tails[1] <= 0.01 < tails[0]
    assert least_samples(1) == least_samples(99)
