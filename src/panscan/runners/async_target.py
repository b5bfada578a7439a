"""Requests one by one, each answered as a stream of events: the asynchronous counterpart of a runner's batches.

A target may be an engine in this process or a server elsewhere. Results are measured as its client sees them, and
become the same records and metrics as those of a runner (:func:`panscan.records.requests.request_fields`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from panscan.core import PanscanError, Request, Result, SettingError, TokenEvent, now

__all__ = ["ResponseStream", "Target", "answer_all", "answer_one"]


class ResponseStream(Protocol):
    """The answer to one request. A failed request ends the iteration by raising its error."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Events as tokens are ready; the last has a ``finish_reason``."""
        ...

    async def result(self) -> Result:
        """What became of the request, once it has ended; a failed one has its ``error``."""
        ...


class Target(Protocol):
    """Something that answers requests as they arrive. :class:`panscan.engine.engine.Engine` is one."""

    def submit(self, request: Request) -> ResponseStream:
        """Begin to answer one request."""
        ...


async def answer_one(target: Target, request: Request) -> Result:
    """The result of one request, with the client's time stamps.

    ``accepted`` is when the request was submitted, ``tokens`` the time in each event (a remote target sets it on
    receipt), ``end`` when the stream ended. Stages that only the target sees keep the target's stamps. A failed request
    has its ``error``.
    """
    accepted = now()
    tokens: list[float] = []
    stream = target.submit(request)
    with suppress(PanscanError):  # the result has it
        async for event in stream:
            if event.token_id is not None:
                tokens.append(event.at)
    result = await stream.result()
    return replace(result, stamps=replace(result.stamps, accepted=accepted, tokens=tokens, end=now()))


async def answer_all(target: Target, requests: Iterable[Request], *, max_concurrency: int) -> list[Result]:
    """The results of requests in their order, in a closed loop: as one ends, the next is submitted.

    Args:
        target: what answers.
        requests: any number; drawn as there is room for them.
        max_concurrency: requests in flight at most.

    Raises:
        SettingError: ``max_concurrency`` is below 1.
    """
    if max_concurrency < 1:
        raise SettingError(f"max_concurrency must be at least 1, got {max_concurrency}")
    results: dict[int, Result] = {}
    source = enumerate(requests)

    async def client() -> None:
        for index, request in source:
            results[index] = await answer_one(target, request)

    async with asyncio.TaskGroup() as clients:
        for _ in range(max_concurrency):
            clients.create_task(client())
    return [results[index] for index in range(len(results))]
