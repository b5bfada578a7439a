"""What a recommendation says: the decision in one sentence, its reason and its costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from panscan.analysis.candidates import Candidate
from panscan.analysis.cells import memory_metric
from panscan.analysis.significance import p_text, points_text, quality_difference
from panscan.core.text import count, number_text
from panscan.records.quality import metric_of, metric_title
from panscan.records.schema import FLOOR
from panscan.records.store import Run

Rule = Literal["accuracy", "views", "limit"]
"""What made settings qualify: no measurable loss of accuracy, the most views, or the user's ``--min-quality``."""

_SHARES = ("exact_match", "relaxed_accuracy", "contains_answer")
"""Metrics whose mean is the share of right answers."""
_CROPS = re.compile(r"up to \d+ crops?\b")


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice and its alternatives.

    Args:
        run: the run.
        chosen: the recommended cell.
        runner_up: the best of the others in ``left``; None without others.
        left: the cells that qualify.
        measured: all finished cells.
        rejected: why other cells do not qualify, by cell id.
        max_p95_ms: the user's limit in milliseconds.
        min_quality: the user's limit, 0 to 1.
        rule: what made cells qualify.
        why: why ``chosen`` qualifies, if its answers or views differ from those of the others.
    """

    run: Run
    chosen: Candidate
    runner_up: Candidate | None
    left: Sequence[Candidate]
    measured: Sequence[Candidate]
    rejected: Mapping[str, str]
    max_p95_ms: float | None
    min_quality: float | None
    rule: Rule
    why: str | None = None

    @property
    def alternative(self) -> Candidate | None:
        """The cell that shows what the choice gains and costs.

        This is the same cell with pan and scan switched on or off, or the fastest cell if it is faster, or the
        runner-up.
        """
        chosen, others = self.chosen, [each for each in self.measured if each is not self.chosen]
        switched = [each for each in others if _other_settings(each) == _other_settings(chosen)]
        switched = [each for each in switched if _pan_and_scan(each) != _pan_and_scan(chosen)]
        if switched:
            return max(switched, key=lambda each: (_mean(each), each.throughput, each.cell))
        faster = [each for each in others if each.throughput > chosen.throughput and not each.overlaps(chosen)]
        return max(faster, key=lambda each: (each.throughput, each.cell), default=self.runner_up)


def _pan_and_scan(candidate: Candidate) -> bool:
    return bool(candidate.row.settings.get("do_pan_and_scan", True))


def _other_settings(candidate: Candidate) -> dict[str, object]:
    return {name: value for name, value in candidate.row.settings.items() if "pan_and_scan" not in name}


def _mean(candidate: Candidate) -> float:
    return 0.0 if candidate.quality is None else candidate.quality.mean


def decision_of(choice: Selection) -> str:
    """Return the decision in one sentence: what to use, and its accuracy and throughput beside the alternative's."""
    chosen, other, run = choice.chosen, choice.alternative, choice.run
    scored = [each for each in (chosen, other) if each is not None and each.quality is not None]
    answered = any(each.quality.mean for each in scored if each.quality is not None)
    accuracy = _accuracy(run, chosen) if answered and chosen.quality is not None else ""
    text = f"Use {_whole_name(chosen)}: {accuracy}{number_text(chosen.throughput)} requests/s{_answer_caveat(chosen)}"
    if other is None:
        return f"{text}."
    changed = " (which changes the answers)" if other.verdict == "different" else ""
    theirs = f"{_share(other)} at " if accuracy and other.quality is not None else ""
    return f"{text}; {_with(other)}{changed}, {theirs}{number_text(other.throughput)} requests/s."


def _whole_name(candidate: Candidate) -> str:
    """Return a cell's name as the object of a verb: alone, "up to 4 crops" would be a limit, not a setting."""
    return f"pan and scan with {candidate.name}" if _CROPS.match(candidate.name) else candidate.name


