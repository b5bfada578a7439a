"""Sample documents with questions and right answers, so that everything can be tried without any data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from panscan.core import InputError, SettingError
from panscan.core.files import replace_file
from panscan.settings import range_of
from panscan.workload.documents import COLUMNS, draw_document

_QUESTIONS = "questions.jsonl"
_MARK = "panscan sample document"  # in the file's metadata


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """One row of ``questions.jsonl``.

    Args:
        image: path of the picture, relative to the file of questions.
        question: in words.
        answers: every right answer; the first one stands in the picture word for word.
        kind: of the document, such as "receipt".
        type: of the question, such as "total".
    """

    image: str
    question: str
    answers: tuple[str, ...]
    kind: str
    type: str


def document_name(kind: str, index: int) -> str:
    """Return the file name of a document. Every fifth is a JPEG, because real piles contain both."""
    return f"{kind}-{index:02d}.{'jpg' if index % 5 == 2 else 'png'}"


def encode_document(image: Image.Image, name: str) -> bytes:
    """Return the bytes of a document's file: JPEG or PNG, by the suffix of its name."""
    buffer = BytesIO()
    if name.endswith(".jpg"):
        image.save(buffer, "JPEG", quality=90, comment=_MARK)
    else:
        metadata = PngInfo()
        metadata.add_text("Comment", _MARK)
        image.save(buffer, "PNG", pnginfo=metadata)
    return buffer.getvalue()


def is_sample(path: str) -> bool:
    """Return whether a file is a document from :func:`encode_document`, by its metadata.

    False for copies that were encoded again, for other paths and for URLs.
    """
    try:
        with Image.open(path) as image:
            comment = image.info.get("Comment", image.info.get("comment"))
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError):
        return False
    return comment in (_MARK, _MARK.encode())


def _files(count: int, seed: int, columns: int) -> dict[str, bytes]:
    """Names and contents, the questions last."""
    files: dict[str, bytes] = {}
    rows = []
    for index in range(count):
        document = draw_document(seed, index, columns=columns)
        name = document_name(document.kind, index)
        files[name] = encode_document(document.image, name)
        for ask in document.questions:
            rows.append(asdict(QuestionRow(name, ask.question, ask.answers, document.kind, ask.type)))
    files[_QUESTIONS] = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    return files


def write_samples(
    directory: Path, *, count: int = 12, seed: int = 0, columns: int = COLUMNS, overwrite: bool = False
) -> Path:
    """Draw ``count`` documents into ``directory`` and return the path of the ``questions.jsonl`` beside them.

    Everything follows from ``seed``: a second call writes the same bytes. The questions are written last, so where
    they are, the pictures are complete.

    Args:
        directory: made if missing; other files in it are left alone.
        count: number of documents, each with two to four questions.
        seed: another seed gives other documents.
        columns: characters that fit across a document's short side, 12 to 200: the more, the smaller the print.
        overwrite: replace files of the same names, whatever they hold.

    Raises:
        SettingError: if ``count`` is below 1 or ``columns`` out of range, or, before anything is written, if a file
            that this call would replace holds something else.
        InputError: ``directory`` cannot be written.
    """
    for name, value in (("count", count), ("columns", columns)):
        range_of(name, "samples").check(name, value)
    files = _files(count, seed, columns)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = {name: (directory / name).read_bytes() for name in files if (directory / name).exists()}
        stale = [name for name, data in files.items() if present.get(name) != data]
        foreign = [name for name in stale if name in present]
        if foreign and not overwrite:
            raise SettingError(
                f"{directory / foreign[-1]} exists and is not of these samples"
                f" (count {count}, seed {seed}, columns {columns});"
                " --force (overwrite=True) replaces it"
            )
        for name in stale:
            with replace_file(directory / name, durable=False) as file:
                file.write(files[name])
    except OSError as error:
        raise InputError(f"samples cannot be written to {directory}: {error.strerror}") from error
    return directory / _QUESTIONS
