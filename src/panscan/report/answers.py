"""Answer quality as a report shows it: each cell against the baseline, and by groups of questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from panscan.analysis.cells import MeasuredCell
from panscan.analysis.significance import compare_with_baseline
from panscan.records.quality import (
    Quality,
    accuracy_title,
    empty_answers,
    metric_of,
    metrics_in,
    quality_of,
)
from panscan.records.schema import RequestRecord
from panscan.records.store import Run
from panscan.report.formatting import FEW, clean, percent

__all__ = [
    "SHAPES",
    "Answers",
    "Breakdown",
    "CellAnswers",
    "Groups",
    "answers_of",
    "breakdowns",
    "quality_text",
    "shape_of",
]

MOST_GROUPS = 12
"""The largest groups of a breakdown; more would not fit a page."""
_STEPS = (1.2, 2.0, 3.0)
"""Ends of the classes of longer over shorter side. Up to 1.2 Gemma 3's processor takes no crops."""
_RANGES = ("1.2–2", "2–3", "over 3")
SHAPES = (
    *(f"tall {each}" for each in reversed(_RANGES)),
    "square",
    *(f"wide {each}" for each in _RANGES),
    "several images",
)
"""Classes of pictures, from tall to wide; questions about several pictures form a separate class."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One way to group questions.

    Args:
        name: "question type", "kind of document" or "aspect ratio".
        groups: (name, questions) of each group that any cell has scores of.
        left_out: smaller groups that are not shown.
        cells: the quality in each group, in the order of ``groups``, by cell id; None where a cell has no score in one.
    """

    name: str
    groups: tuple[tuple[str, int], ...]
    left_out: int
    cells: Mapping[str, tuple[Quality | None, ...]]


def breakdowns(run: Run, cells: Sequence[str]) -> list[Breakdown]:
    """Every way of grouping that tells questions apart, by the run's metric of quality."""
    ways: tuple[tuple[str, Callable[[RequestRecord], Sequence[str]]], ...] = (
        ("question type", lambda request: request.tags.get("type", [])),
        ("kind of document", lambda request: request.tags.get("kind", [])),
        ("aspect ratio", lambda request: [shape] if (shape := shape_of(request)) else []),
    )
    found = (_breakdown(run, cells, name, groups_of) for name, groups_of in ways)
    return [each for each in found if len(each.groups) > 1]


def shape_of(request: RequestRecord) -> str | None:
    """One of :data:`SHAPES`; None where no size was kept."""
    sizes = [size for size in request.image_size if min(size) > 0]
    if len(sizes) != 1:
        return SHAPES[-1] if sizes else None
    [(width, height)] = sizes
    ratio = max(width, height) / min(width, height)
    if ratio < _STEPS[0]:
        return "square"
    return f"{'wide' if width > height else 'tall'} {_RANGES[sum(ratio >= step for step in _STEPS[1:])]}"


def _breakdown(
    run: Run, cells: Sequence[str], name: str, groups_of: Callable[[RequestRecord], Sequence[str]]
) -> Breakdown:
    questions: dict[str, set[object]] = defaultdict(set)
    for request in (request for cell in cells for request in run.answered(cell)):
        if request.scores:
            for group in groups_of(request):
                questions[group].add(request.question)
    largest = sorted(questions, key=lambda group: (-len(questions[group]), group))[:MOST_GROUPS]
    order = [shape for shape in SHAPES if shape in largest] if set(largest) <= set(SHAPES) else largest

    def within(cell: str, group: str) -> Quality | None:
        return quality_of(run, cell, among=lambda request: group in groups_of(request))

    by_group = [[within(cell, group) for cell in cells] for group in order]  # cells of a group share their draws
    return Breakdown(
        name,
        tuple((group, len(questions[group])) for group in order),
        len(questions) - len(order),
        {cell: tuple(column[at] for column in by_group) for at, cell in enumerate(cells)},
    )


@dataclass(frozen=True, slots=True)
class CellAnswers:
    """The answers of a cell.

    Args:
        name: the cell's settings in words.
        scores: in the order of :attr:`Answers.metrics`.
        empty: number of empty answers; None in runs of versions that did not count them.
        word: the comparison with the baseline, in a word.
        against: the comparison with its figures.
    """

    name: str
    scores: tuple[Quality | None, ...]
    empty: int | None
    word: str
    against: str


@dataclass(frozen=True, slots=True)
class Groups:
    """A breakdown.

    Args:
        name: how questions are grouped.
        headings: the groups, with their numbers of questions.
        least: number of questions in the smallest group.
        left_out: number of smaller groups that are not shown.
        rows: (settings in words, quality in each group).
    """

    name: str
    headings: tuple[str, ...]
    least: int
    left_out: int
    rows: tuple[tuple[str, tuple[Quality | None, ...]], ...]

    @property
    def small(self) -> bool:
        """Return whether a group has too few questions to compare settings."""
        return self.least < FEW


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a run.

    Args:
        metrics: titles of all metrics, that of the run's quality first.
        baseline: name of the cell that others are compared with; None if there is only one.
        cells: those with scores.
        groups: breakdowns by the run's metric of quality.
    """

    metrics: tuple[str, ...]
    baseline: str | None
    cells: tuple[CellAnswers, ...]
    groups: tuple[Groups, ...]


def answers_of(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]) -> Answers | None:
    """Return the answers of the measured cells; None for a run without scores.

    Args:
        run: the run.
        rows: measured cells.
        names: settings in words by cell id.
    """
    metrics = list(dict.fromkeys([metric_of(run), *metrics_in(run)]))
    scores = {row.cell: tuple(quality_of(run, row.cell, metric=metric) for metric in metrics) for row in rows}
    scored = [row for row in rows if any(scores[row.cell])]
    if not scored:
        return None
    views = {row.cell: row.metrics.values["mean_views"] or 0.0 for row in scored}
    compared = compare_with_baseline(run, [row.cell for row in scored], views.__getitem__)
    baseline, others = compared if compared is not None else (None, [])
    words = {each.cell: (each.word, each.text) for each in others}
    counted = run.header.settings.quality_metric is not None
    empty = {row.cell: empty_answers(run, row.cell) if counted else None for row in scored}
    cells = tuple(
        CellAnswers(names[row.cell], scores[row.cell], empty[row.cell], *words.get(row.cell, ("", "")))
        for row in scored
    )
    return Answers(
        tuple(map(accuracy_title, metrics)),
        None if baseline is None else names[baseline],
        cells,
        tuple(_groups(each, names) for each in breakdowns(run, [row.cell for row in scored])),
    )


def _groups(found: Breakdown, names: Mapping[str, str]) -> Groups:
    headings = tuple(f"{clean(name)} ({count:,})" for name, count in found.groups)
    rows = tuple((names[cell], qualities) for cell, qualities in found.cells.items())
    least = min(count for _, count in found.groups)
    return Groups(found.name, headings, least, found.left_out, rows)


def quality_text(quality: Quality | None) -> str:
    """``71.2% (68.9%–73.4%)``, or a dash."""
    if quality is None:
        return "-"
    return f"{percent(quality.mean)} ({percent(quality.low)}–{percent(quality.high)})"
