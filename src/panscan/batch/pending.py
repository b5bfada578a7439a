"""The pending tasks of a job: items without an answer, and failed items to retry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from panscan.batch.answers import AnswerFile
from panscan.core import RecordsError
from panscan.workload.rows import Row


@dataclass(frozen=True, slots=True)
class Task:
    """An item to answer.

    Args:
        item: the item.
        retries: whether it failed before.
    """

    item: Row
    retries: bool = False

    @property
    def needs_engine(self) -> bool:
        """Whether the task needs a model."""
        return self.item.problem is None


class AnsweredItems:
    """The items that a file has answers of.

    If an item has several answers, the last one wins.

    Args:
        file: output file of the job; its lines are not changed.
        retry_failed: whether failed items are retried.

    Attributes:
        skipped: number of items so far that need no request.
        any_succeeded: whether an item has been answered without an error.
        order: ids of the items so far.
        superseded: ids of failed files among the answers that now have pages.

    Raises:
        RecordsError: a line is not an answer.
    """

    def __init__(self, file: AnswerFile, *, retry_failed: bool) -> None:
        self._path, self._retry = file.path, retry_failed
        # Hashes, because the questions of a large job may not fit into memory.
        self._asked: dict[str, int] = {}
        self._failed: set[str] = set()
        for answer in file.records():
            self._asked[answer.id] = _asked(answer.image, answer.question)
            (self._failed.discard if answer.error is None else self._failed.add)(answer.id)
        self.skipped = 0
        self.any_succeeded = len(self._failed) < len(self._asked)
        self.order: list[str] = []
        self.superseded: set[str] = set()

    def pending(self, items: Iterable[Row]) -> Iterator[Task]:
        """Yield the pending tasks in the order of the items.

        Raises:
            RecordsError: an item's answer belongs to a different question or image, or no item has an answer, so that
                this is a different job or the documents were named differently.
        """
        is_same_job = not self._asked
        ahead: list[Task] = []
        for item in items:
            is_same_job = is_same_job or item.id in self._asked or item.document in self._asked
            self.order.append(item.id)
            if (task := self._task(item)) is not None:
                ahead.append(task)
            if is_same_job:
                yield from ahead
                ahead.clear()
        if not is_same_job:
            named = f"it has {next(iter(self._asked))!r}, not {ahead[0].item.id!r}" if ahead else "none was found"
            raise RecordsError(
                f"{self._path} answers none of these documents ({named}): name them as before, or choose another -o"
            )

    def _task(self, item: Row) -> Task | None:
        if item.id not in self._asked:
            recovered = {item.document or ""} & self._failed  # a file that could not be read before
            self.superseded |= recovered
            return Task(item, retries=bool(recovered))
        failed = item.id in self._failed
        if failed and self._retry:
            return Task(item, retries=True)
        # A file that could not be read has one entry under its own name; once readable, it has one per page.
        if self._asked[item.id] != _asked(item.named, item.question) and not (failed and item.document):
            raise RecordsError(
                f"{self._path}: {item.id!r} had a different image or question when it was answered:"
                " give rows a permanent 'id', or replace the file with --force"
            )
        self.skipped += 1
        return None


def _asked(named: Iterable[str], question: str | None) -> int:
    return hash((tuple(named), question))
