"""Parquet files, and the Arrow files of Hugging Face ``datasets`` (its cache, ``save_to_disk``), read with pyarrow.

Pictures are columns there: bytes in the table, or paths. Bytes become files of panscan's cache, named by their content,
so that a run that is resumed finds the same pictures under the same names.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from panscan.core import DatasetError, UnsupportedError
from panscan.core.errors import brief
from panscan.core.files import replace_file
from panscan.workload.rows import ANSWER_KEYS, MOST_ROWS, Boundary, Embedded, LoadedDataset, is_file

IMAGES = ("image", "images")
QUESTIONS = ("question", "query")
_ANSWERS = ("answers", "answer", "label")
IDS = ("questionId", "question_id", "id")
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
_ANSWER_TYPES = (
    "string",
    "large_string",
    "string_view",
    "null",
    "bool",
    "int",
    "uint",
    "halffloat",
    "float",
    "double",
    "decimal",
    "date",
    "time",
)
_LARGEST_VALUE = 128 * 2**20  # bytes, as of an image
_BATCH = 64  # rows held at once: their pictures are megabytes


def read(files: Sequence[Path], called: str, loaded: LoadedDataset) -> None:
    """Take the rows of tables that have a column of pictures and one of questions; other columns are not read.

    The metric follows from the columns, where they are those of a dataset that is known.

    Raises:
        DatasetError: a file cannot be read, or has no such columns, or questions or answers that are no text.
        UnsupportedError: pyarrow is missing.
    """
    types: set[str] = set()
    for path in files:
        names = _columns(path, called)
        image, question, answers, row_id, type_ = (
            next((name for name in known if name in names), None)
            for known in (IMAGES, QUESTIONS, _ANSWERS, IDS, _TYPES)
        )
        if image is None or question is None:
            raise DatasetError(
                f"{called}: {path.name}: needs a column image and a column question (or query);"
                f" it has {', '.join(names)}"
            )
        _check_types(path, question, answers, called)
        metric = metric_of_columns(names)
        loaded.metric = metric or loaded.metric
        wanted = [name for name in (question, answers, row_id, type_) if name is not None]
        paths = _paths(path, image, called)
        for number, row in enumerate(_rows(path, wanted, called)):
            tag = row.get(type_ or "")
            if type_ == "human_or_machine" and tag in (0, 1):
                tag = _MACHINE[tag]  # the number of a class
            types.add(str(tag))
            places = Embedded(str(path), number) if paths is None else paths[number]
            loaded.add(
                row.get(row_id or ""),
                places,
                row[question] or None,
                row.get(answers or ""),
                [("type", tag)],
                plain=not isinstance(row.get(answers or ""), list),
                people=metric == "vqa_accuracy",
            )
    if types & _CHARTQA_TYPES:
        loaded.metric = "relaxed_accuracy"


def metric_of_columns(names: Collection[str]) -> str | None:
    """Return the metric of the dataset with these columns; None for an unknown one."""
    return next((metric for known, metric in _METRICS if known <= set(names)), None)


def write_pictures(
    wanted: Collection[Embedded], folder: Path, called: str, boundary: Boundary
) -> dict[Embedded, list[str]]:
    """Return the pictures of rows as files in ``folder``, by row; an empty list for a row without any.

    Raises:
        DatasetError: a table cannot be read, the folder not written, or a row names a file outside the ``boundary``.
    """
    by_file: dict[str, set[int]] = defaultdict(set)
    for each in wanted:
        by_file[each.file].add(each.row)
    found: dict[Embedded, list[str]] = {}
    for file, numbers in by_file.items():
        path, last = Path(file), max(numbers)
        image = next(name for name in IMAGES if name in _columns(path, called))
        for number, row in enumerate(_rows(path, [image], called)):
            if number in numbers:
                value = row[image]
                places: list[str] = []
                for picture in value if isinstance(value, list) else [value]:
                    if (data := image_bytes(picture)) is not None:
                        places.append(_kept(data, folder, called))
                    elif (beside := _beside(picture, path.parent)) is not None:
                        boundary.check(beside, f"{called}: {path.name}, row {number + 1}")
                        places.append(beside)
                found[Embedded(file, number)] = places
            if number == last:
                break
    return found


def image_bytes(picture: Any) -> bytes | None:
    """Return the bytes of a picture as ``datasets`` stores it (bytes, or ``{"bytes", "path"}``), None without any."""
    data = picture.get("bytes") if isinstance(picture, Mapping) else picture
    return data if isinstance(data, bytes) and data else None


def _beside(picture: Any, folder: Path) -> str | None:
    path = picture.get("path") if isinstance(picture, Mapping) else None
    return str(folder / path) if isinstance(path, str) and is_file(folder / path) else None


def _kept(data: bytes, folder: Path, called: str) -> str:
    suffix = next((suffix for magic, suffix in _SUFFIXES if data.startswith(magic)), "")
    path = folder / (hashlib.sha256(data).hexdigest()[:32] + suffix)
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(path, durable=False) as file:
                file.write(data)
    except OSError as error:
        raise DatasetError(
            f"{called}: its pictures cannot be written to {folder}: {error.strerror} (PANSCAN_CACHE names another)"
        ) from error
    return str(path)


def _paths(path: Path, image: str, called: str) -> list[list[str]] | None:
    """Return each row's pictures for a table whose column holds their paths; None if it holds bytes."""
    import pyarrow as pa

    kind = _schema(path, called).field(image).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    names = (row[image] for row in _rows(path, [image], called))
    return [[str(path.parent / name)] if name and is_file(path.parent / name) else [] for name in names]


