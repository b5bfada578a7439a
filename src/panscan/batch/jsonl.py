"""A file of JSON lines that is appended to: whatever ends the process, the lines that were written stay whole."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from panscan.core import RecordsError, create_file, now

__all__ = ["JsonLine", "JsonLines", "Record", "encode", "unwritable"]

Record = dict[str, Any]

_LOG = logging.getLogger(__name__)

_SYNC_S = 1.0  # a failing machine, unlike a killed process, may lose what is younger than this


class JsonLine(NamedTuple):
    """One line of a file: where it begins (bytes), its bytes with the line's end, and what it says."""

    at: int
    raw: bytes
    record: Record


class JsonLines:
    """Answers in a file, one JSON line each.

    Half a last line is not read, and :meth:`cut` off before something is written. A file that is only read, because it
    turns out to be of another job, stays as it was.

    Args:
        path: made if need be.

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
        """The lines, one at a time.

        Raises:
            RecordsError: a line is not an answer.
        """
        at = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if self._torn and at >= self._whole:
                    return
                record = _parse(raw)
                if record is None:
                    raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch")
                yield JsonLine(at, raw, record)
                at += len(raw)

    def read(self, at: int) -> Record:
        """What the line says that begins ``at`` bytes into the file."""
        with self.path.open("rb") as file:
            file.seek(at)
            record: Record = json.loads(file.readline())
        return record

    def cut(self) -> None:
        """Move half a last line to the end of ``NAME.torn``, and report it.

        Raises:
            RecordsError: the disk does not take it there.
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
        """Add one whole line; returns where it begins.

        Raises:
            RecordsError: the disk does not take it; half a line is then cut off again.
        """
        self.cut()
        data = encode(record)
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:  # one turn, unless the disk fills up
                rest = rest[os.write(self._file, rest) :]
            if now() - self._synced >= _SYNC_S:
                self._sync()
        except BaseException as error:  # Ctrl-C, too: the next line must not join half a line
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_size < before + len(data):
                    os.ftruncate(self._file, before)
            if isinstance(error, OSError):
                raise unwritable(self.path, error) from error
            raise
        return before

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the file's lines atomically: a reader sees the old file or the new one.

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
        """Hold no line."""
        self.cut()
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Put everything on the disk. Closed lines are not used again."""
        with contextlib.suppress(OSError):  # what failed in earnest was raised by the write
            self._sync()
        os.close(self._file)

    def _opened(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o664)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = now()


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    # A name that is not Unicode holds halves of surrogate pairs: written \udcxx, which is JSON's escape of them.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def unwritable(path: Path, error: OSError) -> RecordsError:
    """What is raised for a file that the disk or the user's rights do not allow."""
    return RecordsError(f"{path} could not be written: {error.strerror or error}")


def _whole(file: BinaryIO) -> int:
    """Length of the part that ends with a whole line. A machine that failed may leave a last line of zeros, too."""
    before = end = 0
    last = b""
    for line in file:
        before, end, last = end, end + len(line), line
    return end if not last or (last.endswith(b"\n") and b"\0" not in last) else before


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    named = isinstance(record, dict) and isinstance(record.get("id"), str) and isinstance(record.get("image"), list)
    return record if named else None
