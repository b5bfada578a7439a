"""The one rule for accuracy: what the answers of a cell show against those of the baseline.

Every report, recommendation and comparison of accuracies uses :func:`decide_accuracy`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log10
from typing import Literal, TypeVar

from panscan.analysis.cells import MeasuredCell, effective_settings
from panscan.analysis.significance import ROUNDING, decide, sign_flip_p_value
from panscan.core import same_model
from panscan.core.groups import grouped
from panscan.core.sampling import SAMPLING_NAMES
from panscan.core.text import count
from panscan.records.intervals import Z95, normal_tail, paired_interval, paired_statistic
from panscan.records.quality import metric_of
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run

LEAST_QUESTIONS = 30
"""Fewer different questions show nothing about answers."""
MAX_LOSS = 0.02
"""The loss of accuracy that must be excluded by default: 2 points."""
TYPICAL_CHANGE = 0.05
"""Share of the answers that become right or wrong, as assumed before any is known."""
RANK = {"exact": 0, "close": 1}
"""The verdicts that are trusted, the better first."""
_PRIOR = 20  # questions that the typical change counts for, beside those that were asked
_POWER = (Z95 + 0.8416212335729143) ** 2  # a chance of 80% that the interval excludes the loss

Name = TypeVar("Name", bound=Hashable)
Word = Literal["same answers", "gain", "no loss", "undecided", "loss"]


def points_text(share: float) -> str:
    """Percentage points with their sign; no minus before nothing."""
    return f"{100 * share + 0.0:+.1f}".replace("-0.0", "+0.0")


@dataclass(frozen=True, slots=True)
class QualityDifference:
    """The score of one side less that of another, over the questions that both answered.

    Args:
        value: the mean difference over questions, -1 to 1.
        low: of its 95% interval (:func:`panscan.records.intervals.paired_interval`).
        high: of its 95% interval.
        questions: in both.
        better: questions that the first side answers better.
        worse: questions that it answers worse.
        changed: the mean size of the differences, 0 to 1.
        p_value: two-sided, not corrected; see :func:`panscan.analysis.significance.sign_flip_p_value`.
        identical: whether all answers are known to be the same texts.
        blank: whether neither side has any answer right.
    """

    value: float
    low: float
    high: float
    questions: int
    better: int
    worse: int
    changed: float
    p_value: float
    identical: bool = False
    blank: bool = False

    def loss_p_value(self, max_loss: float) -> float:
        """Return the one-sided p-value of a loss of ``max_loss``: small where it is excluded."""
        wins, losses = (self.questions * (self.changed + sign * self.value) / 2 for sign in (1, -1))
        return normal_tail(paired_statistic(wins, losses, self.questions, -max_loss))

    @property
    def text(self) -> str:
        """``-3.1 points (-5.0 to -1.2)``, with the 95% interval."""
        return f"{points_text(self.value)} points ({self.bounds})"

    @property
    def bounds(self) -> str:
        """``-5.0 to -1.2``: the 95% interval in percentage points."""
        return f"{points_text(self.low)} to {points_text(self.high)}"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What the rule says of a difference.

    Args:
        word: the result.
        difference: the figures.
        max_loss: the loss that "no loss" excludes, 0 to 1.
        excludes_loss: whether it is excluded.
    """

    word: Word
    difference: QualityDifference
    max_loss: float
    excludes_loss: bool

    @property
    def lossless(self) -> bool:
        """Whether the answers show that no more than ``max_loss`` is lost."""
        return self.word == "gain" or (self.word in ("no loss", "same answers") and self.excludes_loss)

    @property
    def short_text(self) -> str:
        """The word and the figures, for a table."""
        if self.difference.identical:
            return "same answers"
        return f"{self.label}: {self.difference.text}"

    @property
    def label(self) -> str:
        """The word, with what it stands for."""
        if self.word == "undecided" and not self.difference.better and not self.difference.worse:
            return "same scores"
        return f"no loss above {100 * self.max_loss:g} points" if self.word == "no loss" else self.word

    @property
    def text(self) -> str:
        """The result with its figures, and how many questions would decide."""
        difference = self.difference
        questions = count(difference.questions, "question")
        if difference.blank:
            return f"undecided: no answer to {questions} is right on either side"
        needed = "" if self.lossless or self.word == "loss" else f"; {self.needed_text}"
        if difference.identical:
            return f"the same answers to {_all_of(difference.questions)}{needed}"
        if not difference.better and not difference.worse:
            return f"the same score on {_all_of(difference.questions)}{needed}"
        return f"{self.label}: {difference.text} over {questions}{needed}"

    @property
    def needed_text(self) -> str:
        """How many questions would probably decide."""
        lost = -self.difference.value
        aim = "show a loss" if 2 * lost > self.max_loss else f"exclude a loss of {100 * self.max_loss:g} points"
        return f"about {self.needed:,} questions needed to {aim}"

    @property
    def needed(self) -> int:
        """The number of questions that decide with a chance of 80% if the difference stays what it is."""
        number = self.difference.questions
        changed = (number * self.difference.changed + _PRIOR * TYPICAL_CHANGE) / (number + _PRIOR)
        return max(questions_needed(self.max_loss, changed, self.difference.value), _rounded(number + 1))


