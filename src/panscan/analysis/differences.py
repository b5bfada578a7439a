"""Differences between paired cells that exceed the noise, metric by metric, and the ``--fail-on`` conditions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from statistics import fmean
from typing import Any

import numpy as np

from panscan.analysis.accuracy import Accuracy, decide_accuracy, max_loss_of, question_difference
from panscan.analysis.pairing import ATTAINMENT, CellPair, Comparison, PairedRequests, noun_of
from panscan.analysis.significance import (
    Paired,
    Values,
    clusters_needed,
    decide,
    draws_for,
    repeated_rates,
    repeated_times,
)
from panscan.core import SettingError
from panscan.records.intervals import Floats, Interval
from panscan.settings import nearest

_PERCENTS = {"mean": None, "median": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
_TIMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
"""Times in the names of metrics, and of a request."""
_RATES = ("request_throughput", "output_throughput")
METRICS = (*_RATES, *(f"{statistic}_{time}_ms" for time in _TIMES for statistic in _PERCENTS))
DEFAULT_METRICS = ("request_throughput", "median_ttft_ms", "p95_e2el_ms")


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one pair of cells.

    Args:
        metric: of :data:`METRICS`, :data:`panscan.analysis.pairing.ATTAINMENT`, or a metric of accuracy.
        a: A's value, over the paired requests.
        b: B's.
        change: B / A - 1; None where A's value is 0. Of an accuracy, B - A.
        interval: 95% interval of the change, of this metric alone; None below two clusters.
        clusters: repeats, batches or (of an accuracy) questions that were compared.
        p_value: two-sided, before it is corrected for the number of metrics looked at.
        certified: False for a percentile of too few samples (:data:`panscan.records.metrics.LEAST_SAMPLES`).
        word: faster, slower (of the attainment better, worse), identical, within noise, too few batches; or what the
            rule for accuracy says (:func:`panscan.analysis.accuracy.decide_accuracy`).
        needed: questions that would decide an undecided accuracy; None elsewhere.
    """

    metric: str
    a: float
    b: float
    change: float | None
    interval: Interval | None
    clusters: int
    p_value: float
    certified: bool
    word: str
    needed: int | None = None


def differences(comparisons: Sequence[Comparison], metrics: Sequence[str]) -> list[list[dict[str, Difference]]]:
    """The metrics of every pair of cells, as far as they were measured: ``[comparison][pair][metric]``.

    A metric is called faster or slower if its test raises an alarm, all of all comparisons being one family
    (:func:`panscan.analysis.significance.decide`), and its interval lies on that side of 0, too. Each metric of
    accuracy is a separate family.

    Raises:
        RecordsError: stamps contradict counts.
    """
    pairs = [pair for comparison in comparisons for pair in comparison.pairs]
    rows: list[dict[str, Difference]] = [{} for _ in pairs]
    timed = [name for name in metrics if repeats_help(name)]
    tests = [(row, *test) for pair, row in zip(pairs, rows, strict=True) for test in measured(pair, timed).items()]
    draws = draws_for(2 * len(tests))
    tails = [paired.tails(draws=draws) for *_, paired in tests]
    p_values = [min(1.0, 2 * min(tail)) for tail in tails]
    alarms = decide(p_values, [2 * paired.least_p_value(draws) for *_, paired in tests])
    for (row, metric, paired), tail, p_value, alarm in zip(tests, tails, p_values, alarms, strict=True):
        row[metric] = _difference(metric, paired, larger=tail[0] < tail[1], p_value=p_value, alarm=alarm)
    for metric in (name for name in metrics if not repeats_help(name)):
        answers = [question_difference([(both.b, both.a) for both in pair.requests.pairs], metric) for pair in pairs]
        scored = {index: difference for index, difference in enumerate(answers) if difference is not None}
        for index, accuracy in decide_accuracy(scored, max_loss_of(comparisons[0].a)).items():
            rows[index][metric] = _accuracy_difference(metric, pairs[index], accuracy)
    remaining = iter(rows)
    return [list(islice(remaining, len(comparison.pairs))) for comparison in comparisons]


def _accuracy_difference(metric: str, pair: CellPair, accuracy: Accuracy) -> Difference:
    """Return what the rule for accuracy says of a pair of cells."""
    _, ours, others = zip(*_scores(pair.requests, metric), strict=True)
    return Difference(
        metric,
        fmean(ours),
        fmean(others),
        accuracy.difference.value,
        (accuracy.difference.low, accuracy.difference.high),
        accuracy.difference.questions,
        accuracy.difference.p_value,
        True,
        accuracy.label,
        accuracy.needed if accuracy.word == "undecided" else None,
    )


def measured(pair: CellPair, metrics: Sequence[str]) -> dict[str, Paired]:
    """What the paired requests say about metrics; those that neither or only one side measured are left out.

    Raises:
        RecordsError: stamps contradict counts.
    """
    tests = {metric: _paired(pair.requests, metric) for metric in metrics}
    return {metric: paired for metric, paired in tests.items() if paired is not None}


