"""How right a cell's answers are: the mean of one metric over its questions, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from panscan.core import SettingError
from panscan.records.fields import EXACT_MATCH, METRICS
from panscan.records.intervals import wilson_interval
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.settings import nearest

ANNOTATORS = 10
"""Answers of a question that has ``vqa_accuracy``: one per annotator."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A metric's mean over requests with a score, 0 to 1, and its 95% interval.

    ``questions`` counts different questions; repeats of one are not more evidence about others.
    """

    mean: float
    low: float
    high: float
    questions: int


def metrics_for(answers: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics of a question with these accepted answers, in the order of :data:`METRICS`."""
    return tuple(name for name in METRICS if answers and (name != "vqa_accuracy" or len(answers) == ANNOTATORS))


def metric_of(run: Run) -> str:
    """Return a run's quality metric: the one in its header; exact match in older runs without one."""
    name = run.header.settings.quality_metric
    return name if name in METRICS else EXACT_MATCH


def metric_title(run: Run) -> str:
    """Return the display name of :func:`metric_of`: see :func:`accuracy_title`."""
    return accuracy_title(metric_of(run))


def accuracy_title(metric: str) -> str:
    """Return the column title of a metric, such as ``accuracy (exact match)``; distinct from the verdict *exact*."""
    return f"accuracy ({METRICS[metric].removesuffix(' accuracy')})"


def metrics_in(run: Run) -> list[str]:
    """Return the metrics with a score in any request, in the order of :data:`panscan.records.fields.METRICS`."""
    known = {name for requests in run.requests.values() for request in requests for name in request.scores}
    return [name for name in METRICS if name in known]


def with_metric(run: Run, name: str | None, max_accuracy_loss: float | None = None) -> Run:
    """Return the run with another metric as its quality and another loss to exclude, in points; None: unchanged.

    Raises:
        SettingError: no such metric, or the run's answers were not scored by it.
    """
    if name is not None and name not in METRICS:
        raise SettingError(f"--quality-metric takes {', '.join(METRICS)}; got {name!r}{nearest(name, METRICS)}")
    if name is not None and name not in (known := metrics_in(run)):
        has = f"its answers have {', '.join(known)}" if known else "its dataset has no answers"
        raise SettingError(f"--quality-metric {name}: not in {run.path}: {has}")
    asked = {"quality_metric": name, "max_accuracy_loss": max_accuracy_loss}
    changes = {setting: value for setting, value in asked.items() if value is not None}
    if not changes:
        return run
    settings = msgspec.structs.replace(run.header.settings, **changes)
    return replace(run, header=msgspec.structs.replace(run.header, settings=settings))


def empty_answers(run: Run, cell: str) -> int:
    """Requests of a cell whose answer was empty, which counts as wrong."""
    return sum(request.empty for request in run.answered(cell))


def quality_of(
    run: Run, cell: str, *, metric: str | None = None, among: Callable[[RequestRecord], bool] | None = None
) -> Quality | None:
    """Return a metric of a cell's answers over its complete repeats; None without scores.

    A request that failed after others of its cell were scored has no score. The interval is Wilson's over questions,
    as a question's repeats share its fate. For scores between 0 and 1, which vary less than right and wrong answers of
    the same mean, it is rather too wide than too narrow.

    Args:
        run: run with scored answers.
        cell: id of the cell.
        metric: name of the metric; None: the run's own (:func:`metric_of`).
        among: which requests count; None for all.
    """
    name = metric or metric_of(run)
    scored = [request for request in filter(among, run.answered(cell)) if name in request.scores]
    if not scored:
        return None
    mean = sum(request.scores[name] for request in scored) / len(scored)
    count = len({request.question for request in scored})
    return Quality(mean, *wilson_interval(mean, count), count)