def _all_of(number: int) -> str:
    return "the only question" if number == 1 else f"all {number:,} questions"


def questions_needed(max_loss: float, changed: float = TYPICAL_CHANGE, value: float = 0.0) -> int:
    """Return about how many questions it takes to exclude a loss, or to show one, with a chance of 80%.

    Args:
        max_loss: the loss to exclude, 0 to 1.
        changed: share of the questions whose scores differ.
        value: the true difference, -1 to 1; a gain is no easier than none.
    """
    reach = max(max_loss + min(value, 0.0), -value)
    return _rounded(max(LEAST_QUESTIONS, Z95**2 * (1 - max_loss) / max_loss, _POWER * changed / reach**2))


def _rounded(number: float) -> int:
    """Return a number rounded up to two digits."""
    unit = int(10 ** max(0, int(log10(number)) - 1))
    return ceil(number / unit) * unit


def paired_difference(means: Sequence[float], *, identical: bool = False, blank: bool = False) -> QualityDifference:
    """Return the difference of two qualities from each question's own, -1 to 1."""
    wins, losses = (sum(max(sign * mean, 0.0) for mean in means) for sign in (1, -1))
    low, high = paired_interval(wins, losses, len(means))
    value = (wins - losses) / len(means)
    return QualityDifference(
        value=value,
        low=min(low, value),
        high=max(high, value),
        questions=len(means),
        better=sum(mean > ROUNDING for mean in means),
        worse=sum(mean < -ROUNDING for mean in means),
        changed=(wins + losses) / len(means),
        p_value=sign_flip_p_value(means),
        identical=identical,
        blank=blank,
    )


def question_difference(pairs: Iterable[tuple[RequestRecord, RequestRecord]], metric: str) -> QualityDifference | None:
    """Return the difference of the first requests' scores from the second ones', averaged within a question.

    None without a pair that has both scores.
    """
    scored = [(one, other) for one, other in pairs if metric in one.scores and metric in other.scores]
    by_question = grouped((one.question, one.scores[metric] - other.scores[metric]) for one, other in scored)
    identical = all(one.content is not None and one.content == other.content for one, other in scored)
    blank = not any(one.scores[metric] or other.scores[metric] for one, other in scored)
    means = [sum(values) / len(values) for values in by_question.values()]
    return paired_difference(means, identical=identical, blank=blank) if means else None


def decide_accuracy(differences: Mapping[Name, QualityDifference], max_loss: float = MAX_LOSS) -> dict[Name, Accuracy]:
    """Apply the rule to everything that is compared with one baseline.

    - loss, gain: the paired test is significant after Holm's correction over all of ``differences``: McNemar's exact
      test for right and wrong answers, a sign-flip test for partial scores. The chance that any of them is falsely
      called either is at most 5%.
    - same answers: every answer is the same text.
    - no loss: the 95% interval excludes a loss of ``max_loss``, over at least :data:`LEAST_QUESTIONS` questions, and so
      does the test of such a loss after Holm's correction: the chance that any of them loses more is at most 5%.
    - undecided: the rest, and sides without any right answer.

    Args:
        differences: each compared side less the baseline, by any name.
        max_loss: the loss that "no loss" excludes, 0 to 1.
    """
    alarms = decide(
        [difference.p_value for difference in differences.values()],
        # The smallest p-value that the differing questions could give: all of them differ the same way.
        [min(1.0, 2 * 0.5 ** (difference.better + difference.worse)) for difference in differences.values()],
    )
    p_values = [difference.loss_p_value(max_loss) for difference in differences.values()]
    excluded = decide(p_values, [0.0] * len(p_values))
    results = {}
    for (name, difference), alarm, test in zip(differences.items(), alarms, excluded, strict=True):
        lossless = bool(test) and difference.questions >= LEAST_QUESTIONS and difference.low > -max_loss
        word: Word = "undecided"
        if alarm:
            word = "loss" if difference.value < 0 else "gain"
        elif difference.identical and not difference.blank:
            word = "same answers"
        elif lossless and not difference.blank:
            word = "no loss"
        results[name] = Accuracy(word, difference, max_loss, lossless)
    return results


def max_loss_of(run: Run) -> float:
    """Return the loss of accuracy that a run's decisions exclude, 0 to 1."""
    points = run.header.settings.max_accuracy_loss
    return MAX_LOSS if points is None else points / 100


