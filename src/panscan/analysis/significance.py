"""Whether a difference is real: paired tests with p-values, and the rule for a measurable loss of quality.

If two runs do not differ, the labels A and B of each cluster (batches that answered the same requests) could be
swapped. A p-value is how often swapping gives evidence as strong as was seen. This assumes nothing about how latencies
are distributed, and is valid for any number of clusters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from panscan.records.intervals import RESAMPLED_AT_ONCE, Z95, Interval, bounds, cluster_draws, weighted_percentiles
from panscan.records.quality import metric_of, metric_title, quality_of, scores_of_cell
from panscan.records.store import Run

ALPHA = 0.05
"""The chance, at most, that a family of decisions holds one or more false alarms."""

_LEAST_DRAWS = 9_999
_DRAWS_AT_ONCE = 1_000  # draws looked at together
_NOTHING = 1e-9  # a difference of rounding
_HOPELESS = 0.2  # a p-value above this after the first draws cannot become an alarm

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
    for start in range(0, draws, _DRAWS_AT_ONCE):
        swapped = generator.integers(0, 2, (min(_DRAWS_AT_ONCE, draws - start), count), dtype=np.int8)
        yield (1 - 2 * swapped).astype(np.float64)


Counts = NDArray[np.int64]


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
        blocks = np.array_split(draws, ceil(draws.shape[0] * len(self.a) / RESAMPLED_AT_ONCE))
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


LEAST_QUESTIONS = 30
"""Fewer different questions show nothing about answers."""
WORST_LOSS = 0.02
"""Loss of quality that the 95% interval must exclude, for a loss to be called not measurable."""


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """A comparison of a cell's answers with the baseline's.

    Args:
        cell: id of the cell.
        difference: difference of their quality.
        word: "measurable loss", "measurable gain", "no measurable loss", or "undecided".
        text: the word, the figures, and what this number of questions can show.
    """

    cell: str
    difference: QualityDifference
    word: str
    text: str


def shows_no_loss(run: Run, difference: QualityDifference, peer: str) -> tuple[bool, str]:
    """Return whether a cell has no measurable loss against the cell named ``peer``, and the evidence.

    It loses nothing measurable if the 95% interval of the paired difference reaches 0 and excludes a loss of more than
    :data:`WORST_LOSS`, over at least :data:`LEAST_QUESTIONS` questions, and the p-value does not show a loss: for
    shares the interval is so wide that it alone would overlook small losses of many questions.
    """
    low, high = difference.low, difference.high
    text = (
        f"{metric_title(run)} {points_text(difference.value)} points (95%: {points_text(low)} to {points_text(high)},"
        f" {p_text(difference.p_value)}) against {peer} over {difference.questions} questions"
    )
    if difference.questions < LEAST_QUESTIONS:
        return False, f"{text}, fewer than the {LEAST_QUESTIONS} required"
    if high < 0 or _is_loss(difference):
        return False, f"measurable loss: {text}"
    if low < -WORST_LOSS:
        return False, f"undecided, a loss of {-100 * low:.1f} points is possible: {text}"
    return True, f"no measurable loss: {text}"


def compare_with_baseline(
    run: Run, cells: Sequence[str], views: Callable[[str], float]
) -> tuple[str, list[BaselineComparison]] | None:
    """Return the baseline, and a comparison of every other cell with it; None if fewer than two cells have scores.

    The baseline is the cell with the most views per request, which settings with fewer crops must match; of several,
    the first, because the best one would partly be chosen by luck. All tests
    are one family: the chance that any cell is falsely called worse or better is at most 5%
    (:func:`panscan.analysis.significance.decide`).

    Args:
        run: run with scored answers.
        cells: ids of the cells to compare.
        views: returns the mean views per request of a cell, by its id.
    """
    means = {cell: quality.mean for cell in cells if (quality := quality_of(run, cell)) is not None}
    if len(means) < 2:
        return None
    baseline = max(means, key=views)
    others = [cell for cell in means if cell != baseline]
    found = {cell: each for cell in others if (each := quality_difference(run, cell, baseline)) is not None}
    alarms = decide([each.p_value for each in found.values()], [_least(each) for each in found.values()])
    return baseline, [
        _judged(cell, each, alarm=bool(alarm))
        if means[cell] or means[baseline]
        else BaselineComparison(cell, each, "undecided", "undecided: neither cell has a correct answer")
        for (cell, each), alarm in zip(found.items(), alarms, strict=True)
    ]


def _least(difference: QualityDifference) -> float:
    """Return the smallest p-value that the differing questions could give: all of them differing the same way."""
    return min(1.0, 2 * 0.5 ** (difference.better + difference.worse))


def _is_loss(difference: QualityDifference) -> bool:
    """Whether the p-value alone, not corrected for other tests, shows a loss."""
    return difference.value < 0 and difference.p_value < ALPHA


def _judged(cell: str, difference: QualityDifference, *, alarm: bool) -> BaselineComparison:
    low, high = difference.low, difference.high
    figures = f"{p_text(difference.p_value)}, difference {points_text(difference.value)} points"
    figures += f" [{points_text(low)}, {points_text(high)}]"
    several = f"{difference.questions:,} questions" if difference.questions != 1 else "1 question"
    if alarm and difference.value < 0:
        return BaselineComparison(cell, difference, "measurable loss", f"measurable loss ({figures})")
    if alarm:
        return BaselineComparison(cell, difference, "measurable gain", f"measurable gain ({figures})")
    reach = f"{100 * max(0.0, -low):.1f}"
    if difference.questions >= LEAST_QUESTIONS and low >= -WORST_LOSS and high >= 0 and not _is_loss(difference):
        seen = f"with {several}, a loss of more than {reach} points is excluded"
        word = "no measurable loss"
        return BaselineComparison(cell, difference, word, f"{word} ({figures}): {seen}")
    seen = f"with {several}, " + (f"a loss of {reach} points is possible" if low < 0 else "the result may be chance")
    return BaselineComparison(cell, difference, "undecided", f"undecided ({figures}): {seen}")


def points_text(share: float) -> str:
    """Percentage points with their sign; no minus before nothing."""
    return f"{100 * share + 0.0:+.1f}".replace("-0.0", "+0.0")


def p_text(p_value: float) -> str:
    """``p = 0.62``; no 0 for what is only small."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


