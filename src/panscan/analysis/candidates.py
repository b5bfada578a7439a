"""Finished cells as a recommendation sees them: speed with its interval, views, answers, and what a choice costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.analysis.cells import (
    MeasuredCell,
    cell_title,
    distinguishing,
    meant,
    measured_rows,
    memory_metric,
    number_text,
    told_of,
)
from panscan.analysis.significance import p_text, quality_difference
from panscan.records.intervals import Interval
from panscan.records.quality import Quality, metric_title, quality_of
from panscan.records.store import Run, outcome_of

__all__ = [
    "Candidate",
    "Selection",
    "candidates_of",
    "cell_name",
    "costs_of",
    "pareto_front",
    "reason_of",
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished cell. ``views`` is the mean of a request, ``crops`` the settings that it follows from."""

    row: MeasuredCell
    name: str
    crops: tuple[tuple[str, Any], ...]
    views: float
    throughput: float
    quality: Quality | None

    @property
    def cell(self) -> str:
        return self.row.cell

    @property
    def verdict(self) -> str:
        return self.row.verdict.word

    @property
    def p95_ms(self) -> float | None:
        """Of E2E."""
        return self.row.metrics.values["p95_e2el_ms"]

    @property
    def interval(self) -> Interval:
        """95% of the throughput; the value itself where one batch gave no interval."""
        return self.row.metrics.intervals.get("request_throughput", (self.throughput, self.throughput))

    def overlaps(self, other: Candidate) -> bool:
        """Whether the intervals of both throughputs have a value in common."""
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def candidates_of(run: Run) -> tuple[list[Candidate], dict[str, str]]:
    """The finished cells of a run, and why each of the others is none, by cell id.

    Raises:
        RecordsError: see :func:`panscan.records.summary.cell_metrics`.
    """
    rows = {row.cell: row for row in measured_rows(run)}
    views: dict[tuple[tuple[str, Any], ...], float] = {}
    for row in rows.values():
        crops = _crops(row.settings)
        views[crops] = max(views.get(crops, 0.0), row.metrics.values["mean_views"] or 0.0)
    found, others = [], {}
    for cell in run.cells:
        outcome, reason = outcome_of(run, cell)
        if outcome != "done":
            others[cell] = f"{outcome}: {reason}" if reason else outcome
        elif cell not in rows or not (throughput := rows[cell].metrics.values["request_throughput"]):
            others[cell] = "no request of it succeeded in measurable time"
        else:
            row, crops = rows[cell], _crops(rows[cell].settings)
            found.append(Candidate(row, cell_name(run, cell), crops, views[crops], throughput, quality_of(run, cell)))
    return found, others


