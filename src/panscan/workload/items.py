"""The work items of a batch job: documents or dataset rows, listed at startup and opened one at a time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from panscan.core import DatasetError, ImageError, InputError, SettingError
from panscan.core.daemons import DaemonThreads
from panscan.core.request import MAX_PAGES
from panscan.images.fetch import named_url
from panscan.images.files import SUFFIXES, Page, expand_images, find_files
from panscan.images.storage import check_object, is_stored, local_path
from panscan.workload.datasets import dataset_rows
from panscan.workload.parquet import ParquetTable, RowImages, TableColumns, is_table
from panscan.workload.rows import Boundary

_ONE_PAGE = SUFFIXES - {".pdf", ".tif", ".tiff"}
_AHEAD = 8  # stored documents to download in advance, to count their pages


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a job.

    Args:
        id: unique id: the name of the document or page, or the id of the row.
        images: paths or URLs to open, in order; for a table row, its images, read when the request is made.
        named: names of the images as the user wrote them (in a dataset, relative to its file).
        question: the row's own prompt; None if the job has one prompt.
        problem: error because of which the item cannot be answered.
        document: file of the document or page; None for a row.
    """

    id: str
    images: tuple[str, ...] | RowImages
    named: tuple[str, ...]
    question: str | None = None
    problem: InputError | None = None
    document: str | None = None


