"""Answers as JSON lines, and what a line must hold to be one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from panscan.core import RecordsError
from panscan.core.files import LONGEST_LINE, JsonLog
from panscan.core.foreign import is_count, parse_json
from panscan.core.ranges import Range

__all__ = ["AnswerLog", "JsonLine", "Record", "encode"]

Record = dict[str, Any]

_LOG = logging.getLogger(__name__)

_TEXTS = ("question", "model", "answer", "finish_reason", "error")
_COUNTS = ("views", "crops", "image_tokens", "prompt_tokens", "output_tokens", "cached_tokens", "retries")
_TIMES = ("ttft_ms", "e2el_ms")
_MILLISECONDS = Range(le=10**15)
_SYNC_SECONDS = 1.0  # a machine failure, unlike a killed process, may lose lines younger than this


class JsonLine(NamedTuple):
    """One line of a file: its byte offset, its bytes including the line break, and its record."""

    offset: int
    raw: bytes
    record: Record


class AnswerLog(JsonLog):
    """A file of answers, one JSON line each (see :class:`~panscan.core.files.JsonLog`).

    Args:
        path: the file, created if necessary.

    Raises:
        RecordsError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, RecordsError, sync_seconds=_SYNC_SECONDS)

    def __iter__(self) -> Iterator[JsonLine]:
        """Yield the lines.

        Raises:
            RecordsError: a line is not an answer.
        """
        for number, (offset, raw) in enumerate(self.lines(), 1):
            record = _parse(raw)
            if record is None:
                raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch")
            yield JsonLine(offset, raw, record)

    def cut(self) -> int:
        """Move an incomplete last line to ``NAME.torn`` and log a warning."""
        if size := super().cut():
            text = "%s ended with an incomplete line: moved its %d bytes to %s"
            _LOG.warning(text, self.path, size, self.torn)
        return size


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line."""
    # File names that are not Unicode contain lone surrogates: written as \udcxx, JSON's escape for them.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _parse(line: bytes) -> Record | None:
    """Return the answer of a line; None if it is none, or a field that is counted or copied has another type."""
    try:
        record = parse_json(line, most=LONGEST_LINE)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    images = record.get("image")
    named = isinstance(images, list) and all(isinstance(image, str) for image in images)
    texts = all(isinstance(record.get(name), str | None) for name in _TEXTS)
    counts = all(record.get(name) is None or is_count(record[name]) for name in _COUNTS)
    times = all(record.get(name) is None or record[name] in _MILLISECONDS for name in _TIMES)
    return record if named and texts and counts and times else None
