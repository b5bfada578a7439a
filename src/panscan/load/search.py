"""The search for the highest request rate that meets the goodput: which rate to measure next. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from panscan.records.goodput import Goodput, HighestRate, highest_rate

__all__ = ["RateSearch", "Trial"]

_STEP = 2.0  # factor between rates until the limit is enclosed
_DOWN = 8  # halvings of the first rate at most
_HIGHEST = 1e5  # requests per second


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured level of a search.

    Args:
        rate: offered requests per second.
        goodput: how many of the requests met the limits.
        limited: the client, not the server, was the limit; the level proves nothing about the server.
    """

    rate: float
    goodput: Goodput
    limited: bool = False

    @property
    def record(self) -> dict[str, Any]:
        """The trial in the ``search`` record."""
        return {"rate": self.rate, "attainment": self.goodput.attainment, "limited": self.limited}


@dataclass(slots=True)
class RateSearch:
    """Doubles or halves the rate until the limit lies between two rates, then bisects.

    Args:
        start: first rate, requests per second.
        target: attainment to reach, 0 to 1.
        precision: stop when the lowest failing rate is within this fraction above the highest passing one.
        most: trials at most.

    Attributes:
        trials: the levels measured so far, in order.
    """

    start: float = 1.0
    target: float = 0.95
    precision: float = 0.1
    most: int = 12
    trials: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Add the level measured at :meth:`next_rate`."""
        self.trials.append(trial)

    def next_rate(self) -> float | None:
        """Return the next rate to measure, requests per second; None when the search is over."""
        if len(self.trials) >= self.most or any(trial.limited for trial in self.trials):
            return None
        if not self.trials:
            return self.start
        found = self._found()
        if found.rate is None:
            lowest = min(trial.rate for trial in self.trials)
            return lowest / _STEP if len(self.trials) <= _DOWN else None
        if found.short is None:
            rate = max(trial.rate for trial in self.trials) * _STEP
            return rate if rate <= _HIGHEST else None
        if found.short / found.rate <= 1 + self.precision:
            return None
        return float(f"{math.sqrt(found.rate * found.short):.3g}")

    def best(self) -> Trial | None:
        """Return the trial at the highest rate that meets the target; None if no measured rate does."""
        rate = self._found().rate
        return next((trial for trial in self.trials if trial.rate == rate and not trial.limited), None)

    @property
    def note(self) -> str:
        """How the search ended, in one sentence."""
        found, share = self._found(), f"{self.target:.0%} of the requests"
        if any(trial.limited for trial in self.trials):
            return "the client became the limit: the server may sustain more; raise --processes"
        if found.rate is None:
            lowest = min((trial.rate for trial in self.trials), default=self.start)
            return f"at no measured rate do {share} meet the limits (lowest: {lowest:g} req/s)"
        if found.short is None:
            return f"{share} meet the limits at every measured rate: the server may sustain more"
        return f"{share} meet the limits at {found.rate:g} req/s, not at {found.short:g} req/s"

    def _found(self) -> HighestRate:
        """Return what the trials say, by the rule of the report."""
        return highest_rate([(each.rate, each.goodput) for each in self.trials if not each.limited], self.target)