@dataclass(slots=True)
class BatchWork:
    """The items of a job in input order; can be iterated once. Files are opened during iteration to count their pages.

    Args:
        groups: items of each file or row.
        count: number of files or rows that have not been opened.
        limit: maximum number of items; None: all.
        files: all files and URLs that the job reads.
        has_questions: whether each item has its own prompt.
    """

    groups: Iterator[list[BatchItem]]
    count: int
    limit: int | None
    files: Sequence[str]
    has_questions: bool
    _opened: int = 0

    @property
    def expected(self) -> int:
        """Estimated number of items: a file that has not been opened counts as one."""
        known = self._opened + self.count
        return known if self.limit is None else min(known, self.limit)

    def __iter__(self) -> Iterator[BatchItem]:
        return islice(self._all(), self.limit)

    def _all(self) -> Iterator[BatchItem]:
        for group in self.groups:
            self.count -= 1
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
    """Return the work items of the sources.

    Args:
        sources: one dataset (``.jsonl``), Parquet files, or documents: directories, globs, files and URLs, including
            object store URLs.
        whole_files: make one item per document instead of one per page.
        limit: maximum number of items.
        on_problem: called for each subdirectory that cannot be read.
        external_images: whether dataset rows may reference URLs and files outside the dataset's folder.
        max_pages: maximum number of pages per document; documents with more fail.
        columns: columns of Parquet files from the command line; None if none was given.
        has_prompt: whether the job has one prompt, so that prompts in Parquet files are ignored.

    Raises:
        SettingError: a dataset or Parquet files are combined with other sources, or with ``whole_files``.
        InputError: a source contains no document, does not exist or cannot be opened, or the dataset is invalid.
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
            raise SettingError(f"a dataset needs a separate job: do not combine {' '.join(sources)}")
        if whole_files:
            raise SettingError("--whole-files: not supported for datasets, where each row is one request")
        items = _dataset_items(Path(sources[0]), external=external_images)
        files = [sources[0], *(image for item in items if isinstance(item.images, tuple) for image in item.images)]
        return BatchWork(([item] for item in items), len(items), limit, files, has_questions=True)
    files = list(dict.fromkeys(file for source in sources for file in _source_files(source, on_problem)))
    if not all(map(is_stored, files)):  # object names may look like globs
        files = find_files(files, on_problem=on_problem)  # removes other names of a file
    groups = _opened_ahead(files, lambda file: _document_items(file, max_pages, whole=whole_files))
    return BatchWork(groups, len(files), limit, files, has_questions=False)


def _is_dataset(source: str) -> bool:
    return "://" not in source and source.lower().endswith(".jsonl")


def _source_files(source: str, on_problem: Callable[[ImageError], None]) -> list[str]:
    """Return the files of one source, checked before the model is loaded.

    Raises:
        SettingError: the source is a dataset on an object store.
        InputError: the source contains no document, does not exist or cannot be opened.
    """
    if is_stored(source) and source.lower().endswith(".jsonl"):
        raise SettingError(f"{source}: JSON Lines can only be read from a local file: download it first")
    problems: list[ImageError] = []
    files = find_files([source], on_problem=problems.append)
    if not files:
        raise problems[0] if problems else ImageError(f"{source}: no document found")
    if files == [source] and "://" not in source:
        # Check only that the file exists and is readable; it is opened during iteration.
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
        raise SettingError("some Parquet files have prompts and others do not: use --prompt, or separate jobs")
    _refuse_repeated_ids(tables)
    rows = sum(table.rows for table in tables)
    return BatchWork(_table_items(tables), rows, limit, files, has_questions=tables[0].has_prompts)


def _table_files(source: str, on_problem: Callable[[ImageError], None]) -> list[str]:
    glob = "*" in source or "?" in source
    return _source_files(source, on_problem) if glob or not is_stored(source) else [source]


def _refuse_repeated_ids(tables: Iterable[ParquetTable]) -> None:
    """Refuse repeated ids before any request: jobs are resumed by id.

    Raises:
        DatasetError: two rows have the same id.
    """
    known: set[str] = set()
    for row_id, name, *_ in chain.from_iterable(tables):
        if row_id in known:
            raise DatasetError(f"{name}: another row has the id {row_id!r}: choose another --id-column")
        known.add(row_id)


def _table_items(tables: Iterable[ParquetTable]) -> Iterator[list[BatchItem]]:
    for table in tables:
        for row_id, name, prompt, images in table:
            is_empty = prompt is not None and not prompt.strip()
            problem = DatasetError(f"{name}: the prompt is empty") if is_empty else None
            yield [BatchItem(row_id, images, (name,), prompt, problem)]
        table.close()


def _opened_ahead(files: Iterable[str], document: Callable[[str], list[BatchItem]]) -> Iterator[list[BatchItem]]:
    """Yield the items of each file in order. Stored multi-page documents are downloaded a few in advance."""
    threads = DaemonThreads(_AHEAD, "panscan-storage")
    waiting: deque[Callable[[], list[BatchItem]]] = deque()
    rest = iter(files)
    try:
        while True:
            for file in islice(rest, _AHEAD - len(waiting)):
                opened = partial(document, file)
                waiting.append(_submitted(threads, opened).result if _has_pages(file) else opened)
            if not waiting:
                return
            yield waiting.popleft()()
    finally:
        threads.shutdown()


def _submitted(threads: DaemonThreads, work: Callable[[], list[BatchItem]]) -> Future[list[BatchItem]]:
    future: Future[list[BatchItem]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)

    threads.submit(run)
    return future


def _has_pages(file: str) -> bool:
    """Return whether a stored document may have several pages, which requires a download to count them."""
    return is_stored(file) and PurePosixPath(file).suffix.lower() not in _ONE_PAGE


def _document_items(file: str, max_pages: int, *, whole: bool) -> list[BatchItem]:
    if is_stored(file) and not _has_pages(file):
        return [BatchItem(file, (file,), (file,), document=file)]
    try:
        names = [page.name for page in expand_images([file], max_pages=max_pages) if isinstance(page, Page)]
    except ImageError as error:
        return [BatchItem(file, (file,), (file,), problem=error, document=file)]
    if whole:
        return [BatchItem(file, tuple(names), tuple(names), document=file)]
    return [BatchItem(name, (name,), (name,), document=file) for name in names]


def _dataset_items(path: Path, *, external: bool) -> list[BatchItem]:
    boundary = Boundary([path.parent], external=external)
    items: dict[str, BatchItem] = {}
    for number, row in enumerate(dataset_rows(path, str(path))):
        item_id = str(row.get("id", f"{number:05d}"))
        if item_id in items:
            raise DatasetError(f"{path}: two questions have the id {item_id!r}")
        if not row["question"].strip():  # not skipped: every row has a line in the output
            raise DatasetError(f"{path}: the question with the id {item_id!r} is empty")
        named = tuple(map(named_url, [row["image"]] if isinstance(row["image"], str) else row["image"]))
        images = tuple(name if "://" in name else str(path.parent / name) for name in named)
        for image in images:
            boundary.check(image, f"{path}, row {number + 1}")
        items[item_id] = BatchItem(item_id, images, named, row["question"])
    if not items:
        raise DatasetError(f"{path}: the file has no questions")
    return list(items.values())
