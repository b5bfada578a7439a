"""Dispatch of a job's requests to an engine, and writing of their answers in order."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

from panscan.batch.answers import AnswerFile
from panscan.batch.job import Job
from panscan.batch.jsonl import AnswerRecord
from panscan.batch.pending import Task
from panscan.core import (
    EngineError,
    InputError,
    PanscanError,
    Request,
    Result,
    SettingError,
    StorageError,
    ToolCall,
    now,
)
from panscan.settings import Settings

_SAME_ERRORS = 3  # first requests with the same setting error, after which the setting is at fault
_STORAGE_ERRORS = 8  # consecutive storage errors, after which the object store is at fault


class SupportsStreamResults(Protocol):
    """An engine, such as :class:`panscan.engine.engine.Engine`."""

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index, result) as requests finish; read further requests as others finish."""
        ...


def up_to_first_question(tasks: Iterator[Task]) -> list[Task]:
    """Return the tasks up to the first that needs an engine; all if none does."""
    ahead = []
    for task in tasks:
        ahead.append(task)
        if task.needs_engine:
            break
    return ahead


def answers_ahead(settings: Settings, replicas: int = 1) -> int:
    """Return how many answers may wait for a slower earlier one when answers are written in order."""
    return 4 * max(settings.max_num_seqs, 16) * replicas


def answer(
    engine: SupportsStreamResults | None,
    job: Job,
    tasks: Iterable[Task],
    output: AnswerFile,
    *,
    window: int | None,
    proven: bool,
    on_answer: Callable[[AnswerRecord], None],
) -> None:
    """Answer all tasks and write the answers.

    Args:
        engine: engine that answers; None if no task needs one.
        job: properties that all requests share.
        tasks: tasks in input order, read as others finish.
        output: output for the answers.
        window: maximum number of tasks between the first unwritten answer and the last started task; answers are
            written in the order of the tasks. None: answers are written as they finish.
        proven: whether the job's settings have produced an answer before, so that errors are caused by documents.
        on_answer: called with each record when its request finishes, before it is written.

    Raises:
        EngineError: the engine failed or was closed. Unanswered requests are not written, so they can be resumed.
        SettingError: the first requests all failed with this error, and no request has succeeded.
        StorageError: several consecutive requests failed with a storage error. None of them is written, so all can be
            resumed; a few such failures among answers are attributed to the documents and written.
    """
    lines = _OrderedWriter(output, window)
    streamed = _StreamedTasks(job, iter(tasks), lines, on_answer, proven=proven)
    # A stream ends early when the window is full: its requests finish, then the next stream continues.
    most, before = job.settings.max_concurrency, -1
    while lines.begun > before:
        before = lines.begun
        if engine is None:
            deque(streamed.requests(), maxlen=0)
        else:
            # No name for the results: an exception must close them here, while the engine is open.
            for index, result in engine.stream_results(streamed.requests(), max_concurrency=most):
                streamed.finished(index, result)
        streamed.settle()


class _Finished(NamedTuple):
    """A result with the number of its task."""

    number: int
    task: Task
    result: Result