def _accuracy(run: Run, candidate: Candidate) -> str:
    questions = 0 if candidate.quality is None else candidate.quality.questions
    if metric_of(run) in _SHARES:
        return f"{_share(candidate)} of {count(questions, 'answer')} right at "
    return f"{metric_title(run)} {_share(candidate)} over {count(questions, 'question')} at "


def _share(candidate: Candidate) -> str:
    mean = _mean(candidate)
    text = f"{mean:.0%}"
    return f"{mean:.1%}" if text == "100%" and mean < 1 else text


def _with(candidate: Candidate) -> str:
    name = candidate.name
    return f"without {name[3:]}" if name.startswith("no ") else f"with {name}"


def _answer_caveat(chosen: Candidate) -> str:
    """Return what a reader must know of the answers; empty if they are the reference's."""
    return {
        "different": " (its answers differ from the reference's)",
        "unverified": " (not compared with the reference)",
    }.get(chosen.verdict, "")


def reason_of(choice: Selection) -> str:
    """Return the reason for a choice as one sentence, without a period."""
    chosen, left = choice.chosen, choice.left
    fastest = max(left, key=lambda each: each.throughput)
    parts = [f"{_speed(chosen)}, {_place(choice, fastest)}"]
    if choice.max_p95_ms is not None:
        parts.append(f"p95 E2E {number_text(chosen.p95_ms)} ms, within {choice.max_p95_ms:g} ms")
    if choice.min_quality is not None and chosen.quality is not None:
        parts.append(f"{metric_title(choice.run)} {chosen.quality.mean:.1%}, at least {choice.min_quality:.4g}")
    return "; ".join([*parts, verdict_text(chosen), *([choice.why] if choice.why else [])])


def _place(choice: Selection, fastest: Candidate) -> str:
    what = {
        "accuracy": "with no measurable loss of accuracy",
        "views": "with trusted answers and the most views",
        "limit": "within the limits",
    }[choice.rule]
    if len(choice.left) == 1:
        return f"the only setting {what}"
    several = f"{len(choice.left)} settings {what}"
    if choice.chosen is fastest:
        return f"fastest of {several}"
    return f"within noise of the fastest of {several} ({_speed(fastest)}: {fastest.name})"


def verdict_text(candidate: Candidate) -> str:
    """Return the verdict with its figure; in capitals if the answers are not known to be the reference's."""
    verdict = candidate.row.verdict
    times = "" if verdict.ratio is None else f" (KL {number_text(verdict.ratio)}x the rounding noise)"
    if verdict.negligible:
        times = f" (KL below {FLOOR:g} nats)"
    return {
        "exact": f"exact{times}",
        "close": f"close{times}",
        "different": f"DIFFERENT from the reference{times}",
        "unverified": f"UNVERIFIED: not compared with the reference ({verdict.reason})",
    }[verdict.word]


def costs_of(choice: Selection) -> tuple[str, ...]:
    """Return what the choice costs, and what is uncertain about it, as sentences without a period."""
    return (
        *_about_speed(choice),
        *_about_p95(choice),
        *_about_memory(choice),
        *_about_answers(choice),
        *_about_views(choice),
        *_about_passed_over(choice),
    )


def _about_speed(choice: Selection) -> list[str]:
    chosen, second = choice.chosen, choice.runner_up
    found = []
    if "request_throughput" not in chosen.row.metrics.intervals:
        found.append("measured in one batch: use --repeats or more samples to estimate run-to-run noise")
    if second is not None and second.overlaps(chosen):
        found.append(f"not measurably faster than the runner-up, {second.name}: {_speed(second)}")
    return found


