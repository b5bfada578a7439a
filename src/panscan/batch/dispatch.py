"""Dispatch of a job's requests to an engine, and writing of their answers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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


def answer(
    engine: SupportsStreamResults | None,
    job: Job,
    tasks: Iterable[Task],
    output: AnswerFile,
    *,
    proven: bool,
    on_answer: Callable[[AnswerRecord], None],
) -> None:
    """Answer all tasks and write the answers as they finish.

    Args:
        engine: engine that answers; None if no task needs one.
        job: properties that all requests share.
        tasks: tasks in input order, read as others finish.
        output: output for the answers.
        proven: whether the job's settings have produced an answer before, so that errors are caused by documents.
        on_answer: called with each record when its request finishes, before it is written.

    Raises:
        EngineError: the engine failed or was closed. Unanswered requests are not written, so they can be resumed.
        SettingError: the first requests all failed with this error, and no request has succeeded.
        StorageError: several consecutive requests failed with a storage error. None of them is written, so all can be
            resumed; a few such failures among answers are attributed to the documents and written.
    """
    streamed = _StreamedTasks(job, tasks, output, on_answer, proven)
    if engine is None:
        deque(streamed.requests(), maxlen=0)
    else:
        # No name for the results: an exception must close them here, while the engine is open.
        for index, result in engine.stream_results(streamed.requests(), max_concurrency=job.settings.max_concurrency):
            streamed.finished(index, result)
    streamed.settle()


class _Finished(NamedTuple):
    """A task with its result."""

    task: Task
    result: Result


@dataclass(slots=True)
class _StreamedTasks:
    """The tasks of a job, as requests for an engine and as answers in the output. Arguments: see :func:`answer`."""

    job: Job
    tasks: Iterable[Task]
    output: AnswerFile
    on_answer: Callable[[AnswerRecord], None]
    proven: bool
    begun: int = 0
    in_flight: dict[int, Task] = field(default_factory=dict)  # by index in the stream
    undecided: list[_Finished] = field(default_factory=list)
    storage_failures: list[_Finished] = field(default_factory=list)  # consecutive ones

    def requests(self) -> Iterator[Request]:
        """Yield the requests of the stream; write tasks that have failed already on the way."""
        index = count()
        for task in self.tasks:
            self.begun += 1
            problem: PanscanError | None = task.item.problem
            if problem is None:
                try:
                    request = self.job.request(task.item)
                except InputError as error:  # a table row without an image, or a storage error
                    problem = error
            if problem is not None:
                self._conclude(_Finished(task, Result.unanswered(task.item.id, now(), problem)))
                continue
            self.in_flight[next(index)] = task
            yield request

    def finished(self, index: int, result: Result) -> None:
        """Handle the result of the request at ``index`` of the stream.

        Raises:
            EngineError: the engine failed or was closed.
            SettingError: the first requests all failed with this error.
            StorageError: too many consecutive requests failed with a storage error.
        """
        finished = _Finished(self.in_flight.pop(index), result)
        if isinstance(result.error, EngineError):
            raise result.error
        if result.finish_reason == "cancelled":
            raise EngineError("the engine was closed during the job")
        if self.proven or isinstance(result.error, StorageError):
            self._conclude(finished)
            return
        self.undecided.append(finished)
        error = self._common_error()
        if error is None:
            self._write_undecided()
        elif len(self.undecided) == _SAME_ERRORS:
            raise error

    def settle(self) -> None:
        """Handle the end of the stream.

        Raises:
            SettingError: all requests of the job, fewer than the usual threshold, failed with this error.
        """
        error = self._common_error()
        if error is not None and self.begun == len(self.undecided):
            raise error
        if self.undecided:
            self._write_undecided()
        self._write_all(self.storage_failures)

    def _conclude(self, finished: _Finished) -> None:
        """Write a result, or hold it back if the object store may be unreachable.

        Raises:
            StorageError: too many consecutive requests failed with a storage error.
        """
        failures, error = self.storage_failures, finished.result.error
        failures.append(finished)
        if not isinstance(error, StorageError):
            self._write_all(failures)
        elif len(failures) == _STORAGE_ERRORS:
            raise StorageError(f"{len(failures)} documents failed in a row; last error: {error}")

    def _common_error(self) -> SettingError | None:
        errors = {str(finished.result.error): finished.result.error for finished in self.undecided}
        [error, *others] = list(errors.values()) or [None]
        return error if isinstance(error, SettingError) and not others else None

    def _write_undecided(self) -> None:
        self.proven = True
        self._write_all(self.storage_failures)
        self._write_all(self.undecided)

    def _write_all(self, finished: list[_Finished]) -> None:
        for task, result in finished:
            failed = result.error is not None
            ttft, e2el = (
                None if seconds is None else round(1e3 * seconds, 3)
                for seconds in (result.stamps.ttft, result.stamps.e2e)
            )
            answer = AnswerRecord(
                id=task.item.id,
                image=list(task.item.named),
                question=task.item.question,
                model=self.job.settings.model_name,
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
            self.on_answer(answer)
            self.output.write(answer)
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
