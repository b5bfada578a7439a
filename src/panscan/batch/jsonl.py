"""A JSON Lines file for appending: written lines stay complete, however the process ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from panscan.core import RecordsError, create_file, now
from panscan.core.foreign import is_count, parse_json
from panscan.core.ranges import Range

__all__ = ["JsonLine", "JsonLines", "Record", "encode", "unwritable"]

Record = dict[str, Any]

_LOG = logging.getLogger(__name__)

_LONGEST_LINE = 64 * 2**20  # bytes; an answer of a whole context has less than one
_TEXTS = ("question", "model", "answer", "finish_reason", "error")
_COUNTS = ("views", "crops", "image_tokens", "prompt_tokens", "output_tokens", "cached_tokens", "retries")
_TIMES = ("ttft_ms", "e2el_ms")
_MILLISECONDS = Range(le=10**15)
_SYNC_SECONDS = 1.0  # a machine failure, unlike a killed process, may lose lines younger than this


class JsonLine(NamedTuple):
    """One line of a file: its byte offset, its bytes including the line break, and its record."""

    at: int
    raw: bytes
    record: Record


class JsonLines:
    """A file of answers, one JSON line each.

    An incomplete last line is not read; :meth:`cut` removes it before the first write. A file that is only read is not
    changed.

    Args:
        path: the file, created if necessary.

    Raises:
        RecordsError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced = now()
        try:
            self._file = self._opened()
            with path.open("rb") as found:
                self._whole = _whole(found)  # bytes before the torn line
            self._torn = self._whole < os.fstat(self._file).st_size
        except OSError as error:
            raise unwritable(path, error) from error

    def __iter__(self) -> Iterator[JsonLine]:
        """Yield the lines.

        Raises:
            RecordsError: a line is not an answer.
        """
        at = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(_line_pieces(file), 1):
                if self._torn and at >= self._whole:
                    return
                record = _parse(raw)
                if record is None:
                    raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch")
                yield JsonLine(at, raw, record)
                at += len(raw)

    def read(self, at: int) -> Record:
        """Return the record of the line at byte offset ``at``."""
        with self.path.open("rb") as file:
            file.seek(at)
            record: Record = json.loads(file.readline())
        return record

    def cut(self) -> None:
        """Move an incomplete last line to the end of ``NAME.torn`` and log a warning.

        Raises:
            RecordsError: the incomplete line cannot be written there.
        """
        if not self._torn:
            return
        kept = self.path.with_name(f"{self.path.name}.torn")
        try:
            with self.path.open("rb") as file, kept.open("ab") as torn:
                file.seek(self._whole)
                half = file.read()
                torn.write(half + b"\n")
                torn.flush()
                os.fsync(torn.fileno())
            os.ftruncate(self._file, self._whole)
        except OSError as error:
            raise unwritable(kept, error) from error
        self._torn = False
        _LOG.warning("%s ended with an incomplete line: moved its %d bytes to %s", self.path, len(half), kept)

    def append(self, record: Mapping[str, Any]) -> int:
        """Append one line and return its byte offset.

        Raises:
            RecordsError: the line cannot be written; a partly written line is removed.
        """
        self.cut()
        data = encode(record)
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:  # more than once only if the disk is nearly full
                rest = rest[os.write(self._file, rest) :]
            if now() - self._synced >= _SYNC_SECONDS:
                self._sync()
        except BaseException as error:  # includes KeyboardInterrupt: the next line must not join a partial one
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_size < before + len(data):
                    os.ftruncate(self._file, before)
            if isinstance(error, OSError):
                raise unwritable(self.path, error) from error
            raise
        return before

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace all lines atomically: readers see the old file or the new one.

        Raises:
            RecordsError: the new file cannot be written.
        """
        self.cut()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with create_file(temporary) as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            old, self._file = self._file, self._opened()
            os.close(old)
        except OSError as error:
            raise unwritable(self.path, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all lines."""
        self.cut()
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Flush everything to disk and close the file."""
        with contextlib.suppress(OSError):  # a failed write has already raised
            self._sync()
        os.close(self._file)

    def _opened(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o664)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = now()


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line."""
    # File names that are not Unicode contain lone surrogates: written as \udcxx, JSON's escape for them.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def unwritable(path: Path, error: OSError) -> RecordsError:
    """Return the exception for a file that cannot be written."""
    return RecordsError(f"{path} could not be written: {error.strerror or error}")


def _line_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, its pieces."""
    return iter(lambda: file.readline(_LONGEST_LINE), b"")


def _whole(file: BinaryIO) -> int:
    """Return the length of the complete lines. After a machine failure, the last line may consist of zeros."""
    before = end = 0
    last = b""
    for line in _line_pieces(file):
        before, end, last = end, end + len(line), line
    return end if not last or (last.endswith(b"\n") and b"\0" not in last) else before


def _parse(line: bytes) -> Record | None:
    """Return the answer of a line; None if it is none, or a field that is counted or copied has another type."""
    try:
        record = parse_json(line, most=_LONGEST_LINE)
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
