"""Intervals against independent computations, and how often they hold the truth."""

from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from tests.records.synthetic import batches_of, run_of

from panscan.analysis.cells import cell_metrics
from panscan.records.intervals import (
    cluster_intervals,
    paired_interval,
    ratio_interval,
    student_p_value,
    student_quantile,
)


def test_the_bootstrap_is_the_plain_one_that_draws_batches() -> None:
    """Against a loop that builds every resample and asks numpy."""
    rng = np.random.default_rng(5)
    clusters = np.repeat(np.arange(7), [1, 4, 2, 3, 1, 2, 5])
    values = rng.lognormal(size=len(clusters))
    draws = np.random.default_rng(0).multinomial(7, np.full(7, 1 / 7), size=1_000)
    plain = []
    for row in draws:
        drawn = np.repeat(values, row[clusters])
        plain.append([drawn.mean(), *np.percentile(drawn, [50, 95, 90])])
    expected = np.percentile(np.array(plain), [2.5, 97.5], axis=0).T
    found = cluster_intervals(values.tolist(), clusters.tolist(), (50, 95, 90))
    assert found == [pytest.approx(tuple(pair)) for pair in expected]


@pytest.mark.parametrize("batches", [1, 4])
def test_intervals_cover_what_other_repeats_would_give(batches: int) -> None:
    """Five repeats of one batch (the engine) or several (``generate()``): 95% nominal, here of 150 cells.

    Documents take different times, the same in each repeat; the machine is faster in some repeats than in others.
    Batches as clusters would take the spread of documents for noise, or overlook that of repeats.
    """
    rng = np.random.default_rng(11)
    work = rng.lognormal(0, 0.5, batches)
    expected = {"request_throughput": batches / work.sum(), "mean_e2el_ms": 1e3 * work.mean()}
    hits = dict.fromkeys(expected, 0)
    for _ in range(150):
        repeats = []
        for number in range(5):
            took = work * rng.lognormal(0, 0.03) * rng.lognormal(0, 0.02, batches)
            records = batches_of("c", took.tolist())[:-1]
            repeats += [record | {"repeat": number} for record in records]
        metrics = cell_metrics(run_of(*repeats), "c")
        for name, truth in expected.items():
            low, high = metrics.intervals[name]
            hits[name] += low <= truth <= high
            assert low <= (metrics.values[name] or 0.0) <= high
    assert all(0.9 <= count / 150 <= 0.99 for count in hits.values()), hits


@given(st.integers(1, 60), st.floats(0.0, 30.0))
def test_students_distribution(freedom: int, statistic: float) -> None:
    assert student_p_value(statistic, freedom) == pytest.approx(2 * stats.t.sf(statistic, freedom), abs=1e-12)
    for alpha in (0.05, 0.04):
        assert student_quantile(freedom, alpha) == pytest.approx(stats.t.ppf(1 - alpha / 2, freedom), rel=1e-9)


@pytest.mark.parametrize(("wins", "losses", "count"), [(3, 1, 10), (0, 0, 50), (0, 7, 100), (25, 25, 1000)])
def test_the_ends_of_a_paired_interval_have_tangos_statistic(wins: int, losses: int, count: int) -> None:
    """The standard error is that of the likeliest shares with this difference, found numerically."""
    for end in paired_interval(wins, losses, count):

        def likelihood(share: float, end: float = end) -> float:
            shares = (share + end, share, 1 - 2 * share - end)
            return -sum(
                n * log(max(p, 1e-300)) for n, p in zip((wins, losses, count - wins - losses), shares, strict=True) if n
            )

        lowest, highest = max(0.0, -end), (1 - end) / 2
        found = optimize.minimize_scalar(
            likelihood, bounds=(lowest, highest), options={"xatol": 1e-12}, method="bounded"
        )
        error = sqrt((2 * found.x + end - end**2) / count)
        assert abs((wins - losses) / count - end) / error == pytest.approx(1.959964, rel=2e-3)


def test_one_cluster_has_no_interval() -> None:
    assert ratio_interval([1.0], [1.0]) is None
    assert cluster_intervals([1.0, 2.0], ["a", "a"], (50,)) is None
