from __future__ import annotations

from math import exp

import numpy as np
import pytest
from tests.records.synthetic import batches_of, run_of

from panscan.analysis.summary import cell_metrics
from panscan.records.intervals import cluster_intervals, ratio_interval


def test_the_bootstrap_is_the_plain_one_that_draws_batches() -> None:
    """Against a loop that builds every resample and asks numpy."""
    rng = np.random.default_rng(5)
    clusters = np.repeat(np.arange(7), [1, 4, 2, 3, 1, 2, 5])
    values = rng.lognormal(size=len(clusters))
    draws = np.random.default_rng(3).multinomial(7, np.full(7, 1 / 7), size=1_000)
    plain = []
    for row in draws:
        drawn = np.repeat(values, row[clusters])
        plain.append([drawn.mean(), *np.percentile(drawn, [50, 95, 90])])
    expected = np.percentile(np.array(plain), [2.5, 97.5], axis=0).T
    found = cluster_intervals(values.tolist(), clusters.tolist(), (50, 95, 90), seed=3)
    assert found == [pytest.approx(tuple(pair)) for pair in expected]


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Batches of 4 requests with one latency each, lognormal: 200 cells of 30 batches against the known truth.

    Nominal 95%. A percentile bootstrap of 30 skewed clusters is a little short of it; drawing requests instead of
    batches would give intervals half as wide, and about 60%.
    """
    rng = np.random.default_rng(11)
    sigma, size = 0.5, 4
    mean, median = exp(sigma**2 / 2), 1.0
    truths = {"mean_e2el_ms": mean * 1e3, "median_e2el_ms": median * 1e3, "request_throughput": size / mean}
    hits = dict.fromkeys(truths, 0)
    inside = 0
    cells = 200
    for _ in range(cells):
        metrics = cell_metrics(run_of(*batches_of("c", rng.lognormal(0, sigma, 30).tolist(), size)), "c")
        assert metrics is not None
        for name, truth in truths.items():
            low, high = metrics.intervals[name]
            hits[name] += low <= truth <= high
        low, high = metrics.intervals["mean_e2el_ms"]
        inside += low <= (metrics.values["mean_e2el_ms"] or 0.0) <= high
    assert all(0.88 <= count / cells <= 0.99 for count in hits.values()), hits
    assert inside == cells


def test_one_cluster_has_no_interval() -> None:
    assert ratio_interval([1.0], [1.0], 0) is None
    assert cluster_intervals([1.0, 2.0], ["a", "a"], (50,), 0) is None