def _paired(requests: PairedRequests, metric: str) -> Paired | None:
    """Return what paired requests say about a metric; None if no pair has it."""
    if metric in _RATES:
        amounts, seconds = _by_repeat(requests)[:, :, [_RATES.index(metric), 2]].transpose(2, 0, 1)
        return repeated_rates(*np.stack([amounts, seconds], axis=1))
    if metric not in METRICS:
        return _values(_scores(requests, metric), None)
    statistic, time, _ = metric.split("_")
    times = ((pair, *(getattr(side, _TIMES[time]) for side in (pair.a, pair.b))) for pair in requests.pairs)
    timed = [(pair, a * 1e3, b * 1e3) for pair, a, b in times if a is not None and b is not None]
    values = _values([(pair.cluster, a, b) for pair, a, b in timed], _PERCENTS[statistic])
    if values is None or len(requests.repeats) < 2:
        return values
    return repeated_times(values, np.array([pair.a.repeat for pair, _, _ in timed])) or values


def _by_repeat(requests: PairedRequests) -> Floats:
    """Return the work of each repeat, as batches of a repeat share its noise; of a single one, of each cluster."""
    repeats = requests.repeats
    if len(repeats) < 2:
        return requests.work
    work = np.zeros((2, len(repeats), requests.work.shape[2]))
    for cluster, repeat in {both.cluster: both.a.repeat for both in requests.pairs}.items():
        work[:, repeats.index(repeat)] += requests.work[:, cluster]
    return work


def score_names(pair: CellPair) -> list[str]:
    """Scores that both sides of any paired request have."""
    names = (sorted(both.a.scores.keys() & both.b.scores.keys()) for both in pair.requests.pairs)
    return list(dict.fromkeys(name for shared in names for name in shared))


def repeats_needed(pair: CellPair, tests: int, sides: int) -> int:
    """Times that a level's requests must be sent for each of so many tests to tell."""
    return ceil(clusters_needed(tests, sides) / pair.requests.clusters)


def repeats_help(metric: str) -> bool:
    """Whether repeats make more clusters. Those of an accuracy are different questions; its changes are in points."""
    return metric in METRICS or metric == ATTAINMENT


def _difference(metric: str, paired: Paired, *, larger: bool, p_value: float, alarm: bool | None) -> Difference:
    a, b = paired.levels()
    interval = paired.interval()
    change = b / a - 1 if a > 0 else None
    if paired.identical:
        word = "identical"
    elif alarm is None:
        word = "too few batches"
    elif alarm and interval is not None and (interval[0] > 0 if larger else interval[1] < 0):
        if metric in METRICS:
            word = "faster" if larger == (metric in _RATES) else "slower"
        else:
            word = "better" if larger else "worse"
    else:
        word = "within noise"
    return Difference(metric, a, b, change, interval, paired.clusters, p_value, paired.certified, word)


def _scores(requests: PairedRequests, name: str) -> list[tuple[int, float, float]]:
    """Repeats of one question are one cluster: greedy answers are the same each time and no news. Whether a request
    meets its limits depends on those around it, so its cluster is that of its times."""
    clusters: dict[tuple[Any, ...], int] = {}
    scores = []
    for pair in requests.pairs:
        if name in pair.a.scores and name in pair.b.scores:
            same = clusters.setdefault(pair.a.question, len(clusters))
            scores.append((pair.cluster if name == ATTAINMENT else same, pair.a.scores[name], pair.b.scores[name]))
    return scores


def _values(triples: Sequence[tuple[int, float, float]], percent: float | None) -> Values | None:
    """Return (cluster, A, B) as values, whose clusters are numbered without gaps; None without any."""
    if not triples:
        return None
    clusters, a, b = zip(*triples, strict=True)
    numbered = np.unique(np.array(clusters, dtype=np.int64), return_inverse=True)[1]  # some may have had no time
    return Values(np.array(a), np.array(b), numbered, percent)


_VERDICT = "verdict"
_FORM = re.compile(r"\s*([\w-]+?)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")
_RANK = {"exact": 0, "close": 1, "different": 2}


