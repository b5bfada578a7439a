"""Goodput: which requests meet the limits on their times, and the highest rate at which enough of them do. Pure.

Limits hold for the user: a request that waits in the client for a slot of ``--max-concurrency`` is as late as one that
waits in the server, so the wait counts towards the limits on TTFT and E2E. Latencies exclude it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from panscan.records.intervals import Z95, Interval, wilson_interval
from panscan.records.request_records import RequestTimes

Limits = Mapping[str, float]
"""Milliseconds that the times of a request may take, by name of :data:`panscan.records.fields.LIMITED_TIMES`."""

FAILED = "failed"
"""The name under which a request without an answer counts as missed."""

_SUSTAINED = 0.9
"""Completions per arrival, over the middle of a level, below which its queue grows."""
_LEAST_ARRIVALS = 10


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that meet all limits.

    Args:
        sent: requests, failed ones included.
        met: requests that were answered within every limit.
        missed: requests over each limit by its name, and those that failed by :data:`FAILED`. A request over two
            limits counts in both.
        overloaded: whether requests arrive faster than they complete, under limits that do not bound the wait: a limit
            on TPOT alone holds however long the queue grows.
        variance: of the number of requests that meet the limits, estimated from blocks of consecutive requests; 0 if
            requests are taken as independent.
    """

    sent: int
    met: int
    missed: Mapping[str, int]
    overloaded: bool = False
    variance: float = 0.0

    def __add__(self, other: Goodput) -> Goodput:
        names = dict.fromkeys((*self.missed, *other.missed))
        missed = {name: self.missed.get(name, 0) + other.missed.get(name, 0) for name in names}
        return Goodput(
            self.sent + other.sent,
            self.met + other.met,
            missed,
            self.overloaded or other.overloaded,
            self.variance + other.variance,
        )

    @property
    def attainment(self) -> float:
        """Return the share of all requests sent that meet the limits, 0 to 1."""
        return self.met / self.sent if self.sent else 0.0

    @property
    def interval(self) -> Interval:
        """Return the 95% interval of the attainment: Wilson's, of as many requests as the blocks are worth."""
        return wilson_interval(self.attainment, self.sent / self._requests_per_independent) if self.sent else (0.0, 1.0)

    @property
    def _requests_per_independent(self) -> float:
        """Return how many requests tell as much as one would that shares no queue with another."""
        independent = self.met * (1 - self.attainment)
        return max(1.0, self.variance / independent) if independent else 1.0

    def proves(self, target: float) -> bool:
        """Return whether the target is reached beyond chance: by the lower end of the 95% interval."""
        return self.interval[0] >= target and not self.overloaded

    def requests_to_prove(self, target: float) -> int | None:
        """Return about how many requests would prove the target if the attainment stays; None where it is too near."""
        above = self.attainment - target
        if above <= 0 or target >= 1:
            return None
        return ceil(Z95**2 * target * (1 - target) / above**2 * self._requests_per_independent)

    def reaches(self, target: float) -> bool:
        """Return whether a target attainment, 0 to 1, is reached at a rate that the endpoint sustains."""
        return self.attainment >= target and not self.overloaded

    def clearly_misses(self, target: float) -> bool:
        """Return whether the target is missed by more than chance explains (95% interval)."""
        return self.overloaded or self.interval[1] < target


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate at which enough requests meet the limits, from measured levels.

    A level falls short if too few requests meet the limits, or if it is overloaded (:class:`Goodput`).

    Args:
        rate: the highest measured one that meets the target with no lower one clearly short of it; None if none does.
        short: the lowest measured rate above it that falls short; None if none does, or without ``rate`` the lowest.
        contrary: lower rates that fall short by no more than chance explains, and rates above ``short`` that meet the
            target all the same.
    """

    rate: float | None
    short: float | None
    contrary: tuple[float, ...] = ()


def missed_limits(request: RequestTimes, limits: Limits) -> list[str]:
    """Return what a request missed: names of limits, or :data:`FAILED`; nothing if it meets all of them.

    The limits on TTFT and E2E include the wait for a slot of ``--max-concurrency`` (``queued``).

    A request of fewer than two output tokens has no TPOT and cannot miss it. One without any chunk has no TTFT and
    no E2E, and misses both limits.

    Raises:
        RecordsError: stamps contradict counts.
    """
    if request.error is not None:
        return [FAILED]
    queued, ttft, tpot, e2e = request.queued or 0.0, request.ttft, request.tpot, request.e2e
    seconds = {
        "ttft": inf if ttft is None else ttft + queued,
        "tpot": 0.0 if tpot is None else tpot,
        "e2el": inf if e2e is None else e2e + queued,
    }
    return [name for name, limit in limits.items() if 1e3 * seconds[name] > limit]


def follows_arrivals(levels: Iterable[Sequence[RequestTimes]]) -> bool | None:
    """Return whether requests of an open loop complete as fast as they arrive; None if there are too few.

    It compares the time between the 10th and the 90th percentile of arrivals with that of completions. A constant
    latency, even a long one, leaves both equal; a growing queue stretches completions.

    Args:
        levels: requests of each repeat of a level.
    """
    arrived = completed = 0.0
    for requests in levels:
        ends = [request.stamps.tokens[-1] for request in requests if request.error is None and request.stamps.tokens]
        if len(ends) < _LEAST_ARRIVALS:
            return None
        arrived += _middle([request.due for request in requests if request.due is not None])
        completed += _middle(ends)
    return arrived >= _SUSTAINED * completed if arrived > 0 else None


def _middle(times: Sequence[float]) -> float:
    """Return the seconds between the 10th and the 90th percentile."""
    if not times:
        return 0.0
    low, high = np.percentile(times, (10, 90))
    return float(high - low)


def goodput_of(requests: Iterable[RequestTimes], limits: Limits, *, has_rate: bool = False, block: int = 1) -> Goodput:
    """Return the goodput of a level.

    Args:
        requests: all requests sent.
        limits: milliseconds by name. Without limits every answered request meets them.
        has_rate: whether requests arrive at a rate, which may overload the endpoint.
        block: consecutive requests that share their fate, as they are in flight together.

    Raises:
        RecordsError: stamps contradict counts.
    """
    requests = list(requests)
    misses = [missed_limits(request, limits) for request in requests]
    missed = {name: sum(name in names for names in misses) for name in (*limits, FAILED)}
    overloaded = has_rate and limits.keys() == {"tpot"} and follows_arrivals([requests]) is False
    met = np.array([not names for names in misses], dtype=np.float64)
    blocks, variance = ceil(len(met) / block), 0.0
    if block > 1 and blocks > 1:
        sums = np.bincount(np.arange(len(met)) // block, met - met.mean())
        variance = float((sums**2).sum() * blocks / (blocks - 1))
    return Goodput(len(misses), int(met.sum()), missed, overloaded, variance)


def highest_rate(levels: Sequence[tuple[float, Goodput]], target: float) -> HighestRate:
    """Return the highest rate that meets a target.

    A lower rate that falls short rules out the higher ones, unless chance explains it: its 95% interval holds the
    target, and it is not overloaded.

    Args:
        levels: (rate in requests per second, goodput) in any order; levels of equal rates are added up.
        target: the least attainment, 0 to 1.
    """
    rates: dict[float, Goodput] = {}
    for rate, goodput in sorted(levels, key=lambda level: level[0]):
        rates[rate] = rates[rate] + goodput if rate in rates else goodput
    passing = [rate for rate, goodput in rates.items() if goodput.reaches(target)]
    failing = [rate for rate in rates if rate not in passing]
    clear = min((rate for rate in failing if rates[rate].clearly_misses(target)), default=inf)
    best = max((rate for rate in passing if rate < clear), default=None)
    short = min((rate for rate in failing if best is None or rate > best), default=None)
    if best is None:
        return HighestRate(None, short)
    contrary = [*(rate for rate in failing if rate < best), *(rate for rate in passing if rate > best)]
    return HighestRate(best, short, tuple(contrary))
