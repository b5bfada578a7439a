"""Parquet files, local or on an object store, and the Arrow files of Hugging Face ``datasets``, read with pyarrow.

Only a few rows are in memory at a time. Images are columns there: bytes in the table, or paths.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from panscan.core import DatasetError, UnsupportedError
from panscan.core.errors import brief
from panscan.core.files import replace_file
from panscan.core.installation import install_command
from panscan.images.storage import is_stored, open_object
from panscan.workload.rows import ANSWER_KEYS, MOST_ROWS, Boundary, LoadedDataset, is_file

IMAGES = ("image", "images")
QUESTIONS = ("question", "query")
IDS = ("questionId", "question_id", "id")
_ANSWERS = ("answers", "answer", "label")
_TYPES = ("question_types", "question_type", "human_or_machine", "answer_type", "type")
_METRICS = (
    ({"human_or_machine"}, "relaxed_accuracy"),  # ChartQA
    ({"query", "label"}, "relaxed_accuracy"),
    ({"question_types", "docId"}, "anls"),  # DocVQA
    ({"question_types", "ucsf_document_id"}, "anls"),
    ({"answer_type", "operation/reasoning"}, "anls"),  # InfographicVQA
    ({"image_id", "flickr_300k_url"}, "vqa_accuracy"),  # TextVQA
    ({"image_id", "image_classes"}, "vqa_accuracy"),
)
_CHARTQA_TYPES = {"human_test", "augmented_test"}
_MACHINE = ("human", "machine")
_SUFFIXES = (
    (b"\x89PNG", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"%PDF", ".pdf"),
    (b"RIFF", ".webp"),
)
OTHER_TABLES = (".csv", ".tsv", ".xlsx")
"""Suffixes of tables that are neither read nor written."""

_TEXT = ("string", "large_string", "string_view", "null")
_ANSWER = (*_TEXT, "bool", "int", "uint", "halffloat", "float", "double", "decimal", "date", "time")
_IMAGE = ("binary", "large_binary", "fixed_size_binary", "string", "large_string", "null")
_LARGEST_VALUE = 128 * 2**20  # bytes, as of an image
_IMAGE_ROWS = 16  # rows whose images are read at once
_TEXT_ROWS = 250
_BUFFER_BYTES = 8 * 2**20


def is_table(source: str) -> bool:
    """Return whether a source names Parquet files."""
    return source.lower().endswith(".parquet")


class TableFile:
    """A Parquet or Arrow file.

    Args:
        source: path or URL.
        boundary: folders that the images of rows may be in, unless the table is on an object store.
        called: name in messages; default: the source.

    Attributes:
        rows: number of rows.
        names: names of the columns.

    Raises:
        DatasetError: the file cannot be read.
        StorageError: the object store refused a request or did not answer.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(self, source: str, boundary: Boundary, called: str = "") -> None:
        self.source, self.called, self._boundary = source, called or source, boundary
        self._pa = require_pyarrow(self.called)
        with self._reading():
            if is_table(source):
                file = self._parquet()
                self._schema, self._metadata = file.schema_arrow, file.metadata
                groups = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
            else:
                with self._pa.memory_map(source) as stream:
                    self._schema, batches = _arrow_batches(stream)
                    self._metadata, groups = None, [sum(batch.num_rows for batch in batches)]
        self.rows = sum(groups)
        self.names: list[str] = self._schema.names
        self._group_starts = [0, *accumulate(groups)]
        self._image = ""
        self._images: Iterator[Any] | None = None
        self._next = 0  # next row of _images

    def column(self, usual: Sequence[str], given: str | None = None, option: str = "") -> str | None:
        """Return the column that the user names, else the first with a usual name, else None.

        Raises:
            DatasetError: there is no column of the given name, or there are several of the name.
        """
        name = next((name for name in (usual if given is None else (given,)) if name in self.names), None)
        if name is None and given is not None:
            raise self.lacks((given,), option)
        if name is not None and self.names.count(name) > 1:
            raise DatasetError(f"{self.called}: several columns are named {name!r}: rename all but one")
        return name

    def lacks(self, wanted: Sequence[str], option: str = "") -> DatasetError:
        """Return the error of a column that the table must have."""
        fix = f": choose one with {option}" if option else ""
        missing = " or ".join(map(repr, wanted))
        return DatasetError(f"{self.called}: no column {missing}; it has {', '.join(self.names)}{fix}")

    def image_column(self, given: str | None = None, option: str = "") -> str:
        """Return the column of images, and read images from it.

        Raises:
            DatasetError: see :meth:`column`; also if the table has none, or it holds no images.
        """
        name = self.column(IMAGES, given, option)
        if name is None:
            raise self.lacks(IMAGES, option)
        kind = self._schema.field(name).type
        inner = kind.value_type if _is_list(kind) else kind
        fields = [field.name for field in inner] if str(inner).startswith("struct<") else []
        if not {"bytes", "path"} & {*fields} and not str(inner).startswith(_IMAGE):
            fix = f": choose another with {option}" if option else ""
            content = "images (bytes, or structs of bytes and path)"
            raise DatasetError(f"{self.called}: column {name!r} is {kind}, not {content}{fix}")
        self._image = name
        return name

    def check_text(self, name: str | None, *, answers: bool = False) -> None:
        """Refuse a column that holds no text (or answers), instead of counting every row as incomplete."""
        kind = None if name is None else self._schema.field(name).type
        refused = None if kind is None else _no_answer(kind) if answers else None if _is_leaf(kind, _TEXT) else kind
        if refused is not None:
            raise DatasetError(f"{self.called}: column {name!r} is {refused}, not text")

    def check_sizes(self, names: Collection[str], most_rows: int) -> None:
        """Check that rows of a Parquet file fit into memory, by its footer.

        Args:
            names: columns that will be read.
            most_rows: maximum number of rows.

        Raises:
            DatasetError: there are more rows, or the values of a column have more than 128 MiB on average.
        """
        if self.rows > most_rows:
            raise DatasetError(f"{self.called}: {self.rows:,} rows, at most {most_rows:,}: split the table")
        metadata = self._metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)) if metadata is not None else ():
            for column in map(group.column, range(group.num_columns)):
                large = column.total_uncompressed_size > _LARGEST_VALUE * max(1, column.num_values)
                if large and column.path_in_schema.split(".")[0] in names:
                    size = f"{column.total_uncompressed_size:,} bytes in {column.num_values:,} values"
                    raise DatasetError(f"{self.called}: column {column.path_in_schema!r} has {size}: too large")

    def records(self, names: Sequence[str], group: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows from a row group to the end, with these columns only."""
        rows = _IMAGE_ROWS if self._image in names else _TEXT_ROWS
        with self._reading():
            if self._metadata is not None:
                with self._parquet() as file:
                    groups = list(range(group, self._metadata.num_row_groups))
                    for batch in file.iter_batches(rows, columns=list(names), row_groups=groups):
                        yield from batch.to_pylist()
                return
            with self._pa.memory_map(self.source) as stream:
                for batch in _arrow_batches(stream)[1]:
                    chosen = batch.select(list(names))
                    for start in range(0, chosen.num_rows, rows):
                        yield from chosen.slice(start, rows).to_pylist()

    def images(self, row: int) -> tuple[bytes | str, ...]:
        """Return the images of a row, bytes or paths; none if one is missing. Sequential calls read the file once.

        Raises:
            DatasetError: the file cannot be read, or the row references an image outside the boundary.
            StorageError: the object store failed.
        """
        group = bisect_right(self._group_starts, row) - 1
        if self._images is None or not self._group_starts[group] <= self._next <= row:
            self._next = self._group_starts[group]
            self._images = (record[self._image] for record in self.records([self._image], group))
        skipped = row - self._next
        self._next = row + 1
        try:
            value = next(islice(self._images, skipped, None), None)  # None: the file was truncated meanwhile
        except BaseException:
            self.close()  # a generator that raised is exhausted: the next row opens the file again
            raise
        images: list[bytes | str] = []
        for image in value if isinstance(value, list) else [value]:
            fields = image if isinstance(image, Mapping) else {"bytes": image, "path": image}
            content, path = fields.get("bytes"), fields.get("path")
            if isinstance(content, bytes) and content:
                images.append(content)
            elif not isinstance(path, str) or not path:
                return ()
            elif "://" not in path and is_stored(self.source):
                images.append(f"{self.source.rpartition('/')[0]}/{path}")
            else:
                path = path if "://" in path else str(Path(self.source).parent / path)
                self._boundary.check(path, f"{self.called}, row {row + 1}")
                images.append(path)
        return tuple(images)

    def close(self) -> None:
        """Release images that were read in advance. A closed table reopens on the next read."""
        self._images = None

    def _parquet(self) -> Any:
        from pyarrow import parquet

        source = open_object(self.source) if is_stored(self.source) else self.source
        return parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert errors of reading to one line with the file's name."""
        try:
            yield
        except (self._pa.ArrowException, OSError) as error:
            raise DatasetError(f"{self.called}: not a readable Parquet or Arrow file: {brief(error)}") from error


def read_tables(files: Sequence[Path], loaded: LoadedDataset) -> None:
    """Take the rows of tables that have a column of images and one of questions; other columns are not read.

    The metric follows from the columns, where they are those of a dataset that is known.

    Raises:
        DatasetError: a file cannot be read, or has no such columns, or questions or answers that are no text.
        UnsupportedError: pyarrow is missing.
    """
    types: set[str] = set()
    recent: list[TableFile] = []

    def images_of(table: TableFile, number: int) -> tuple[bytes | str, ...]:
        """Read a row's images. Of all files, only the one that was read last stays open."""
        if recent and recent[0] is not table:
            recent[0].close()
        recent[:] = [table]
        return table.images(number)

    for path in files:
        table = TableFile(str(path), loaded.boundary, f"{loaded.called}: {path.name}")
        image = table.image_column()
        question, answers, row_id, type_ = map(table.column, (QUESTIONS, _ANSWERS, IDS, _TYPES))
        if question is None:
            raise table.lacks(QUESTIONS)
        table.check_text(question)
        table.check_text(answers, answers=True)
        wanted = [name for name in (question, answers, row_id, type_) if name is not None]
        table.check_sizes([image, *wanted], MOST_ROWS)
        metric = next((metric for known, metric in _METRICS if known <= {*table.names}), None)
        loaded.metric = metric or loaded.metric
        for number, record in enumerate(table.records(wanted)):
            tag = record.get(type_ or "")
            if type_ == "human_or_machine" and tag in (0, 1):
                tag = _MACHINE[tag]  # the number of a class
            types.add(str(tag))
            given = record.get(answers or "")
            loaded.add(
                record.get(row_id or ""),
                partial(images_of, table, number),
                record[question] or None,
                given,
                [("type", tag)],
                plain=not isinstance(given, list),
                people=metric == "vqa_accuracy",
            )
    if types & _CHARTQA_TYPES:
        loaded.metric = "relaxed_accuracy"


def picture_files(images: Sequence[bytes | str], folder: Path, called: str) -> list[str]:
    """Return the images of a row as files; none if one is missing.

    Bytes become files in ``folder``, named by their content, so that a run that is resumed finds the same names.

    Raises:
        DatasetError: the folder cannot be written.
    """
    names = []
    for image in images:
        if isinstance(image, str):
            names.append(image)
            continue
        suffix = next((suffix for magic, suffix in _SUFFIXES if image.startswith(magic)), "")
        path = folder / (hashlib.sha256(image).hexdigest()[:32] + suffix)
        names.append(str(path))
        try:
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                with replace_file(path, durable=False) as file:
                    file.write(image)
        except OSError as error:
            reason = f"{error.strerror} (PANSCAN_CACHE names another)"
            raise DatasetError(f"{called}: its pictures cannot be written to {folder}: {reason}") from error
    return names if all("://" in name or is_file(Path(name)) for name in names) else []


def _no_answer(kind: Any) -> Any:
    """Return the part of an Arrow type that cannot be read as text; None if there is none."""
    if str(kind).startswith("struct<"):
        key = next((key for key in ANSWER_KEYS if kind.get_field_index(key) >= 0), None)
        return None if key is None else _no_answer(kind.field(key).type)
    return _no_answer(kind.value_type) if _is_list(kind) else None if _is_leaf(kind, _ANSWER) else kind


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _is_leaf(kind: Any, names: tuple[str, ...]) -> bool:
    """Return whether an Arrow type, or the value type of a dictionary, has one of these names."""
    return str(kind.value_type if str(kind).startswith("dictionary<") else kind).startswith(names)


def _arrow_batches(stream: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the batches. ``datasets`` writes streams; others write files of random access."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(stream)
    except pa.ArrowInvalid:
        stream.seek(0)
        reader = pa.ipc.open_file(stream)
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema, iter(reader)


def require_pyarrow(called: str) -> Any:
    """Return the module pyarrow.

    Args:
        called: the file or option that needs it, for the message.

    Raises:
        UnsupportedError: pyarrow is missing.
    """
    try:
        import pyarrow
    except ImportError:
        needs = f"{called}: reading parquet and arrow files needs pyarrow: {install_command('datasets')}"
        raise UnsupportedError(needs) from None
    return pyarrow
