"""A comparison of two or more runs, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from string import ascii_uppercase
from typing import Any

from panscan.analysis.accuracy import max_loss_of, points_text
from panscan.analysis.cells import shared_settings
from panscan.analysis.differences import (
    DEFAULT_METRICS,
    METRICS,
    Condition,
    Difference,
    Finding,
    differences,
    evaluate,
    parse_condition,
    repeats_help,
    repeats_needed,
    score_names,
)
from panscan.analysis.levels import VERIFY_HINT
from panscan.analysis.pairing import LOAD_WORKLOAD, CellPair, Comparison, compare_runs
from panscan.analysis.setting_words import label, shown
from panscan.core import SettingError
from panscan.core.text import count, listed, number_text
from panscan.records.fields import METRICS as METRIC_NAMES
from panscan.records.intervals import ALPHA
from panscan.records.load_runs import BLOCKS, is_load_run, load_settings
from panscan.records.quality import metric_of
from panscan.records.store import Run

Row = tuple[str, str, str, str, str, str]
"""Metric, A, B, change, interval, word."""

_REPEATS = 5  # are enough for every test of a sweep
_MODEL = ("model", "random_weights", "model_shape")
_MACHINE = ("gpus", "cpu", "cpu_count")


@dataclass(frozen=True, slots=True)
class Report:
    """Runs compared with the first of them.

    Args:
        runs: all of them, the baseline first.
        comparisons: one for each other run.
        differences: ``[comparison][pair][metric]``.
        conditions: of ``--fail-on``.
        findings: those that hold or cannot be evaluated.
        repeats: ``--repeats`` that every test of too few batches can tell with, or, of a load run, times its requests;
            None if there is no such test.
    """

    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]
    differences: Sequence[Sequence[Mapping[str, Difference]]]
    conditions: tuple[Condition, ...]
    findings: tuple[Finding, ...]
    repeats: int | None

    @property
    def letters(self) -> dict[str, Run]:
        """The runs by their letter."""
        return dict(zip(ascii_uppercase, self.runs, strict=False))

    def head(self) -> list[str]:
        """Which letter is which run, which of them did another job than A, and what reading them left out."""
        lines = [f"{name}: {run.path.parent}" for name, run in self.letters.items()]
        for comparison in self.comparisons:
            if text := self.warning(comparison):
                lines.append(f"A and {comparison.name}: {text}" if len(self.comparisons) > 1 else text)
        return [*lines, *(f"Note on {name}: {note}" for name, run in self.letters.items() for note in run.notes)]

    def warning(self, comparison: Comparison) -> str | None:
        """That the runs of a comparison did not do the same job on the same machine; None if nothing says so."""
        applies = {
            "model": not comparison.apart.keys().isdisjoint(_MODEL)
            or any(name.endswith(" weights") for name in comparison.differences),
            "machine": not comparison.differences.keys().isdisjoint(_MACHINE),
            "workload": None not in comparison.differences.get("workload_sha256", (None,)),
        }
        if self.of_load:
            applies["model"] = "model" in comparison.differences
            applies["workload"] |= not comparison.differences.keys().isdisjoint(LOAD_WORKLOAD)
        kinds = [name for name, holds in applies.items() if holds]
        if not kinds:
            return None
        alone = kinds == ["machine"]
        meaning = "this alone may explain all changes" if alone else "these numbers compare different jobs"
        return f"Different {listed(kinds, 'and')}: {meaning}."

    def lines(self, comparison: Comparison) -> list[str]:
        """In what the runs of a comparison differ as a whole, and what has no partner."""
        written = []
        if comparison.apart:
            label_a, label_b = (label({key: both[side] for key, both in comparison.apart.items()}) for side in (0, 1))
            written.append(f"A has {label_a}; {comparison.name} has {label_b}")
        if comparison.differences:
            different = (
                fact if fact == "workload_sha256" else f"{fact} {shown(a)[:40]} / {shown(b)[:40]}"
                for fact, (a, b) in comparison.differences.items()
            )
            written.append(f"Also different, A / {comparison.name}: {', '.join(different)}")
        written += comparison.alone
        if self.of_load:
            return written
        same = shared_settings([pair.settings for pair in comparison.pairs])
        same = {name: value for name, value in same.items() if name not in (*comparison.apart, *comparison.varying)}
        return [*written, *([f"In both: {label(same)}"] if same else [])]

    @property
    def of_load(self) -> bool:
        """Whether load runs are compared: they have no verdicts."""
        return is_load_run(self.runs[0])

    def pairs(self, index: int) -> list[tuple[CellPair, list[Row]]]:
        """The pairs of cells of a comparison, each with a row per metric and one of peak memory, untested."""
        tables = []
        for pair, metrics in zip(self.comparisons[index].pairs, self.differences[index], strict=True):
            rows = [_row(difference) for difference in metrics.values()]
            for name, (a, b) in list(pair.peaks.items())[:1]:
                change = f"{b / a - 1:+.1%}" if a else "-"
                gib_a, gib_b = number_text(a / 2**30), number_text(b / 2**30)
                rows.append((f"{name.removesuffix('_bytes')} GiB", gib_a, gib_b, change, "", "not tested"))
            tables.append((pair, rows))
        return tables

    def legend(self) -> list[str]:
        """What the words mean, and how often they are wrong."""
        shown_ = [difference for block in self.differences for pair in block for difference in pair.values()]
        words = {difference.word for difference in shown_}
        lines = [
            f"The chance of any false alarm among these {count(len(shown_), 'test')} is at most {ALPHA:.0%} (paired"
            " tests, Holm; accuracies are a family of their own). Each interval covers one number, not all of them"
            " together."
        ]
        if not all(difference.certified for difference in shown_):
            lines.append("~ has too few samples for 99% confidence.")
        if self.of_load:
            lines.append(
                f"A batch is a block of consecutive requests, at most {BLOCKS} per level: requests that are in flight"
                " together are not independent."
            )
            lines.append(VERIFY_HINT)
        if "too few batches" in words:
            lines.append(f"Too few batches to tell: measure both with {_remedy(self.runs[0], self.repeats)}.")
        elif not self.of_load and any(
            len(pair.requests.repeats) == 1 for comparison in self.comparisons for pair in comparison.pairs
        ):
            lines.append(f"Measured once: noise between runs is unknown. Use {_remedy(self.runs[0], None)}.")
        if needed := max((difference.needed or 0 for difference in shown_), default=0):
            lines.append(
                f"Undecided: about {needed:,} different questions are needed to exclude a loss of"
                f" {100 * max_loss_of(self.runs[0]):g} points."
            )
        return lines

    def outcomes(self) -> list[tuple[str, str]]:
        """Each condition that holds or cannot be evaluated, where and why; then the others."""
        lines = []
        for finding in self.findings:
            comparison = self.comparisons[finding.comparison]
            title = "" if finding.pair is None else f"{comparison.pairs[finding.pair].title}: "
            run = f"{comparison.name}, " if len(self.comparisons) > 1 else ""
            state = "holds" if finding.holds else "cannot be evaluated"
            lines.append((finding.condition, f"{state}: {run}{title}{finding.reason}"))
        spoken = {finding.condition for finding in self.findings}
        rest = dict.fromkeys(condition.text for condition in self.conditions if condition.text not in spoken)
        return [*lines, *((text, "does not hold") for text in rest)]


def build_report(runs: Sequence[Run], fail_on: Iterable[str] = ()) -> Report:
    """Compare every run with the first.

    Args:
        runs: 2 to 26, the baseline first.
        fail_on: conditions as the user typed them.

    Raises:
        RecordsError: a run without a measured cell, nothing pairs, stamps contradict counts, or load runs among
            others.
        SettingError: a condition that cannot be.
    """
    fail_on = tuple(fail_on)
    comparisons = tuple(
        compare_runs(runs[0], other, name) for name, other in zip(ascii_uppercase[1:], runs[1:], strict=False)
    )
    if is_load_run(runs[0]) and "verdict" in map(str.strip, fail_on):
        raise SettingError(f"--fail-on verdict: load runs have no verdicts. {VERIFY_HINT}")
    pairs = (pair for comparison in comparisons for pair in comparison.pairs)
    scores = list(dict.fromkeys(name for pair in pairs for name in score_names(pair)))
    conditions = tuple(dict.fromkeys(parse_condition(text, scores) for text in fail_on))
    named = [item.metric for item in conditions if item.metric in METRICS]
    # Of scores, the quality of any run and those in a condition: each more test makes all stricter. Scores that are no
    # metric of this version are shown, too.
    wanted = {*map(metric_of, runs), *(item.metric for item in conditions)}
    shown_scores = (name for name in scores if name in wanted or name not in METRIC_NAMES)
    metrics = list(dict.fromkeys((*DEFAULT_METRICS, *named, *shown_scores)))
    tested = differences(comparisons, metrics)
    findings = evaluate(conditions, comparisons)
    needed = [*_repeats(comparisons, tested), *(item.repeats for item in findings if item.repeats is not None)]
    repeats = max(needed, default=None) if is_load_run(runs[0]) else _REPEATS if needed else None
    # The whole report names one remedy.
    remedy = f"measure both with {_remedy(runs[0], repeats)}"
    findings = [
        finding if finding.repeats is None else replace(finding, reason=f"{finding.reason}: {remedy}", repeats=repeats)
        for finding in findings
    ]
    return Report(tuple(runs), comparisons, tested, conditions, tuple(findings), repeats)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data: fractions, not percent; times in milliseconds; p-values before their correction."""
    return {
        "runs": [
            {"name": name, "path": str(run.path), "run_id": run.header.run_id, "notes": run.notes}
            for name, run in report.letters.items()
        ],
        "false_alarm_rate": ALPHA,
        "comparisons": [
            _comparison_json(report, comparison, differences)
            for comparison, differences in zip(report.comparisons, report.differences, strict=True)
        ],
        "fail_on": [
            asdict(finding) | {"run": report.comparisons[finding.comparison].name} for finding in report.findings
        ],
    }


