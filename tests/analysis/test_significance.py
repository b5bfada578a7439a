"""p-values against scipy's, and against enumeration."""

import json
from collections.abc import Sequence
from itertools import product
from math import comb

import numpy as np
import pytest
from benchmarks.decision_errors import RECORD, accuracy_errors, coverage, faster_chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from panscan.analysis import significance
from panscan.records.intervals import ALPHA

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def table(seed: int, clusters: int, columns: int = 2, shift: float = 0.0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(shift, 1, (clusters, columns))


def reference(a: NDArray[np.float64], b: NDArray[np.float64], alternative: str, draws: int) -> float:
    """scipy's paired permutation test of a difference in means."""
    result = stats.permutation_test(
        (b, a),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=draws,
        alternative=alternative,
        rng=np.random.default_rng(5),
    )
    return float(result.pvalue)


def test_many_clusters_give_scipys_p_values_within_what_draws_can_differ() -> None:
    for seed, shift in enumerate([0.0, 0.2, 0.4]):
        a, b = table(seed, 40)[:, 0], table(seed + 50, 40, shift=shift)[:, 0]
        actual = min(significance.tail_p_values((b - a)[:, None], draws=20_000))
        expected = min(reference(a, b, side, 20_000) for side in ("greater", "less"))
        assert actual == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 10_000) ** 0.5)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3))
def test_the_largest_of_several_statistics_is_judged_by_all_swaps(seed: int, clusters: int, columns: int) -> None:
    values = table(seed, clusters, columns)
    scale = np.sqrt((values**2).sum(axis=0))
    for tail, turned in zip(significance.tail_p_values(values), (values, -values), strict=True):
        seen = max(turned.sum(axis=0) / scale)
        swaps = [max(np.array(signs) @ turned / scale) for signs in product((1, -1), repeat=clusters)]
        assert tail == pytest.approx(np.mean([swap >= seen - 1e-9 for swap in swaps]))


def test_a_statistic_that_no_swap_changes_is_no_evidence() -> None:
    assert significance.tail_p_values(np.zeros((8, 2))) == (1.0, 1.0)
    lone = table(3, 8, 1, 0.5)
    assert significance.tail_p_values(np.hstack([lone, np.zeros((8, 1))])) == significance.tail_p_values(lone)


def test_the_smallest_p_value_is_reached_and_never_zero() -> None:
    for clusters, draws, least in ((6, 10_000, 1 / 64), (60, 999, 1 / 1_000)):
        assert significance.tail_p_values(np.ones((clusters, 1)), draws=draws)[0] == least
        assert significance.least_p_value(clusters, draws) == least


@given(P_VALUES)
def test_without_small_families_decisions_are_holms(p_values: list[float]) -> None:
    order = sorted(p_values)
    least_kept = next((p for rank, p in enumerate(order) if p > ALPHA / (len(order) - rank)), 2.0)
    assert significance.decide(p_values, [0.0] * len(p_values)) == [p < least_kept for p in p_values]


@given(P_VALUES, st.data())
def test_tests_that_cannot_alarm_are_told_apart_and_cost_the_others_nothing(p_values: list[float], data) -> None:
    hopeless = data.draw(st.lists(st.floats(0.06, 1), max_size=20))
    decisions = significance.decide([*p_values, *hopeless], [0.0] * len(p_values) + hopeless)
    assert decisions == significance.decide(p_values, [0.0] * len(p_values)) + [None] * len(hopeless)


@given(st.lists(st.integers(1, 14), min_size=1, max_size=30))
def test_a_test_that_is_called_able_can_alarm(clusters: list[int]) -> None:
    """With its smallest p-value it does, whatever the others say; that is what "too few batches" is the opposite of."""
    least = [significance.least_p_value(count, 99_999) for count in clusters]
    for index, able in enumerate(significance.decide([1.0] * len(least), least)):
        p_values = [1.0] * len(least)
        p_values[index] = least[index]
        assert significance.decide(p_values, least)[index] is (None if able is None else True)


@given(st.integers(1, 500), st.sampled_from([1, 2]))
def test_as_many_clusters_as_asked_for_can_tell(tests: int, sides: int) -> None:
    count = significance.clusters_needed(tests, sides)
    least = significance.least_p_value(count, significance.draws_for(sides * tests))
    assert sides * least <= ALPHA / tests < sides * 0.5 ** (count - 1)


@settings(max_examples=40)
@given(st.integers(0, 1_000), st.sampled_from([None, 50.0, 95.0]), st.floats(0.5, 2.0))
def test_evidence_changes_its_sign_with_the_labels(seed: int, percent: float | None, factor: float) -> None:
    draws = np.random.default_rng(seed)
    a, b, cluster = draws.lognormal(size=30), draws.lognormal(size=30), np.arange(30) // 2
    ours = significance.Values(a * factor, b, cluster, percent).contributions()
    assert ours == pytest.approx(-significance.Values(b, a * factor, cluster, percent).contributions())
    assert ours == pytest.approx(significance.Values(a, b, cluster, percent).contributions(factor))
    amounts = draws.integers(1, 5, (2, 30)).astype(float)
    ones, others = np.array([amounts[0], a]), np.array([amounts[1], b])
    rates = significance.repeated_rates(ones, others)
    assert rates.tails() == pytest.approx(significance.repeated_rates(others, ones).tails()[::-1])
    scaled = significance.repeated_rates(np.array([amounts[0] * factor, a]), others)
    assert scaled.tails() == pytest.approx(rates.tails(factor))