@dataclass(frozen=True, slots=True)
class Standings:
    """The cells of a run against their baseline.

    Args:
        baseline: the cell that others are compared with; None if no cell can be.
        cells: what the rule says of each other cell with scores, by id.
        same_work: ids of the trusted cells that compute the same answers as the baseline: exact or close, with the
            same model, views and sampling. They need no further evidence, unless their answers show a loss.
    """

    baseline: MeasuredCell | None
    cells: Mapping[str, Accuracy]
    same_work: frozenset[str]

    def qualifies(self, row: MeasuredCell) -> bool:
        """Return whether nothing speaks against a cell's answers, and its verdict or its answers speak for it."""
        standing = self.cells.get(row.cell)
        if standing is None:
            return self.baseline is not None and self.baseline.cell == row.cell
        return standing.lossless or (row.cell in self.same_work and standing.word != "loss")

    def rank(self, row: MeasuredCell) -> int:
        """Return how good a cell's answers are known to be: a gain above all, then no loss, undecided, a loss."""
        standing = self.cells.get(row.cell)
        if standing is not None and standing.word in ("gain", "loss"):
            return 2 if standing.word == "gain" else -1
        return int(self.qualifies(row))


def standings_of(run: Run, rows: Sequence[MeasuredCell]) -> Standings:
    """Compare the cells of a run with their baseline, by the run's metric.

    The baseline is fixed in advance, not by its answers: the trusted cell (:data:`RANK`) with the most views; of
    several, an exact one before a close one, and then the first. A run without a verified cell has its baseline among
    all cells.

    Args:
        run: run with scored answers, else nothing is compared.
        rows: its measured cells.
    """
    scored = [row for row in rows if row.quality is not None]
    trusted = [row for row in scored if row.verdict.word in RANK]
    if all(row.verdict.word == "unverified" for row in scored):
        trusted = scored
    if not trusted:
        return Standings(None, {}, frozenset())
    baseline = max(trusted, key=lambda row: (row.views, -RANK.get(row.verdict.word, 0)))
    differences = {
        row.cell: difference
        for row in scored
        if row is not baseline and (difference := quality_difference(run, row.cell, baseline.cell)) is not None
    }
    same_work = {row.cell for row in trusted if row.verdict.word in RANK and _same_work(run, row, baseline)}
    return Standings(baseline, decide_accuracy(differences, max_loss_of(run)), frozenset(same_work))


def quality_difference(run: Run, cell: str, baseline: str) -> QualityDifference | None:
    """Return the run's metric of a cell less the baseline's, paired by request and repeat; None without a pair."""
    ours, others = (
        {(*one.question, one.repeat, one.request, one.replica): one for one in run.answered(name)}
        for name in (cell, baseline)
    )
    keys = sorted(ours.keys() & others.keys())
    return question_difference(((ours[key], others[key]) for key in keys), metric_of(run))


_ANSWER_SETTINGS = (
    "revision",
    "random_weights",
    "model_shape",
    "max_new_tokens",
    "ignore_eos",
    *SAMPLING_NAMES,
    "sampling_seed",
)
"""Settings besides the model and the views that change the answers of an exact computation."""


def _same_work(run: Run, row: MeasuredCell, baseline: MeasuredCell) -> bool:
    """Return whether an exact computation of both cells gives the same answers.

    A quantised checkpoint counts as its base.
    """
    views, other_views = (
        {(request.request, *request.question): request.views for request in run.answered(one.cell)}
        for one in (row, baseline)
    )
    same_views = all(views[key] == other_views[key] for key in views.keys() & other_views.keys())
    settings, others = (dict(effective_settings(run.cells[one.cell].settings)) for one in (row, baseline))
    load = run.loads.get(row.cell)
    if load is not None and load.base_model and same_model(load.base_model, others.get("model")):
        settings |= {"model": load.base_model, "revision": others.get("revision")}
    same_settings = all(settings.get(name) == others.get(name) for name in _ANSWER_SETTINGS)
    return same_views and same_settings and same_model(settings.get("model"), others.get("model"))


ACCURACY_COLUMNS = (
    "baseline",
    "accuracy_result",
    *(f"accuracy_difference{part}" for part in ("", "_low", "_high", "_p_value")),
)


def accuracy_columns(run: Run, rows: Sequence[MeasuredCell]) -> dict[str, dict[str, float | str | None]]:
    """By cell id, :data:`ACCURACY_COLUMNS` of ``summary.csv``, None but for the compared cells; nothing without a
    baseline."""
    standings = standings_of(run, rows)
    if standings.baseline is None:
        return {}
    columns: dict[str, dict[str, float | str | None]] = {cell: dict.fromkeys(ACCURACY_COLUMNS) for cell in run.cells}
    for cell, standing in standings.cells.items():
        difference = standing.difference
        figures = (difference.value, difference.low, difference.high, difference.p_value)
        columns[cell] |= zip(ACCURACY_COLUMNS, (standings.baseline.cell, standing.word, *figures), strict=True)
    return columns
