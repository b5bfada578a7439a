"""Asynchronous targets: requests are answered one by one as streams of events, not in batches as by a runner.

A target may be an engine in this process or a remote server. Results are measured by the client, and produce the same
records and metrics as those of a runner (:func:`panscan.records.requests.request_fields`).
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
    """The answer to one request. Iteration raises the error of a failed request."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield events as tokens are ready; the last event has a ``finish_reason``."""
        ...

    async def result(self) -> Result:
        """Return the result once the request has ended; a failed request has an ``error``."""
        ...


class Target(Protocol):
    """An engine or server that answers requests as they arrive, such as :class:`panscan.engine.engine.Engine`."""

    def submit(self, request: Request) -> ResponseStream:
        """Submit one request and return its stream."""
        ...


async def answer_one(target: Target, request: Request) -> Result:
    """Answer one request and return its result with the client's timestamps.

    ``accepted`` is the time of submission, ``tokens`` the times of the events (set on receipt for a remote target) and
    ``end`` the end of the stream. Other stages keep the target's timestamps. A failed request has an ``error``.
    """
    accepted = now()
    tokens: list[float] = []
    stream = target.submit(request)
    with suppress(PanscanError):  # the result contains it
        async for event in stream:
            if event.token_id is not None:
                tokens.append(event.at)
    result = await stream.result()
    return replace(result, stamps=replace(result.stamps, accepted=accepted, tokens=tokens, end=now()))


async def answer_all(target: Target, requests: Iterable[Request], *, max_concurrency: int) -> list[Result]:
    """Answer requests in a closed loop and return their results in order.

    Args:
        target: target that answers.
        requests: any number of requests, read as others finish.
        max_concurrency: maximum requests in flight.

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
