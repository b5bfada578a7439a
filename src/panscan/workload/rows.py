"""Rows of a dataset: questions with accepted answers and images, and their files. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from math import isnan
from pathlib import Path, PurePosixPath
from typing import Any

from panscan.core import DatasetError, InputError, files, foreign
from panscan.images.fetch import conceal
from panscan.images.files import split_page
from panscan.records.schema import DatasetFacts

_MOST_BYTES = 256 * 2**20  # of a file of questions or prompts, which are all in memory

MOST_ROWS = 1_000_000
"""Questions of a dataset, which are all in memory."""

ANSWER_KEYS = ("answers", "answer", "text")


class Number(str):
    """A number of a JSON file, as written: "12.50" would lose its 0 as a float."""

    __slots__ = ()


def answer_texts(value: Any, *, people: bool = False) -> tuple[tuple[str, ...], bool]:
    """Return the answers, and whether they were a plain list of texts.

    Numbers are kept as written, a whole float without its ".0"; true and false as these words; dates and
    times as in ISO 8601, a space between them. Lists may be
    nested, and objects may hold their answers under "answers", "answer" or "text", as SQuAD and VQA have them. Nothing,
    not-a-number, blank texts and other objects are no answers. Repeats stay: they are other people's answers.

    Args:
        value: stored value.
        people: the answers are one per annotator, so blank ones among others count as well.
    """
    flat = value is None or (isinstance(value, list | tuple) and all(type(element) is str for element in value))
    texts = tuple(_texts(value))
    answered = any(text.strip() for text in texts)
    return tuple(text for text in texts if text.strip() or (people and answered)), flat


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text; JSON's escapes can write lone surrogates, which it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield str(value)
    elif isinstance(value, bool):
        yield str(value).lower()
    elif isinstance(value, float):
        if not isnan(value):
            yield str(int(value)) if value.is_integer() else repr(value)
    elif isinstance(value, int | Decimal | date | time):
        yield str(value)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _texts(element)
    elif isinstance(value, Mapping):
        for key in ANSWER_KEYS:
            if key in value:
                yield from _texts(value[key])
                return


def read_text(path: Path, called: str) -> str:
    """Return a file's text; see :func:`panscan.core.files.read_text`.

    Raises:
        DatasetError: the file (``called`` in the message) cannot be read, is larger than 256 MiB, or has another
            encoding.
    """
    fix = "split it, or use Parquet"
    return files.read_text(path, _MOST_BYTES, called, DatasetError, fix=fix, pipe=True)


def read_json(path: Path, called: str) -> Any:
    """Return a file's JSON value; see :func:`parse_json`.

    Raises:
        DatasetError: the file cannot be read or is not JSON.
    """
    text = read_text(path, called)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{called}, line {error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise DatasetError(f"{called}: {error}") from error


def parse_json(text: str) -> Any:
    """Parse JSON, with numbers as :class:`panscan.workload.rows.Number`.

    Raises:
        json.JSONDecodeError: the text is not JSON.
        ValueError: it is nested too deeply, or has too many values.
    """
    return foreign.parse_json(text, parse_int=Number, parse_float=Number)


class Pictures:
    """Finder of pictures by the names in rows.

    Args:
        roots: folders that names are relative to, and that have the other folders; the first that has a picture counts.
        folders: names of folders of pictures, which hold files of a row's last name.
    """

    def __init__(self, roots: Sequence[Path], folders: Sequence[str]) -> None:
        directories = (root / folder for root in roots for folder in folders)
        self._directories = [directory for directory in directories if directory.is_dir()]
        self._roots = list(roots)

    def find(self, name: Any) -> list[str]:
        """Return a list with the path of a picture; empty if there is none (or no name)."""
        if not isinstance(name, str) or isinstance(name, Number) or not name.strip() or "\0" in name:
            return []
        last = PurePosixPath(name).name
        for index, directory in enumerate(self._directories):
            if is_file(directory / last):
                self._directories.insert(0, self._directories.pop(index))  # the others are there, too
                return [str(self._directories[0] / last)]
        for root in self._roots:
            if is_file(root / name):
                return [str(root / name)]
        return []


class Boundary:
    """The folders that a dataset's images may be in. Rows may come from strangers, and images show in answers.

    Args:
        folders: folders of the dataset.
        external: whether rows may name URLs and other files as well.
    """

    def __init__(self, folders: Iterable[Path], *, external: bool) -> None:
        self.external = external
        self._roots: list[Path] = []
        for folder in folders:
            real = folder.resolve()
            self._roots.append(real)
            # The files of a snapshot in the Hugging Face hub's cache are links to ``blobs`` beside the snapshots.
            for snapshot in (real, *real.parents):
                blobs = snapshot.parent.parent / "blobs"
                if snapshot.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
                    self._roots.append(blobs)

    def check(self, image: str, where: str) -> None:
        """Refuse an image of a row, links resolved, that lies elsewhere.

        Raises:
            DatasetError: the image lies elsewhere or is a URL.
        """
        if self.external:
            return
        if "://" in image:
            raise DatasetError(f"{where}: the image {conceal(image)} is a URL: allow it with --allow-external-images")
        try:
            real = Path(split_page(image)[0]).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte: nothing that could be opened
            return
        if not any(real.is_relative_to(root) for root in self._roots):
            raise DatasetError(
                f"{where}: the image {image} is outside the dataset's folder: allow it with --allow-external-images"
            )


def beside(file: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of images that a file names relative to itself; URLs unchanged."""
    return tuple(name if "://" in name else str(file.parent / name) for name in names)


