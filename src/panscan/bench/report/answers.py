"""What a report says of answers: each cell by every metric, against one cell, and by groups of questions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from panscan.bench.breakdowns import Breakdown, breakdowns
from panscan.bench.loss import losses
from panscan.bench.quality import Quality, empty_answers, metric_of, metrics_in, quality_of
from panscan.bench.records import Run
from panscan.bench.report.text import clean, percent
from panscan.bench.rows import Row
from panscan.bench.scores import METRICS

__all__ = ["Answers", "CellAnswers", "Groups", "answers_of", "quality_text"]


@dataclass(frozen=True, slots=True)
class CellAnswers:
    """A cell's answers: ``scores`` in the order of :attr:`Answers.metrics`, and words on it against the baseline.

    ``empty`` is None in runs of versions that did not count them.
    """

    number: int
    scores: tuple[Quality | None, ...]
    empty: int | None
    word: str
    against: str


@dataclass(frozen=True, slots=True)
class Groups:
    """A breakdown: headings with the number of questions, and the quality of each cell by its number."""

    name: str
    headings: tuple[str, ...]
    left_out: int
    rows: tuple[tuple[int, tuple[Quality | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a run.

    Args:
        metrics: titles of all metrics, that of the run's quality first.
        baseline: number of the cell that others are compared with; None where there is only one.
        cells: those with scores.
        groups: breakdowns by the run's metric of quality.
    """

    metrics: tuple[str, ...]
    baseline: int | None
    cells: tuple[CellAnswers, ...]
    groups: tuple[Groups, ...]


def answers_of(run: Run, rows: Sequence[Row], numbers: Mapping[str, int]) -> Answers | None:
    """The answers of the measured cells, whose numbers are given by id; None for a run without scores."""
    names = list(dict.fromkeys([metric_of(run), *metrics_in(run)]))
    scores = {row.cell: tuple(quality_of(run, row.cell, metric=name) for name in names) for row in rows}
    scored = [row for row in rows if any(scores[row.cell])]
    if not scored:
        return None
    views = {row.cell: row.metrics.values["mean_views"] or 0.0 for row in scored}
    compared = losses(run, [row.cell for row in scored], views.__getitem__)
    baseline, others = compared if compared is not None else (None, [])
    words = {each.cell: (each.word, each.text) for each in others}
    counted = "quality_metric" in run.header["settings"]
    empty = {row.cell: empty_answers(run, row.cell) if counted else None for row in scored}
    cells = tuple(
        CellAnswers(numbers[row.cell], scores[row.cell], empty[row.cell], *words.get(row.cell, ("", "")))
        for row in scored
    )
    return Answers(
        tuple(METRICS[name] for name in names),
        None if baseline is None else numbers[baseline],
        cells,
        tuple(_groups(each, numbers) for each in breakdowns(run, [row.cell for row in scored])),
    )


def _groups(found: Breakdown, numbers: Mapping[str, int]) -> Groups:
    headings = tuple(f"{clean(name)} ({count:,})" for name, count in found.groups)
    rows = tuple((numbers[cell], qualities) for cell, qualities in found.cells.items())
    return Groups(found.name, headings, found.left_out, rows)


def quality_text(quality: Quality | None) -> str:
    """``71.2% (68.9%–73.4%)``, or a dash."""
    if quality is None:
        return "-"
    return f"{percent(quality.mean)} ({percent(quality.low)}–{percent(quality.high)})"
