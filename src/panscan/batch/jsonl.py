"""Answers as JSON lines: the fields of a line, the file of answers, and the file of those that wait for their turn."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from panscan.core import RecordsError
from panscan.core.files import LONGEST_LINE, JsonLog
from panscan.core.foreign import is_count, parse_json
from panscan.core.option import Range

Record = dict[str, Any]

ANSWER_FIELDS = {
    "id": "string",
    "image": "list",
    "question": "string",
    "model": "string",
    "answer": "string",
    "finish_reason": "string",
    "views": "int32",
    "crops": "int32",
    "image_tokens": "int32",
    "prompt_tokens": "int32",
    "output_tokens": "int32",
    "error": "string",
    "cached_tokens": "int32",
    "ttft_ms": "float64",
    "e2el_ms": "float64",
    "retries": "int32",
}
"""Fields of an answer and their types in Parquet. Lines of older versions lack some; only ``id`` and ``image`` must be
there."""

_LOG = logging.getLogger(__name__)

_MILLISECONDS = Range(le=10**15)
_VALID: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list) and all(isinstance(image, str) for image in value),
    "int32": is_count,
    "float64": lambda value: value in _MILLISECONDS,
}
_SYNC_SECONDS = 1.0  # a machine failure, unlike a killed process, may lose lines younger than this
_REPLACES = "replaces"  # additional key of held answers
_DEAD = 1000  # lines of dropped answers after which the file of held ones is rewritten


class AnswerLine(NamedTuple):
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

    def __iter__(self) -> Iterator[AnswerLine]:
        """Yield the lines.

        Raises:
            RecordsError: a line is not an answer.
        """
        for number, (offset, raw) in enumerate(self.lines(), 1):
            try:
                record = parse_json(raw, most=LONGEST_LINE)
            except ValueError:
                record = None
            if not _is_answer(record):
                raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch")
            yield AnswerLine(offset, raw, record)

    def cut(self) -> int:
        """Move an incomplete last line to ``NAME.torn`` and log a warning."""
        if size := super().cut():
            text = "%s ended with an incomplete line: moved its %d bytes to %s"
            _LOG.warning(text, self.path, size, self.torn)
        return size


def _is_answer(record: Any) -> bool:
    """Return whether a value has the fields of an answer, as far as they are counted or copied."""
    if not isinstance(record, dict) or record.get("id") is None or record.get("image") is None:
        return False
    return all(record.get(name) is None or _VALID[kind](record[name]) for name, kind in ANSWER_FIELDS.items())


def encode(record: Record) -> bytes:
    """Return a record as a line."""
    # File names that are not Unicode contain lone surrogates: written as \\udcxx, JSON's escape for them.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class HeldAnswers:
    """Finished answers that are not yet in the output, in a separate file, so that ``kill -9`` loses none.

    They have ids, of which the last answer counts, and the id of the failed answer that they replace, or None.

    Args:
        path: the file; created with the first answer, and removed on :meth:`close` if it has no answers.
        resumed: whether the file's answers count.

    Raises:
        RecordsError: the file exists but cannot be used.
    """

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self._path = path
        self._log: AnswerLog | None = None
        self._lines: dict[str, tuple[int, str | None]] = {}  # id -> byte offset, replaced id
        self._written = 0
        if resumed and path.exists():
            self._index(self._opened_log())

    def __contains__(self, id: str) -> bool:
        return id in self._lines

    def __iter__(self) -> Iterator[tuple[Record, str | None]]:
        """Yield each answer with the id of the failed answer that it replaces, or None."""
        for id, (_, replaces) in self._lines.items():
            yield self.get(id), replaces

    def add(self, record: Record, replaces: str | None = None) -> None:
        """Add an answer.

        Raises:
            RecordsError: the answer cannot be written.
        """
        line = record if replaces is None else {**record, _REPLACES: replaces}
        self._lines[record["id"]] = self._opened_log().append(encode(line)), replaces
        self._written += 1

    def get(self, id: str) -> Record:
        """Return the answer with this id, which must exist."""
        record: Record = json.loads(self._raw(id))
        record.pop(_REPLACES, None)
        return record

    def replacing(self) -> dict[str, list[str]]:
        """Return the ids of the answers that replace each failed one, with the pages of a file in order."""
        by_failed: dict[str, list[str]] = {}
        for id, (_, replaces) in self._lines.items():
            if replaces is not None:
                by_failed.setdefault(replaces, []).append(id)
        # The entry of a file that failed again, before its pages could be listed, is not one of its pages.
        return {
            failed: sorted(set(ids) - {failed} or ids, key=lambda id: (len(id), id))
            for failed, ids in by_failed.items()
        }

    def drop(self, id: str) -> None:
        """Remove an answer. The file is rewritten when it contains too many removed answers."""
        del self._lines[id]
        log = self._opened_log()
        if not self._lines:
            log.clear()
            self._written = 0
        elif self._written - len(self._lines) > max(_DEAD, len(self._lines)):
            log.rewrite([self._raw(id) for id in self._lines])
            self._index(log)

    def close(self) -> None:
        """Close the file; remove it if it has no answers."""
        if self._log is not None:
            self._log.close()
            self._log = None
            if not self._lines:
                self._path.unlink(missing_ok=True)

    def _opened_log(self) -> AnswerLog:
        if self._log is None:
            self._log = AnswerLog(self._path)
        return self._log

    def _index(self, log: AnswerLog) -> None:
        lines = [(line.record["id"], (line.offset, line.record.get(_REPLACES))) for line in log]
        self._lines, self._written = dict(lines), len(lines)

    def _raw(self, id: str) -> bytes:
        return self._opened_log().read(self._lines[id][0])
