"""The work items of a batch job: documents or dataset rows, listed at startup and opened one at a time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from panscan.core import DatasetError, ImageError, InputError, SettingError
from panscan.core.daemons import run_in_daemon
from panscan.core.errors import OnProblem
from panscan.core.request import MAX_PAGES
from panscan.images.fetch import named_url
from panscan.images.files import ONE_PAGE_SUFFIXES, Page, expand_images, find_files
from panscan.images.storage import MAX_OBJECTS, check_object, is_stored, local_path
from panscan.workload.datasets import dataset_rows
from panscan.workload.rows import Boundary, Row, beside
from panscan.workload.tables import IDS, OTHER_TABLES, QUESTIONS, TableFile, is_table

_PROMPTS = (*QUESTIONS, "prompt")
_AHEAD = 8  # stored documents to download in advance, to count their pages


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Column names from the command line; None: the first column with a usual name."""

    image: str | None = None
    id: str | None = None
    prompt: str | None = None


@dataclass(slots=True)
class BatchWork:
    """The items of a job in input order; can be iterated once. Files are opened during iteration to count their pages.

    Args:
        groups: items of each file or row.
        count: number of items; a file that has not been opened counts as one.
        limit: maximum number of items; None: all.
        files: all files and URLs that the job reads.
        has_questions: whether each item has its own prompt.
        lacking: what a table without prompts lacks; empty for documents.
    """

    groups: Iterator[list[Row]]
    count: int
    limit: int | None
    files: Sequence[str]
    has_questions: bool
    lacking: str = ""

    @property
    def expected(self) -> int:
        """Estimated number of items to yield."""
        return self.count if self.limit is None else min(self.count, self.limit)

    def __iter__(self) -> Iterator[Row]:
        return islice(self._all(), self.limit)

    def _all(self) -> Iterator[Row]:
        for group in self.groups:
            self.count += len(group) - 1
            yield from group


def find_work(
    sources: Sequence[str],
    *,
    whole_files: bool,
    limit: int | None,
    on_problem: OnProblem,
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
    if any("://" not in source and source.lower().endswith(".jsonl") for source in sources):
        if len(sources) > 1:
            raise SettingError(f"a dataset needs a separate job: do not combine {' '.join(sources)}")
        if whole_files:
            raise SettingError("--whole-files: not supported for datasets, where each row is one request")
        items = _dataset_items(Path(sources[0]), external=external_images)
        files = [sources[0], *(image for item in items if isinstance(item.images, tuple) for image in item.images)]
        return BatchWork(([item] for item in items), len(items), limit, files, has_questions=True)
    if other := next((source for source in sources if source.lower().endswith((*OTHER_TABLES, ".json"))), None):
        raise SettingError(f"{other}: tables are read as Parquet (.parquet) or JSON Lines (.jsonl): convert it")
    files = list(dict.fromkeys(file for source in sources for file in _source_files(source, on_problem)))
    if not all(map(is_stored, files)):  # object names may look like globs
        files = find_files(files, on_problem=on_problem)  # removes other names of a file
    groups = _opened_ahead(files, lambda file: _document_items(file, max_pages, as_one=whole_files))
    return BatchWork(groups, len(files), limit, files, has_questions=False)


def _source_files(source: str, on_problem: OnProblem) -> list[str]:
    """Return the files of one source, checked before the model is loaded.

    Raises:
        SettingError: the source is a dataset on an object store.
        InputError: the source contains no document, does not exist or cannot be opened.
    """
    if is_stored(source) and source.lower().endswith(".jsonl"):
        raise SettingError(f"{source}: JSON Lines can only be read from a local file: download it first")
    problems: list[InputError] = []
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
    on_problem: OnProblem,
    has_prompt: bool,
    *,
    external: bool,
) -> BatchWork:
    if has_prompt and columns.prompt is not None:
        raise SettingError("--prompt-column and --prompt exclude each other: give one of them")
    files: dict[str, None] = {}
    for source in sources:  # an object's name is not checked: reading it shows whether it exists
        named = is_stored(source) and not ("*" in source or "?" in source)
        files |= dict.fromkeys([source] if named else _source_files(source, on_problem))
    tables = [_asked_table(file, columns, has_prompt=has_prompt, external=external) for file in files]
    if len({table.prompt is None for table in tables}) > 1:
        raise SettingError("some Parquet files have prompts and others do not: use --prompt, or separate jobs")
    known: set[str] = set()
    for row in chain.from_iterable(map(_table_rows, tables)):  # before any request: jobs are resumed by id
        if row.id in known:
            raise DatasetError(f"{row.named[0]}: another row has the id {row.id!r}: choose another --id-column")
        known.add(row.id)
    groups = ([row] for asked in tables for row in _table_rows(asked))
    first = tables[0]
    has_prompts = first.prompt is not None
    lacking = f"{first.table.lacks(_PROMPTS, '--prompt-column')}, or give one prompt with -p"
    lacking = "" if has_prompts or has_prompt else lacking
    return BatchWork(groups, len(known), limit, list(files), has_questions=has_prompts, lacking=lacking)


