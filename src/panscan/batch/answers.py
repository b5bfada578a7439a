"""The file of answers: one JSON line per document, appended whole, so that ``kill -9`` loses none that was written.

``answers.jsonl`` holds answers and nothing else. How they were made stands beside it, in ``answers.jsonl.run.json``
(prompt, settings, versions), because a job is only resumed with what it began with. ``answers.jsonl.lock`` keeps a
second process out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from filelock import FileLock, Timeout

from panscan.bench.records import write_atomically
from panscan.core import RecordsError, now

__all__ = ["AnswerFile", "Mode", "Record"]

Record = dict[str, Any]
Mode = Literal["new", "resume", "force"]

_SYNC_S = 1.0  # a failing machine, unlike a killed process, may lose what is younger than this


class AnswerFile:
    """Appends answers to a file. One process at a time holds it.

    Args:
        path: the file of answers; its directory is made if need be.
        header: how the answers are made, kept beside the file.
        mode: ``new`` refuses a file that has answers, ``resume`` goes on with it (or begins it; half a last line is cut
            off), ``force`` throws it away.
        check: of a header that is there and the one of now; why one cannot be resumed with the other, or None.

    Attributes:
        path: the file, links resolved.
        begun_with: the header that the file began with.

    Raises:
        RecordsError: another process holds the file, it has answers already, was made in another way, or cannot be
            read or written.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        mode: Mode,
        check: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None],
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.header_path = self.path.with_name(f"{self.path.name}.run.json")
        self._file: int | None = None
        self._synced = now()
        self._lock = FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise RecordsError(f"-o {path}: not a regular file")
            self._lock.acquire()
        except Timeout as error:
            raise RecordsError(f"{path} is being written by another panscan; give this job its own file") from error
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self.begun_with = self._begin(header, mode, check)
        except OSError as error:
            self.close()
            raise _unwritable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    def records(self) -> Iterator[Record]:
        """The answers in the file, one at a time.

        Raises:
            RecordsError: a line is not an answer.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                record = _parse(line)
                if record is None:
                    raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch")
                yield record

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one answer, as one whole line.

        Raises:
            RecordsError: the disk does not take it; half a line is then cut off again.
        """
        assert self._file is not None  # not closed
        # A name that is not Unicode holds halves of surrogate pairs: written \udcxx, which is JSON's escape of them.
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        whole = os.fstat(self._file).st_size + len(data)
        try:
            rest = memoryview(data)
            while rest:  # one turn, unless the disk fills up
                rest = rest[os.write(self._file, rest) :]
            if now() - self._synced >= _SYNC_S:
                self._sync()
        except BaseException as error:  # Ctrl-C, too: the next line must not join half a line
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_size < whole:
                    os.ftruncate(self._file, whole - len(data))
            if isinstance(error, OSError):
                raise _unwritable(self.path, error) from error
            raise

    def keep(self, wanted: Callable[[Record], bool]) -> None:
        """Take the other answers out of the file; whoever looks sees the old file or the new one.

        Raises:
            RecordsError: a line is not an answer, or the disk does not take the new file.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file, self.path.open("rb") as old:
                file.writelines(line for record, line in zip(self.records(), old, strict=True) if wanted(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            self._open()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Put everything on the disk and let go of the file. A closed file is not used again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what failed in earnest was raised by the write
                self._sync()
            os.close(self._file)
            self._file = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self,
        header: Mapping[str, Any],
        mode: Mode,
        check: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None],
    ) -> Mapping[str, Any]:
        has_answers = self.path.exists() and self.path.stat().st_size > 0
        if has_answers and mode == "new":
            raise RecordsError(f"{self.path} has answers already: go on with --resume, or start anew with --force")
        if has_answers and mode == "resume":
            found = self._header()
            if (reason := check(found, header)) is not None:
                raise RecordsError(f"{self.path} {reason}: resume with the same, or start anew with --force")
            self._open()
            return found
        # In this order: answers never stand beside the header of others.
        self.path.unlink(missing_ok=True)
        write_atomically(self.header_path, json.dumps(header, indent=2).encode() + b"\n")
        self._open()
        return header

    def _header(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self.header_path.read_bytes())
        except FileNotFoundError as error:
            raise RecordsError(
                f"{self.header_path} is missing, so nobody knows how {self.path.name} was made: --force starts anew"
            ) from error
        except ValueError as error:
            raise RecordsError(f"{self.header_path} is garbled: --force starts anew") from error
        if not isinstance(found, dict):
            raise RecordsError(f"{self.header_path} is garbled: --force starts anew")
        return found

    def _open(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        with self.path.open("rb") as file:
            whole = _whole(file)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        self._sync()

    def _sync(self) -> None:
        assert self._file is not None  # not closed
        os.fsync(self._file)
        self._synced = now()


def _whole(file: BinaryIO) -> int:
    """Length of the part that ends with a whole line. A machine that failed may leave a last line of zeros, too."""
    before = end = 0
    last = b""
    for line in file:
        before, end, last = end, end + len(line), line
    return end if not last or (last.endswith(b"\n") and _parse(last) is not None) else before


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    named = isinstance(record, dict) and isinstance(record.get("id"), str) and isinstance(record.get("image"), list)
    return record if named else None


def _unwritable(path: Path, error: OSError) -> RecordsError:
    return RecordsError(f"{path} could not be written: {error.strerror or error}")
