"""``--fail-on``: conditions on how a run may differ from the baseline, and whether they hold beyond the noise."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from panscan.bench.compare import Comparison
from panscan.bench.differences import METRICS, measured, repeats_needed
from panscan.bench.paired import Paired
from panscan.bench.permutation import decide, draws_for, least_p_value, tail_p_values
from panscan.core import SettingError
from panscan.settings import nearest

__all__ = ["Condition", "Finding", "evaluate", "parse_condition"]

_VERDICT = "verdict"
_FORM = re.compile(r"\s*([\w-]+?)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")
_RANK = {"exact": 0, "close": 1, "different": 2}


@dataclass(frozen=True, slots=True)
class Condition:
    """A change of a metric beyond a threshold, in the direction typed; or, with the metric "verdict", a worse verdict.

    Args:
        text: as the user typed it.
        metric: of :data:`panscan.bench.differences.METRICS`, the name of a score, or "verdict".
        larger: whether B / A must be above the factor (or below).
        factor: B / A of the threshold: 1.05 for ``>5%``.
    """

    text: str
    metric: str
    larger: bool = True
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds for a pair of cells (``pair``; None for what has no pair), or of which nobody can tell.

    Args:
        condition: as the user typed it.
        comparison: number of the comparison, from 0.
        pair: number of the pair of cells in it.
        holds: False: it cannot be told, and ``reason`` says why.
        reason: in words.
        repeats: with so many ``--repeats`` it could be told; None where they are no remedy.
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
    """The conditions that hold beyond the noise, and those of which nobody can tell.

    The chance of one or more false alarms is at most :data:`panscan.bench.permutation.ALPHA` over all conditions, cells
    and comparisons together. The test's hypothesis is the threshold itself: A's metric, scaled by the factor. Verdicts
    have no noise and are no part of that.

    Raises:
        RecordsError: stamps contradict counts.
    """
    metrics = list(dict.fromkeys(each.metric for each in conditions if each.metric != _VERDICT))
    values = [[measured(pair, metrics) for pair in comparison.pairs] for comparison in comparisons]
    found = [finding for condition in conditions for finding in _untested(condition, comparisons, values)]
    tests = [
        (condition, at, place, pair[condition.metric])
        for condition in conditions
        for at, comparison in enumerate(values)
        for place, pair in enumerate(comparison)
        if condition.metric in pair and pair[condition.metric].contributions().any()  # identical: nothing to tell
    ]
    draws = draws_for(len(tests))
    p_values = []
    for condition, _, _, paired in tests:
        larger, smaller = tail_p_values(paired.contributions(condition.factor), draws)
        p_values.append(larger if condition.larger else smaller)
    alarms = decide(p_values, [least_p_value(paired.clusters, draws) for *_, paired in tests])
    for (condition, at, place, paired), alarm in zip(tests, alarms, strict=True):
        if alarm is None:
            reason = f"{paired.clusters} batches are too few to tell (tests: {len(tests)})"
            needed = repeats_needed(comparisons[at].pairs[place], len(tests), sides=1)
            found.append(Finding(condition.text, at, place, False, reason, needed))
        elif alarm and _beyond(condition, paired):
            found.append(Finding(condition.text, at, place, True, _change(paired)))
    return found


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


def _untested(
    condition: Condition, comparisons: Sequence[Comparison], values: Sequence[Sequence[Mapping[str, Paired]]]
) -> list[Finding]:
    """Worse and unknown verdicts, and metrics that a pair of cells does not have."""
    found = []
    for at, comparison in enumerate(comparisons):
        for place, pair in enumerate(comparison.pairs):
            if condition.metric == _VERDICT:
                a, b = (verdict.word for verdict in pair.verdicts)
                if a not in _RANK or b not in _RANK:
                    found.append(Finding(condition.text, at, place, False, f"{a} in A, {b} in B"))
                elif _RANK[b] > _RANK[a]:
                    found.append(Finding(condition.text, at, place, True, f"{a} in A, {b} in B"))
            elif condition.metric not in values[at][place]:
                found.append(Finding(condition.text, at, place, False, "not measured on both sides"))
        if comparison.unpaired:
            reason = f"cells of A that were not compared: {comparison.unpaired}"
            found.append(Finding(condition.text, at, None, False, reason))
    return found


def _beyond(condition: Condition, paired: Paired) -> bool:
    interval = paired.interval()
    if interval is None:
        return False
    return interval[0] > condition.factor - 1 if condition.larger else interval[1] < condition.factor - 1


def _change(paired: Paired) -> str:
    (a, b), interval = paired.levels(), paired.interval()
    low, high = interval or (float("nan"), float("nan"))
    return f"{b / a - 1:+.1%} (95% interval {low:+.1%} to {high:+.1%})"
