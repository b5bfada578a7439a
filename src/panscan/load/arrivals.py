"""Arrival processes of open-loop traffic: when each request is sent. Pure and seeded.

Each function returns the ascending arrival times of ``count`` requests, in seconds from the start of the level. Rates,
burstiness and traces are checked where they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def constant_arrivals(rate: float, count: int) -> list[float]:
    """Return equal intervals at ``rate`` requests per second, starting at 0."""
    return [index / rate for index in range(count)]


def gamma_arrivals(rate: float, count: int, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return gamma-distributed intervals, as in vLLM: a Poisson process at burstiness 1.

    The times are scaled so that the last request arrives at ``count / rate``: every sample has the requested mean rate.

    Args:
        rate: mean requests per second.
        count: number of requests.
        burstiness: shape of the gamma distribution; below 1 is burstier than Poisson, above 1 more regular.
        seed: seed of the random intervals.
    """
    times = np.cumsum(np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / burstiness, size=count))
    if count and not times[-1] > 0:  # a tiny burstiness underflows: every interval is 0
        return [count / rate] * count
    return [float(time) for time in times * (count / rate / times[-1])] if count else []


def trace_arrivals(recorded: Sequence[float], count: int, speed_up: float = 1.0) -> list[float]:
    """Return recorded times from the first one on, replayed faster by the factor ``speed_up``."""
    return [(time - recorded[0]) / speed_up for time in recorded[:count]]