def test_the_test_of_throughputs_is_students_for_repeats_of_the_same_work() -> None:
    """Against scipy's paired test of logarithms, which it approaches where the noise is small."""
    draws = np.random.default_rng(3)
    a, b = np.exp(draws.normal(0, 0.002, (2, 6)))
    rates = significance.repeated_rates(np.array([np.ones(6), a]), np.array([np.ones(6), b * 1.001]))
    expected = stats.ttest_rel(-np.log(b * 1.001), -np.log(a))
    tail = expected.pvalue / 2 if expected.statistic < 0 else 1 - expected.pvalue / 2
    assert rates.tails()[1] == pytest.approx(tail, rel=1e-2)
    assert np.log1p(rates.interval()) == pytest.approx(tuple(expected.confidence_interval()), abs=1e-5)


def test_a_percentiles_evidence_is_that_of_the_pairs_around_it() -> None:
    a, b = np.linspace(1, 2, 100), np.linspace(1, 2, 100)
    b[90:] *= 1.5
    high, middle = (
        significance.Values(a, b, np.arange(100), percent).contributions()[:, 0] for percent in (95.0, 50.0)
    )
    assert high.sum() > 1
    assert middle.sum() == pytest.approx(0, abs=1e-9)


def test_intervals_are_of_the_paired_change() -> None:
    """Both sides are drawn together: what differs between questions does not widen the interval of the change."""
    sizes = np.random.default_rng(0).lognormal(0, 1, 40)
    values = significance.Values(sizes, sizes * 1.1, np.arange(40), None)
    assert values.interval() == pytest.approx((0.1, 0.1))
    rates = significance.repeated_rates(np.array([np.ones(40), sizes]), np.array([np.ones(40), sizes * 1.25]))
    assert rates.interval() == pytest.approx((-0.2, -0.2))
    assert rates.levels() == pytest.approx((40 / sizes.sum(), 32 / sizes.sum()))
    assert significance.Values(sizes[:2], sizes[:2], np.zeros(2, dtype=np.int64), 95.0).interval() is None


def enumerated(differences: Sequence[float]) -> float:
    """Twice the smaller tail over all ways to turn the signs."""
    seen = sum(differences)
    sums = [
        sum(s * difference for s, difference in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    upper, lower = (sum(sign * total >= sign * seen - 1e-9 for total in sums) / len(sums) for sign in (1, -1))
    return min(1.0, 2 * min(upper, lower))


graded = st.lists(st.sampled_from([-1.0, -0.6, -0.25, 0.0, 0.25, 0.5, 1.0]), max_size=9)


@given(graded)
def test_p_values_are_those_of_all_swaps(differences: list[float]) -> None:
    assert significance.sign_flip_p_value(differences) == pytest.approx(enumerated(differences))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_right_and_wrong_have_mcnemars_exact_p_value(won: int, lost: int, ties: int) -> None:
    p_value = significance.sign_flip_p_value([1.0] * won + [-1.0] * lost + [0.0] * ties)
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert p_value == pytest.approx(expected)
    assert significance.sign_flip_p_value([0.3] * won + [-0.3] * lost) == pytest.approx(expected), (
        "one size is as good as 1"
    )


def test_mcnemar_of_many_questions_is_exact_and_quick() -> None:
    tail = sum(comb(5000, count) for count in range(2401))
    assert significance.sign_flip_p_value([1.0] * 2400 + [-1.0] * 2600) == pytest.approx(2 * tail / 2**5000)


def test_many_graded_differences_are_close_to_the_normal_curves() -> None:
    """Too many swaps to look at all of them: the seeded draws give what the central limit gives."""
    differences = [0.5, -0.25, 0.75, -0.5] * 20 + [0.25] * 8
    z = (sum(differences) - 0.125) / sum(difference**2 for difference in differences) ** 0.5
    assert significance.sign_flip_p_value(differences) == pytest.approx(2 * stats.norm.sf(z), abs=0.02)


# A small sample of ``benchmarks/decision_errors.py``, which goes red if decisions get worse.


def test_few_questions_recommend_nothing_worse_and_call_nothing_equal_a_loss() -> None:
    """Uncorrected tests call an equal one of nine cells a loss in half of the runs; of three cells, the most accurate
    over 35 questions is a worse one in a quarter."""
    rates = accuracy_errors(np.random.default_rng(3), 100, 9, 8, pages=1)
    assert rates["false_loss"] <= 0.09 and rates["one_worse_chosen"] == 0 and rates["contradictions"] == 0
    assert accuracy_errors(np.random.default_rng(4), 35, 3, 25, pages=1)["one_worse_chosen"] == 0


def test_intervals_hold_the_truth_and_the_faster_cell_is_chosen() -> None:
    rates = coverage(np.random.default_rng(5), 25)
    assert min(rates[name] for name in ("engine", "generate", "ratio")) >= 0.8
    assert faster_chosen(np.random.default_rng(5), 25) >= 0.95


def test_the_committed_record_meets_the_bars() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    for name, row in record["answers"].items():
        assert max(row["false_loss"], row["one_worse_chosen"], row["all_worse_chosen"]) <= 0.05, name
        assert row["contradictions"] == 0, name
        assert row["equal_qualifies"] >= (0.8 if name.startswith("1000") else 0.0), name
    speeds = record["speeds"]
    for name, row in (*speeds["noise"].items(), ("five repeats", speeds["five_repeats"])):
        assert all(0.93 <= row[interval] <= 0.97 for interval in ("engine", "generate", "ratio")), name
    assert speeds["runs"] >= 2_000 and speeds["faster"] >= 0.95
