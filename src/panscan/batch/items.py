"""What a batch job asks: documents or rows of a dataset, found at once but opened one after the other."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from panscan.batch.tables import ParquetTable, RowImages, TableColumns, is_table
from panscan.core import DatasetError, ImageError, InputError, SettingError
from panscan.core.request import MAX_PAGES
from panscan.engine.daemons import DaemonThreads
from panscan.images.fetch import named_url
from panscan.images.files import SUFFIXES, Page, expand_images, find_files
from panscan.images.storage import check_object, is_stored, local_path
from panscan.quality.datasets import Boundary, dataset_rows

__all__ = ["BatchItem", "BatchWork", "find_work"]

_ONE_PAGE = SUFFIXES - {".pdf", ".tif", ".tiff"}
_AHEAD = 8  # stored documents that are downloaded ahead to count their pages


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One line of answers to be.

    Args:
        id: its own within the job: the document's name, or the row's id.
        images: what is opened, in order; of a table's row its images, which are read when it is asked about.
        named: the same as the user calls it (images of a dataset are relative to its file).
        question: of a row; None where the job has one prompt.
        problem: why it cannot be asked.
        document: the file that it is, or is a page of; None for a row.
    """

    id: str
    images: tuple[str, ...] | RowImages
    named: tuple[str, ...]
    question: str | None = None
    problem: InputError | None = None
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
    columns: TableColumns | None = None,
    has_prompt: bool = False,
) -> BatchWork:
    """The work that a user's sources stand for.

    Args:
        sources: one dataset (``.jsonl``), Parquet files, or documents: directories, globs, files and URLs, also those
            of object stores.
        whole_files: all pages of a document are one item. Otherwise each page is.
        limit: items at most.
        on_problem: receives the error of each unreadable subdirectory.
        external_images: rows of the dataset may name URLs, and files outside its folder.
        max_pages: a document with more fails.
        columns: columns of Parquet files that the user named; None if there are none.
        has_prompt: whether the job has one prompt, so that the prompts of Parquet files are ignored.

    Raises:
        SettingError: a dataset or Parquet files beside something else, or with ``whole_files``.
        InputError: a source stands for no document, is not there or cannot be opened, or the dataset cannot be used.
    """
    sources = [named_url(local_path(source)) for source in sources]
    if any(is_table(source) for source in sources):
        if not all(is_table(source) for source in sources):
            raise SettingError(f"Parquet files need a separate job: do not combine {' '.join(sources)}")
        if whole_files:
            raise SettingError("--whole-files: not supported for Parquet files, where each row is one request")
        return _table_work(sources, columns or TableColumns(), limit, on_problem, has_prompt, external=external_images)
    if columns is not None:
        raise SettingError("--image-column, --id-column and --prompt-column are for Parquet files (.parquet)")
    if any(_is_dataset(source) for source in sources):
        if len(sources) > 1:
            raise SettingError(f"a dataset stands alone: give {' '.join(sources)} to jobs of their own")
        if whole_files:
            raise SettingError("--whole-files does not go with a dataset: each row is one request already")
        items = _dataset(Path(sources[0]), external=external_images)
        files = [sources[0], *(image for item in items if isinstance(item.images, tuple) for image in item.images)]
        return BatchWork(([item] for item in items), len(items), limit, files, has_questions=True)
    found = [file for source in sources for file in _files(source, on_problem)]
    if all(is_stored(file) for file in found):  # their names are unique, and may look like globs
        files = list(dict.fromkeys(found))
    else:
        files = find_files(found, on_problem=on_problem)  # each once
    groups = _opened(files, lambda file: _document(file, max_pages, whole=whole_files))
    return BatchWork(groups, len(files), limit, files, has_questions=False)


def _is_dataset(source: str) -> bool:
    return "://" not in source and source.lower().endswith(".jsonl")


