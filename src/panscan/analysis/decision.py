"""What a recommendation says: the decision in one sentence, its reason and its costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from panscan.analysis.accuracy import Standings
from panscan.analysis.cache_room import cache_advice
from panscan.analysis.cells import MeasuredCell, distinguishing_names, effective_settings, memory_metric
from panscan.analysis.setting_words import option_words
from panscan.core.text import count, number_text
from panscan.records.fields import FLOOR
from panscan.records.quality import metric_of, metric_title
from panscan.records.store import Run
from panscan.settings import axes
from panscan.settings.preset_files import load_preset, preset_names

Rule = Literal["accuracy", "views", "limit"]
"""What made settings qualify: no loss of accuracy, the most views, or the user's ``--min-quality``."""

NO_LABELS = "only a labelled dataset can show the accuracy cost"
_SHARES = ("exact_match", "relaxed_accuracy", "contains_answer")
"""Metrics whose mean is the share of right answers."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice and its alternatives.

    Args:
        run: the run.
        chosen: the recommended cell.
        runner_up: the best of the others that qualify; None without others.
        qualified: the cells that qualify.
        measured: all finished cells.
        max_p95_ms: the user's limit in milliseconds.
        min_quality: the user's limit, 0 to 1.
        rule: what made cells qualify.
        standings: the accuracy of the measured cells against their baseline.
        rejected: why each cell that does not qualify was rejected, by cell id.
        why: why ``chosen`` qualifies, if its answers or views differ from those of the others.
    """

    run: Run
    chosen: MeasuredCell
    runner_up: MeasuredCell | None
    qualified: Sequence[MeasuredCell]
    measured: Sequence[MeasuredCell]
    max_p95_ms: float | None
    min_quality: float | None
    rule: Rule
    standings: Standings
    rejected: Mapping[str, str]
    why: str | None = None

    @property
    def alternative(self) -> MeasuredCell | None:
        """The cell that shows what the choice gains and costs.

        This is the same cell with pan and scan switched on or off, or the fastest cell if it is faster, or the
        runner-up.
        """
        chosen, others = self.chosen, [row for row in self.measured if row is not self.chosen]
        switched = [
            row
            for row in others
            if _other_settings(row) == _other_settings(chosen) and row.pan_and_scan != chosen.pan_and_scan
        ]
        if switched:
            return max(switched, key=lambda row: (row.accuracy, row.speed, row.cell))
        faster = [row for row in others if row.speed > chosen.speed and not row.within_noise_of(chosen)]
        return max(faster, key=lambda row: (row.speed, row.cell), default=self.runner_up)


def _other_settings(row: MeasuredCell) -> dict[str, object]:
    return {name: value for name, value in row.settings.items() if name not in row.crops}


def decision_of(choice: Selection) -> str:
    """Return the decision in one sentence: what to use, and its accuracy and throughput beside the alternative's."""
    chosen, other, run = choice.chosen, choice.alternative, choice.run
    accuracy = ""
    if chosen.quality is not None and (chosen.accuracy or (other is not None and other.accuracy)):
        questions = chosen.quality.questions
        if metric_of(run) in _SHARES:
            accuracy = f"{_share(chosen)} of {count(questions, 'answer')} right at "
        else:
            accuracy = f"{metric_title(run)} {_share(chosen)} over {count(questions, 'question')} at "
    caveat = {
        "different": " (its answers differ from the reference's)",
        "unverified": " (not compared with the reference)",
    }.get(chosen.verdict.word, "")
    what = _choice_words(run, chosen)
    if re.match(r"up to \d+ crops?\b", what):  # alone, it would be a limit, not a setting
        what = f"pan and scan with {what}"
    text = f"Use {what}: {accuracy}{number_text(chosen.speed)} requests/s{caveat}"
    if other is None:
        return f"{text}."
    standing = choice.standings.cells.get(other.cell)
    undecided = accuracy and other.cell in choice.rejected and standing is not None and standing.word == "undecided"
    changed = " (accuracy undecided)" if undecided else ""
    if other.verdict.word == "different":
        changed = " (which changes the answers)"
    share = f"{_share(other)} at " if accuracy and other.quality is not None else ""
    words = _choice_words(run, other)
    which = f"without {words[3:]}" if words.startswith("no ") else f"with {words}"
    return f"{text}; {which}{changed}, {share}{number_text(other.speed)} requests/s."


def _choice_words(run: Run, row: MeasuredCell) -> str:
    """Return what to use: a preset's options as one types them, else the settings in words."""
    recorded = run.cells[row.cell]
    if (preset := recorded.preset) in preset_names() and not recorded.aliases:
        varying = distinguishing_names([effective_settings(cell.settings) for cell in run.cells.values()])
        # Not the default runner: a sweep that names none chooses by its other options.
        base = {name: [option.default] for name, option in axes().items() if name != "runner"} | load_preset(preset)
        values = {name: row.settings.get(name) for name in varying}
        return option_words(preset, {name: value for name, value in values.items() if value not in base.get(name, ())})
    return row.name


def _share(row: MeasuredCell) -> str:
    text = f"{row.accuracy:.0%}"
    return f"{row.accuracy:.1%}" if text == "100%" and row.accuracy < 1 else text