def pareto_front(merits: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other is at least as good in both merits and better in one.

    Args:
        merits: two of each point, such as speed and quality; larger is better. Equal points do not beat each other.
    """

    def beats(other: tuple[float, float], own: tuple[float, float]) -> bool:
        return other != own and other[0] >= own[0] and other[1] >= own[1]

    return [not any(beats(other, own) for other in merits) for own in merits]


def cell_name(run: Run, cell: str) -> str:
    """A cell's id, and its settings that differ from other cells'."""
    every = [told_of(run, other) for other in run.cells]
    names = distinguishing(every)
    if run.aliases.get(cell):  # name what the choice leaves open, even if all cells do
        names += [name for name, value in told_of(run, cell).items() if value != meant(run.cells[cell])[name]]
    return cell_title(cell, told_of(run, cell), list(dict.fromkeys(names)))


def _crops(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, value) for name, value in settings.items() if "pan_and_scan" in name))


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen, and from what: ``left`` are the cells that qualify, ``measured`` all finished ones.

    ``why`` says by what a cell qualifies whose answers or views are not those of the others.
    """

    run: Run
    chosen: Candidate
    runner_up: Candidate | None
    left: Sequence[Candidate]
    measured: Sequence[Candidate]
    rejected: Mapping[str, str]
    max_p95_ms: float | None
    min_quality: float | None
    why: str | None = None


def reason_of(choice: Selection) -> str:
    """One sentence."""
    chosen, left = choice.chosen, choice.left
    fastest = max(left, key=lambda each: each.throughput)
    parts = [f"{_speed(chosen)}, {_place(chosen, fastest, len(left))}"]
    if choice.max_p95_ms is not None:
        parts.append(f"p95 E2E {_number(chosen.p95_ms)} ms, within {choice.max_p95_ms:g} ms")
    if choice.min_quality is not None and chosen.quality is not None:
        parts.append(f"{metric_title(choice.run)} {chosen.quality.mean:.3f}, at least {choice.min_quality}")
    return "; ".join([*parts, verdict_text(chosen), *([choice.why] if choice.why else [])])


def _place(chosen: Candidate, fastest: Candidate, count: int) -> str:
    if count == 1:
        return "the only cell that qualifies"
    if chosen is fastest:
        return f"the most of {count} cells that qualify"
    return f"within the noise of the most of {count} cells that qualify ({_speed(fastest)}: {fastest.name})"


def verdict_text(candidate: Candidate) -> str:
    """The verdict with its figure; loud where the answers are not known to be the reference's."""
    verdict = candidate.row.verdict
    times = "" if verdict.ratio is None else f" (KL {number_text(verdict.ratio)}x the rounding noise)"
    return {
        "exact": f"exact{times}",
        "close": f"close{times}",
        "different": f"DIFFERENT from the reference{times}",
        "unverified": f"UNVERIFIED: nobody compared its answers with the reference ({verdict.reason})",
    }[verdict.word]


def costs_of(choice: Selection) -> tuple[str, ...]:
    """What the choice costs, and what is not certain about it."""
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
        found.append("measured in one batch: how far noise moves its throughput is unknown (--repeats, more samples)")
    if second is not None and second.overlaps(chosen):
        found.append(f"not measurably faster than the runner-up {second.name}: {_speed(second)}")
    return found


def _about_p95(choice: Selection) -> list[str]:
    chosen, found = choice.chosen, []
    timed = [each for each in choice.left if each.p95_ms is not None]
    quickest = min(timed, key=lambda each: (each.p95_ms or 0.0, each.cell), default=chosen)
    if chosen.p95_ms is not None and quickest.p95_ms is not None and _number(chosen.p95_ms) != _number(quickest.p95_ms):
        found.append(
            f"p95 E2E {_number(chosen.p95_ms)} ms against {_number(quickest.p95_ms)} ms of the quickest,"
            f" {quickest.name}"
        )
    if choice.max_p95_ms is None:
        return found
    metrics = chosen.row.metrics
    if "p95_e2el_ms" in metrics.uncertified:
        found.append(f"its p95 rests on {metrics.values['completed']:.0f} requests: too few to be certified")
    high = metrics.intervals.get("p95_e2el_ms", (0.0, 0.0))[1]
    if high > choice.max_p95_ms:
        found.append(f"the 95% interval of its p95 reaches {_number(high)} ms, over the limit")
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
        found.append(f"{_matches(choice.run, chosen, finest)} of {finest.name}")
    if choice.min_quality is not None and quality.low < choice.min_quality:
        found.append(
            f"the 95% interval of its {metric_title(choice.run)} begins at {quality.low:.3f}, under the limit"
            f" ({quality.questions} questions)"
        )
    return found


def _about_views(choice: Selection) -> list[str]:
    """The finished cell with the most views, if the chosen one has fewer."""
    chosen = choice.chosen
    most = max(choice.measured, key=lambda each: (each.views, each.throughput))
    if most.views <= chosen.views:
        return []
    text = f"fewer views a request ({chosen.views:.3g}) than {most.name} ({most.views:.3g})"
    if chosen.quality is None or most.quality is None:
        return [f"{text}: without a dataset with answers their effect on answers is unknown"]
    return [f"{text}: {_matches(choice.run, chosen, most)}"]


def _about_passed_over(choice: Selection) -> list[str]:
    """The fastest finished cell that does not qualify, if it is faster."""
    others = [each for each in choice.measured if each not in choice.left]
    fastest = max(others, key=lambda each: each.throughput, default=choice.chosen)
    if fastest.throughput <= choice.chosen.throughput:
        return []
    return [f"{fastest.name} does {_speed(fastest)}, but was passed over: {choice.rejected[fastest.cell]}"]


def _matches(run: Run, chosen: Candidate, other: Candidate) -> str:
    difference = quality_difference(run, chosen.cell, other.cell)
    means = [each.quality.mean for each in (chosen, other) if each.quality is not None]
    title, interval = metric_title(run), ""
    if difference is not None:
        interval = f", 95% of the difference {difference.low:+.3f} to {difference.high:+.3f}"
        interval += f", {p_text(difference.p_value)}"
    return f"{title} {means[0]:.3f} against {means[1]:.3f}{interval}"


def _speed(candidate: Candidate) -> str:
    low, high = candidate.interval
    bounds = f" (95%: {number_text(low)} to {number_text(high)})" if low < high else ""
    return f"{number_text(candidate.throughput)} requests/s{bounds}"


def _number(value: float | None) -> str:
    return number_text(value)
