"""The file of answers: one JSON line per document, appended whole, so that ``kill -9`` loses none that was finished.

``answers.jsonl`` holds answers and nothing else. How they were made stands beside it, in ``answers.jsonl.run.json``
(prompt, settings, versions), because a job is only resumed with what it began with. ``answers.jsonl.held`` holds the
answers that wait: for a slower one before them, or, of documents that are asked again, for the end of the job.
``answers.jsonl.lock`` keeps a second process out. ``answers.jsonl.torn`` has what a killed process or a failed machine
left of a line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from panscan.batch.jsonl import JsonLines, Record, encode, unwritable
from panscan.batch.ledger import ledger_path
from panscan.batch.outbox import Outbox
from panscan.core import RecordsError
from panscan.records.store import write_atomically

__all__ = ["AnswerFile", "Mode", "refuse_answers", "refuse_sources"]

Mode = Literal["new", "resume", "force"]
Check = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]

_SIDECARS = (".run.json", ".held", ".lock", ".torn", ".held.torn", ".ledger.json")


class AnswerFile:
    """Appends answers to a file. One process at a time holds it.

    Nothing is made, and nothing thrown away, before the first answer: a job that never begins leaves all as it was.

    Args:
        path: the file of answers; its directory is made if need be.
        header: how the answers are made, kept beside the file.
        mode: ``new`` refuses a file that has answers, ``resume`` continues it (or begins it; half a last line moves
            to ``.torn`` with the first answer), ``force`` throws it away.
        check: of a header that is there and the one of now; why one cannot be resumed with the other, or None.

    Attributes:
        path: the file, links resolved.
        begun_with: the header that the file began with.

    Raises:
        RecordsError: another process holds the file, it has answers already, was made in another way, or cannot be
            read or written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], mode: Mode, check: Check) -> None:
        self.path = Path(os.path.realpath(path))
        self.header_path, self._held_path, self._lock_path, *_ = _sidecars(self.path)
        self.begun_with = header
        self._lines: JsonLines | None = None
        self._held: Outbox | None = None
        self._made: list[Path] = []
        self._lock = FileLock(self._lock_path, timeout=0, thread_local=False)
        try:
            _refuse_irregular(path)
            self._acquire()
            if mode != "force" and (_size(self.path) or _size(self._held_path)):
                self._go_on(header, mode, check)
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def begun(self) -> bool:
        """Whether it holds anything, or did before."""
        return self._lines is not None

    def records(self) -> Iterator[Record]:
        """The answers in the file, one at a time.

        Raises:
            RecordsError: a line is not an answer.
        """
        return (line.record for line in self._lines or ())

    def held(self) -> Iterator[tuple[Record, str | None]]:
        """The answers that wait beside the file, each with the id of the failed one that it replaces, if it does."""
        return iter(self._held or ())

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one answer, as one whole line.

        Raises:
            RecordsError: the disk does not take it.
        """
        lines, held = self._begun()
        lines.append(record)
        if record["id"] in held:
            held.drop(record["id"])

    def hold(self, record: Mapping[str, Any], replaces: str | None = None) -> None:
        """Keep an answer until its turn comes (:meth:`write_held`), or, of one asked again, until :meth:`finish`.

        Args:
            record: the answer.
            replaces: the id of the failed one whose place it takes.

        Raises:
            RecordsError: the disk does not take it.
        """
        _, held = self._begun()
        held.add(record, replaces)

    def write_held(self, id: str) -> None:
        """The turn of a held answer has come.

        Raises:
            RecordsError: the disk does not take it.
        """
        _, held = self._begun()
        self.write(held.get(id))

    def drop_held(self, id: str) -> None:
        """A held answer is not wanted any more."""
        _, held = self._begun()
        held.drop(id)

    def finish(self) -> None:
        """The job is done: what was asked again takes the places of the failed answers, all at once.

        Raises:
            RecordsError: a line is not an answer, or the disk does not take the new file.
        """
        if self._lines is None or self._held is None:
            return
        self._lines.cut()
        if not (replacing := self._held.replacing()):
            return
        self._lines.rewrite(_replaced(self._lines, self._held, replacing))
        for id in [record["id"] for record, replaces in self._held if replaces is not None]:
            self._held.drop(id)

    def close(self) -> None:
        """Put everything on the disk and let go of the file. A closed file is not used again."""
        if self._lines is not None:
            self._lines.close()
        else:
            self._forget()
        if self._held is not None:
            self._held.close()
        self._lines = self._held = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> None:
        made = [path for path in (self._lock_path, *self.path.parents) if not path.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o664))  # FileLock takes some refusals for a lock
        try:
            self._lock.acquire()
            self._made = made
        except Timeout as error:
            raise RecordsError(
                f"{self.path} is being written by another panscan; give this job its own file"
            ) from error

    def _go_on(self, header: Mapping[str, Any], mode: Mode, check: Check) -> None:
        if mode == "new":
            refuse_answers(self.path)
        self.begun_with = self._header()
        if (reason := check(self.begun_with, header)) is not None:
            raise RecordsError(f"{self.path} {reason}: resume with the same, or start anew with --force")
        self._lines = JsonLines(self.path)
        self._held = Outbox(self._held_path)

    def _begun(self) -> tuple[JsonLines, Outbox]:
        if self._lines is None or self._held is None:
            # In this order: answers never stand beside the header of others.
            try:
                self.path.unlink(missing_ok=True)
                self._held_path.unlink(missing_ok=True)
                ledger_path(self.path).unlink(missing_ok=True)
            except OSError as error:
                raise unwritable(self.path, error) from error
            write_atomically(self.header_path, json.dumps(self.begun_with, indent=2).encode() + b"\n")
            self._held = Outbox(self._held_path)
            self._lines = JsonLines(self.path)
        return self._lines, self._held

    def _header(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self.header_path.read_bytes())
        except FileNotFoundError as error:
            raise RecordsError(
                f"{self.header_path} is missing, so {self.path.name} cannot be resumed: add --force to start over"
            ) from error
        except ValueError as error:
            raise RecordsError(f"{self.header_path} is not valid JSON: add --force to start over") from error
        if not isinstance(found, dict):
            raise RecordsError(f"{self.header_path} is not a JSON object: add --force to start over")
        return found

    def _forget(self) -> None:
        """Remove the lock and directories that a job created but never used."""
        for path in self._made:
            with contextlib.suppress(OSError):  # not empty: another process wrote into them
                path.unlink() if path == self._lock_path else path.rmdir()


def refuse_answers(path: Path) -> None:
    """Refuse a file of answers that has some.

    Raises:
        RecordsError: it has answers, or answers are held for it.
    """
    path = Path(os.path.realpath(path))
    held = _sidecars(path)[1]
    if _size(path) or _size(held):
        raise RecordsError(f"{path} already has answers: continue with --resume, or replace them with --force")


def refuse_sources(output: Path, sources: Iterable[str]) -> None:
    """Refuse an output that would overwrite what is asked about.

    Args:
        output: the file of answers.
        sources: every file that is read.

    Raises:
        RecordsError: the output, or a file beside it, is one of them.
    """
    real = Path(os.path.realpath(output))
    # Files, not names: a link of either kind is the same file. What does not exist yet is no source.
    written = {_identity(path): path for path in (real, *_sidecars(real)) if path.exists()}
    for source in sources if written else ():
        if (path := written.get(_identity(source))) is not None:
            raise RecordsError(f"-o {output} would overwrite {source}, a source of this job ({path.name})")


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - Path.stat takes no string
    except (OSError, ValueError):  # a URL, or a file that is gone: found out when its turn comes
        return None
    return found.st_dev, found.st_ino


def _sidecars(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(f"{path.name}{suffix}") for suffix in _SIDECARS)


def _refuse_irregular(path: Path) -> None:
    """Terminals, pipes and devices hold no answers to resume; nor does what standard output is redirected to."""
    regular = "an output that can be resumed is a regular file of its own"
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise RecordsError(f"-o {path}: {regular}")
    ours = _identity(path)
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            found = os.fstat(stream)
            if ours == (found.st_dev, found.st_ino):
                raise RecordsError(f"-o {path}: standard output goes there, and {regular}")
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise RecordsError(f"-o {path}: {parent} is a file, not a directory")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _replaced(lines: JsonLines, held: Outbox, replacing: Mapping[str, list[str]]) -> Iterator[bytes]:
    """The lines, answers that were asked again in the places of failed ones."""
    left = dict(replacing)
    there = set()
    for line in lines:
        there.add(line.record["id"])
        ids = left.pop(line.record["id"], None)
        yield line.raw if ids is None else b"".join(encode(held.get(id)) for id in ids)
    # Where the failed one has gone, this was done before, and stopped at its very end.
    yield from (encode(held.get(id)) for ids in left.values() for id in ids if id not in there)
