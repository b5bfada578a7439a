"""Confidence intervals: Student's for what repeats vary, the bootstrap for blocks of a load level, scores for shares.

What happens together shares its fate, so an interval counts repeats or blocks, never single requests. A bootstrap of
few repeats would be too narrow, so their intervals are Student's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import atan, ceil, cos, erfc, exp, pi, sin, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Interval = tuple[float, float]

Z95 = 1.959963984540054  # of a 95% interval, two-sided normal

_RESAMPLES = 1_000
_RESAMPLED_AT_ONCE = 4_000_000
"""Numbers held at once while resampling: 32 MB."""
ALPHA = 0.05
"""Chance, two-sided, that an interval misses; also that a family of decisions holds one or more false alarms."""
LOOKED_AT = 0.04
"""The same where ``panscan bench`` repeats until the interval is narrow, which favours repeats that happen to agree.
From the fifth to the tenth repeat, a 95% interval would hold the truth in 92.9% at the worst noise; one that would miss
with a chance of 4% if the number of repeats were fixed does in 94.2 to 96.0%."""


def student_p_value(statistic: float, freedom: int) -> float:
    """Return the two-sided p-value of Student's t, exact for a whole number of degrees of freedom.

    The series is that of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = atan(abs(statistic) / sqrt(freedom))
    squared = cos(angle) ** 2
    term = cos(angle) if freedom % 2 else 1.0
    total, first = (0.0 if freedom == 1 else term), 3 if freedom % 2 else 2
    for number in range(first, freedom - 1, 2):
        term *= squared * (number - 1) / number
        total += term
    inside = 2 / pi * (angle + sin(angle) * total) if freedom % 2 else sin(angle) * total
    return max(0.0, 1.0 - inside)


@lru_cache(maxsize=256)
def student_quantile(freedom: int, alpha: float = ALPHA) -> float:
    """Return how many standard errors a two-sided interval reaches that misses with a chance of 4 to 5%."""
    low, high = 1.9, 16.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_p_value(middle, freedom) > alpha else (low, middle)
    return high


def log_error(deviations: Floats) -> float:
    """Return the standard error of a logarithm from what each repeat adds to it, ``[repeats]``; two at least."""
    count = len(deviations)
    return float(sqrt(count / (count - 1) * (deviations**2).sum()))


def rate_deviations(amounts: Floats, seconds: Floats) -> Floats:
    """Return what each repeat adds to the logarithm of ``sum(amounts) / sum(seconds)``, to first order."""
    deviations: Floats = amounts / amounts.sum() - seconds / seconds.sum()
    return deviations


def log_deviations(figures: Floats) -> Floats:
    """Return what each repeat adds to the mean of the logarithm of its figures, ``[repeats, figures]``, all above 0."""
    logs = np.log(figures)
    deviations: Floats = (logs - logs.mean(axis=0)) / len(logs)
    return deviations


def around(value: float, error: float, repeats: int, alpha: float = ALPHA) -> Interval:
    """Return the 95% interval of a positive value from the standard error of its logarithm over repeats.

    Args:
        value: the centre.
        error: standard error.
        repeats: two at least.
        alpha: chance that it misses.
    """
    factor = exp(min(student_quantile(repeats - 1, alpha) * error, 700.0))
    return value / factor, value * factor


def ratio_interval(parts: Floats, wholes: Floats) -> Interval | None:
    """Return the 95% interval of ``sum(parts) / sum(wholes)``, one entry per cluster; None below two clusters."""
    if len(parts) < 2:
        return None
    draws = _cluster_draws(len(parts))
    below = draws @ wholes
    usable = below > 0  # clusters that end at the same instant share no time: a draw of only those says nothing
    if not usable.any():
        return None
    return bounds((draws @ parts)[usable] / below[usable])


def cluster_intervals(
    values: Sequence[float], clusters: Sequence[object], percents: Sequence[float]
) -> list[Interval] | None:
    """Return 95% intervals of the mean and of percentiles of ``values``, resampled by cluster.

    Intervals are in the unit of the values. None below two clusters.
    """
    numbers = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < 2:
        return None
    numbered = np.array([numbers[cluster] for cluster in clusters])
    return [bounds(sample) for sample in resampled(np.array(values, np.float64), numbered, (None, *percents))]


