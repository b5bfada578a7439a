"""Confidence intervals by a seeded percentile bootstrap that draws whole clusters (batches), not single values.

The requests of one batch share its fate; drawing them one by one would make intervals far too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Interval = tuple[float, float]

Z95 = 1.959963984540054  # of a 95% interval, two-sided normal

_RESAMPLES = 1_000
RESAMPLED_AT_ONCE = 4_000_000
"""Numbers held at once while resampling: 32 MB."""


def ratio_interval(parts: Sequence[float], wholes: Sequence[float], seed: int) -> Interval | None:
    """Return the 95% interval of ``sum(parts) / sum(wholes)``, one entry per cluster; None below two clusters."""
    if len(parts) < 2:
        return None
    draws = cluster_draws(len(parts), seed)
    below = draws @ np.asarray(wholes, dtype=np.float64)
    usable = below > 0  # clusters that end at the same instant share no time: a draw of only those says nothing
    if not usable.any():
        return None
    return bounds((draws @ np.asarray(parts, dtype=np.float64))[usable] / below[usable])


def cluster_intervals(
    values: Sequence[float], clusters: Sequence[object], percents: Sequence[float], seed: int
) -> list[Interval] | None:
    """Return 95% intervals of the mean and of percentiles of ``values``, resampled by cluster.

    Intervals are in the unit of the values. None below two clusters.
    """
    numbers = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < 2:
        return None
    order = np.argsort(values)
    ordered = np.asarray(values, dtype=np.float64)[order]
    belongs = np.array([numbers[cluster] for cluster in clusters])[order]
    draws = cluster_draws(len(numbers), seed)
    samples: list[list[Floats]] = []
    for block in np.array_split(draws, ceil(_RESAMPLES * len(values) / RESAMPLED_AT_ONCE)):
        weights = block[:, belongs]
        samples.append([weights @ ordered / weights.sum(axis=1), *weighted_percentiles(ordered, weights, percents)])
    return [bounds(np.concatenate(parts)) for parts in zip(*samples, strict=True)]


@lru_cache(maxsize=4)
def cluster_draws(clusters: int, seed: int) -> Counts:
    """Return the draws of each cluster in each resample, ``[resamples, clusters]``. Read-only: callers share it."""
    draws = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES)
    draws.flags.writeable = False
    return draws


def bounds(statistics: Floats) -> tuple[float, float]:
    """Return the middle 95% of resampled statistics."""
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)


def weighted_percentiles(ordered: Floats, weights: Counts, percents: Sequence[float]) -> list[Floats]:
    """``numpy.percentile`` of each row's sample: ascending values ``[n]``, each repeated as ``[rows, n]`` says."""
    upto = np.cumsum(weights, axis=1)
    last = upto[:, -1:] - 1
    percentiles = []
    for percent in percents:
        position = last * (percent / 100)
        low = np.floor(position)
        below, above = (ordered[(upto <= rank).sum(axis=1)] for rank in (low, np.minimum(low + 1, last)))
        percentiles.append(below + (above - below) * (position - low)[:, 0])
    return percentiles


def wilson_interval(share: float, count: int) -> Interval:
    """Return Wilson's 95% interval of a share of ``count``. It always contains the share, also 0 and 1."""
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    reach = Z95 / (1 + Z95**2 / count) * sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    # For shares 0 and 1, one end equals the share; rounding would show it as 0.1% or 99.9%.
    return max(0.0, min(share, centre - reach)), min(1.0, max(share, centre + reach))
