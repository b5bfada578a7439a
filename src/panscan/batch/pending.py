"""What is left of a job: items without an answer, failed ones that are asked again, answers that wait to be written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from panscan.batch.answers import AnswerFile
from panscan.batch.items import BatchItem
from panscan.batch.jsonl import Record
from panscan.core import RecordsError

__all__ = ["AnswerCounts", "Answered", "Task", "tally"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """One item that has no line in the file yet, or another one than it should have.

    Args:
        item: the item.
        replaces: the id of the failed answer whose place the new one takes.
        held: it has been answered, and only waits for its turn to be written.
    """

    item: BatchItem
    replaces: str | None = None
    held: bool = False

    @property
    def needs_engine(self) -> bool:
        """Whether a model has to look at it."""
        return not self.held and self.item.problem is None


class Answered:
    """Which items a file has answers of. No line of it is changed. Of several answers to one item the last one counts,
    and they are reported.

    Args:
        file: the file.
        retry_failed: failed ones are asked again.

    Attributes:
        skipped: items so far that need not be asked.
        any_succeeded: whether there is an answer that is no failure.

    Raises:
        RecordsError: a line is not an answer.
    """

    def __init__(self, file: AnswerFile, *, retry_failed: bool) -> None:
        self._file, self._retry = file, retry_failed
        # Hashes, because a job may have more documents than memory has room for their questions.
        self._asked: dict[str, int] = {}
        self._failed: set[str] = set()
        self._held: set[str] = set()  # in no place of the file yet
        self._replaces: dict[str, str] = {}
        repeated: list[str] = []
        for record in file.records():
            if record["id"] in self._asked:
                repeated.append(record["id"])
            self._note(record)
        if repeated:
            _LOG.warning(
                "%s: several answers to one document, using the last: %s%s", file.path,
                ", ".join(map(repr, repeated[:5])), f" and {len(repeated) - 5} more" if len(repeated) > 5 else "",
            )  # fmt: skip
        for record, replaces in list(file.held()):
            if replaces is not None:
                self._replaces[record["id"]] = replaces
            elif record["id"] in self._asked:  # written, and the process was ended before it could let go of it
                file.drop_held(record["id"])
                continue
            else:
                self._held.add(record["id"])
            self._note(record)
        self.skipped = 0
        self.any_succeeded = len(self._failed) < len(self._asked)

    def left(self, items: Iterable[BatchItem]) -> Iterator[Task]:
        """What is left of the items, in their order.

        Raises:
            RecordsError: an answer has an item's id, but belongs to another question or image; or no item has one,
                so that this is another job, or the same one under other names.
        """
        known = not self._asked
        ahead: list[Task] = []
        for item in items:
            known = known or item.id in self._asked or item.document in self._asked
            if (task := self._task(item)) is not None:
                ahead.append(task)
            if known:
                yield from ahead
                ahead.clear()
        if not known:
            named = f"it has {next(iter(self._asked))!r}, not {ahead[0].item.id!r}" if ahead else "nothing was found"
            raise RecordsError(
                f"{self._file.path} answers none of these documents ({named}): type them as before, or give another -o"
            )

    def _task(self, item: BatchItem) -> Task | None:
        if item.id not in self._asked:
            return Task(item, replaces=self._whole_file(item))
        failed = item.id in self._failed
        if failed and self._retry:
            return Task(item, replaces=None if item.id in self._held else self._replaces.get(item.id, item.id))
        # A file that failed was known by its own name, and is known by those of its pages once it can be read.
        if self._asked[item.id] != _asked(item.named, item.question) and not (failed and item.document):
            raise RecordsError(
                f"{self._file.path}: {item.id!r} was another image or question when it was answered:"
                " give rows an 'id' that stays with them, or start anew with --force"
            )
        self.skipped += 1
        return Task(item, held=True) if item.id in self._held else None

    def _whole_file(self, item: BatchItem) -> str | None:
        """The failed answer of the file of which ``item`` is a page, now that it can be read."""
        if item.document not in self._failed:
            return None
        if item.document not in self._held:
            return item.document
        self._held.discard(item.document)
        self._failed.discard(item.document)
        self._file.drop_held(item.document)
        return None

    def _note(self, record: Record) -> None:
        self._asked[record["id"]] = _asked(record["image"], record.get("question"))
        if record.get("error") is None:
            self._failed.discard(record["id"])
        else:
            self._failed.add(record["id"])


def _asked(named: Iterable[str], question: str | None) -> int:
    return hash((tuple(named), question))


@dataclass(slots=True)
class AnswerCounts:
    """What a file of answers comes to; ``reasons`` are (id, error) of the first failed documents."""

    answered: int
    failed: int
    reasons: list[tuple[str, str]]


def tally(records: Iterable[Record], reasons: int) -> AnswerCounts:
    """Count answers, and keep up to ``reasons`` of the failures."""
    found = AnswerCounts(0, 0, [])
    for record in records:
        if record.get("error") is None:
            found.answered += 1
            continue
        found.failed += 1
        if len(found.reasons) < reasons:
            found.reasons.append((record["id"], str(record["error"])))
    return found
