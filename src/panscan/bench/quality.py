"""The quality axis: how often a cell's answers are the dataset's, with intervals, and paired with another cell's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any
from unicodedata import normalize

from panscan.bench.intervals import cluster_intervals
from panscan.bench.records import Run

__all__ = ["EXACT_MATCH", "Quality", "exact_match", "quality_difference", "quality_of", "scores_of"]

EXACT_MATCH = "exact_match"
_POINT = 1e-9  # an interval that is only as wide as rounding
_Z = 1.959963984540054  # 95%, two-sided normal


@dataclass(frozen=True, slots=True)
class Quality:
    """Share of right answers, 0 to 1: the mean over requests with a score and its 95% interval.

    ``questions`` counts different questions; repeats of one are not more evidence about others.
    """

    mean: float
    low: float
    high: float
    questions: int


def exact_match(answer: str, answers: Sequence[str]) -> float:
    """1.0 if the answer is one of the accepted ones, else 0.0.

    As in DocVQA's accuracy, case and surrounding space do not count; nor do runs of white space, composed or decomposed
    letters, or one final full stop, which chat models add to bare answers. Everything else does: "$5.00" is not "5.00",
    and a sentence around the answer makes it wrong.
    """
    return float(_plain(answer) in {_plain(each) for each in answers})


def _plain(text: str) -> str:
    return " ".join(normalize("NFC", text.casefold()).split()).removesuffix(".").rstrip()


def scores_of(text: str, answers: Sequence[str]) -> dict[str, float]:
    """The ``scores`` of a request record: by name, 0 to 1; none without accepted answers."""
    return {EXACT_MATCH: exact_match(text, answers)} if answers else {}


def quality_of(run: Run, cell: str, *, seed: int = 0) -> Quality | None:
    """Exact match of a cell's answers over its complete repeats; None without scores.

    A request that failed after others of its cell were scored has no score. The interval is a bootstrap that draws
    whole questions (a question's repeats share its fate), or Wilson's over questions where all of them score the same,
    which a bootstrap would take for certainty.
    """
    scores = _scores(run, cell)
    if not scores:
        return None
    values = [score for _, _, score in scores]
    questions = [question for question, _, _ in scores]
    mean = sum(values) / len(values)
    count = len(set(questions))
    [(low, high)] = cluster_intervals(values, questions, (), seed) or [(mean, mean)]
    if high - low < _POINT:
        low, high = _wilson(mean, count)
    return Quality(mean, low, high, count)


def quality_difference(run: Run, cell: str, baseline: str) -> tuple[float, float, float] | None:
    """(difference, low, high): exact match of a cell less the baseline's, over requests that both have a score of.

    Paired by request and repeat, averaged within a question. The 95% interval is Agresti and Min's for matched
    proportions (Statistics in Medicine 24, 2005): Wald's after half an observation has been added to each outcome of a
    pair, here half a win, half a loss and one tie. It stays honest where no answer differs: a bootstrap would then be
    certain after one question. None without a common request.
    """
    ours = {(question, key): score for question, key, score in _scores(run, cell)}
    theirs = {(question, key): score for question, key, score in _scores(run, baseline)}
    by_question: dict[object, list[float]] = defaultdict(list)
    for pair in ours.keys() & theirs.keys():
        by_question[pair[0]].append(ours[pair] - theirs[pair])
    if not by_question:
        return None
    means = [sum(values) / len(values) for values in by_question.values()]
    count = len(means) + 2
    centre = sum(means) / count
    spread = sqrt(((sum(mean**2 for mean in means) + 1) / count - centre**2) / count)
    return sum(means) / len(means), max(-1.0, centre - _Z * spread), min(1.0, centre + _Z * spread)


_Score = tuple[tuple[Any, ...], tuple[Any, ...], float]
"""(question, what tells its requests apart, score)."""


def _scores(run: Run, cell: str) -> list[_Score]:
    return [
        (_question(record), (record["repeat"], record["request"], record.get("replica", 0)), score)
        for key, records in run.requests.items()
        if key[0] == cell
        for record in records
        if record["error"] is None and (score := record.get("scores", {}).get(EXACT_MATCH)) is not None
    ]


def _question(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same documents and prompt are one question, whatever the request is called."""
    return (*record["image_sha256"], record["prompt_sha256"])


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of ``count``."""
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    reach = _Z / (1 + _Z**2 / count) * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)
