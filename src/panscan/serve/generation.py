"""Answers of the server: submission of requests, whole or streamed answers, refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from panscan.core import EngineError, PanscanError, Result, Stream, TokenEvent
from panscan.serve import tracing
from panscan.serve.admission import SHUTTING_DOWN, AdmissionControl, AdmissionSlot, RefusedError, disconnection
from panscan.serve.replies import DONE, TIMED_OUT, Reply, encoded, error_body, error_of, server_sent
from panscan.serve.requests import PreparedRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

__all__ = ["Generation", "refusal"]

log = logging.getLogger("panscan.serve")

_SEND_SECONDS = 60.0  # after the deadline of a request, for a client that reads slowly


class Generation:
    """The answers of the server.

    Args:
        admission: admission control, with the backend that computes answers and the metrics to update.
        tracer: tracer that records spans; None: no traces.
    """

    def __init__(self, admission: AdmissionControl, tracer: Tracer | None) -> None:
        self._admission, self._tracer = admission, tracer

    async def answer(
        self,
        request: Request,
        slot: AdmissionSlot,
        prepared: PreparedRequest,
        reply: Reply,
        *,
        stream: bool,
        include_usage: bool,
        per_prompt: int,
    ) -> Response:
        """Submit the requests of one HTTP request and return its response.

        A streaming response starts with the first event, so that an earlier failure gets an HTTP error status.

        Raises:
            PanscanError: the error of the first request that failed.
            TimeoutError: the deadline passed.
            ClientDisconnect: the client disconnected; its requests are cancelled.
        """
        slot.grow(prepared.image_bytes)
        streams: list[Stream] = []
        try:
            for choice in prepared.requests:
                streams.append(self._admission.backend.submit(choice, prepared.work, stream=stream))
            slot.waiting = False
            if stream:
                events = _merged(streams)
                first = await self._admission.until_disconnect(request, slot, anext(events))
                await _check_begun(streams[first[0]], first[1])
                answer = _StreamingAnswer(
                    self, slot, request, streams, reply, include_usage=include_usage, per_prompt=per_prompt
                )
                limit = slot.ends + _SEND_SECONDS
                return _EventStream(answer.chunks(first, events), answer.close, request.receive, limit)
            results = await self._admission.until_disconnect(request, slot, _collect(streams))
        except BaseException:  # cancellation too: nothing else would cancel these streams
            self.abandon(streams, request)
            raise
        for result in results:
            self.observe(result, request)
        for result in results:
            if result.error is not None:
                raise result.error
            if result.finish_reason == "cancelled":
                raise EngineError(SHUTTING_DOWN)
        if not reply.logprobs:
            return JSONResponse(reply.whole(results, per_prompt))
        await slot.within(reply.fetch_token_bytes(results))
        body = await self._admission.in_thread(request, slot, lambda: encoded(reply.whole(results, per_prompt)))
        return Response(body, media_type="application/json")

    def abandon(self, streams: Sequence[Stream], request: Request) -> None:
        """Cancel unfinished requests, and count all requests once they have ended."""

        def count(task: asyncio.Task[Result]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.observe(task.result(), request)

        for stream in streams:
            stream.cancel()
            asyncio.ensure_future(stream.result()).add_done_callback(count)

    def observe(self, result: Result, request: Request) -> None:
        """Record a finished request in the metrics and traces."""
        self._admission.metrics.observe(result)
        if self._tracer is not None:
            tracing.record(self._tracer, result, dict(request.headers))


class _StreamingAnswer:
    """A streaming answer."""

    def __init__(
        self,
        generation: Generation,
        slot: AdmissionSlot,
        request: Request,
        streams: Sequence[Stream],
        reply: Reply,
        *,
        include_usage: bool,
        per_prompt: int,
    ) -> None:
        self._generation, self._slot, self._request = generation, slot, request
        self._streams, self._reply = streams, reply
        self._include_usage, self._per_prompt = include_usage, per_prompt

    async def chunks(
        self, first: tuple[int, TokenEvent], events: AsyncIterator[tuple[int, TokenEvent]]
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events; a failure becomes an error event, which ends the stream.

        No timeout may surround a ``yield``: it would also cancel the sending of a chunk.
        """
        found: tuple[int, TokenEvent] | None = first
        try:
            yield b"".join(map(server_sent, self._reply.first(len(self._streams))))
            while found is not None:
                if (chunk := await self._slot.within(self._chunk(*found))) is not None:
                    yield chunk
                found = await self._slot.within(anext(events, None))
            results = await self._slot.within(_collect(self._streams))
            if self._include_usage:
                yield server_sent(self._reply.last(results, self._per_prompt))
            yield DONE
        except PanscanError as error:
            yield server_sent(error_of(error))
        except TimeoutError:
            yield server_sent(error_body(TIMED_OUT, 504))
        except Exception as error:  # a bug must not look like the end of the answer
            log.exception("a stream failed")
            yield server_sent(error_body(f"internal error: {type(error).__name__}", 500))

    def close(self) -> None:
        """Release the slot, cancel unfinished requests, and count all requests."""
        self._slot.release()
        self._generation.abandon(self._streams, self._request)

    async def _chunk(self, index: int, event: TokenEvent) -> bytes | None:
        if event.finish_reason == "cancelled":
            raise EngineError(SHUTTING_DOWN)
        chunk = await self._reply.chunk(index, event)
        return None if chunk is None else server_sent(chunk)


class _EventStream(Response):
    """A response of server-sent events, which stops when they end or the client disconnects.

    Args:
        chunks: encoded events.
        close: called at the end, even after a failure.
        receive: ``receive`` of the request, whose body has been read.
        limit: time on the event loop's clock at which a slow client is disconnected.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None], receive: Receive, limit: float) -> None:
        self.status_code, self.background = 200, None
        self._chunks, self._close, self._receive, self._limit = chunks, close, receive, limit
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send(send))
        disconnected = asyncio.ensure_future(disconnection(self._receive))
        try:
            left = self._limit - asyncio.get_running_loop().time()
            await asyncio.wait({sending, disconnected}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, disconnected):
                task.cancel()
            await asyncio.gather(sending, disconnected, return_exceptions=True)
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]  # an async generator, which has aclose()
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _check_begun(stream: Stream, event: TokenEvent) -> None:
    """Raise the error of a stream whose first event reports a failure.

    Raises:
        PanscanError: see :class:`panscan.core.Result`.
    """
    if event.finish_reason == "error" and (error := (await stream.result()).error) is not None:
        raise error


async def _collect(streams: Sequence[Stream]) -> list[Result]:
    return list(await asyncio.gather(*(stream.result() for stream in streams)))


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, TokenEvent]]:
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
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, PanscanError):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


_Merge = asyncio.Queue[tuple[int, TokenEvent] | PanscanError | None]
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


def refusal(error: RefusedError) -> Response:
    """Return the response of a refused request."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.close:
        headers["connection"] = "close"
    body: dict[str, Any] = error_body(str(error), error.status, code=error.code)
    return JSONResponse(body, error.status, headers)
