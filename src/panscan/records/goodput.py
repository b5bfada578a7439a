"""Goodput: which requests meet the limits on their times, and the highest rate at which enough of them do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.records.intervals import Interval, wilson_interval
from panscan.records.requests import RequestMetrics

__all__ = ["Goodput", "HighestRate", "Limits", "goodput_of", "highest_rate", "missed_limits"]

Limits = Mapping[str, float]
"""Milliseconds that the times of a request may take, by name of :data:`panscan.records.schema.LIMITED_TIMES`."""

FAILED = "failed"
"""The name of what a request missed that has no answer."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that meet all limits.

    Args:
        sent: requests, failed ones included.
        met: requests that were answered within every limit.
        seconds: from the start of the level to its end.
        missed: requests over each limit by its name, and those that failed by :data:`FAILED`. A request over two
            limits counts in both.
    """

    sent: int
    met: int
    seconds: float
    missed: Mapping[str, int]

    @property
    def attainment(self) -> float:
        """Return the share of all requests sent that meet the limits, 0 to 1."""
        return self.met / self.sent if self.sent else 0.0

    @property
    def interval(self) -> Interval:
        """Return the 95% interval of the attainment."""
        return wilson_interval(self.attainment, self.sent) if self.sent else (0.0, 1.0)

    @property
    def throughput(self) -> float | None:
        """Return the requests per second that meet the limits; None for a level that took no time."""
        return self.met / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate at which enough requests meet the limits, from measured levels.

    Args:
        rate: the highest measured one below which no measured rate falls short; None if the lowest falls short.
        short: the lowest measured rate above it, which falls short; None if none does.
        estimate: where the attainment crosses the target between both, by linear interpolation; None without both.
        later: higher rates than ``short`` that meet the limits all the same: the measurement is noisy.
    """

    rate: float | None
    short: float | None
    estimate: float | None
    later: tuple[float, ...] = ()


def missed_limits(record: Mapping[str, Any], limits: Limits) -> list[str]:
    """Return what a ``request`` record missed: names of limits, or :data:`FAILED`; nothing if it meets all of them.

    A request of fewer than two output tokens has no TPOT and cannot miss it. One without any content has no TTFT and
    no E2E, and misses both limits.

    Raises:
        RecordsError: stamps contradict counts.
    """
    if record["error"] is not None:
        return [FAILED]
    times = RequestMetrics.from_record(record)
    seconds = {"ttft": times.ttft, "tpot": times.tpot, "e2el": times.e2e}
    return [name for name, limit in limits.items() if not _within(name, seconds[name], limit)]


def _within(name: str, seconds: float | None, limit: float) -> bool:
    if seconds is None:
        return name == "tpot"
    return 1e3 * seconds <= limit


def goodput_of(requests: Iterable[Mapping[str, Any]], limits: Limits, seconds: float) -> Goodput:
    """Return the goodput of a level.

    Args:
        requests: ``request`` records of all requests sent.
        limits: milliseconds by name. Without limits every answered request meets them.
        seconds: from the start of the level to its end.

    Raises:
        RecordsError: stamps contradict counts.
    """
    missed = dict.fromkeys((*limits, FAILED), 0)
    sent = met = 0
    for record in requests:
        names = missed_limits(record, limits)
        sent, met = sent + 1, met + (not names)
        for name in names:
            missed[name] += 1
    return Goodput(sent, met, seconds, missed)


def highest_rate(levels: Sequence[tuple[float, float]], target: float) -> HighestRate:
    """Return the highest rate that meets a target.

    Args:
        levels: (rate in requests per second, attainment) in any order; of equal rates the better one counts.
        target: the least attainment, 0 to 1.
    """
    best: dict[float, float] = {}
    for rate, attainment in sorted(levels):
        best[rate] = max(attainment, best.get(rate, 0.0))
    rates = list(best)
    first = next((index for index, rate in enumerate(rates) if best[rate] < target), len(rates))
    below = rates[first - 1] if first else None
    short = rates[first] if first < len(rates) else None
    later = tuple(rate for rate in rates[first + 1 :] if best[rate] >= target)
    estimate = None
    if below is not None and short is not None:
        fall = (best[below] - target) / (best[below] - best[short])
        estimate = below + fall * (short - below)
    return HighestRate(below, short, estimate, later)
