"""Arrival processes: their rates and their randomness."""

from __future__ import annotations

import numpy as np
import pytest

from panscan.load.arrivals import constant_arrivals, gamma_arrivals, trace_arrivals


def test_constant_and_recorded_arrivals_start_at_0() -> None:
    assert constant_arrivals(4.0, 4) == [0.0, 0.25, 0.5, 0.75]
    assert trace_arrivals((100.0, 101.0, 105.0), 3, speed_up=2.0) == [0.0, 0.5, 2.5]
    assert trace_arrivals((100.0, 101.0, 105.0), 2) == [0.0, 1.0]
    assert constant_arrivals(1.0, 0) == gamma_arrivals(1.0, 0) == []


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_rate_and_the_variation_of_their_burstiness(burstiness: float) -> None:
    times = gamma_arrivals(8.0, 4000, burstiness, seed=3)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(500.0)
    intervals = np.diff([0.0, *times])
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.08)


def test_random_arrivals_depend_on_the_seed_and_scale_with_the_rate() -> None:
    slow, fast = gamma_arrivals(2.0, 20, seed=1), gamma_arrivals(8.0, 20, seed=1)
    assert slow == gamma_arrivals(2.0, 20, seed=1) != gamma_arrivals(2.0, 20, seed=2)
    assert slow == pytest.approx([4 * time for time in fast])


def test_a_tiny_burstiness_is_one_burst() -> None:
    times = gamma_arrivals(2.0, 10, 1e-9)
    assert times == sorted(times) and times[-1] == pytest.approx(5.0)
