"""The search for the highest request rate that meets the goodput: which rate to measure next. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from panscan.records.goodput import Goodput, HighestRate, highest_rate
from panscan.records.request_records import RequestRecord

_STEP = 2.0  # factor between rates until the limit is enclosed
_DOWN = 8  # halvings of the first rate at most
_HIGHEST = 1e5  # requests per second
_LEAST_UNDISTURBED = 5  # requests; the first of a level may be slow for other reasons


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured level of a search.

    Args:
        rate: offered requests per second.
        goodput: counts of requests that met the limits.
        limited: the client, not the server, was the limit; the level proves nothing about the server.
        undisturbed: goodput of the requests that no other request overlapped; None if unknown.
    """

    rate: float
    goodput: Goodput
    limited: bool = False
    undisturbed: Goodput | None = None


def undisturbed(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the requests of a level that no other request overlapped, from its arrival to its end.

    Those are as fast as requests can be: a lower rate does not help them.
    """
    ordered = sorted(requests, key=lambda request: request.due or 0.0)
    dues = [request.due or 0.0 for request in ordered]
    alone, busy_until = [], -math.inf
    for request, due, following in zip(ordered, dues, [*dues[1:], math.inf], strict=False):
        end = request.stamps.end or 0.0
        if busy_until <= due and end <= following:
            alone.append(request)
        busy_until = max(busy_until, end)
    return alone


class RateSearch(Struct):
    """Doubles or halves the rate until the limit lies between two rates, then bisects.

    A rate that falls short by no more than chance explains does not end the doubling, as in :func:`highest_rate`.
    The halving ends once even undisturbed requests clearly miss the target.

    Args:
        start: first rate, requests per second.
        target: attainment to reach, 0 to 1.
        precision: stop when the lowest failing rate is within this fraction above the highest passing one.
        most: trials at most.

    Attributes:
        trials: the levels measured so far, in order: the caller adds that at each :meth:`next_rate`.
    """

    start: float = 1.0
    target: float = 0.95
    precision: float = 0.1
    most: int = 12
    trials: list[Trial] = []

    def next_rate(self) -> float | None:
        """Return the next rate to measure, requests per second; None when the search is over."""
        if len(self.trials) >= self.most or self._is_limited():
            return None
        if not self.trials:
            return self.start
        highest, fastest = self._highest(), max(self.trials, key=lambda trial: trial.rate)
        if not fastest.goodput.clearly_misses(self.target):
            return fastest.rate * _STEP if fastest.rate * _STEP <= _HIGHEST else None
        if highest.rate is None:
            lowest = min(trial.rate for trial in self.trials)
            return None if self._is_unreachable() or len(self.trials) > _DOWN else lowest / _STEP
        if highest.short is None or highest.short / highest.rate <= 1 + self.precision:
            return None
        return float(f"{math.sqrt(highest.rate * highest.short):.3g}")

    def best(self) -> Trial | None:
        """Return the trial at the highest rate that meets the target; None if no measured rate does."""
        rate = self._highest().rate
        return next((trial for trial in self.trials if trial.rate == rate and not trial.limited), None)

    @property
    def note(self) -> str:
        """How the search ended, in one sentence."""
        highest, share = self._highest(), f"{self.target:.0%} of the requests"
        if self._is_limited():
            return "the client became the limit: the server may sustain more; raise --processes"
        if highest.rate is None:
            if self._is_unreachable():
                return "the limits are out of reach: requests miss them even without others in flight; raise --goodput"
            lowest = min((trial.rate for trial in self.trials), default=self.start)
            return f"at no measured rate do {share} meet the limits (lowest: {lowest:g} req/s)"
        if highest.short is None:
            return f"{share} meet the limits at the highest measured rate: the server may sustain more"
        return f"{share} meet the limits at {highest.rate:g} req/s, not at {highest.short:g} req/s"

    def _is_limited(self) -> bool:
        return any(trial.limited for trial in self.trials)

    def _is_unreachable(self) -> bool:
        """Return whether requests miss the target even without others in flight, so that no lower rate reaches it."""
        goodputs = [trial.undisturbed for trial in self.trials if trial.undisturbed is not None and not trial.limited]
        goodput = sum(goodputs, Goodput(0, 0, {}))
        return goodput.sent >= _LEAST_UNDISTURBED and goodput.clearly_misses(self.target)

    def _highest(self) -> HighestRate:
        """Return what the trials say, by the rule of the report."""
        return highest_rate([(trial.rate, trial.goodput) for trial in self.trials if not trial.limited], self.target)
