"""A runner with the streaming interface of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Self

from panscan.core import PanscanError, Request, Result, now
from panscan.runners.base import Runner

__all__ = ["RunnerStream"]


class RunnerStream:
    """A runner that answers any number of requests in batches of ``batch_size``.

    It has the methods of :class:`panscan.engine.engine.Engine` that ``panscan batch`` uses, and closes the runner on
    exit.

    Args:
        runner: configured runner.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Answer requests batch by batch and yield (index, result).

        Args:
            requests: requests, read when their batch starts.
            max_concurrency: maximum requests in flight; None: the batch size.
        """
        size = min(self._runner.settings.batch_size, max_concurrency or self._runner.settings.batch_size)
        left = enumerate(requests)
        while batch := list(islice(left, size)):
            yield from zip([index for index, _ in batch], self._answer([each for _, each in batch]), strict=True)

    def _answer(self, batch: Sequence[Request]) -> list[Result]:
        """Answer a batch. If it fails, answer each request alone, so that only faulty requests get errors."""
        accepted = now()
        try:
            return self._runner.run(batch)
        except PanscanError as error:
            if len(batch) == 1:
                return [Result.unanswered(batch[0].id, accepted, error)]
        return [result for request in batch for result in self._answer([request])]
