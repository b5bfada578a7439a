"""panscan's own layout: JSON Lines of ``{image, question}`` and perhaps ``answers``, ``kind``, ``type`` and ``id``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panscan.bench.datasets.answer_texts import Number, answer_texts, is_unicode
from panscan.bench.datasets.rows import Loaded
from panscan.bench.datasets.text_files import parse_json, read_text
from panscan.core import DatasetError
from panscan.settings import nearest

__all__ = ["dataset_rows", "read"]

_KEYS = {"image", "question", "answers", "kind", "type", "id"}


def read(files: Sequence[Path], called: str, loaded: Loaded) -> None:
    """Take the rows of JSON Lines files; pictures are relative to them.

    Raises:
        DatasetError: see :func:`dataset_rows`.
    """
    for path in files:
        for row in dataset_rows(path, called):
            names = [row["image"]] if isinstance(row["image"], str) else row["image"]
            places = [name if "://" in name else str(path.parent / name) for name in names]
            tags = [(key, row[key]) for key in ("kind", "type") if key in row]
            loaded.add(row.get("id"), places, row["question"], row.get("answers"), tags)


def dataset_rows(path: Path, called: str) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file of ``{image, question}`` and perhaps ``answers``, ``kind``, ``type`` and ``id``.

    Args:
        path: the file; empty lines in it are skipped.
        called: what messages call it.

    Raises:
        DatasetError: the file cannot be read, or a line is not such a row; the message has its number.
    """
    lines = read_text(path, called).split("\n")
    return [_row(line, f"{called}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
        valid = is_unicode(json.dumps(row, ensure_ascii=False))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DatasetError(f"{where}: nested too deeply") from error
    if not valid:
        raise DatasetError(f"{where}: half of a surrogate pair is no text")
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected an object with image, question and answers")
    for key in ("image", "question"):
        if key not in row:
            raise DatasetError(f"{where}: {key!r} is missing")
    for key in row.keys() - _KEYS:
        raise DatasetError(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}")
    names = [row["image"]] if isinstance(row["image"], str) else row["image"]
    if not names or not _texts(names) or not all(names):
        raise DatasetError(f"{where}: 'image' must be a file name or a list of them")
    if not _texts([row["question"]]):
        raise DatasetError(f"{where}: 'question' must be text")
    if isinstance(row.get("answers"), dict) and not answer_texts(row["answers"])[0]:
        raise DatasetError(f"{where}: 'answers' must be texts or numbers, or a list of them")
    return row


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and not isinstance(text, Number) for text in value)