def _files(source: str, on_problem: Callable[[ImageError], None]) -> list[str]:
    """The files of one source. A misspelt one is refused now, before a model is loaded for nothing."""
    if is_stored(source) and source.lower().endswith(".jsonl"):
        raise SettingError(f"{source}: JSON Lines can only be read from a local file: download it first")
    problems: list[ImageError] = []
    files = find_files([source], on_problem=problems.append)
    if not files:
        raise problems[0] if problems else ImageError(f"{source}: no document found")
    if files == [source] and "://" not in source:
        # What is in a file shows when its turn comes; that it is there and may be read shows now.
        path = source if os.path.lexists(source) else re.sub("#page=[0-9]+$", "", source)
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):  # noqa: PTH113 - Path.is_file may raise
            expand_images([path])
    elif files == [source] and is_stored(source):
        check_object(re.sub("#page=[0-9]+$", "", source))
    for problem in problems:
        on_problem(problem)
    return files


def _table_work(
    sources: Sequence[str],
    columns: TableColumns,
    limit: int | None,
    on_problem: Callable[[ImageError], None],
    has_prompt: bool,
    *,
    external: bool,
) -> BatchWork:
    if has_prompt and columns.prompt is not None:
        raise SettingError("--prompt-column and --prompt exclude each other: give one of them")
    prompts = True if columns.prompt is not None else False if has_prompt else None
    files = list(dict.fromkeys(file for source in sources for file in _table_files(source, on_problem)))
    tables = [ParquetTable(file, columns, prompts=prompts, external=external) for file in files]
    if len({table.has_prompts for table in tables}) > 1:
        raise SettingError("some of the Parquet files have prompts and others do not: give --prompt or separate jobs")
    _refuse_repeated_ids(tables)
    rows = sum(table.rows for table in tables)
    return BatchWork(_table_items(tables), rows, limit, files, has_questions=tables[0].has_prompts)


def _table_files(source: str, on_problem: Callable[[ImageError], None]) -> list[str]:
    glob = "*" in source or "?" in source
    return _files(source, on_problem) if glob or not is_stored(source) else [source]


def _refuse_repeated_ids(tables: Iterable[ParquetTable]) -> None:
    """Check the ids of all rows before anything is asked; a job resumes by them."""
    known: set[str] = set()
    for table in tables:
        for row in table:
            if row.id in known:
                raise DatasetError(f"{row.name}: another row has the id {row.id!r}: choose another --id-column")
            known.add(row.id)


def _table_items(tables: Iterable[ParquetTable]) -> Iterator[list[BatchItem]]:
    for table in tables:
        for row in table:
            empty = row.prompt is not None and not row.prompt.strip()
            problem = DatasetError(f"{row.name}: the prompt is empty") if empty else None
            yield [BatchItem(row.id, row.images, (row.name,), row.prompt, problem)]
        table.close()


def _opened(files: Iterable[str], document: Callable[[str], list[BatchItem]]) -> Iterator[list[BatchItem]]:
    """Yield the items of each file in order. Stored documents of several pages are downloaded a few ahead."""
    threads = DaemonThreads(_AHEAD, "panscan-storage")
    waiting: deque[tuple[str, Future[list[BatchItem]] | None]] = deque()
    rest = iter(files)
    try:
        while True:
            for file in islice(rest, _AHEAD - len(waiting)):
                ahead = _has_pages(file)
                waiting.append((file, _submitted(threads, document, file) if ahead else None))
            if not waiting:
                return
            file, future = waiting.popleft()
            yield document(file) if future is None else future.result()
    finally:
        threads.shutdown()


def _submitted(
    threads: DaemonThreads, document: Callable[[str], list[BatchItem]], file: str
) -> Future[list[BatchItem]]:
    future: Future[list[BatchItem]] = Future()

    def run() -> None:
        try:
            future.set_result(document(file))
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)

    threads.submit(run)
    return future


def _has_pages(file: str) -> bool:
    """Return whether a stored document may have several pages, so that it is downloaded to count them."""
    return is_stored(file) and PurePosixPath(file).suffix.lower() not in _ONE_PAGE


def _document(file: str, max_pages: int, *, whole: bool) -> list[BatchItem]:
    if is_stored(file) and not _has_pages(file):
        return [BatchItem(file, (file,), (file,), document=file)]
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