@dataclass(frozen=True, slots=True)
class QualityDifference:
    """A cell's quality less another's, over the questions that both answered.

    Args:
        value: the mean difference over questions, -1 to 1.
        low: of its 95% interval.
        high: of its 95% interval.
        questions: in both.
        better: questions that the cell answers better.
        worse: questions that the cell answers worse.
        p_value: two-sided; see :func:`panscan.analysis.significance.sign_flip_p_value`.
    """

    value: float
    low: float
    high: float
    questions: int
    better: int
    worse: int
    p_value: float


def quality_difference(run: Run, cell: str, baseline: str) -> QualityDifference | None:
    """A metric of a cell less the baseline's, over requests that both have a score of; None without a common request.

    Paired by request and repeat, averaged within a question; see :func:`paired_difference`.
    """
    name = metric_of(run)
    ours = {(question, key): score for question, key, score in scores_of_cell(run, cell, name)}
    theirs = {(question, key): score for question, key, score in scores_of_cell(run, baseline, name)}
    by_question: dict[object, list[float]] = defaultdict(list)
    for pair in sorted(ours.keys() & theirs.keys()):
        by_question[pair[0]].append(ours[pair] - theirs[pair])
    means = [sum(values) / len(values) for values in by_question.values()]
    return paired_difference(means) if means else None


def paired_difference(means: Sequence[float]) -> QualityDifference:
    """The difference of two qualities from each question's own, -1 to 1.

    The 95% interval is Agresti and Min's for matched proportions (Statistics in Medicine 24, 2005): Wald's after half
    an observation has been added to each outcome of a pair, here half a win, half a loss and one tie. It stays honest
    where no answer differs: a bootstrap would then be certain after one question. For scores between 0 and 1 a win is
    the largest difference there can be, so the interval is rather too wide than too narrow.
    """
    count = len(means) + 2
    centre = sum(means) / count
    spread = sqrt(((sum(mean**2 for mean in means) + 1) / count - centre**2) / count)
    value = sum(means) / len(means)
    return QualityDifference(
        value=value,
        low=max(-1.0, min(value, centre - Z95 * spread)),
        high=min(1.0, max(value, centre + Z95 * spread)),
        questions=len(means),
        better=sum(mean > _NOTHING for mean in means),
        worse=sum(mean < -_NOTHING for mean in means),
        p_value=sign_flip_p_value(means),
    )