def _check_types(path: Path, question: str, answers: str | None, called: str) -> None:
    """Refuse columns of unreadable types by name, instead of counting every row as incomplete."""
    schema = _schema(path, called)
    found = schema.field(question).type
    if not _is_leaf(found, ("string", "large_string", "string_view", "null")):
        raise DatasetError(f"{called}: {path.name}: the questions in column {question!r} are {found}, not text")
    refused = None if answers is None else _no_answer(schema.field(answers).type)
    if refused is not None:
        raise DatasetError(f"{called}: {path.name}: the answers in column {answers!r} are {refused}, not text")


def _no_answer(kind: Any) -> Any:
    """Return the part of an Arrow type that cannot be read as text; None if there is none."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        key = next((key for key in ANSWER_KEYS if kind.get_field_index(key) >= 0), None)
        return None if key is None else _no_answer(kind.field(key).type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _no_answer(kind.value_type)
    return None if _is_leaf(kind, _ANSWER_TYPES) else kind


def _is_leaf(kind: Any, names: Sequence[str]) -> bool:
    """Return whether an Arrow type, or the value type of a dictionary, has one of these names."""
    import pyarrow as pa

    return str(kind.value_type if pa.types.is_dictionary(kind) else kind).startswith(tuple(names))


def _columns(path: Path, called: str) -> list[str]:
    names: list[str] = _schema(path, called).names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"{called}: {path.name}: there are several columns {twice[0]!r}: rename all but one")
    return names


def _schema(path: Path, called: str) -> Any:
    pa = require_pyarrow(called)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_schema(path)
        with pa.memory_map(str(path)) as source:
            return _opened(source).schema
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, called, error) from error


def _rows(path: Path, names: Sequence[str], called: str) -> Iterator[dict[str, Any]]:
    pa = require_pyarrow(called)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                check_table(file.metadata, names, MOST_ROWS, f"{called}: {path.name}")
                for batch in file.iter_batches(_BATCH, columns=list(names)):
                    yield from batch.to_pylist()
            return
        with pa.memory_map(str(path)) as source:
            reader = _opened(source)
            batches = reader if hasattr(reader, "__iter__") else map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                chosen = batch.select(list(names))
                for start in range(0, chosen.num_rows, _BATCH):
                    yield from chosen.slice(start, _BATCH).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, called, error) from error


def check_table(metadata: Any, names: Collection[str], most_rows: int, called: str) -> None:
    """Check that rows of a Parquet file fit into memory, by its footer.

    Args:
        metadata: ``ParquetFile.metadata``.
        names: columns that will be read.
        most_rows: maximum number of rows.
        called: name in messages.

    Raises:
        DatasetError: there are more rows, or the values of a column have more than 128 MiB on average.
    """
    if metadata.num_rows > most_rows:
        raise DatasetError(f"{called}: {metadata.num_rows:,} rows, at most {most_rows:,}: split the table")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            large = column.total_uncompressed_size > _LARGEST_VALUE * max(1, column.num_values)
            if large and column.path_in_schema.split(".")[0] in names:
                size = f"{column.total_uncompressed_size:,} bytes in {column.num_values:,} values"
                raise DatasetError(f"{called}: column {column.path_in_schema!r} has {size}: too large")


def _opened(source: Any) -> Any:
    """``datasets`` writes streams; others write files of random access."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source)


def _unreadable(path: Path, called: str, error: Exception) -> DatasetError:
    return DatasetError(f"{called}: {path.name}: not a table that can be read: {brief(error)}")


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
        raise UnsupportedError(
            f"{called}: reading parquet and arrow files needs pyarrow: pip install 'panscan[datasets]'"
        ) from None
    return pyarrow
