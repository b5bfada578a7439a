"""Sample documents with questions and right answers, so that everything can be tried without any data."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import PIL
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

import panscan
from panscan.core import InputError, SettingError
from panscan.core.files import cache_directory, fallback_directory, replace_file
from panscan.images.encode import encoded_image
from panscan.settings import range_of
from panscan.workload.documents import COLUMNS, Document, draw_document

_QUESTIONS, _PROMPTS = "questions.jsonl", "prompts.txt"
_MARK = "panscan sample document"  # in the file's metadata


class SampleFile(NamedTuple):
    """A drawn document, and the name and the bytes of its file."""

    document: Document
    name: str
    content: bytes


def draw_sample(seed: int, index: int, columns: int) -> SampleFile:
    """Draw a document. Every fifth file is a JPEG, the others are PNGs, because real piles contain both."""
    document = draw_document(seed, index, columns=columns)
    name = f"{document.kind}-{index:02d}"
    if index % 5 == 2:
        return SampleFile(document, f"{name}.jpg", encoded_image(document.image, "JPEG", quality=90, comment=_MARK))
    metadata = PngInfo()
    metadata.add_text("Comment", _MARK)
    return SampleFile(document, f"{name}.png", encoded_image(document.image, pnginfo=metadata))


def check_samples(count: int, columns: int) -> None:
    """Check options of ``panscan samples``.

    Raises:
        SettingError: one is out of range.
    """
    range_of("count", "samples").check("count", count)
    range_of("columns", "samples").check("columns", columns)


def is_sample(path: str) -> bool:
    """Return whether a file is that of a :class:`SampleFile`, by its metadata.

    False for copies that were encoded again, for other paths and for URLs.
    """
    try:
        with Image.open(path) as image:
            comment = image.info.get("Comment", image.info.get("comment"))
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError):
        return False
    return comment in (_MARK, _MARK.encode())


def write_samples(
    directory: Path, *, count: int = 12, seed: int = 0, columns: int = COLUMNS, overwrite: bool = False
) -> Path:
    """Draw ``count`` documents into ``directory`` and return the path of the ``questions.jsonl`` beside them.

    ``prompts.txt`` has each question once, for ``--prompts``.

    Everything follows from ``seed``: a second call writes the same bytes. The questions are written last, so where
    they are, the pictures are complete. Each line has the picture's name, the ``question``, all right ``answers`` (the
    first one stands in the picture word for word), the ``kind`` of document and the ``type`` of question.

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
    check_samples(count, columns)
    contents: dict[str, bytes] = {}
    rows = []
    for index in range(count):
        document, name, content = draw_sample(seed, index, columns)
        contents[name] = content
        for ask in document.questions:
            row = {"image": name, "question": ask.question, "answers": ask.answers}
            rows.append({**row, "kind": document.kind, "type": ask.type})
    prompts = dict.fromkeys(str(row["question"]) for row in rows)
    contents[_PROMPTS] = "".join(f"{prompt}\n" for prompt in prompts).encode()
    contents[_QUESTIONS] = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = {name: (directory / name).read_bytes() for name in contents if (directory / name).exists()}
        stale = [name for name, data in contents.items() if present.get(name) != data]
        foreign = [name for name in stale if name in present]
        if foreign and not overwrite:
            raise SettingError(
                f"{directory / foreign[-1]} exists and is not of these samples"
                f" (count {count}, seed {seed}, columns {columns});"
                " --force (overwrite=True) replaces it"
            )
        for name in stale:
            with replace_file(directory / name, durable=False) as file:
                file.write(contents[name])
    except OSError as error:
        raise InputError(f"samples cannot be written to {directory}: {error.strerror}") from error
    return directory / _QUESTIONS


def sample_dataset() -> Path:
    """The bundled sample documents' ``questions.jsonl``, drawn into the cache on first use.

    Another recipe draws into another folder: its documents do not mix with older ones, and runs that read those resume.
    :func:`~panscan.core.files.fallback_directory` replaces a cache that cannot be written, so that a run can resume.

    Raises:
        SettingError: the cache cannot be written, and the fallback is not private.
        InputError: neither can be written.
    """
    # The source that draws the documents, and the library that does.
    workload = files("panscan.workload")
    sources = [files("panscan.images") / "ink.py", workload / "samples.py", *(workload / "documents").iterdir()]
    digest = hashlib.sha256(PIL.__version__.encode())
    for source in sorted((path for path in sources if path.name.endswith(".py")), key=lambda path: path.name):
        digest.update(source.read_bytes())
    name = f"samples-{panscan.__version__}-{digest.hexdigest()[:12]}"
    try:
        return write_samples(cache_directory() / name, overwrite=True)
    except InputError:
        return write_samples(fallback_directory() / name, overwrite=True)
