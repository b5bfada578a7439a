"""What a batch job asks: documents or rows of a dataset, found at once but opened one after the other."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from panscan.core import DatasetError, ImageError, SettingError
from panscan.core.request import MAX_PAGES
from panscan.images.fetch import named_url
from panscan.images.files import Page, expand_images, find_files
from panscan.quality.datasets import Boundary, dataset_rows

__all__ = ["BatchItem", "BatchWork", "find_work"]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One line of answers to be.

    Args:
        id: its own within the job: the document's name, or the row's id.
        images: what is opened, in order.
        named: the same as the user calls it (images of a dataset are relative to its file).
        question: of a row; None where the job has one prompt.
        problem: why it cannot be asked.
        document: the file that it is, or is a page of; None for a row.
    """

    id: str
    images: tuple[str, ...]
    named: tuple[str, ...]
    question: str | None = None
    problem: ImageError | None = None
    document: str | None = None


class BatchWork:
    """The items of a job in input order, once over. Files are opened to count their pages as the iteration gets there.

    Args:
        groups: the items of each file or row.
        count: files or rows.
        limit: items at most; None: all.
        files: every file or URL that the job reads.
        has_questions: each item brings its own.
    """

    def __init__(
        self,
        groups: Iterator[list[BatchItem]],
        count: int,
        limit: int | None,
        files: Sequence[str],
        *,
        has_questions: bool,
    ) -> None:
        self._groups, self._left, self._limit = groups, count, limit
        self._opened = 0
        self.files = files
        self.has_questions = has_questions

    @property
    def expected(self) -> int:
        """Items in all, as far as is known: a file that has not been opened counts as one."""
        known = self._opened + self._left
        return known if self._limit is None else min(known, self._limit)

    def __iter__(self) -> Iterator[BatchItem]:
        return islice(self._all(), self._limit)

    def _all(self) -> Iterator[BatchItem]:
        for group in self._groups:
            self._left -= 1
            self._opened += len(group)
            yield from group


def find_work(
    sources: Sequence[str],
    *,
    whole_files: bool,
    limit: int | None,
    on_problem: Callable[[ImageError], None],
    external_images: bool = False,
    max_pages: int = MAX_PAGES,
) -> BatchWork:
    """The work that a user's sources stand for.

    Args:
        sources: one dataset (``.jsonl``), or documents: directories, globs, files and URLs.
        whole_files: all pages of a document are one item. Otherwise each page is.
        limit: items at most.
        on_problem: told of each subdirectory that cannot be read.
        external_images: rows of the dataset may name URLs, and files outside its folder.
        max_pages: a document with more fails.

    Raises:
        SettingError: a dataset beside something else, or with ``whole_files``.
        InputError: a source stands for no document, is not there or cannot be opened, or the dataset cannot be used.
    """
    sources = [named_url(source) for source in sources]
    if any(_is_dataset(source) for source in sources):
        if len(sources) > 1:
            raise SettingError(f"a dataset stands alone: give {' '.join(sources)} to jobs of their own")
        if whole_files:
            raise SettingError("--whole-files does not go with a dataset: each row is one request already")
        items = _dataset(Path(sources[0]), external=external_images)
        files = [sources[0], *(image for item in items for image in item.images)]
        return BatchWork(([item] for item in items), len(items), limit, files, has_questions=True)
    found = [file for source in sources for file in _files(source, on_problem)]
    files = find_files(found, on_problem=on_problem)  # each once
    groups = (_document(file, max_pages, whole=whole_files) for file in files)
    return BatchWork(groups, len(files), limit, files, has_questions=False)


def _is_dataset(source: str) -> bool:
    return "://" not in source and source.lower().endswith(".jsonl")


def _files(source: str, on_problem: Callable[[ImageError], None]) -> list[str]:
    """The files of one source. A misspelt one is refused now, before a model is loaded for nothing."""
    problems: list[ImageError] = []
    files = find_files([source], on_problem=problems.append)
    if not files:
        raise problems[0] if problems else ImageError(f"{source}: no document found")
    if files == [source] and "://" not in source:
        # What is in a file shows when its turn comes; that it is there and may be read shows now.
        path = source if os.path.lexists(source) else re.sub("#page=[0-9]+$", "", source)
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):  # noqa: PTH113 - Path.is_file may raise
            expand_images([path])
    for problem in problems:
        on_problem(problem)
    return files


def _document(file: str, max_pages: int, *, whole: bool) -> list[BatchItem]:
    try:
        names = [page.name for page in expand_images([file], max_pages=max_pages) if isinstance(page, Page)]
    except ImageError as error:
        return [BatchItem(file, (file,), (file,), problem=error, document=file)]
    if whole:
        return [BatchItem(file, tuple(names), tuple(names), document=file)]
    return [BatchItem(name, (name,), (name,), document=file) for name in names]


def _dataset(path: Path, *, external: bool) -> list[BatchItem]:
    boundary = Boundary([path.parent], external=external)
    items: dict[str, BatchItem] = {}
    for number, row in enumerate(dataset_rows(path, str(path))):
        item_id = str(row.get("id", f"{number:05d}"))
        if item_id in items:
            raise DatasetError(f"{path}: two questions have the id {item_id!r}")
        if not row["question"].strip():  # every row has a line in the output: none is left out
            raise DatasetError(f"{path}: the question with the id {item_id!r} is empty")
        named = tuple(map(named_url, [row["image"]] if isinstance(row["image"], str) else row["image"]))
        images = tuple(name if "://" in name else str(path.parent / name) for name in named)
        for image in images:
            boundary.check(image, f"{path}, row {number + 1}")
        items[item_id] = BatchItem(item_id, images, named, row["question"])
    if not items:
        raise DatasetError(f"{path}: the file has no question")
    return list(items.values())