def is_file(path: Path) -> bool:
    """Return whether a file exists; False for a path that cannot be checked."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file, a folder that may not be entered
        return False


RowImages = Callable[[], tuple[bytes | str, ...]]
"""Reads the images of a table's row: bytes, paths or URLs; none if one is missing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question about images: a row of a dataset or table, or a document of a batch job.

    Args:
        id: unique id: that of the row, or the name of the document or page.
        images: paths or URLs to open, in order; of a table, a function that reads them.
        question: unchanged text; None if the job has one prompt.
        answers: accepted answers; empty if unknown. With annotators, one answer each, including repeats.
        tags: (name, value): ``type`` of the question, ``kind`` of the document; a name may have several values.
        named: names of the images as the user wrote them (in a dataset, relative to its file).
        problem: error because of which the row cannot be answered.
        document: file of the document or page; None for a row.
    """

    id: str
    images: tuple[str, ...] | RowImages
    question: str | None = None
    answers: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    named: tuple[str, ...] = ()
    problem: InputError | None = None
    document: str | None = None


@dataclass(slots=True)
class LoadedDataset:
    """Content of a dataset's files: usable rows in their order, and the counts of all others.

    Args:
        facts: dataset name, and counts of the rows so far.
        metric: the dataset's own metric of quality.
        called: name in messages.
        boundary: folders that its images may be in.
    """

    facts: DatasetFacts
    metric: str
    called: str
    boundary: Boundary
    rows: list[Row] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    def add(
        self,
        given: Any,
        images: Sequence[str] | RowImages,
        question: Any,
        answers: Any,
        tags: Iterable[tuple[str, Any]] = (),
        *,
        plain: bool = False,
        people: bool = False,
    ) -> None:
        """Add a row, or count the reason for skipping it.

        Raises:
            DatasetError: an image is outside the dataset, or there are more than :data:`MOST_ROWS` rows.

        Args:
            given: id of the row; None: its number.
            images: empty if a picture is missing.
            question: a text that is not blank, else it is missing. Half a surrogate pair, which JSON's escapes
                can write, is none; ids, tags and answers with one are left out.
            answers: see :func:`panscan.workload.rows.answer_texts`.
            tags: values that are None or empty are left out; a list is several values.
            plain: numbers and single texts are how this layout stores answers, so they are not counted.
            people: the answers are one per annotator, including blank ones.
        """
        facts = self.facts
        number = facts.questions
        if number == MOST_ROWS:
            raise DatasetError(f"{self.called}: more than {MOST_ROWS:,} questions: split it")
        facts.questions += 1
        if not isinstance(question, str) or not question.strip():
            facts.without_question += 1
            return
        if not callable(images):
            for image in images:
                self.boundary.check(image, f"{self.called}, row {number + 1}")
            if not images:
                facts.without_image += 1
                return
        if not is_unicode(question):
            facts.broken_text += 1
            return
        row_id = f"{number:05d}" if given is None or not is_unicode(str(given)) else str(given)
        if row_id in self._ids:
            facts.repeated_ids += 1
            row_id = unique_id(row_id, self._ids)
        self._ids.add(row_id)
        texts, flat = answer_texts(answers, people=people)
        facts.converted_answers += not flat and not plain
        places = images if callable(images) else tuple(images)
        named = [(name, value if isinstance(value, list | tuple) else [value]) for name, value in tags]
        pairs = {(name, str(value)): None for name, values in named for value in values if value is not None}
        text_tags = tuple((name, text) for name, text in pairs if text.strip() and is_unicode(text))
        self.rows.append(Row(row_id, places, question, tuple(filter(is_unicode, texts)), text_tags))


def unique_id(wanted: str, taken: Collection[str]) -> str:
    """Return ``wanted#2``, or the same with the next free number."""
    number = 2
    while f"{wanted}#{number}" in taken:
        number += 1
    return f"{wanted}#{number}"
