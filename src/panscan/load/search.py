"""The search for the highest request rate that meets the goodput: which rate to measure next. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from panscan.core import SettingError

__all__ = ["RateSearch", "Trial"]

_STEP = 2.0  # factor between rates until the limit is enclosed
_DOWN = 8  # halvings of the first rate at most
_HIGHEST = 1e5  # requests per second


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured level of a search.

    Args:
        rate: offered requests per second.
        attainment: share of the requests that met the limits, 0 to 1.
        limited: the client, not the server, was the limit; the level proves nothing about the server.
    """

    rate: float
    attainment: float
    limited: bool = False


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
        """Add the level measured at :meth:`next_rate`.

        Raises:
            SettingError: the attainment is not between 0 and 1.
        """
        if not 0 <= trial.attainment <= 1:
            raise SettingError(f"attainment must be between 0 and 1, got {trial.attainment}")
        self.trials.append(trial)

    def next_rate(self) -> float | None:
        """Return the next rate to measure, requests per second; None when the search is over."""
        if len(self.trials) >= self.most or any(trial.limited for trial in self.trials):
            return None
        if not self.trials:
            return self.start
        best, worst = self._best(), self._worst()
        if worst is None:
            rate = max(trial.rate for trial in self.trials) * _STEP
            return rate if rate <= _HIGHEST else None
        if best is None:
            return worst.rate / _STEP if len(self.trials) <= _DOWN else None
        if worst.rate / best.rate <= 1 + self.precision:
            return None
        return float(f"{math.sqrt(best.rate * worst.rate):.3g}")

    def best(self) -> Trial | None:
        """Return the highest rate that meets the target; None if no measured rate does."""
        return self._best()

    @property
    def note(self) -> str:
        """How the search ended, in one sentence."""
        best, worst = self._best(), self._worst()
        share = f"{self.target:.0%} of the requests"
        if any(trial.limited for trial in self.trials):
            return "the client became the limit: the server may sustain more; raise --processes"
        if best is None:
            lowest = min((trial.rate for trial in self.trials), default=self.start)
            return f"at no measured rate do {share} meet the limits (lowest: {lowest:g} req/s)"
        if worst is None:
            return f"{share} meet the limits at every measured rate: the server may sustain more"
        return f"{share} meet the limits at {best.rate:g} req/s, not at {worst.rate:g} req/s"

    def _best(self) -> Trial | None:
        """Return the highest passing rate below every failing one: noise can let a higher rate pass."""
        worst = self._worst()
        passing = [
            trial for trial in self._valid() if self._passes(trial) and (worst is None or trial.rate < worst.rate)
        ]
        return max(passing, key=lambda trial: trial.rate, default=None)

    def _worst(self) -> Trial | None:
        failing = [trial for trial in self._valid() if not self._passes(trial)]
        return min(failing, key=lambda trial: trial.rate, default=None)

    def _valid(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.limited]

    def _passes(self, trial: Trial) -> bool:
        return trial.attainment >= self.target
