"""Whether a difference is real: paired tests with p-values, and which of a family of tests raise an alarm.

Throughputs and latencies are compared by Student's test over repeats, the only noise that another run shares. One
repeat has none, a percentile has no value for one block of a load level, and scores are not normal. For these: if two
sides do not differ, the labels A and B of each cluster (batches or blocks that answered the same requests, or
questions) could be swapped. A p-value is how often swapping gives evidence as strong as was seen. This assumes nothing
about how latencies are distributed, and is valid for any number of clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, log2

import numpy as np

from panscan.records.intervals import (
    ALPHA,
    Counts,
    Floats,
    Interval,
    around,
    bounds,
    log_deviations,
    log_error,
    rate_deviations,
    resampled,
    student_p_value,
)
from panscan.records.metrics import LEAST_SAMPLES

_LEAST_DRAWS = 9_999
_DRAWS_AT_ONCE = 1_000  # draws looked at together
ROUNDING = 1e-9  # a difference of rounding
_HOPELESS = 0.2  # a p-value above this after the first draws cannot become an alarm


def tail_p_values(contributions: Floats, draws: int = _LEAST_DRAWS) -> tuple[float, float]:
    """One-sided p-values of "B is larger" and of "B is smaller".

    The statistic is the largest of the columns' sums (for "smaller", of their negatives), each over the square root of
    its sum of squares: the standard deviation that it has when signs are drawn. All ``2**n`` swaps are looked at if
    they are no more than ``draws``; else ``draws`` random ones, and the observed one is counted among them (Phipson and
    Smyth, 2010). Draws stop early where the evidence is clearly none, which can only make alarms rarer.

    Args:
        contributions: ``[clusters, statistics]``, what each cluster adds to each statistic in favour of "B is larger";
            swapping a cluster's labels changes the signs of its row.
        draws: at most this many swaps.
    """
    scale = np.sqrt((contributions**2).sum(axis=0))
    rows = contributions[:, scale > 0] / scale[scale > 0]
    if not rows.size:
        return 1.0, 1.0
    count = len(rows)
    seen = rows.sum(axis=0)
    least = np.array([seen.max(), (-seen).max()]) - 1e-9  # sums in another order differ in the last digits
    complete = count <= log2(draws)
    hits, drawn = np.zeros(2), 0
    for signs in _signs(count, 0 if complete else draws):
        sums = signs @ rows
        hits += [(sums.max(axis=1) >= least[0]).sum(), ((-sums).max(axis=1) >= least[1]).sum()]
        drawn += len(signs)
        if not complete and hits.min() > _HOPELESS * drawn:
            break
    larger, smaller = hits / drawn if complete else (hits + 1) / (drawn + 1)
    return float(larger), float(smaller)


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of paired differences whose signs could as well be the others: twice the smaller tail, or 1.

    Where all differences that are not 0 have one size, as those of right and wrong answers have, the tails are those
    of the binomial distribution, which makes it the exact test of McNemar (1947). Else they are those of
    :func:`tail_p_values`: of all swaps where there are few, of random ones otherwise. Differences of 0 say nothing.
    """
    values = np.array([difference for difference in differences if abs(difference) > ROUNDING], dtype=np.float64)
    if not values.size:
        return 1.0
    if np.ptp(np.abs(values)) < ROUNDING:
        fewer = min(int((values > 0).sum()), int((values < 0).sum()))
        term = ways = 1  # of Python's integers: exact
        for count in range(fewer):
            term = term * (len(values) - count) // (count + 1)
            ways += term
        return float(min(1.0, 2 * ways / 2 ** len(values)))
    return min(1.0, 2 * min(tail_p_values(values[:, None])))


def least_p_value(clusters: int, draws: int) -> float:
    """The smallest one-sided p-value that so many clusters can give."""
    return float(max(0.5**clusters, 1 / (draws + 1)))


def draws_for(tests: int) -> int:
    """Draws that resolve the smallest level that :func:`decide` may ask of a family of so many tests."""
    return max(_LEAST_DRAWS, ceil(20 * tests / ALPHA))


def clusters_needed(tests: int, sides: int) -> int:
    """Clusters with which each of so many tests could raise an alarm, whatever became of the others."""
    return ceil(log2(sides * tests / ALPHA))


def decide(p_values: Sequence[float], least: Sequence[float]) -> list[bool | None]:
    """Which of a family of tests raise an alarm; None for one that never could.

    The chance of one or more false alarms in the family is at most :data:`ALPHA`, whatever depends on what: Holm's
    procedure (1979) over the tests that could raise an alarm at their level at all (Tarone, 1990). A test of few
    clusters could not, so it does not make the others stricter.

    Args:
        p_values: of each test.
        least: the smallest p-value that each could have had.
    """
    level = 1
    while sum(value <= ALPHA / level for value in least) > level:
        level += 1
    able = sorted((i for i, value in enumerate(least) if value <= ALPHA / level), key=lambda i: p_values[i])
    decisions: list[bool | None] = [None] * len(p_values)
    raising = True
    for rank, index in enumerate(able):
        raising = raising and p_values[index] <= ALPHA / (len(able) - rank)
        decisions[index] = raising
    return decisions


