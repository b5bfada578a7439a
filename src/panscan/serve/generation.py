"""Answers of the server: submission of requests, whole or streamed answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from panscan.core import EngineError, PanscanError, Result, Stream, TokenEvent
from panscan.serve import tracing
from panscan.serve.admission import SHUTTING_DOWN, AdmissionControl, AdmissionSlot, disconnection, race
from panscan.serve.client import PreparedRequest
from panscan.serve.replies import DONE, TIMED_OUT, Reply, error_body, error_of, json_response, server_sent

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


log = logging.getLogger("panscan.serve")

_SEND_SECONDS = 60.0  # after the deadline of a request, for a client that reads slowly

_EVENT_STREAM = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
"""Headers of a streaming answer."""

_IndexedEvent = tuple[int, TokenEvent]
_Events = AsyncGenerator[_IndexedEvent, None]


class Generation:
    """The answers of the server.

    Args:
        admission: admission control, with the backend that computes answers and the metrics to update.
        tracer: tracer that records spans; None: no traces.
    """

    def __init__(self, admission: AdmissionControl, tracer: Tracer | None) -> None:
        self._admission, self._tracer = admission, tracer

    async def answer(self, slot: AdmissionSlot, prepared: PreparedRequest, reply: Reply, *, stream: bool) -> ASGIApp:
        """Submit the requests of one HTTP request and return its response.

        A streaming response starts with the first event, so that an earlier failure gets an HTTP error status.

        Raises:
            PanscanError: the error of the first request that failed.
            TimeoutError: the deadline passed.
            ClientDisconnect: the client disconnected; its requests are cancelled.
        """
        self._admission.check_queue(self._admission.backend.inflight + len(prepared.requests) - 1)
        slot.grow(prepared.image_bytes)
        streams: list[Stream] = []
        try:
            for choice in prepared.requests:
                streams.append(self._admission.backend.submit(choice, prepared.work, stream=stream))
            slot.waiting = False
            if stream:
                events = _merged(streams)
                first = await slot.until_disconnect(anext(events))
                slot.streaming = True
                return partial(self._stream, slot, streams, _chunks(slot, streams, reply, first, events))
            results = await slot.until_disconnect(_collect(streams))
        except BaseException:  # cancellation too: nothing else would cancel these streams
            self.abandon(streams, slot)
            raise
        for result in results:
            self.observe(result, slot)
        for result in results:
            if result.error is not None:
                raise result.error
            if result.finish_reason == "cancelled":
                raise EngineError(SHUTTING_DOWN)
        if not reply.needs_token_bytes:
            return json_response(reply.whole(results))
        await slot.within(reply.fetch_token_bytes(results))
        return await slot.in_thread(lambda: json_response(reply.whole(results)))

    def abandon(self, streams: Sequence[Stream], slot: AdmissionSlot) -> None:
        """Cancel unfinished requests, and count all requests once they have ended."""

        def count(task: asyncio.Task[Result]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.observe(task.result(), slot)

        for stream in streams:
            stream.cancel()
            asyncio.ensure_future(stream.result()).add_done_callback(count)

    def observe(self, result: Result, slot: AdmissionSlot) -> None:
        """Record a finished request in the metrics and traces."""
        self._admission.metrics.observe(result)
        if self._tracer is not None:
            tracing.record(self._tracer, result, dict(slot.request.headers))

    async def _stream(
        self,
        slot: AdmissionSlot,
        streams: Sequence[Stream],
        chunks: AsyncGenerator[bytes, None],
        _scope: Scope,
        _receive: Receive,
        send: Send,
    ) -> None:
        """Send a streaming answer, until it ends or the client disconnects.

        At the end, even after a failure, the slot is released, and unfinished requests are cancelled.
        """
        seconds = slot.ends + _SEND_SECONDS - asyncio.get_running_loop().time()
        try:
            await race(_send(chunks, send), disconnection(slot.request.receive), seconds=seconds)
        finally:
            slot.release()
            self.abandon(streams, slot)


async def _send(chunks: AsyncGenerator[bytes, None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    async with aclosing(chunks):
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _chunks(
    slot: AdmissionSlot, streams: Sequence[Stream], reply: Reply, first: _IndexedEvent, events: _Events
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events; a failure becomes an error event, which ends the stream.

    No timeout may surround a ``yield``: it would also cancel the sending of a chunk.

    Args:
        slot: slot of the request, whose body has been read.
        streams: streams of the choices.
        reply: response to the request.
        first: index of a stream, and the first event.
        events: the other events.
    """
    event: _IndexedEvent | None = first
    try:
        await slot.within(reply.fetch_echoed_bytes())
        yield b"".join(map(server_sent, reply.first(len(streams), first[1].prompt_tokens)))
        while event is not None:
            if event[1].finish_reason == "cancelled":
                raise EngineError(SHUTTING_DOWN)
            if reply.logprobs:
                await slot.within(reply.fetch_event_bytes(event[1]))
            if (chunk := reply.chunk(*event)) is not None:
                yield server_sent(chunk)
            event = await slot.within(anext(events, None))
        results = await slot.within(_collect(streams))
        if reply.include_usage:
            yield server_sent(reply.last(results))
        yield DONE
    except PanscanError as error:
        yield server_sent(error_of(error))
    except TimeoutError:
        yield server_sent(error_body(TIMED_OUT, 504))
    except Exception as error:  # a bug must not look like the end of the answer
        log.exception("a stream failed")
        yield server_sent(error_body(f"internal error: {type(error).__name__}", 500))


async def _collect(streams: Sequence[Stream]) -> list[Result]:
    return list(await asyncio.gather(*(stream.result() for stream in streams)))


async def _merged(streams: Sequence[Stream]) -> _Events:
    """Yield (index, event) of all streams as the events arrive.

    Raises:
        PanscanError: the error of the first stream that fails.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            if event.finish_reason != "error":  # the iteration raises it next
                yield 0, event
        return
    queue: _Merge = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, PanscanError):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


_Merge = asyncio.Queue[_IndexedEvent | PanscanError | None]
"""Events of several streams; an error; None for each stream that has ended."""


async def _pump(index: int, stream: Stream, queue: _Merge) -> None:
    """Move a stream's events into a queue."""
    try:
        async for event in stream:
            if event.finish_reason != "error":  # the iteration raises it next
                queue.put_nowait((index, event))
    except PanscanError as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