def _about_p95(choice: Selection) -> list[str]:
    chosen, found = choice.chosen, []
    timed = [each for each in choice.left if each.p95_ms is not None]
    quickest = min(timed, key=lambda each: (each.p95_ms or 0.0, each.cell), default=chosen)
    own, least = number_text(chosen.p95_ms), number_text(quickest.p95_ms)
    if chosen.p95_ms is not None and quickest.p95_ms is not None and own != least:
        found.append(f"p95 E2E {own} ms against {least} ms with {quickest.name}")
    if choice.max_p95_ms is None:
        return found
    metrics = chosen.row.metrics
    if "p95_e2el_ms" in metrics.uncertified:
        found.append(f"p95 over {metrics.values['completed']:.0f} requests: too few to certify it")
    high = metrics.intervals.get("p95_e2el_ms", (0.0, 0.0))[1]
    if high > choice.max_p95_ms:
        found.append(f"the 95% interval of p95 reaches {number_text(high)} ms, over the limit")
    return found


def _about_memory(choice: Selection) -> list[str]:
    name, whose = memory_metric([each.row for each in choice.left])
    known = [(value, each) for each in choice.left if (value := each.row.metrics.values[name]) is not None]
    own = choice.chosen.row.metrics.values[name]
    if own is None or not known:
        return []
    least, leanest = min(known, key=lambda pair: (pair[0], pair[1].cell))
    more = f"{(own - least) / 2**30:.1f}"
    if more == "0.0":
        return []
    return [f"{more} GiB more peak memory ({whose}) than {leanest.name}: {own / 2**30:.1f} against {least / 2**30:.1f}"]


def _about_answers(choice: Selection) -> list[str]:
    chosen, found = choice.chosen, []
    if chosen.verdict == "close":
        found.append(f"{verdict_text(chosen)}, not exact")
    quality = chosen.quality
    if quality is None:
        return found
    peers = [(each.quality.mean, each) for each in choice.left if each.quality is not None]
    most, finest = max(peers, key=lambda pair: (pair[0], pair[1].cell))
    if most > quality.mean:
        found.append(_accuracy_comparison(choice.run, chosen, finest))
    if choice.min_quality is not None and quality.low < choice.min_quality:
        found.append(
            f"the 95% interval of {metric_title(choice.run)} begins at {quality.low:.1%}, below the limit"
            f" ({count(quality.questions, 'question')})"
        )
    return found


def _about_views(choice: Selection) -> list[str]:
    """Compare the choice with the finished cell with the most views, if that has more."""
    chosen = choice.chosen
    most = max(choice.measured, key=lambda each: (each.views, each.throughput))
    if most.views <= chosen.views:
        return []
    text = f"fewer views per request ({chosen.views:.3g}) than {most.name} ({most.views:.3g})"
    if chosen.quality is None or most.quality is None:
        return [f"{text}: only a labelled dataset can show the accuracy cost"]
    return [f"{text}: {_accuracy_comparison(choice.run, chosen, most)}"]


def _about_passed_over(choice: Selection) -> list[str]:
    """Name the fastest finished cell that does not qualify, if it is faster."""
    others = [each for each in choice.measured if each not in choice.left]
    fastest = max(others, key=lambda each: each.throughput, default=choice.chosen)
    if fastest.throughput <= choice.chosen.throughput:
        return []
    return [f"faster but rejected: {fastest.name}, {_speed(fastest)}"]


def _accuracy_comparison(run: Run, chosen: Candidate, other: Candidate) -> str:
    """Return both accuracies as text, with the interval and p-value of their difference."""
    difference = quality_difference(run, chosen.cell, other.cell)
    interval = ""
    if difference is not None:
        low, high = points_text(difference.low), points_text(difference.high)
        interval = f" (95% interval of the difference: {low} to {high} points, {p_text(difference.p_value)})"
    return f"{metric_title(run)} {_share(chosen)} against {_share(other)} with {other.name}{interval}"


def _speed(candidate: Candidate) -> str:
    low, high = candidate.interval
    bounds = f" (95%: {number_text(low)} to {number_text(high)})" if low < high else ""
    return f"{number_text(candidate.throughput)} requests/s{bounds}"
