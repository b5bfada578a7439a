"""Request handling in the server: admission, reading the body, submission, whole or streamed answers, refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from panscan.core import EngineError, PanscanError, Result, Stream, TokenEvent, now
from panscan.core.ranges import shorten
from panscan.serve import tracing
from panscan.serve.backend import ServeBackend
from panscan.serve.metrics import ServerMetrics
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import FieldError
from panscan.serve.replies import DONE, TIMED_OUT, Reply, error_body, error_of, server_sent
from panscan.serve.requests import PreparedRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

__all__ = ["AdmissionControl", "AdmissionSlot", "Pool", "RefusedError", "read_body", "refusal"]

log = logging.getLogger("panscan.serve")

Answer = TypeVar("Answer")
Pool = Literal["read", "fetch", "decode"]
"""Threads that read documents, download them, or decode pages for previews."""

_THREADS = 16  # threads per pool, except for decoding; a download may take a minute
_SEND_SECONDS = 60.0  # after the deadline of a request, for a client that reads slowly
_DECODERS = 2  # threads that decode pages for previews: each holds up to 540 MB of pixels
_BODIES = 2 * 2**30  # maximum bytes of all request bodies and images in flight
_BODY_SECONDS = 120.0  # per body: a slow client must not hold a slot until its deadline
_TIMEOUT_HEADER = "x-request-timeout"


class RefusedError(Exception):
    """An error for a request that is refused before it is submitted.

    Args:
        status: HTTP status.
        message: reason, which the client receives.
        retry_after: seconds after which the client may retry.
        code: OpenAI's error code.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.code = status, retry_after, code


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """The admission slot of one request. ``release`` may be called more than once.

    Args:
        admission: admission control that issued the slot.
        deadline: time on the event loop's clock.
        accepted: time of admission, seconds of :func:`panscan.core.now`.
        size: bytes of the body received so far.
        released: whether the slot was released.
    """

    admission: AdmissionControl
    deadline: float
    accepted: float
    size: int = 0
    released: bool = False

    @property
    def until(self) -> float:
        """The deadline, in seconds of :func:`panscan.core.now`."""
        return now() + self.deadline - asyncio.get_running_loop().time()

    def grow(self, size: int) -> None:
        """Count bytes of the body, or of images sent to the engine.

        Raises:
            RefusedError: the bodies and images of all requests in flight exceed the server's limit.
        """
        self.size += size
        self.admission.bodies += size
        if self.admission.bodies > _BODIES:
            raise RefusedError(
                429,
                f"the server is at capacity: request bodies and images in flight exceed"
                f" {_BODIES >> 30} GiB; retry later",
                self.admission.metrics.retry_after,
            )

    def release(self) -> None:
        """Release the slot."""
        if not self.released:
            self.released = True
            self.admission.leave(self)


