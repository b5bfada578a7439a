"""Parquet files as sources of a batch job. Only a few rows are in memory at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from panscan.core import DatasetError
from panscan.core.errors import brief
from panscan.images.storage import MAX_OBJECTS, is_stored, open_object
from panscan.workload.rows import Boundary
from panscan.workload.tables import IDS, IMAGES, QUESTIONS, check_table, image_bytes, require_pyarrow

_IMAGE_ROWS = 16  # rows whose images are read at once
_TEXT_ROWS = 250
_BUFFER_BYTES = 8 * 2**20
_IMAGE_TYPES = ("binary", "large_binary", "fixed_size_binary", "string", "large_string", "struct<")
_TEXTS = ("string", "large_string", "string_view", "null", "dictionary<values=string", "dictionary<values=large_string")


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Column names from the command line; None: the first column with a usual name."""

    image: str | None = None
    id: str | None = None
    prompt: str | None = None


RowImages = Callable[[], tuple[bytes | str, ...]]
"""Reads the images of a row, as :meth:`ParquetTable.images` does."""


def is_table(source: str) -> bool:
    """Return whether a source names Parquet files."""
    return source.lower().endswith(".parquet")


class ParquetTable:
    """A Parquet file, local or on an object store.

    Args:
        source: path or URL.
        columns: columns to read.
        prompts: True requires a prompt column, None uses one if it exists, False ignores it.
        external: whether rows may reference URLs and files outside the table's folder.

    Attributes:
        rows: number of rows.
        has_prompts: whether each row has its own prompt.

    Raises:
        DatasetError: the file cannot be read, or lacks a column.
        StorageError: the object store refused a request or did not answer.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(self, source: str, columns: TableColumns, *, prompts: bool | None, external: bool) -> None:
        self.source = source
        self._pa = require_pyarrow(source)
        self._boundary = None if is_stored(source) else Boundary([Path(source).parent], external=external)
        self._external = external
        with self._reading():
            file = self._open()
            schema, metadata = file.schema_arrow, file.metadata
        self.rows: int = metadata.num_rows
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group_starts = [0, *accumulate(groups)]
        self._image = self._column(schema, "--image-column", columns.image, IMAGES)
        self._id = self._column(schema, "--id-column", columns.id, IDS, required=False)
        usual = (*QUESTIONS, "prompt")
        prompt = self._column(schema, "--prompt-column", columns.prompt, usual, required=prompts is True)
        self._prompt: str | None = None if prompts is False else prompt
        self.has_prompts = self._prompt is not None
        self._check_types(schema)
        names = [name for name in (self._image, self._id, self._prompt) if name is not None]
        check_table(metadata, names, MAX_OBJECTS, source)
        self._images: Iterator[Any] | None = None
        self._next = 0  # next row of _images

    def __iter__(self) -> Iterator[tuple[str, str, str | None, RowImages]]:
        """Yield each row's unique id, its name (``pages.parquet#row=1``), its prompt or None, and its images, unread.

        Raises:
            DatasetError: a row has no id.
        """
        names = [name for name in (self._id, self._prompt) if name is not None]
        for number, row in enumerate(self._records(names) if names else ({} for _ in range(self.rows))):
            name = f"{self.source}#row={number + 1}"
            row_id = name if self._id is None else row[self._id]
            if row_id is None or row_id == "":
                raise DatasetError(f"{name}: column {self._id!r} is empty: every row needs an id")
            prompt = (row[self._prompt] or "") if self._prompt is not None else None
            yield str(row_id), name, prompt, partial(self.images, number)

    def images(self, row: int) -> tuple[bytes | str, ...]:
        """Return the images of a row: bytes, or paths where the table has paths. Sequential calls read the file once.

        Raises:
            DatasetError: the row has no image, or references one outside the table's folder.
            StorageError: the object store failed.
        """
        name = f"{self.source}#row={row + 1}"
        with self._reading():
            value = self._image_value(row)
        if value == []:
            raise DatasetError(f"{name}: column {self._image!r} has no image")
        return tuple(self._resolved(image, name) for image in (value if isinstance(value, list) else [value]))

    def close(self) -> None:
        """Release images that were read in advance. A closed table reopens on the next read."""
        self._images = None

    def _image_value(self, row: int) -> Any:
        group = bisect_right(self._group_starts, row) - 1
        if self._images is None or not self._group_starts[group] <= self._next <= row:
            self._next = self._group_starts[group]
            self._images = (row[self._image] for row in self._records([self._image], group))
        skipped = row - self._next
        self._next = row + 1
        try:
            return next(islice(self._images, skipped, None), None)  # None: the file was truncated meanwhile
        except BaseException:
            self.close()  # a generator that raised is exhausted: the next row opens the file again
            raise

    def _records(self, names: Sequence[str], group: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows from a row group to the end, with these columns only."""
        rows = _IMAGE_ROWS if self._image in names else _TEXT_ROWS
        with self._reading():
            file = self._open()
            groups = range(group, file.metadata.num_row_groups)
            for batch in file.iter_batches(rows, columns=list(names), row_groups=list(groups)):
                yield from batch.to_pylist()

    def _open(self) -> Any:
        from pyarrow import parquet

        source = open_object(self.source) if is_stored(self.source) else self.source
        return parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert errors of reading Parquet to one line with the file's name."""
        try:
            yield
        except (self._pa.ArrowException, OSError) as error:
            raise DatasetError(f"{self.source}: not a readable Parquet file: {brief(error)}") from error

    def _column(
        self, schema: Any, option: str, given: str | None, usual: Sequence[str], *, required: bool = True
    ) -> str:
        names: list[str] = schema.names
        wanted = usual if given is None else (given,)
        column = next((name for name in wanted if name in names), None)
        if column is None and (required or given is not None):
            missing = " or ".join(map(repr, wanted))
            raise DatasetError(
                f"{self.source}: no column {missing}; it has {', '.join(names)}: choose one with {option}"
            )
        if column is not None and names.count(column) > 1:
            raise DatasetError(f"{self.source}: several columns are named {column!r}: rename all but one")
        return column  # type: ignore[return-value]  # None only where it is not required

    def _check_types(self, schema: Any) -> None:
        kind = str(schema.field(self._image).type)
        inner = kind.removeprefix("large_").removeprefix("list<").partition(": ")[2] if "list<" in kind[:11] else kind
        if not inner.startswith(_IMAGE_TYPES) or (inner.startswith("struct<") and "bytes: " not in inner):
            raise DatasetError(
                f"{self.source}: column {self._image!r} is {kind}, not images (bytes, or structs of bytes and path):"
                " choose another with --image-column"
            )
        if self._prompt is not None and not (kind := str(schema.field(self._prompt).type)).startswith(_TEXTS):
            raise DatasetError(f"{self.source}: the prompts in column {self._prompt!r} are {kind}, not text")

    def _resolved(self, value: Any, name: str) -> bytes | str:
        if (content := image_bytes(value)) is not None:
            return content
        path = value.get("path") if isinstance(value, Mapping) else value
        if not isinstance(path, str) or not path:
            raise DatasetError(f"{name}: column {self._image!r} has no image")
        if "://" in path:
            if not self._external:
                raise DatasetError(f"{name}: the image {path} is a URL: allow it with --allow-external-images")
            return path
        if self._boundary is None:
            return f"{self.source.rpartition('/')[0]}/{path}"
        path = str(Path(self.source).parent / path)
        self._boundary.check(path, name)
        return path
