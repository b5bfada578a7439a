"""Questions of a dataset that a run asks: drawn, their pictures opened, and what could not be used counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from panscan.bench.datasets import DatasetFacts, Embedded, Row, counted, load_dataset, write_pictures
from panscan.core import DatasetError, ImageError, InputError, cache_directory
from panscan.images.files import Page, find_pages, load_page, page_digest

__all__ = ["Document", "Questions", "dataset_items", "documents_of"]

_MOST_SAID = 8  # files that are named; the count has them all


@dataclass(frozen=True, slots=True)
class Document:
    """One picture of a workload: its name, size in pixels (upright) and the hash of its file."""

    name: str
    width: int
    height: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions with their documents, in the order of the dataset, and what became of the others.

    ``metric`` is the dataset's own.
    """

    questions: list[tuple[Row, tuple[Document, ...]]]
    facts: DatasetFacts
    metric: str


def dataset_items(
    path: Path,
    layout: str | None,
    split: str | None,
    count: int | None,
    seed: int,
    on_problem: Callable[[InputError], None],
) -> Questions:
    """The questions of a dataset, or ``count`` of them: a seeded draw, kept in order.

    Args:
        path: of the dataset.
        layout: see :func:`panscan.bench.datasets.load_dataset`.
        split: see there.
        count: at most so many; None for all.
        seed: of the draw.
        on_problem: told of the first few files that cannot be used, each once, and of how many more there are.

    Raises:
        InputError: the dataset cannot be read, or nothing usable is left.
    """
    loaded = load_dataset(path, layout=layout, split=split)
    rows = loaded.rows
    wanted = len(rows) if count is None else min(count, len(rows))
    opening = _Opening(f"--dataset {path}", on_problem)
    found: list[tuple[int, tuple[Document, ...]]] = []
    unreadable = 0
    order = _order(len(rows), wanted, seed)
    while len(found) < wanted and (numbers := order[: wanted - len(found)]):
        order = order[len(numbers) :]
        for number, documents in zip(numbers, opening.open([rows[number] for number in numbers]), strict=True):
            if documents:
                found.append((number, documents))
            else:
                unreadable += 1
    opening.finish()
    questions = [(rows[number], documents) for number, documents in sorted(found, key=lambda each: each[0])]
    facts = counted(loaded, [row for row, _ in questions], unreadable)
    if not questions:
        raise DatasetError(f"--dataset {path}: no usable question is left ({facts.text})")
    return Questions(questions, facts, loaded.metric)


def _order(rows: int, wanted: int, seed: int) -> list[int]:
    """The rows that are drawn, then the others in the order in which they take the places of bad ones."""
    if wanted == rows:
        return list(range(rows))
    draw = random.Random(seed)
    first = sorted(draw.sample(range(rows), wanted))
    drawn = set(first)
    rest = [number for number in range(rows) if number not in drawn]
    draw.shuffle(rest)
    return first + rest


class _Opening:
    """Opens pictures, each file once, and says what is wrong with the first few."""

    def __init__(self, called: str, on_problem: Callable[[InputError], None]) -> None:
        self._called = called
        self._on_problem = on_problem
        self._known: dict[str, list[Document]] = {}
        self._problems = 0

    def open(self, rows: Sequence[Row]) -> Iterator[tuple[Document, ...]]:
        """The documents of each row; nothing for one of which any picture cannot be read."""
        embedded = [row.images for row in rows if isinstance(row.images, Embedded)]
        folder = cache_directory() / "dataset-pictures"
        written = write_pictures(embedded, folder, self._called) if embedded else {}
        for row in rows:
            names = written[row.images] if isinstance(row.images, Embedded) else row.images
            pages = [self._documents(name) for name in names]
            yield tuple(document for each in pages for document in each) if all(pages) else ()

    def finish(self) -> None:
        if self._problems > _MOST_SAID:
            more = self._problems - _MOST_SAID
            self._on_problem(DatasetError(f"{self._called}: {more} more file{'' if more == 1 else 's'}"))

    def _documents(self, place: str) -> list[Document]:
        if place not in self._known:
            self._known[place] = documents_of(find_pages([place], on_problem=self._problem), self._problem)
        return self._known[place]

    def _problem(self, problem: InputError) -> None:
        self._problems += 1
        if self._problems <= _MOST_SAID:
            self._on_problem(problem)


def documents_of(pages: Sequence[Page], on_problem: Callable[[InputError], None]) -> list[Document]:
    """Pages as documents, each decoded once; ``on_problem`` is told of those that cannot be."""
    found = []
    for page in pages:
        try:
            width, height = load_page(page).size
            found.append(Document(page.name, width, height, page_digest(page)))
        except ImageError as error:
            on_problem(error)
    return found