class AdmissionControl:
    """The admission control of the server: bounds the number of requests, and answers them.

    Args:
        options: server options.
        backend: backend that computes answers.
        metrics: metrics to update.
        tracer: tracer that records spans; None: no traces.
    """

    def __init__(
        self, options: ServeOptions, backend: ServeBackend, metrics: ServerMetrics, tracer: Tracer | None
    ) -> None:
        self.options, self.backend, self.metrics, self._tracer = options, backend, metrics, tracer
        self.draining = False
        self.bodies = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        sizes: dict[Pool, int] = {"read": _THREADS, "fetch": _THREADS, "decode": _DECODERS}
        self._pools = {name: ThreadPoolExecutor(size, f"panscan-{name}") for name, size in sizes.items()}

    def admit(self, request: Request) -> AdmissionSlot:
        """Return a slot for a new request.

        Raises:
            RefusedError: the server is draining, not ready, or at capacity.
            FieldError: the header ``X-Request-Timeout`` is not a number of seconds.
        """
        if self.draining:
            raise RefusedError(503, "the server is shutting down", 5)
        info = self.backend.info
        if info is None:
            raise RefusedError(503, "the model is loading", 5)
        most = info.max_concurrency + self.options.max_queued_requests
        if self._active >= most:
            message = f"the server is at capacity: {most} requests are running or waiting"
            raise RefusedError(429, message, self.metrics.retry_after, "queue_full")
        seconds = _timeout(request, self.options.request_timeout)
        self._active += 1
        self._idle.clear()
        self.metrics.active.labels(self.options.model_name).set(self._active)
        return AdmissionSlot(self, asyncio.get_running_loop().time() + seconds, now())

    def leave(self, slot: AdmissionSlot) -> None:
        """Release a slot."""
        self._active -= 1
        self.bodies -= slot.size
        self.metrics.active.labels(self.options.model_name).set(self._active)
        if not self._active:
            self._idle.set()

    async def drain(self) -> bool:
        """Refuse new requests and wait for running ones; return False if the drain timeout expires first."""
        self.draining = True
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def in_thread(self, slot: AdmissionSlot, work: Callable[[], Answer], pool: Pool = "read") -> Answer:
        """Run blocking work of a request in a thread and return its result.

        Args:
            slot: slot of the request.
            work: function to run. It continues after the deadline, but its result is then discarded.
            pool: thread pool. Downloads and decoding use separate pools, so that other requests never wait for them.

        Raises:
            TimeoutError: the deadline passed.
        """
        async with asyncio.timeout_at(slot.deadline):
            return await asyncio.get_running_loop().run_in_executor(self._pools[pool], work)

    def close(self) -> None:
        """Stop the threads; busy ones stop after their current document."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self, request: Request, slot: AdmissionSlot, prepared: PreparedRequest, reply: Reply, *,
        stream: bool, include_usage: bool, per_prompt: int,
    ) -> Response:  # fmt: skip
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
            for each in prepared.requests:
                streams.append(self.backend.submit(each, prepared.work, stream=stream))
            if stream:
                events = _merged(streams)
                first = await self._until_disconnect(request, slot, anext(events))
                await _check_begun(streams[first[0]], first[1])
                answer = _StreamingAnswer(
                    self, slot, request, streams, reply, include_usage=include_usage, per_prompt=per_prompt
                )
                limit = slot.deadline + _SEND_SECONDS
                return _EventStream(answer.chunks(first, events), answer.close, request.receive, limit)
            results = await self._until_disconnect(request, slot, _collect(streams))
        except BaseException:  # cancellation too: nothing else would cancel these streams
            self.abandon(streams, request)
            raise
        for result in results:
            self.observe(result, request)
        for result in results:
            if result.error is not None:
                raise result.error
            if result.finish_reason == "cancelled":
                raise EngineError("the server is shutting down")
        await reply.fetch_token_bytes(results)
        if reply.logprobs:  # millions of entries at worst
            return await self.in_thread(slot, lambda: JSONResponse(reply.whole(results, per_prompt)))
        return JSONResponse(reply.whole(results, per_prompt))

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
        self.metrics.observe(result)
        if self._tracer is not None:
            tracing.record(self._tracer, result, dict(request.headers))

    async def _until_disconnect(self, request: Request, slot: AdmissionSlot, work: Awaitable[Answer]) -> Answer:
        """Return the result of ``work``; cancel it if the client disconnects or the deadline passes."""
        task = asyncio.ensure_future(work)
        disconnected = asyncio.ensure_future(_disconnected(request.receive))
        try:
            async with asyncio.timeout_at(slot.deadline):
                await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for each in (task, disconnected):
                each.cancel()
            await asyncio.gather(task, disconnected, return_exceptions=True)


class _StreamingAnswer:
    """A streaming answer."""

    def __init__(
        self, admission: AdmissionControl, slot: AdmissionSlot, request: Request, streams: Sequence[Stream],
        reply: Reply, *,
        include_usage: bool, per_prompt: int,
    ) -> None:  # fmt: skip
        self._admission, self._slot, self._request = admission, slot, request
        self._streams, self._reply = streams, reply
        self._include_usage, self._per_prompt = include_usage, per_prompt

    async def chunks(
        self, first: tuple[int, TokenEvent], events: AsyncIterator[tuple[int, TokenEvent]]
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events; a failure becomes an error event, which ends the stream."""
        found: tuple[int, TokenEvent] | None = first
        try:
            yield b"".join(map(server_sent, self._reply.first(len(self._streams))))
            while found is not None:
                if (chunk := await self._in_time(self._chunk(*found))) is not None:
                    yield chunk
                found = await self._in_time(anext(events, None))
            results = await self._in_time(_collect(self._streams))
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
        self._admission.abandon(self._streams, self._request)

    async def _in_time(self, work: Awaitable[Answer]) -> Answer:
        """Await ``work`` until the deadline. A timeout around a ``yield`` would also cancel the sending of a chunk."""
        async with asyncio.timeout_at(self._slot.deadline):
            return await work

    async def _chunk(self, index: int, event: TokenEvent) -> bytes | None:
        if event.finish_reason == "cancelled":
            raise EngineError("the server is shutting down")
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

    def __init__(
        self, chunks: AsyncIterator[bytes], close: Callable[[], None], receive: Receive, limit: float
    ) -> None:  # fmt: skip
        self.status_code, self.background = 200, None
        self._chunks, self._close, self._receive, self._limit = chunks, close, receive, limit
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send(send))
        disconnected = asyncio.ensure_future(_disconnected(self._receive))
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


