"""Answer quality as a report shows it: each cell against the baseline, and by groups of questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from panscan.analysis.accuracy import Standings
from panscan.analysis.cells import MeasuredCell
from panscan.core.text import capitalised
from panscan.records.quality import (
    Quality,
    accuracy_title,
    empty_answers,
    metric_of,
    metrics_in,
    quality_of,
)
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.report.formatting import FEW
from panscan.report.table import Column, Medium, Table, quality_cell

MOST_GROUPS = 12
"""The largest groups of a breakdown; more would not fit a page."""
_STEPS = (1.2, 2.0, 3.0)
"""Ends of the classes of longer over shorter side. Up to 1.2 Gemma 3's processor takes no crops."""
_RANGES = ("1.2–2", "2–3", "over 3")
SHAPES = (
    *(f"tall {label}" for label in reversed(_RANGES)),
    "square",
    *(f"wide {label}" for label in _RANGES),
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

    @property
    def least(self) -> int:
        """Return the number of questions in the smallest group."""
        return min(questions for _, questions in self.groups)

    @property
    def small(self) -> bool:
        """Return whether a group has too few questions to compare settings."""
        return self.least < FEW


def breakdowns(run: Run, cells: Sequence[str]) -> list[Breakdown]:
    """Every way of grouping that tells questions apart, by the run's metric of quality."""
    ways: tuple[tuple[str, Callable[[RequestRecord], Sequence[str]]], ...] = (
        ("question type", lambda request: request.tags.get("type", [])),
        ("kind of document", lambda request: request.tags.get("kind", [])),
        ("aspect ratio", lambda request: [shape] if (shape := shape_of(request)) else []),
    )
    groupings = (_breakdown(run, cells, name, groups_of) for name, groups_of in ways)
    return [grouping for grouping in groupings if len(grouping.groups) > 1]


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
        {cell: tuple(column[index] for column in by_group) for index, cell in enumerate(cells)},
    )


@dataclass(frozen=True, slots=True)
class CellAnswers:
    """The answers of a cell.

    Args:
        cell: its id.
        name: its settings in words.
        scores: in the order of :attr:`Answers.metrics`.
        empty: number of empty answers; None in runs of versions that did not count them.
        against: the comparison with the baseline, with its figures.
    """

    cell: str
    name: str
    scores: tuple[Quality | None, ...]
    empty: int | None
    against: str


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a run.

    Args:
        metrics: titles of all metrics, that of the run's quality first.
        baseline: name of the cell that others are compared with; None if there is only one.
        cells: those with scores.
        breakdowns: groups of questions, by the run's metric of quality.
    """

    metrics: tuple[str, ...]
    baseline: str | None
    cells: tuple[CellAnswers, ...]
    breakdowns: Callable[[], list[Breakdown]]

    @property
    def table(self) -> Table[CellAnswers]:
        """Return the table of every metric, and of each cell against the baseline."""
        columns = [
            _NAME,
            *(_quality_column(title, f"{title}, 95%", index) for index, title in enumerate(self.metrics)),
            Column("empty answers", lambda cell: cell.empty),
        ]
        if self.baseline is not None:
            columns.append(Column(f"against {self.baseline}", lambda cell: cell.against or "-", text=Medium.ALL))
        return Table(columns, self.cells)

    @property
    def grouped(self) -> list[tuple[str, Breakdown, Table[CellAnswers]]]:
        """Return each breakdown with its title and its table."""
        tables = []
        for grouping in self.breakdowns():
            headings = (f"{name} ({questions:,})" for name, questions in grouping.groups)
            columns = [_NAME, *(_quality_column(heading, "", index) for index, heading in enumerate(headings))]
            rows = [replace(cell, scores=grouping.cells[cell.cell]) for cell in self.cells]
            tables.append((f"{capitalised(self.metrics[0])} by {grouping.name}", grouping, Table(columns, rows)))
        return tables


_NAME: Column[CellAnswers] = Column("setting", lambda cell: cell.name, text=Medium.ALL)


def _quality_column(title: str, markdown: str, index: int) -> Column[CellAnswers]:
    return Column(title, lambda cell: quality_cell(cell.scores[index]), markdown=markdown)


def answers_of(run: Run, rows: Sequence[MeasuredCell], standings: Standings) -> Answers | None:
    """Return the answers of the measured cells; None for a run without scores."""
    names = {row.cell: row.name for row in rows}
    metrics = list(dict.fromkeys([metric_of(run), *metrics_in(run)]))
    scores = {row.cell: tuple(quality_of(run, row.cell, metric=metric) for metric in metrics) for row in rows}
    cells = [row.cell for row in rows if any(scores[row.cell])]
    if not cells:
        return None
    against = {cell: standing.text for cell, standing in standings.cells.items()}
    baseline = standings.baseline if against else None
    counted = run.header.settings.quality_metric is not None
    return Answers(
        tuple(map(accuracy_title, metrics)),
        None if baseline is None else names[baseline.cell],
        tuple(
            CellAnswers(
                cell, names[cell], scores[cell], empty_answers(run, cell) if counted else None, against.get(cell, "")
            )
            for cell in cells
        ),
        lambda: breakdowns(run, cells),
    )
