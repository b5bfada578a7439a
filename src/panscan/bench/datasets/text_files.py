"""Text and JSON files as people have them: UTF-8, or UTF-16 and UTF-32 that say so; anything else is refused."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from panscan.bench.datasets.answer_texts import Number
from panscan.core import DatasetError

__all__ = ["parse_json", "read_json", "read_text"]

_MARKS = (  # the longer first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)


def read_text(path: Path, called: str) -> str:
    """A file's text, its line ends made "\\n". (str.splitlines would also cut at signs that a JSON text may hold.)

    A byte order mark says which Unicode encoding it is; without one it is UTF-8. Other encodings are not guessed: what
    is guessed wrong would be asked and scored as if it were right.

    Raises:
        DatasetError: the file, ``called`` so, cannot be read or is in another encoding.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{called}: {error.strerror}") from error
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        if encoding != "utf-8":
            raise DatasetError(f"{called}: not the {encoding} text that its byte order mark promises") from error
        raise DatasetError(
            f"{called}: not UTF-8 text (byte 0x{data[error.start]:02x} in line {line}): save it as UTF-8"
        ) from error
    if "\0" in text:
        raise DatasetError(f"{called}: not UTF-8 text but perhaps UTF-16 without a byte order mark: save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, called: str) -> Any:
    """A file's JSON value; see :func:`parse_json`.

    Raises:
        DatasetError: the file cannot be read or is not JSON.
    """
    text = read_text(path, called)
    try:
        return parse_json(text)
    except RecursionError as error:
        raise DatasetError(f"{called}: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{called}, line {error.lineno}: not JSON: {error.msg}") from error


def parse_json(text: str) -> Any:
    """JSON, its numbers as :class:`panscan.bench.datasets.answer_texts.Number`.

    Raises:
        json.JSONDecodeError: it is none.
    """
    return json.loads(text, parse_int=Number, parse_float=Number)
