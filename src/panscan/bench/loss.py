"""Whether a cell's answers are worse than another's, by one rule for reports and advice, and in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from panscan.bench.permutation import ALPHA, decide
from panscan.bench.quality import QualityDifference, metric_title, quality_difference, quality_of
from panscan.bench.records import Run

__all__ = ["LEAST_QUESTIONS", "WORST_LOSS", "Against", "harmless", "losses", "p_text"]

LEAST_QUESTIONS = 30
"""Fewer different questions show nothing about answers."""
WORST_LOSS = 0.02
"""Loss of quality that the 95% interval must exclude, for a loss to be called not measurable."""


@dataclass(frozen=True, slots=True)
class Against:
    """A cell's answers against the baseline's.

    Args:
        cell: its id.
        difference: of their quality.
        word: "measurably worse", "measurably better", "loses nothing measurable", or "cannot tell".
        text: the word, the figures, and what so many questions could have shown.
    """

    cell: str
    difference: QualityDifference
    word: str
    text: str


def harmless(run: Run, difference: QualityDifference, peer: str) -> tuple[bool, str]:
    """Whether a cell loses nothing measurable against ``peer``, as it is called, and what is known of it.

    It loses nothing measurable if the 95% interval of the paired difference reaches 0 and excludes a loss of more than
    :data:`WORST_LOSS`, over at least :data:`LEAST_QUESTIONS` questions, and the p-value does not speak of a loss: for
    shares the interval is so wide that it alone would overlook small losses of many questions.
    """
    value, low, high = difference.value, difference.low, difference.high
    text = (
        f"{metric_title(run)} {value:+.3f} (95%: {low:+.3f} to {high:+.3f}, {p_text(difference.p_value)})"
        f" against {peer} over {difference.questions} questions"
    )
    if difference.questions < LEAST_QUESTIONS:
        return False, f"{text}: fewer than {LEAST_QUESTIONS} show nothing"
    if high < 0 or _is_loss(difference):
        return False, f"{text}: a measurable loss"
    if low < -WORST_LOSS:
        return False, f"{text}: a loss of more than {WORST_LOSS} is not excluded"
    return True, f"no measurable loss: {text}"


def losses(run: Run, cells: Sequence[str], views: Callable[[str], float]) -> tuple[str, list[Against]] | None:
    """The baseline and every other cell against it; None where fewer than two cells have scores.

    The baseline is the cell that reads the most views a request, so the one that settings with fewer crops must match;
    among several of those, the first: the one that answers best would have been chosen by its luck, too. All tests are
    one family: the chance that any cell is falsely called worse or better is at most 5%
    (:func:`panscan.bench.permutation.decide`).

    Args:
        run: with the answers' scores.
        cells: ids of the cells to compare.
        views: mean views of a cell's requests, by its id.
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
        else Against(cell, each, "cannot tell", "cannot tell: neither answers anything right")
        for (cell, each), alarm in zip(found.items(), alarms, strict=True)
    ]


def _least(difference: QualityDifference) -> float:
    """The smallest p-value that the questions that differ could have given, had all of them differed the same way."""
    return min(1.0, 2 * 0.5 ** (difference.better + difference.worse))


def _is_loss(difference: QualityDifference) -> bool:
    """Whether the p-value alone, not corrected for other tests, speaks of a loss."""
    return difference.value < 0 and difference.p_value < ALPHA


def _judged(cell: str, difference: QualityDifference, *, alarm: bool) -> Against:
    low, high = difference.low, difference.high
    figures = f"{p_text(difference.p_value)}, difference {_points(difference.value)} points"
    figures += f" [{_points(low)}, {_points(high)}]"
    several = f"{difference.questions:,} questions" if difference.questions != 1 else "1 question"
    if alarm and difference.value < 0:
        return Against(cell, difference, "measurably worse", f"measurably worse ({figures})")
    if alarm:
        return Against(cell, difference, "measurably better", f"measurably better ({figures})")
    reach = f"{100 * max(0.0, -low):.1f}"
    if difference.questions >= LEAST_QUESTIONS and low >= -WORST_LOSS and high >= 0 and not _is_loss(difference):
        seen = f"a loss of more than {reach} points is excluded by {several}"
        return Against(cell, difference, "loses nothing measurable", f"loses nothing measurable ({figures}): {seen}")
    seen = f"{several} do not exclude a loss of up to {reach} points"
    if difference.questions == 1:
        seen = seen.replace("do not", "does not")
    return Against(cell, difference, "cannot tell", f"cannot tell ({figures}): {seen}")


def _points(share: float) -> str:
    """Percentage points with their sign; no minus before nothing."""
    return f"{100 * share + 0.0:+.1f}".replace("-0.0", "+0.0")


def p_text(p_value: float) -> str:
    """``p = 0.62``; no 0 for what is only small."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"
