"""Quality by what a question is about and what its picture looks like: type, kind of document, aspect ratio. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from panscan.bench.quality import Quality, quality_of, question_of
from panscan.bench.records import Record, Run

__all__ = ["SHAPES", "Breakdown", "breakdowns", "shape_of"]

MOST_GROUPS = 12
"""The largest groups of a breakdown; more would not fit a page."""
_STEPS = (1.2, 2.0, 3.0)
"""Ends of the classes of longer over shorter side. Up to 1.2 Gemma 3's processor takes no crops."""
_RANGES = ("1.2–2", "2–3", "over 3")
SHAPES = (
    *(f"tall {each}" for each in reversed(_RANGES)), "square", *(f"wide {each}" for each in _RANGES), "several images",
)  # fmt: skip
"""Classes of pictures, from tall to wide; a question about several pictures is in a class of its own."""


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
    ways: tuple[tuple[str, Callable[[Record], Sequence[str]]], ...] = (
        ("question type", lambda record: _tags(record, "type")),
        ("kind of document", lambda record: _tags(record, "kind")),
        ("aspect ratio", lambda record: [shape] if (shape := shape_of(record)) else []),
    )
    found = (_breakdown(run, cells, name, groups_of) for name, groups_of in ways)
    return [each for each in found if len(each.groups) > 1]


def shape_of(record: Record) -> str | None:
    """One of :data:`SHAPES`; None where no size was kept."""
    sizes = [size for size in record.get("image_size") or () if len(size) == 2 and min(size) > 0]
    if len(sizes) != 1:
        return SHAPES[-1] if sizes else None
    [(width, height)] = sizes
    ratio = max(width, height) / min(width, height)
    if ratio < _STEPS[0]:
        return "square"
    return f"{'wide' if width > height else 'tall'} {_RANGES[sum(ratio >= step for step in _STEPS[1:])]}"


def _tags(record: Record, name: str) -> Sequence[str]:
    tags = record.get("tags")
    values = tags.get(name) if isinstance(tags, dict) else None
    return [str(value) for value in values] if isinstance(values, list) else []


def _breakdown(run: Run, cells: Sequence[str], name: str, groups_of: Callable[[Record], Sequence[str]]) -> Breakdown:
    questions: dict[str, set[object]] = defaultdict(set)
    for key, records in run.requests.items():
        for record in records if key[0] in cells else ():
            if record["error"] is None and record.get("scores"):
                for group in groups_of(record):
                    questions[group].add(question_of(record))
    largest = sorted(questions, key=lambda group: (-len(questions[group]), group))[:MOST_GROUPS]
    order = [shape for shape in SHAPES if shape in largest] if set(largest) <= set(SHAPES) else largest

    def within(cell: str, group: str) -> Quality | None:
        return quality_of(run, cell, among=lambda record: group in groups_of(record))

    by_group = [[within(cell, group) for cell in cells] for group in order]  # cells of a group share their draws
    return Breakdown(
        name,
        tuple((group, len(questions[group])) for group in order),
        len(questions) - len(order),
        {cell: tuple(column[at] for column in by_group) for at, cell in enumerate(cells)},
    )