@dataclass(frozen=True, slots=True)
class Condition:
    """A change of a metric beyond a threshold, in the direction typed; or, with the metric "verdict", a worse verdict.

    Args:
        text: as the user typed it.
        metric: of :data:`panscan.analysis.differences.METRICS`, the name of a score, or "verdict".
        larger: whether B / A must be above the factor (or below).
        factor: B / A of the threshold: 1.05 for ``>5%``.
    """

    text: str
    metric: str
    larger: bool = True
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds for a pair of cells (``pair``; None for what has no pair), or is unknown.

    Args:
        condition: as the user typed it.
        comparison: number of the comparison, from 0.
        pair: number of the pair of cells in it.
        holds: False: it cannot be evaluated, and ``reason`` says why.
        reason: in words.
        repeats: number of ``--repeats`` with which it could be evaluated; None if repeats do not help.
    """

    condition: str
    comparison: int
    pair: int | None
    holds: bool
    reason: str
    repeats: int | None = None


def parse_condition(text: str, scores: Collection[str] = ()) -> Condition:
    """A condition from ``METRIC>NUMBER%``, ``METRIC<-NUMBER%`` or ``verdict``; ``_ms`` may be left out of names.

    Raises:
        SettingError: another form, an unknown metric (the nearest one is suggested), or a condition that holds for
            equal runs.
    """
    if text.strip() == _VERDICT:
        return Condition(text.strip(), _VERDICT)
    form = _FORM.fullmatch(text)
    if form is None:
        raise SettingError(f"--fail-on takes e.g. p95_e2el>5%, request_throughput<-5% or verdict; got {text!r}")
    name, sign, number = form.groups()
    percent, larger = float(number), sign == ">"
    if larger == (percent < 0) and percent != 0:
        turned = f"{name}{'<' if larger else '>'}{percent:g}%"
        raise SettingError(f"--fail-on {text!r} holds for runs that do not differ; did you mean {turned}?")
    if percent <= -100:
        raise SettingError(f"--fail-on {text!r}: nothing can fall by 100% or more")
    return Condition(text.strip(), _metric(name, scores), larger, 1 + percent / 100)


def evaluate(conditions: Sequence[Condition], comparisons: Sequence[Comparison]) -> list[Finding]:
    """The conditions that hold beyond the noise, and those that are unknown.

    The chance of one or more false alarms is at most :data:`panscan.records.intervals.ALPHA` over all conditions,
    cells and comparisons together. The test's hypothesis is the threshold itself: A's metric, scaled by the factor.
    Verdicts have no noise and are not included.

    Raises:
        RecordsError: stamps contradict counts.
    """
    findings: list[Finding] = []
    tests: list[tuple[Condition, tuple[int, int], Paired]] = []
    for condition in conditions:
        for index, comparison in enumerate(comparisons):
            for number, pair in enumerate(comparison.pairs):
                paired = None if condition.metric == _VERDICT else _paired(pair.requests, condition.metric)
                if paired is None:
                    findings += _untested(condition, (index, number), pair)
                elif not paired.identical:  # else nothing to tell
                    tests.append((condition, (index, number), paired))
            if comparison.unpaired:
                reason = f"{noun_of(comparison.a)}s of A that were not compared: {comparison.unpaired}"
                findings.append(Finding(condition.text, index, None, False, reason))
    draws = draws_for(len(tests))
    tails = [(condition, paired.tails(condition.factor, draws)) for condition, _, paired in tests]
    p_values = [larger if condition.larger else smaller for condition, (larger, smaller) in tails]
    alarms = decide(p_values, [paired.least_p_value(draws) for *_, paired in tests])
    for (condition, (index, number), paired), alarm in zip(tests, alarms, strict=True):
        if alarm is None:
            more = repeats_help(condition.metric)
            clusters = "batches" if more else "questions"
            reason = f"{paired.clusters} {clusters} are too few to tell (tests: {len(tests)})"
            needed = repeats_needed(comparisons[index].pairs[number], len(tests), sides=1)
            findings.append(Finding(condition.text, index, number, False, reason, needed if more else None))
            continue
        low, high = paired.interval() or (-inf, inf)  # unknown: not beyond
        threshold = condition.factor - 1
        if alarm and (low > threshold if condition.larger else high < threshold):
            a, b = paired.levels()
            change = f"{b / a - 1:+.1%} (95% interval {low:+.1%} to {high:+.1%})"
            findings.append(Finding(condition.text, index, number, True, change))
    return findings


def _metric(name: str, scores: Collection[str]) -> str:
    if name in scores:
        return name
    name = name.replace("-", "_")
    for known in (name, f"{name}_ms"):
        if known in METRICS:
            return known
    names = [*(metric.removesuffix("_ms") for metric in METRICS), *scores, _VERDICT]
    hint = nearest(name, names) or f" (known are {', '.join(names)})"
    raise SettingError(f"--fail-on: unknown metric {name!r}{hint}")


def _untested(condition: Condition, place: tuple[int, int], pair: CellPair) -> list[Finding]:
    """Return a worse or unknown verdict, or that a pair of cells does not have a metric."""
    if condition.metric != _VERDICT:
        return [Finding(condition.text, *place, False, "not measured on both sides")]
    a, b = (verdict.word for verdict in pair.verdicts)
    known = a in _RANK and b in _RANK
    if known and _RANK[b] <= _RANK[a]:
        return []
    return [Finding(condition.text, *place, known, f"{a} in A, {b} in B")]