async def read_body(request: Request, slot: AdmissionSlot) -> tuple[bytes, dict[str, bytes]]:
    """Return the JSON of a request, and the files of a multipart body by field name.

    Raises:
        RefusedError: the content type is neither JSON nor multipart, the body arrives too slowly, or the bodies in
            flight are too large.
        TimeoutError: the deadline passed.
        FieldError: the multipart body is malformed.
        BodyTooLargeError: see :mod:`panscan.serve.guards`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise RefusedError(415, "the content type must be application/json or multipart/form-data")

    async def counted() -> Message:
        message = await request.receive()
        slot.grow(len(message.get("body", b"")))
        return message

    counting = Request(request.scope, counted)
    slow = asyncio.get_running_loop().time() + _BODY_SECONDS
    try:
        async with asyncio.timeout_at(min(slow, slot.deadline)):
            if kind == "multipart/form-data":
                return await _read_form(counting, slot.admission.options)
            return await counting.body(), {}
    except ValueError as error:  # raised by the codec that a part of the form names
        raise FieldError(f"request: the multipart body cannot be decoded ({error})", "request") from error
    except TimeoutError:
        if slow > slot.deadline:
            raise
        raise RefusedError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None


async def _read_form(request: Request, options: ServeOptions) -> tuple[bytes, dict[str, bytes]]:
    size = round(options.max_body_mb * 1e6)
    async with request.form(max_files=options.max_images + 1, max_fields=1, max_part_size=size) as form:
        files: dict[str, bytes] = {}
        body: bytes | None = None
        for name, value in form.multi_items():
            content = await value.read() if isinstance(value, UploadFile) else value.encode()
            if name == "request" and body is None:
                body = content
            elif name == "request" or name in files:
                raise FieldError(f"{name}: the multipart body repeats this field", name)
            elif isinstance(value, UploadFile):
                files[name] = content
            else:
                raise FieldError(f"{name} is not supported; send files, and the JSON body in the field request", name)
    if body is None:
        raise FieldError("request: this field of the multipart body is missing; it must hold the JSON body", "request")
    return body, files


def _timeout(request: Request, most: float) -> float:
    """Return the request timeout in seconds: the server's limit, or the client's if it is lower."""
    given = request.headers.get(_TIMEOUT_HEADER)
    if given is None:
        return most
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise FieldError(f"the header X-Request-Timeout must be a number of seconds above 0, got {shorten(given)}")
    return min(seconds, most)


async def _disconnected(receive: Receive) -> None:
    """Return once the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
    if error.status == 408:  # the rest of the body is not read
        headers["connection"] = "close"
    body: dict[str, Any] = error_body(str(error), error.status, code=error.code)
    return JSONResponse(body, error.status, headers)
