"""Arrival processes of open-loop traffic: when each request is sent. Pure and seeded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from panscan.core import SettingError

__all__ = ["Arrivals", "BurstArrivals", "ConstantArrivals", "GammaArrivals", "TraceArrivals"]


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, count: int) -> list[float]:
        """Return the ascending arrival times of ``count`` requests, in seconds from the start of the level."""
        ...


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    """All requests at once: an unlimited request rate."""

    def times(self, count: int) -> list[float]:
        """See :meth:`Arrivals.times`."""
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """Equal intervals, starting at 0.

    Args:
        rate: requests per second.

    Raises:
        SettingError: the rate is not positive and finite.
    """

    rate: float

    def __post_init__(self) -> None:
        _check_positive("--request-rate", self.rate)

    def times(self, count: int) -> list[float]:
        """See :meth:`Arrivals.times`."""
        return [index / self.rate for index in range(count)]


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gamma-distributed intervals, as in vLLM: a Poisson process at burstiness 1.

    The times are scaled so that the last request arrives at ``count / rate``: every sample has the requested mean rate.

    Args:
        rate: mean requests per second.
        burstiness: shape of the gamma distribution; below 1 is burstier than Poisson, above 1 more regular.
        seed: seed of the random intervals.

    Raises:
        SettingError: the rate or the burstiness is not positive and finite.
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_positive("--request-rate", self.rate)
        _check_positive("--burstiness", self.burstiness)

    def times(self, count: int) -> list[float]:
        """See :meth:`Arrivals.times`."""
        if count == 0:
            return []
        times = np.cumsum(_unit_intervals(count, self.burstiness, self.seed))
        if not times[-1] > 0:  # a tiny burstiness underflows: every interval is 0
            return [count / self.rate] * count
        return [float(time) for time in times * (count / self.rate / times[-1])]


@dataclass(frozen=True, slots=True)
class TraceArrivals:
    """Recorded arrival times, replayed from the first one.

    Args:
        recorded: ascending times in seconds, from any origin.
        speed_up: factor by which the replay is faster than the recording.

    Raises:
        SettingError: the times are not finite and ascending, or the speed-up is not positive and finite.
    """

    recorded: tuple[float, ...]
    speed_up: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("the trace's speed-up", self.speed_up)
        if not all(math.isfinite(time) for time in self.recorded):
            raise SettingError("the trace has a time that is not a finite number of seconds: remove it")
        if any(later < earlier for earlier, later in pairwise(self.recorded)):
            raise SettingError("the times of the trace are not ascending: sort them")

    def times(self, count: int) -> list[float]:
        """See :meth:`Arrivals.times`.

        Raises:
            SettingError: the trace has fewer than ``count`` arrivals.
        """
        if count > len(self.recorded):
            raise SettingError(
                f"--num-prompts {count}: the trace has {len(self.recorded)} arrivals;"
                " give a longer trace or fewer prompts"
            )
        return [(time - self.recorded[0]) / self.speed_up for time in self.recorded[:count]]


def _unit_intervals(count: int, burstiness: float, seed: int) -> np.ndarray:
    """Return random intervals of mean 1, float64 ``[count]``."""
    return np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / burstiness, size=count)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise SettingError(f"{name}: expected a positive number, got {value!r}")