def _signs(count: int, draws: int) -> Iterator[Floats]:
    """Yield blocks of so many random rows of ``count`` signs; of 0, every row there is in one block."""
    generator = np.random.default_rng(0)
    if not draws:
        yield (1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)).astype(np.float64)
    for start in range(0, draws, _DRAWS_AT_ONCE):
        swapped = generator.integers(0, 2, (min(_DRAWS_AT_ONCE, draws - start), count), dtype=np.int8)
        yield (1 - 2 * swapped).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """Two figures above 0 of which each cluster shows the noise: throughputs, or times of repeats.

    The test is Student's on the logarithm of the ratio, which can tell with few repeats, as no permutation test could.

    Args:
        a: A's figure.
        b: B's.
        deviations: ``[clusters]``, what each adds to the logarithm of B / A.
        identical: whether A and B did the same in the same time.
        certified: False for a percentile of too few samples.
    """

    a: float
    b: float
    deviations: Floats
    identical: bool = False
    certified: bool = True

    @property
    def clusters(self) -> int:
        return len(self.deviations)

    def levels(self) -> tuple[float, float]:
        """The figures of A and of B."""
        return self.a, self.b

    def interval(self) -> Interval | None:
        """95% interval of B / A - 1; None below two clusters or without a figure."""
        if self._is_untold():
            return None
        low, high = around(self.b / self.a, log_error(self.deviations), self.clusters)
        return low - 1, high - 1

    def tails(self, factor: float = 1.0, draws: int = 0) -> tuple[float, float]:
        """One-sided p-values of "B's figure is more than ``factor`` times A's" and of "less"."""
        if self._is_untold():
            return 1.0, 1.0
        effect, error = log(self.b / self.a / factor), log_error(self.deviations)
        if abs(effect) < ROUNDING:
            return 0.5, 0.5
        half = student_p_value(effect / error, self.clusters - 1) / 2 if error > ROUNDING else 0.0
        return (half, 1 - half) if effect > 0 else (1 - half, half)

    def least_p_value(self, draws: int) -> float:
        """The smallest one-sided p-value that so many clusters can give."""
        return 0.0 if self.clusters > 1 else 1.0

    def _is_untold(self) -> bool:
        return self.clusters < 2 or not self.a or not self.b


def repeated_rates(a: Floats, b: Floats) -> Repeated:
    """Return two throughputs from ``[2, clusters]`` of each side: amounts (requests, tokens), then seconds."""
    rates = [float(amount.sum() / seconds.sum()) if seconds.sum() > 0 else 0.0 for amount, seconds in (a, b)]
    deviations = rate_deviations(*b) - rate_deviations(*a) if all(rates) else np.zeros(len(a[0]))
    return Repeated(rates[0], rates[1], deviations, identical=bool((a == b).all()))


def repeated_times(pairs: Values, repeats: Counts) -> Repeated | None:
    """Return two statistics of times that differ from repeat to repeat; None where one is 0.

    Args:
        pairs: the times.
        repeats: ``[pairs]``, which repeat each comes from.
    """
    parts = [replace(pairs, a=pairs.a[part], b=pairs.b[part]).levels() for part in map(repeats.__eq__, set(repeats))]
    figures, (a, b) = np.array(parts), pairs.levels()
    if not (figures > 0).all():
        return None
    below, above = log_deviations(figures).T
    return Repeated(a, b, above - below, pairs.identical, pairs.certified)


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

    @property
    def certified(self) -> bool:
        """Whether a percentile has enough samples for 99% confidence."""
        return self.percent is None or len(self.a) >= LEAST_SAMPLES[self.percent]

    def levels(self) -> tuple[float, float]:
        """The statistic of A and of B."""
        if self.percent is None:
            return float(self.a.mean()), float(self.b.mean())
        return float(np.percentile(self.a, self.percent)), float(np.percentile(self.b, self.percent))

    def interval(self) -> Interval | None:
        """95% interval of B / A - 1, clusters drawn with both their sides; None below two clusters or for A = 0."""
        if self.clusters < 2:
            return None
        [below], [above] = (resampled(side, self.cluster, [self.percent]) for side in (self.a, self.b))
        usable = below > 0
        return bounds(above[usable] / below[usable] - 1) if usable.any() else None

    def tails(self, factor: float = 1.0, draws: int = _LEAST_DRAWS) -> tuple[float, float]:
        """One-sided p-values of "B's statistic is more than ``factor`` times A's" and of "less"."""
        return tail_p_values(self.contributions(factor), draws)

    def least_p_value(self, draws: int) -> float:
        """The smallest one-sided p-value that so many clusters can give."""
        return least_p_value(self.clusters, draws)

    @property
    def identical(self) -> bool:
        """Whether no pair differs."""
        return not self.contributions().any()

    def contributions(self, factor: float = 1.0) -> Floats:
        """Evidence of each cluster that B's statistic is more than ``factor`` times A's, ``[clusters, 2]``.

        The first column is of the statistic itself: differences for a mean; for a percentile relative differences of
        the pairs around it, weighted by how likely each is to be it (a normal curve over ranks with the rank's standard
        error, near Harrell and Davis, 1982). The second takes the relative differences of all pairs alike. Ranks are of
        the pairs' means, so that swapping a pair's labels leaves the weights as they are. Permuting the raw percentiles
        instead would look at one or two requests only: those that are larger than the others in both runs.
        """
        a = self.a * factor
        total = a + self.b
        # Over their mean: antisymmetric, and 0 where both are.
        relative = np.divide(2 * (self.b - a), total, out=np.zeros_like(total), where=total > 0)
        around = self.b - a if self.percent is None else relative * self._weights(total)
        return np.stack([np.bincount(self.cluster, evidence, self.clusters) for evidence in (around, relative)], axis=1)

    def _weights(self, sizes: Floats) -> Floats:
        count = len(sizes)
        share = (self.percent or 0.0) / 100
        ranks = np.empty(count)
        ranks[np.argsort(sizes, kind="stable")] = (np.arange(count) + 0.5) / count
        spread = np.sqrt(share * (1 - share) / (count + 2)) + 0.5 / count
        weights: Floats = np.exp(-(((ranks - share) / spread) ** 2) / 2)
        return weights


Paired = Repeated | Values