class _AskedTable(NamedTuple):
    """A Parquet file, and its columns of ids and of prompts, which it may lack."""

    table: TableFile
    id: str | None
    prompt: str | None


def _asked_table(file: str, columns: TableColumns, *, has_prompt: bool, external: bool) -> _AskedTable:
    table = TableFile(file, Boundary([] if is_stored(file) else [Path(file).parent], external=external))
    image = table.image_column(columns.image, "--image-column")
    row_id = table.column(IDS, columns.id, "--id-column")
    prompt = None if has_prompt else table.column(_PROMPTS, columns.prompt, "--prompt-column")
    table.check_text(prompt)
    table.check_sizes([name for name in (image, row_id, prompt) if name is not None], MAX_OBJECTS)
    return _AskedTable(table, row_id, prompt)


def _table_rows(asked: _AskedTable) -> Iterator[Row]:
    """Yield the rows of a table, with their images unread.

    Raises:
        DatasetError: a row has no id.
    """
    table, id_column, prompt = asked
    names = [name for name in (id_column, prompt) if name is not None]
    for number, record in enumerate(table.records(names) if names else repeat({}, table.rows)):
        name = f"{table.source}#row={number + 1}"
        row_id = name if id_column is None else record[id_column]
        if row_id is None or row_id == "":
            raise DatasetError(f"{name}: column {id_column!r} is empty: every row needs an id")
        question = None if prompt is None else record[prompt] or ""
        is_empty = question is not None and not question.strip()
        problem = DatasetError(f"{name}: the prompt is empty") if is_empty else None
        yield Row(str(row_id), partial(table.images, number), question, named=(name,), problem=problem)
    table.close()


def _opened_ahead(files: Iterable[str], document: Callable[[str], list[Row]]) -> Iterator[list[Row]]:
    """Yield the items of each file in order. Stored multi-page documents are downloaded a few in advance."""
    waiting: deque[Callable[[], list[Row]]] = deque()
    rest = iter(files)
    while True:
        for file in islice(rest, _AHEAD - len(waiting)):
            opened = partial(document, file)
            waiting.append(run_in_daemon(opened, "panscan-storage").result if _has_pages(file) else opened)
        if not waiting:
            return
        yield waiting.popleft()()


def _has_pages(file: str) -> bool:
    """Return whether a stored document may have several pages, which requires a download to count them."""
    return is_stored(file) and PurePosixPath(file).suffix.lower() not in ONE_PAGE_SUFFIXES


def _document_items(file: str, max_pages: int, *, as_one: bool) -> list[Row]:
    try:
        names = [file]
        if not is_stored(file) or _has_pages(file):
            names = [page.name for page in expand_images([file], max_pages=max_pages) if isinstance(page, Page)]
    except ImageError as error:
        return [Row(file, (file,), named=(file,), problem=error, document=file)]
    items = {file: tuple(names)} if as_one else {name: (name,) for name in names}
    return [Row(item, images, named=images, document=file) for item, images in items.items()]


def _dataset_items(path: Path, *, external: bool) -> list[Row]:
    boundary = Boundary([path.parent], external=external)
    items: dict[str, Row] = {}
    for number, row in enumerate(dataset_rows(path, str(path))):
        item_id = str(row.get("id", f"{number:05d}"))
        if item_id in items:
            raise DatasetError(f"{path}: two questions have the id {item_id!r}")
        if not row["question"].strip():  # not skipped: every row has a line in the output
            raise DatasetError(f"{path}: the question with the id {item_id!r} is empty")
        named = tuple(map(named_url, row["image"]))
        images = beside(path, named)
        for image in images:
            boundary.check(image, f"{path}, row {number + 1}")
        items[item_id] = Row(item_id, images, row["question"], named=named)
    if not items:
        raise DatasetError(f"{path}: the file has no questions")
    return list(items.values())
