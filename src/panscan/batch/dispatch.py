"""Requests of a job through the engine, and their answers, in order, into the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Protocol

from panscan.batch.items import BatchItem
from panscan.batch.job import Job
from panscan.batch.jsonl import Record
from panscan.batch.pending import Task
from panscan.core import EngineError, InputError, PanscanError, Request, Result, SettingError, StorageError, now
from panscan.settings import Settings

__all__ = ["Output", "SupportsStreamResults", "answer", "answers_ahead", "up_to_first_question"]

_SAME_ERRORS = 3  # of the first requests, until their setting and not they are at fault
_STORAGE_ERRORS = 8  # in succession, until the object store and not a document is at fault


class SupportsStreamResults(Protocol):
    """What answers. :class:`panscan.engine.engine.Engine` does."""

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Pairs of a request's index and its result, as they finish; pulls requests as it has room for them."""
        ...


class Output(Protocol):
    """What takes answers. :class:`panscan.batch.answers.AnswerFile` does."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Append an answer."""
        ...

    def hold(self, record: Mapping[str, Any], replaces: str | None = None) -> None:
        """Keep an answer until its turn comes, or until it can take the place of a failed one."""
        ...

    def write_held(self, id: str) -> None:
        """The turn of a held answer has come."""
        ...


def up_to_first_question(tasks: Iterator[Task]) -> list[Task]:
    """Take tasks up to the first that needs an engine; all of them if none does."""
    ahead = []
    for task in tasks:
        ahead.append(task)
        if task.needs_engine:
            break
    return ahead


def answers_ahead(settings: Settings, replicas: int = 1) -> int:
    """Return how many answers may wait for a slower one before them, when they are written in order."""
    return 4 * max(settings.max_num_seqs, 16) * replicas


def answer(
    engine: SupportsStreamResults | None,
    job: Job,
    tasks: Iterable[Task],
    output: Output,
    *,
    window: int | None,
    proven: bool,
    on_answer: Callable[[Record], None],
) -> None:
    """Ask what is to be asked and write every answer.

    Args:
        engine: what answers; None where no task needs it.
        job: what the requests have in common.
        tasks: pulled as the engine has room.
        output: takes the answers.
        window: answers are written in the order of the tasks, and no task is begun that lies this far behind the first
            unwritten one: what bounds the answers that wait. None: they are written as they finish.
        proven: the job's settings have answered something before, so that an error is a document's own.
        on_answer: called with each line as its request finishes, before it is written.

    Raises:
        EngineError: the engine broke or was closed. What it had not answered is not written, so that it can be asked.
        SettingError: the first requests all failed with it, and nothing else is known of the settings.
        StorageError: several requests in a row failed with it. None of them is written, so that all can be asked
            again; a few such failures among answers are the documents' own and are written.
    """
    lines = _OrderedWriter(output, window)
    asking = _StreamedTasks(job, iter(tasks), lines, on_answer, proven=proven)
    if engine is None:
        deque(asking.requests(), maxlen=0)
        asking.settle()
        return
    # A stream ends early when the window is full: what it has begun is then finished, and the next one goes on.
    most, before = job.settings.max_concurrency, -1
    while lines.begun > before:
        before = lines.begun
        for index, result in engine.stream_results(asking.requests(), max_concurrency=most):
            asking.finished(index, result)
        asking.settle()