def reason_of(choice: Selection) -> str:
    """Return the reason for a choice as one sentence, without a period."""
    chosen = choice.chosen
    fastest = max(choice.qualified, key=lambda row: row.speed)
    what = {
        "accuracy": "shown to keep the accuracy",
        "views": "with trusted answers and the most views",
        "limit": "within the limits",
    }[choice.rule]
    several = f"{len(choice.qualified)} settings {what}"
    if len(choice.qualified) == 1:
        place = f"the only setting {what}"
        if choice.rule == "accuracy" and chosen is choice.standings.baseline:
            place = "the baseline: no other setting is shown to keep its accuracy"  # which is no evidence against them
    elif chosen is fastest:
        place = f"fastest of {several}"
    else:
        place = f"within noise of the fastest of {several} ({_speed(fastest)}: {fastest.name})"
    parts = [f"{_speed(chosen)}, {place}"]
    if choice.max_p95_ms is not None:
        parts.append(f"p95 E2E {number_text(chosen.p95_ms)} ms, within {choice.max_p95_ms:g} ms")
    if choice.min_quality is not None and chosen.quality is not None:
        quality = chosen.quality
        interval = f"95%: {quality.low:.1%} to {quality.high:.1%}"
        parts.append(f"{metric_title(choice.run)} {quality.mean:.1%} ({interval}), at least {choice.min_quality:.4g}")
    return "; ".join([*parts, verdict_text(chosen), *([choice.why] if choice.why else [])])


def verdict_text(row: MeasuredCell) -> str:
    """Return the verdict with its figure; in capitals if the answers are not known to be the reference's."""
    verdict = row.verdict
    times = "" if verdict.ratio is None else f" (KL {number_text(verdict.ratio)}x the rounding noise)"
    if verdict.negligible:
        times = " (same answers as the reference)" if verdict.word == "exact" else f" (KL below {FLOOR:g} nats)"
    return {
        "exact": f"exact{times}",
        "close": f"close{times}",
        "different": f"DIFFERENT from the reference{times}",
        "unverified": f"UNVERIFIED: not compared with the reference ({verdict.reason})",
    }[verdict.word]


def costs_of(choice: Selection) -> tuple[str, ...]:
    """Return what the choice costs, and what is uncertain about it, as sentences without a period."""
    lines = [*_costs_in_time(choice), *_costs_in_memory(choice), *_costs_in_answers(choice)]
    if advice := cache_advice(choice.run, choice.chosen.cell):
        lines.append(advice)
    others = [row for row in choice.measured if row not in choice.qualified]
    fastest = max(others, key=lambda row: row.speed, default=choice.chosen)
    if fastest.speed > choice.chosen.speed:
        lines.append(f"faster but rejected: {fastest.name}, {_speed(fastest)}")
    return tuple(lines)


def _costs_in_time(choice: Selection) -> list[str]:
    chosen, second, lines = choice.chosen, choice.runner_up, []
    if "request_throughput" not in chosen.metrics.intervals:
        lines.append("measured once, so the run-to-run noise is unknown: use --repeats 5")
    if second is not None and second.within_noise_of(chosen):
        lines.append(f"not measurably faster than the runner-up, {second.name}: {_speed(second)}")
    # Latencies of requests that arrive in other ways cannot be compared.
    timed = [row for row in choice.qualified if row.p95_ms is not None and row.all_at_once == chosen.all_at_once]
    quickest = min(timed, key=lambda row: (row.p95_ms or 0.0, row.cell), default=chosen)
    p95, least = number_text(chosen.p95_ms), number_text(quickest.p95_ms)
    if chosen.p95_ms is not None and p95 != least:
        lines.append(f"p95 E2E {p95} ms against {least} ms with {quickest.name}")
    if choice.max_p95_ms is None:
        return lines
    metrics = chosen.metrics
    if "p95_e2el_ms" in metrics.uncertified:
        lines.append(f"p95 over {metrics.values['completed']:.0f} requests: too few to certify it")
    high = metrics.intervals.get("p95_e2el_ms", (0.0, 0.0))[1]
    if high > choice.max_p95_ms:
        lines.append(f"the 95% interval of p95 reaches {number_text(high)} ms, over the limit")
    return lines


def _costs_in_memory(choice: Selection) -> list[str]:
    name, whose = memory_metric(choice.qualified)
    known = [(value, row) for row in choice.qualified if (value := row.metrics.values[name]) is not None]
    peak = choice.chosen.metrics.values[name]
    if peak is None:
        return []
    least, leanest = min(known, key=lambda pair: (pair[0], pair[1].cell))
    more = f"{(peak - least) / 2**30:.1f}"
    if more == "0.0":
        return []
    return [
        f"{more} GiB more peak memory ({whose}) than {leanest.name}: {peak / 2**30:.1f} against {least / 2**30:.1f}"
    ]


def _costs_in_answers(choice: Selection) -> list[str]:
    """Compare the choice with the baseline, and with the cell with the most views."""
    chosen, lines = choice.chosen, []
    if chosen.verdict.word == "close":
        lines.append(f"{verdict_text(chosen)}, not exact")
    quality, standings = chosen.quality, choice.standings
    baseline, standing = standings.baseline, standings.cells.get(chosen.cell)
    if baseline is not None and standing is not None and standing.difference.value < 0:
        lines.append(f"{metric_title(choice.run)} against {baseline.name}: {standing.text}")
    most = max(choice.measured, key=lambda row: (row.views, row.speed))
    if most.views > chosen.views:
        text = f"fewer views per request ({chosen.views:.3g}) than {most.name} ({most.views:.3g})"
        if quality is None or most.quality is None:
            text = f"{text}: {NO_LABELS}"
        lines.append(text)
    return lines


def _speed(row: MeasuredCell) -> str:
    bounds = "" if row.interval is None else f" (95%: {' to '.join(map(number_text, row.interval))})"
    return f"{number_text(row.speed)} requests/s{bounds}"