def _comparison_json(
    report: Report, comparison: Comparison, tested: Sequence[Mapping[str, Difference]]
) -> dict[str, Any]:
    return {
        "a": "A",
        "b": comparison.name,
        "warning": report.warning(comparison),
        "apart": comparison.apart,
        "different": comparison.differences,
        "without_partner": list(comparison.alone),
        "cells": [
            {
                "cells": pair.cells,
                "settings": pair.settings,
                "requests": len(pair.requests.pairs),
                "batches": pair.requests.clusters,
                "verdicts": None if report.of_load else [verdict.word for verdict in pair.verdicts],
                "metrics": [asdict(difference) for difference in metrics.values()],
                "peaks": pair.peaks,
            }
            for pair, metrics in zip(comparison.pairs, tested, strict=True)
        ],
    }


def _repeats(comparisons: Sequence[Comparison], tested: Sequence[Sequence[Mapping[str, Difference]]]) -> list[int]:
    """``--repeats`` that the rows of too few batches need, for each pair of cells that has such a row."""
    tests = sum(len(metrics) for block in tested for metrics in block)
    return [
        repeats_needed(pair, tests, sides=2)
        for comparison, block in zip(comparisons, tested, strict=True)
        for pair, metrics in zip(comparison.pairs, block, strict=True)
        if any(difference.word == "too few batches" for difference in metrics.values())
    ]


def _remedy(run: Run, repeats: int | None) -> str:
    """Return the option that makes enough batches: of a load run, so many times its requests."""
    if repeats is not None and is_load_run(run):
        return f"--num-prompts {repeats * load_settings(run).num_prompts}"
    return f"--repeats {_REPEATS}"


def _row(difference: Difference) -> Row:
    mark = "" if difference.certified else "~"
    a, b = (mark + number_text(value) for value in (difference.a, difference.b))
    if not repeats_help(difference.metric) and difference.change is not None and difference.interval is not None:
        bounds = " to ".join(map(points_text, difference.interval))
        return difference.metric, a, b, f"{points_text(difference.change)} points", bounds, difference.word
    change = "-" if difference.change is None else f"{difference.change:+.1%}"
    low, high = difference.interval or (None, None)
    interval = "-" if low is None or high is None else f"{low:+.1%} to {high:+.1%}"
    return difference.metric, a, b, change, interval, difference.word