class _StreamedTasks:
    """Tasks on their way through streams of an engine, one stream after the other."""

    def __init__(
        self,
        job: Job,
        queue: Iterator[Task],
        lines: _OrderedWriter,
        on_answer: Callable[[Record], None],
        *,
        proven: bool,
    ) -> None:
        self._job, self._queue, self._lines, self._on_answer = job, queue, lines, on_answer
        self._in_flight: dict[int, tuple[int, Task]] = {}  # by the request's index in its stream
        self._unsure: list[tuple[int, Task, Result]] = []
        self._unstored: list[tuple[int, Task, Result]] = []  # failed with a StorageError, one after the other
        self._proven = proven

    def requests(self) -> Iterator[Request]:
        """The requests of the next stream; what cannot be asked, or has been, is written on the way."""
        index = count()
        while self._lines.has_room and (task := next(self._queue, None)) is not None:
            number = self._lines.begin(task)
            if task.held:
                self._lines.add_held(number, task)
                continue
            problem: PanscanError | None = task.item.problem
            if problem is None:
                try:
                    request = self._job.request(task.item)
                except InputError as error:  # a table's row without an image, or a store that failed
                    problem = error
            if problem is not None:
                self._concluded(number, task, Result.unanswered(task.item.id, now(), problem))
                continue
            self._in_flight[next(index)] = number, task
            yield request

    def finished(self, index: int, result: Result) -> None:
        """The request that the stream drew at ``index`` has its result."""
        number, task = self._in_flight.pop(index)
        if isinstance(result.error, EngineError):
            raise result.error
        if result.finish_reason == "cancelled":
            raise EngineError("the engine was closed while it answered")
        if self._proven or isinstance(result.error, StorageError):
            self._concluded(number, task, result)
            return
        self._unsure.append((number, task, result))
        error = self._common_error()
        if error is None:
            self._believe()
        elif len(self._unsure) == _SAME_ERRORS:
            raise error

    def settle(self) -> None:
        """The stream is over; were its results one and the same error of a setting, too few to tell, they are enough
        if there is nothing beside them."""
        error = self._common_error()
        if error is not None and self._lines.begun == len(self._unsure):
            raise error
        if self._unsure:
            self._believe()
        self._write_unstored()

    def _concluded(self, number: int, task: Task, result: Result) -> None:
        """Write a result, unless it may be one of many that an unreachable object store fails."""
        if isinstance(result.error, StorageError):
            self._unstored.append((number, task, result))
            if len(self._unstored) == _STORAGE_ERRORS:
                raise StorageError(f"{len(self._unstored)} documents failed in a row; last error: {result.error}")
            return
        self._write_unstored()
        self._done(number, task, result)

    def _write_unstored(self) -> None:
        for number, task, result in self._unstored:
            self._done(number, task, result)
        self._unstored.clear()

    def _common_error(self) -> SettingError | None:
        errors = {str(result.error): result.error for _, _, result in self._unsure}
        [error, *others] = list(errors.values()) or [None]
        return error if isinstance(error, SettingError) and not others else None

    def _believe(self) -> None:
        self._proven = True
        self._write_unstored()
        for number, task, result in self._unsure:
            self._done(number, task, result)
        self._unsure.clear()

    def _done(self, number: int, task: Task, result: Result) -> None:
        record = _record(task.item, self._job.settings.model_name, result)
        self._on_answer(record)
        self._lines.add(number, task, record)


class _OrderedWriter:
    """Answers on their way to the file. One that takes a failed one's place has its place, and waits for no turn."""

    def __init__(self, output: Output, window: int | None) -> None:
        self._output, self._window = output, window
        self._held: dict[int, str] = {}
        self._ordered = self._turn = 0
        self.begun = 0

    @property
    def has_room(self) -> bool:
        """Whether another task may begin."""
        return self._window is None or self._ordered - self._turn < self._window

    def begin(self, task: Task) -> int:
        """The number of the task that begins now."""
        self.begun += 1
        self._ordered += task.replaces is None
        return self._ordered - 1

    def add(self, number: int, task: Task, record: Record) -> None:
        """Write the answer of task ``number`` when those of all before it are written; at once without a window."""
        if task.replaces is not None:
            self._output.hold(record, task.replaces)
        elif self._window is None or number == self._turn:
            self._output.write(record)
            self._advance()
        else:
            self._output.hold(record)
            self._held[number] = record["id"]

    def add_held(self, number: int, task: Task) -> None:
        """The same for an answer that the output holds already."""
        if self._window is None or number == self._turn:
            self._output.write_held(task.item.id)
            self._advance()
        else:
            self._held[number] = task.item.id

    def _advance(self) -> None:
        self._turn += 1
        while (id := self._held.pop(self._turn, None)) is not None:
            self._output.write_held(id)
            self._turn += 1


def _record(item: BatchItem, model: str, result: Result) -> Record:
    """Return the line of an answer. Fields that vary between runs of the same job come last."""
    failed = result.error is not None
    stamps = result.stamps
    seconds = {"ttft_ms": stamps.ttft, "e2el_ms": stamps.e2e}
    return {
        "id": item.id,
        "image": list(item.named),
        **({} if item.question is None else {"question": item.question}),
        "model": model,
        "answer": None if failed else result.text,
        "finish_reason": result.finish_reason,
        "views": result.views,
        "crops": result.crops,
        "image_tokens": result.image_tokens,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "error": str(result.error) if failed else None,
        "cached_tokens": result.cached_tokens,
        **{name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()},
        "retries": result.retries,
    }
