"""Arrival processes: their rates, their randomness, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from panscan.core import SettingError
from panscan.load.arrivals import (
    Arrivals,
    BurstArrivals,
    ConstantArrivals,
    GammaArrivals,
    TraceArrivals,
)


def test_constant_arrivals_have_equal_intervals() -> None:
    assert ConstantArrivals(4.0).times(4) == [0.0, 0.25, 0.5, 0.75]


def test_a_burst_arrives_at_once() -> None:
    assert BurstArrivals().times(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_rate_and_the_variation_of_their_burstiness(burstiness: float) -> None:
    times = GammaArrivals(8.0, burstiness, seed=3).times(4000)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(500.0)
    intervals = np.diff([0.0, *times])
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.08)


def test_random_arrivals_depend_on_the_seed_only() -> None:
    assert GammaArrivals(2.0, seed=1).times(20) == GammaArrivals(2.0, seed=1).times(20)
    assert GammaArrivals(2.0, seed=1).times(20) != GammaArrivals(2.0, seed=2).times(20)


def test_a_rate_scales_the_same_random_times() -> None:
    slow, fast = GammaArrivals(2.0, seed=1).times(20), GammaArrivals(8.0, seed=1).times(20)
    assert slow == pytest.approx([4 * time for time in fast])


def test_a_tiny_burstiness_is_one_burst() -> None:
    assert GammaArrivals(2.0, 1e-9).times(10) == sorted(GammaArrivals(2.0, 1e-9).times(10))
    assert GammaArrivals(2.0, 1e-9).times(10)[-1] == pytest.approx(5.0)


def test_a_trace_is_replayed_from_its_first_time() -> None:
    assert TraceArrivals((100.0, 101.0, 105.0), speed_up=2.0).times(3) == [0.0, 0.5, 2.5]
    assert TraceArrivals((100.0, 101.0, 105.0)).times(2) == [0.0, 1.0]
    with pytest.raises(SettingError, match="--num-prompts 4: the trace has 3 arrivals"):
        TraceArrivals((100.0, 101.0, 105.0)).times(4)


@pytest.mark.parametrize("arrivals", [BurstArrivals(), ConstantArrivals(1.0), GammaArrivals(1.0)])
def test_no_requests_have_no_times(arrivals: Arrivals) -> None:
    assert arrivals.times(0) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantArrivals(0.0), "--request-rate: expected a positive number, got 0.0"),
        (lambda: GammaArrivals(float("nan")), "--request-rate"),
        (lambda: GammaArrivals(1.0, -1.0), "--burstiness"),
        (lambda: TraceArrivals((1.0, 0.5)), "not ascending"),
        (lambda: TraceArrivals((1.0, float("nan"))), "not a finite number"),
        (lambda: TraceArrivals((1.0,), speed_up=0.0), "speed-up"),
    ],
)
def test_impossible_arrivals_are_refused(make: Callable[[], Arrivals], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()
