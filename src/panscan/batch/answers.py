"""The output file of a batch job: one JSON line per document. ``kill -9`` loses no finished answer.

``answers.jsonl`` contains only answers: while the job runs, in the order in which they finish, with answers of a retry
after the failures that they replace; at its end, one per document, in the order of the documents. Files beside it:

- ``answers.jsonl.run.json``: the header with prompt, settings and versions. A job can only be resumed with the same.
- ``answers.jsonl.lock``: lock against a second process.
- ``answers.jsonl.torn``: incomplete lines after a killed process or a machine failure.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from panscan.batch.jsonl import AnswerLog, AnswerRecord, JobHeader, read_sidecar
from panscan.batch.ledger import ledger_path
from panscan.core import RecordsError
from panscan.core.files import WriteLock, file_identity, replaced_source, write_errors, write_file

Mode = Literal["new", "resume", "force"]
Check = Callable[[JobHeader, JobHeader], str | None]

_SIDECARS = (".run.json", ".lock", ".torn", ".ledger.json")


class AnswerFile:
    """Appends answers to a file, which it locks against other processes.

    No answer is written or deleted before the first :meth:`write`: a job that does not start leaves the files as they
    were.

    Args:
        path: output file; its directory is created if necessary.
        header: description of the job, stored beside the file.
        mode: ``new`` refuses a file with answers; ``resume`` continues it, or starts a new one, and moves an incomplete
            last line to ``.torn`` with the first answer; ``force`` replaces it.
        check: compares the stored header with ``header``; returns why the job cannot be resumed, or None.

    Attributes:
        path: the file, with symbolic links resolved.
        original_header: header that the file was started with.

    Raises:
        RecordsError: another process is writing the file, it already has answers, it belongs to a different job, or it
            cannot be read or written.
    """

    def __init__(self, path: Path, header: JobHeader, mode: Mode, check: Check) -> None:
        self.path = Path(os.path.realpath(path))
        self.header_path, self._lock_path, *_ = _sidecars(self.path)
        self.original_header = header
        self._log: AnswerLog | None = None
        self._created: list[Path] = []
        self._lock = WriteLock(
            self._lock_path,
            lambda holder: RecordsError(f"{self.path} is being written by {holder}; choose another -o for this job"),
        )
        try:
            with write_errors(self.path, RecordsError):
                _refuse_irregular(path)
                created = [path for path in (self._lock_path, *self.path.parents) if not path.exists()]
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
                self._created = created
                if mode != "force" and _has_answers(self.path):
                    self._resume(header, mode, check)
        except BaseException:
            self.close()
            raise

    @property
    def begun(self) -> bool:
        """Whether the job has answers, written now or by an earlier start."""
        return self._log is not None

    def records(self) -> Iterator[AnswerRecord]:
        """Yield the answers in the file. Of several with one id, the last counts.

        Raises:
            RecordsError: a line is not an answer.
        """
        return (answer for _, answer in self._log or ())

    def write(self, answer: AnswerRecord) -> None:
        """Append one answer.

        Raises:
            RecordsError: the answer cannot be written.
        """
        self._begin().append(answer.line)

    def finish(self, order: Sequence[str] = (), superseded: Collection[str] = ()) -> None:
        """Finish the job: keep the last answer of each id, and sort the answers, atomically.

        Args:
            order: ids in the order of the documents; others follow in their present order.
            superseded: ids of answers to drop, such as that of a file that now has answers of its pages.

        Raises:
            RecordsError: a line is not an answer, or the new file cannot be written.
        """
        if (log := self._log) is None:
            return
        log.cut()
        last: dict[str, int] = {}
        count = 0
        for offset, answer in log:
            count += 1
            if answer.id not in superseded:
                last[answer.id] = offset
        ranks = {id: rank for rank, id in enumerate(order)}
        offsets = [last[id] for id in sorted(last, key=lambda id: ranks.get(id, len(ranks)))]
        if len(offsets) < count or offsets != sorted(offsets):
            log.rewrite(log.lines_at(offsets))

    def close(self) -> None:
        """Flush everything to disk and release the file."""
        if self._log is not None:
            self._log.close()
        else:
            for path in self._created:  # because it never started
                with contextlib.suppress(OSError):  # a directory that is no longer empty stays
                    path.unlink() if path == self._lock_path else path.rmdir()
        self._log = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, header: JobHeader, mode: Mode, check: Check) -> None:
        if mode == "new":
            refuse_answers(self.path)
        fix = "the job cannot be resumed without its header; replace it with --force"
        self.original_header = read_sidecar(self.header_path, JobHeader, "the header of a job", fix)
        if (reason := check(self.original_header, header)) is not None:
            raise RecordsError(f"{self.path} {reason}: resume with the same options, or replace it with --force")
        self._log = AnswerLog(self.path)

    def _begin(self) -> AnswerLog:
        if self._log is None:
            # In this order, so that answers never lie beside the header of another job.
            with write_errors(self.path, RecordsError):
                for path in (self.path, ledger_path(self.path)):
                    path.unlink(missing_ok=True)
            header = msgspec.structs.asdict(self.original_header)
            write_file(self.header_path, json.dumps(header, indent=2) + "\n", RecordsError)
            self._log = AnswerLog(self.path)
        return self._log


def refuse_answers(path: Path) -> None:
    """Refuse a file of answers that has some.

    Raises:
        RecordsError: it has answers.
    """
    path = Path(os.path.realpath(path))
    if _has_answers(path):
        raise RecordsError(f"{path} already has answers: continue with --resume, or replace them with --force")


def refuse_sources(output: Path, sources: Iterable[str]) -> None:
    """Refuse an output that would overwrite a source.

    Args:
        output: output file of the job.
        sources: all files that the job reads.

    Raises:
        RecordsError: the output, or a file that is written beside it, is one of them.
    """
    real = Path(os.path.realpath(output))
    if (replaced := replaced_source((real, *_sidecars(real)), sources)) is not None:
        path, source = replaced
        raise RecordsError(f"-o {output} would overwrite {source}, a source of this job ({path.name})")


def _sidecars(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(f"{path.name}{suffix}") for suffix in _SIDECARS)


def _refuse_irregular(path: Path) -> None:
    """Refuse terminals, pipes, devices, and the target of a redirected standard output: they cannot be resumed.

    Raises:
        RecordsError: the output is one of these, or lies below a file.
    """
    hint = "use a separate regular file, so that the job can be resumed"
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise RecordsError(f"-o {path}: not a regular file: {hint}")
    ours = file_identity(path)
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(stream)
            if ours == (status.st_dev, status.st_ino):
                raise RecordsError(f"-o {path}: standard output or standard error is redirected to it: {hint}")
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise RecordsError(f"-o {path}: {parent} is a file, not a directory")


def _has_answers(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
