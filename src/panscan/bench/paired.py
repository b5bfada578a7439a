"""What a pair of cells says about one metric: both values, the interval of their relative difference, and the evidence
that :mod:`panscan.bench.permutation` weighs. Times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from panscan.bench.intervals import Interval, bounds, cluster_draws, weighted_percentiles

__all__ = ["Paired", "Rates", "Values"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_BLOCK = 4_000_000  # numbers held at once while resampling: 32 MB


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """A throughput: amounts (requests, tokens) over seconds, ``[clusters]`` of A and of B. One entry per cluster."""

    amount_a: Floats
    amount_b: Floats
    seconds_a: Floats
    seconds_b: Floats

    @property
    def clusters(self) -> int:
        return len(self.amount_a)

    def levels(self) -> tuple[float, float]:
        """Amount per second of A and of B; 0 where no time passed."""
        sides = ((self.amount_a, self.seconds_a), (self.amount_b, self.seconds_b))
        a, b = (float(amount.sum() / seconds.sum()) if seconds.sum() > 0 else 0.0 for amount, seconds in sides)
        return a, b

    def interval(self, seed: int = 0) -> Interval | None:
        """95% interval of B / A - 1; None below two clusters or where no time passed."""
        if self.clusters < 2:
            return None
        draws = cluster_draws(self.clusters, seed)
        above = (draws @ self.amount_b) * (draws @ self.seconds_a)
        return _interval(above, (draws @ self.amount_a) * (draws @ self.seconds_b))

    def contributions(self, factor: float = 1.0) -> Floats:
        """Evidence of each cluster that B's rate is more than ``factor`` times A's, ``[clusters, 2]``: seconds saved
        at the amount of both, and the relative difference of the two rates."""
        with np.errstate(divide="ignore", invalid="ignore"):
            pace_a, pace_b = self.seconds_a / self.amount_a / factor, self.seconds_b / self.amount_b
            saved = (pace_a - pace_b) * (self.amount_a + self.amount_b) / 2
        return np.nan_to_num(np.stack([saved, _relative(pace_b, pace_a)], axis=1), posinf=0.0, neginf=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A statistic of values that pair one to one: times, or scores.

    Args:
        a: ``[pairs]`` of A.
        b: ``[pairs]`` of B.
        cluster: ``[pairs]``, from 0 without gaps: pairs of one cluster share their fate.
        percent: of the percentile; None for the mean.
    """

    a: Floats
    b: Floats
    cluster: Counts
    percent: float | None

    @property
    def clusters(self) -> int:
        return int(self.cluster.max(initial=-1)) + 1

    def levels(self) -> tuple[float, float]:
        """The statistic of A and of B."""
        if self.percent is None:
            return float(self.a.mean()), float(self.b.mean())
        return float(np.percentile(self.a, self.percent)), float(np.percentile(self.b, self.percent))

    def interval(self, seed: int = 0) -> Interval | None:
        """95% interval of B / A - 1, clusters drawn with both their sides; None below two clusters or for A = 0."""
        if self.clusters < 2:
            return None
        draws = cluster_draws(self.clusters, seed)
        blocks = np.array_split(draws, ceil(draws.shape[0] * len(self.a) / _BLOCK))
        below, above = (np.concatenate([self._resampled(side, block) for block in blocks]) for side in (self.a, self.b))
        return _interval(above, below)

    def contributions(self, factor: float = 1.0) -> Floats:
        """Evidence of each cluster that B's statistic is more than ``factor`` times A's, ``[clusters, 2]``.

        The first column is of the statistic itself: differences for a mean; for a percentile relative differences of
        the pairs around it, weighted by how likely each is to be it (a normal curve over ranks with the rank's standard
        error, near Harrell and Davis, 1982). The second takes the relative differences of all pairs alike. Ranks are of
        the pairs' means, so that swapping a pair's labels leaves the weights as they are. Permuting the raw percentiles
        instead would look at one or two requests only: those that are larger than the others in both runs.
        """
        a = self.a * factor
        relative = _relative(a, self.b)
        around = self.b - a if self.percent is None else relative * self._weights(a + self.b)
        return np.stack([np.bincount(self.cluster, each, self.clusters) for each in (around, relative)], axis=1)

    def _weights(self, sizes: Floats) -> Floats:
        count = len(sizes)
        share = (self.percent or 0.0) / 100
        ranks = np.empty(count)
        ranks[np.argsort(sizes, kind="stable")] = (np.arange(count) + 0.5) / count
        spread = np.sqrt(share * (1 - share) / (count + 2)) + 0.5 / count
        weights: Floats = np.exp(-(((ranks - share) / spread) ** 2) / 2)
        return weights

    def _resampled(self, side: Floats, draws: Counts) -> Floats:
        order = np.argsort(side, kind="stable")
        weights = draws[:, self.cluster[order]]
        if self.percent is None:
            means: Floats = weights @ side[order] / weights.sum(axis=1)
            return means
        return weighted_percentiles(side[order], weights, [self.percent])[0]


Paired = Rates | Values


def _relative(a: Floats, b: Floats) -> Floats:
    """(B - A) over their mean: antisymmetric, and 0 where both are."""
    total = a + b
    return np.divide(2 * (b - a), total, out=np.zeros_like(total), where=total > 0)


def _interval(above: Floats, below: Floats) -> Interval | None:
    usable = below > 0
    return bounds(above[usable] / below[usable] - 1) if usable.any() else None