class _StreamedTasks:
    """The tasks of a job, answered by consecutive streams of an engine."""

    def __init__(
        self,
        job: Job,
        queue: Iterator[Task],
        lines: _OrderedWriter,
        on_answer: Callable[[AnswerRecord], None],
        *,
        proven: bool,
    ) -> None:
        self._job, self._queue, self._lines, self._on_answer, self._proven = job, queue, lines, on_answer, proven
        self._in_flight: dict[int, tuple[int, Task]] = {}  # by index in the stream
        self._undecided: list[_Finished] = []
        self._storage_failures: list[_Finished] = []  # consecutive ones

    def requests(self) -> Iterator[Request]:
        """Yield the requests of the next stream; write failed and held tasks on the way."""
        index = count()
        while self._lines.has_room and (task := next(self._queue, None)) is not None:
            number = self._lines.begin(task)
            if task.held:
                self._lines.add(number, task)
                continue
            problem: PanscanError | None = task.item.problem
            if problem is None:
                try:
                    request = self._job.request(task.item)
                except InputError as error:  # a table row without an image, or a storage error
                    problem = error
            if problem is not None:
                self._conclude(_Finished(number, task, Result.unanswered(task.item.id, now(), problem)))
                continue
            self._in_flight[next(index)] = number, task
            yield request

    def finished(self, index: int, result: Result) -> None:
        """Handle the result of the request at ``index`` of the stream.

        Raises:
            EngineError: the engine failed or was closed.
            SettingError: the first requests all failed with this error.
            StorageError: too many consecutive requests failed with a storage error.
        """
        finished = _Finished(*self._in_flight.pop(index), result)
        if isinstance(result.error, EngineError):
            raise result.error
        if result.finish_reason == "cancelled":
            raise EngineError("the engine was closed during the job")
        if self._proven or isinstance(result.error, StorageError):
            self._conclude(finished)
            return
        self._undecided.append(finished)
        error = self._common_error()
        if error is None:
            self._write_undecided()
        elif len(self._undecided) == _SAME_ERRORS:
            raise error

    def settle(self) -> None:
        """Handle the end of a stream.

        Raises:
            SettingError: all requests of the job, fewer than the usual threshold, failed with this error.
        """
        error = self._common_error()
        if error is not None and self._lines.begun == len(self._undecided):
            raise error
        if self._undecided:
            self._write_undecided()
        self._write_all(self._storage_failures)

    def _conclude(self, finished: _Finished) -> None:
        """Write a result, or hold it back if the object store may be unreachable.

        Raises:
            StorageError: too many consecutive requests failed with a storage error.
        """
        failures, error = self._storage_failures, finished.result.error
        failures.append(finished)
        if not isinstance(error, StorageError):
            self._write_all(failures)
        elif len(failures) == _STORAGE_ERRORS:
            raise StorageError(f"{len(failures)} documents failed in a row; last error: {error}")

    def _common_error(self) -> SettingError | None:
        errors = {str(finished.result.error): finished.result.error for finished in self._undecided}
        [error, *others] = list(errors.values()) or [None]
        return error if isinstance(error, SettingError) and not others else None

    def _write_undecided(self) -> None:
        self._proven = True
        self._write_all(self._storage_failures)
        self._write_all(self._undecided)

    def _write_all(self, finished: list[_Finished]) -> None:
        for number, task, result in finished:
            failed = result.error is not None
            ttft, e2el = (
                None if seconds is None else round(1e3 * seconds, 3)
                for seconds in (result.stamps.ttft, result.stamps.e2e)
            )
            answer = AnswerRecord(
                id=task.item.id,
                image=list(task.item.named),
                question=task.item.question,
                model=self._job.settings.model_name,
                answer=None if failed else result.text,
                finish_reason=result.finish_reason,
                pixels=result.page_sizes,
                views=result.views,
                crops=result.crops,
                image_tokens=result.image_tokens,
                prompt_tokens=result.prompt_tokens,
                output_tokens=result.output_tokens,
                error=str(result.error) if failed else None,
                cached_tokens=result.cached_tokens,
                ttft_ms=ttft,
                e2el_ms=e2el,
                retries=result.retries,
                tool_calls=_calls_text(result.tool_calls),
            )
            self._on_answer(answer)
            self._lines.add(number, task, answer)
        finished.clear()


def _calls_text(calls: Sequence[ToolCall]) -> str | None:
    """Return the calls of an answer as JSON, with arguments as objects unless they were cut."""
    listed = []
    for call in calls:
        arguments: Any = call.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments)
        listed.append({"name": call.name, "arguments": arguments})
    return json.dumps(listed, ensure_ascii=False) if listed else None


class _OrderedWriter:
    """Writes answers in the order of their tasks. Answers that replace failed ones are held at once."""

    def __init__(self, output: AnswerFile, window: int | None) -> None:
        self._output, self._window = output, window
        self._waiting: dict[int, str] = {}  # number -> id of a held answer
        self._ordered = self._turn = 0
        self.begun = 0

    @property
    def has_room(self) -> bool:
        """Whether another task may start."""
        return self._window is None or self._ordered - self._turn < self._window

    def begin(self, task: Task) -> int:
        """Start a task and return its number."""
        self.begun += 1
        self._ordered += task.replaces is None
        return self._ordered - 1

    def add(self, number: int, task: Task, answer: AnswerRecord | None = None) -> None:
        """Write the answer of task ``number`` once all earlier ones are written; immediately without a window.

        Args:
            number: result of :meth:`begin`.
            task: the task.
            answer: its answer; None if the output already holds it.
        """
        if answer is not None and task.replaces is not None:
            answer.replaces = task.replaces
            self._output.hold(answer)
        elif self._window is not None and number != self._turn:
            if answer is not None:
                self._output.hold(answer)
            self._waiting[number] = task.item.id
        else:
            self._output.write_held(task.item.id) if answer is None else self._output.write(answer)
            self._turn += 1
            while (id := self._waiting.pop(self._turn, None)) is not None:
                self._output.write_held(id)
                self._turn += 1