def resampled(values: Floats, clusters: Counts, percents: Sequence[float | None]) -> list[Floats]:
    """Return statistics of resamples of some values, each ``[resamples]``: the same resamples for the same clusters.

    Args:
        values: ``[n]``.
        clusters: ``[n]``, from 0 without gaps: values of one cluster are drawn together.
        percents: of the percentiles; None for the mean.
    """
    order = np.argsort(values, kind="stable")
    ordered, belongs = values[order], clusters[order]
    draws = _cluster_draws(int(clusters.max()) + 1)
    samples = []
    for block in np.array_split(draws, ceil(_RESAMPLES * len(values) / _RESAMPLED_AT_ONCE)):
        weights = block[:, belongs]
        upto = weights if percents == [None] else np.cumsum(weights, axis=1)  # a mean needs no ranks
        samples.append(
            [
                weights @ ordered / weights.sum(axis=1) if percent is None else _percentile(ordered, upto, percent)
                for percent in percents
            ]
        )
    return [np.concatenate(parts) for parts in zip(*samples, strict=True)]


@lru_cache(maxsize=4)
def _cluster_draws(clusters: int) -> Counts:
    """Return the draws of each cluster in each resample, ``[resamples, clusters]``. Read-only: callers share it."""
    draws = np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES)
    draws.flags.writeable = False
    return draws


def bounds(statistics: Floats) -> tuple[float, float]:
    """Return the middle 95% of resampled statistics."""
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)


def _percentile(ordered: Floats, upto: Counts, percent: float) -> Floats:
    """``numpy.percentile`` of each row's sample: ascending values ``[n]``, up to each so many as ``[rows, n]`` says."""
    last = upto[:, -1:] - 1
    position = last * (percent / 100)
    low = np.floor(position)
    below, above = (ordered[(upto <= rank).sum(axis=1)] for rank in (low, np.minimum(low + 1, last)))
    percentiles: Floats = below + (above - below) * (position - low)[:, 0]
    return percentiles


def wilson_interval(share: float, count: float) -> Interval:
    """Return Wilson's 95% interval of a share of ``count``. It always contains the share, also 0 and 1."""
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    reach = Z95 / (1 + Z95**2 / count) * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    # For shares 0 and 1, one end equals the share; rounding would show it as 0.1% or 99.9%.
    return max(0.0, min(share, centre - reach)), min(1.0, max(share, centre + reach))


def paired_statistic(wins: float, losses: float, count: int, difference: float) -> float:
    """Return by how many standard errors ``(wins - losses) / count`` exceeds a difference above -1 and below 1.

    It is Tango's score statistic: the standard error is that of the maximum-likelihood shares with this difference.
    """
    linear = (2 * count - wins + losses) * difference - wins - losses
    constant = -losses * difference * (1 - difference)
    share = (sqrt(max(0.0, linear**2 - 8 * count * constant)) - linear) / (4 * count)
    variance = count * (2 * share + difference * (1 - difference))
    return (wins - losses - count * difference) / sqrt(max(variance, 1e-300))


def normal_tail(statistic: float) -> float:
    """Return the probability that a standard normal variable exceeds a value."""
    return erfc(statistic / sqrt(2)) / 2


def paired_interval(wins: float, losses: float, count: int) -> Interval:
    """Return Tango's 95% score interval of ``(wins - losses) / count`` (Statistics in Medicine 17, 1998).

    It keeps its promise where few of the pairs differ, or none: Wald's intervals would be certain after one question.

    Args:
        wins: pairs of which only the first is right; or the sum of the differences in its favour, of partial scores.
        losses: the same for the second.
        count: all pairs.
    """
    value = (wins - losses) / count

    def crossing(outside: float, sign: int) -> float:
        inside = value
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (
                (middle, outside) if sign * paired_statistic(wins, losses, count, middle) < Z95 else (inside, middle)
            )
        return outside

    return crossing(-1.0, 1), crossing(1.0, -1)
