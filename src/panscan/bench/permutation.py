"""Paired permutation tests: how often swapping the labels A and B gives evidence as strong as was seen.

If two runs do not differ, the labels of each cluster (batches that answered the same requests) could be swapped.
Nothing is assumed about how latencies are distributed, and no number of clusters is too small to be valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALPHA", "clusters_needed", "decide", "draws_for", "least_p_value", "sign_flip_p_value", "tail_p_values"]

ALPHA = 0.05
"""The chance, at most, that a family of decisions holds one or more false alarms."""

_LEAST_DRAWS = 9_999
_BLOCK = 1_000  # draws looked at together
_NOTHING = 1e-9  # a difference of rounding
_HOPELESS = 0.2  # after the first block, more than this is never going to be an alarm

Floats = NDArray[np.float64]


def tail_p_values(contributions: Floats, draws: int = _LEAST_DRAWS, seed: int = 0) -> tuple[float, float]:
    """One-sided p-values of "B is larger" and of "B is smaller".

    The statistic is the largest of the columns' sums (for "smaller", of their negatives), each over the square root of
    its sum of squares: the standard deviation that it has when signs are drawn. All ``2**n`` swaps are looked at if
    they are no more than ``draws``; else ``draws`` random ones, and the observed one is counted among them (Phipson and
    Smyth, 2010). Draws stop early where the evidence is clearly none, which can only make alarms rarer.

    Args:
        contributions: ``[clusters, statistics]``, what each cluster adds to each statistic in favour of "B is larger";
            swapping a cluster's labels changes the signs of its row.
        draws: at most this many swaps.
        seed: of the draws.
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
    for signs in _all_signs(count) if complete else _random_signs(count, draws, seed):
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
    values = np.array([each for each in differences if abs(each) > _NOTHING], dtype=np.float64)
    if not values.size:
        return 1.0
    if np.ptp(np.abs(values)) < _NOTHING:
        return _mcnemar(int((values > 0).sum()), int((values < 0).sum()))
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


def _mcnemar(won: int, lost: int) -> float:
    """Twice the smaller tail of ``won + lost`` throws of a coin; in whole numbers, so exact."""
    total, term, ways = won + lost, 1, 1  # of Python's, which do not overflow
    for count in range(min(won, lost)):
        term = term * (total - count) // (count + 1)
        ways += term
    return float(min(1.0, 2 * ways / 2**total))


def _all_signs(count: int) -> Iterator[Floats]:
    """Every row of ``count`` signs, ``[2**count, count]`` in one block."""
    bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    yield (1 - 2 * bits).astype(np.float64)


def _random_signs(count: int, draws: int, seed: int) -> Iterator[Floats]:
    generator = np.random.default_rng(seed)
    for start in range(0, draws, _BLOCK):
        swapped = generator.integers(0, 2, (min(_BLOCK, draws - start), count), dtype=np.int8)
        yield (1 - 2 * swapped).astype(np.float64)
