"""Admission of requests: the arrival of their bodies, slots, threads for blocking work, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar

from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from panscan.core import EngineError
from panscan.core.daemons import DaemonThreads
from panscan.core.deadline import Deadline
from panscan.core.option import shorten
from panscan.serve.body import FieldError
from panscan.serve.client import EngineClient
from panscan.serve.metrics import ServerMetrics
from panscan.serve.options import ServeOptions

Answer = TypeVar("Answer")
Pool = Literal["parse", "read", "document", "fetch", "decode"]
"""Threads that parse large bodies, read images, read documents, download either, or decode pages for previews."""

SHUTTING_DOWN = "the server is shutting down"

_POOLS: dict[Pool, int] = {"parse": 1, "read": 16, "document": 16, "fetch": 16, "decode": 2}
"""Threads per pool. Parsing holds Python's lock, so that several threads would only delay the event loop. A download
may take a minute; a page that is decoded for a preview holds up to 540 MB."""

_BODIES = 2 * 2**30  # maximum bytes of all request bodies and images in flight
_BODY_SECONDS = 120.0  # longest time until a body has arrived
_BODY_GRACE = 10.0  # seconds before a minimum rate applies to a body
_BODY_RATE = 4096.0  # bytes/s: the minimum average rate after that
_INLINE = 64 * 1024  # bytes; larger multipart bodies are split in a thread
_PART_HEAD = 4096  # maximum bytes of the headers of a part
_TIMEOUT_HEADER = "x-request-timeout"


class RefusedError(HTTPException):
    """An error for a request that is refused before it is submitted.

    Args:
        status: HTTP status.
        message: reason, which the client receives.
        retry_after: seconds after which the client may retry.
        code: OpenAI's error code.
        close: whether the connection must be closed, because the rest of the body is not read.
    """

    def __init__(
        self, status: int, message: str, retry_after: int | None = None, code: str | None = None, *, close: bool = False
    ) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        super().__init__(status, message, headers | ({"connection": "close"} if close else {}))
        self.code = code


async def race(*works: Awaitable[Any], seconds: float | None = None) -> list[asyncio.Future[Any] | None]:
    """Wait until one of several awaitables has ended, and cancel the others.

    Args:
        works: awaitables.
        seconds: longest time to wait.

    Returns:
        The future of each one that has ended, and None for the others.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return [task if task in ended else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AdmissionSlot:
    """A request from its arrival to its end. It counts against the server's limit once its body has arrived.

    Args:
        admission: admission control that issued the slot.
        request: HTTP request.
        seconds: time until the deadline.

    Attributes:
        ends: deadline on the event loop's clock.
        size: bytes of the body received so far, and of images sent to the engine.
        waiting: whether the request will be sent to the engine, and was not yet.
        streaming: whether a streaming response releases the slot.
        uploads: files of a multipart body by field name, until the documents have been read.
    """

    def __init__(self, admission: AdmissionControl, request: Request, seconds: float) -> None:
        self._admission, self.request = admission, request
        self._timer: asyncio.Timeout | None = None
        self.deadline = Deadline.after(seconds)
        self.ends = asyncio.get_running_loop().time() + seconds
        self.size = 0
        self.uploads: dict[str, bytes] = {}
        self.taken = self.released = self.stopped = self.waiting = self.streaming = False

    def grow(self, size: int) -> None:
        """Count bytes of the body, or of images sent to the engine.

        Raises:
            RefusedError: the bodies and images of all requests in flight exceed the server's limit.
        """
        self.size += size
        self._admission.bodies += size
        if self._admission.bodies > _BODIES:
            message = f"at capacity: request bodies and images in flight exceed {_BODIES >> 30} GiB; retry later"
            raise RefusedError(
                429, f"the server is {message}", self._admission.metrics.retry_after, close=not self.taken
            )

    async def within(self, work: Awaitable[Answer], limit: float = math.inf) -> Answer:
        """Await ``work`` until the deadline, or until ``limit`` on the event loop's clock.

        Raises:
            TimeoutError: the time has passed.
            EngineError: the server is shutting down.
        """
        try:
            async with asyncio.timeout_at(min(self.ends, limit)) as self._timer:
                if self.stopped:
                    self._timer.reschedule(0.0)
                return await work
        except TimeoutError:
            if self.stopped:
                raise EngineError(SHUTTING_DOWN) from None
            raise
        finally:
            self._timer = None

    def stop(self) -> None:
        """End the request now: its pending :meth:`within` raises an error, and its blocking work stops soon."""
        self.stopped = True
        self.deadline.abandon()
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0.0)

    def release(self) -> None:
        """Release the slot, and stop what still works for the request. May be called more than once."""
        if not self.released:
            self.released = True
            self.deadline.abandon()
            self._admission.leave(self)

    async def in_thread(self, work: Callable[[], Answer], pool: Pool = "read") -> Answer:
        """Run blocking work in a thread and return its result. The body must have been read.

        Args:
            work: function to run. It must check the slot's deadline; its result is discarded if the request has ended.
            pool: threads to use: downloads, documents and decoding never delay requests of another kind.

        Raises:
            TimeoutError, ClientDisconnect, EngineError: see :meth:`until_disconnect`.
        """
        future: Future[Answer] = Future()
        queued = [work]  # emptied if the request ends first: the work holds its body
        del work

        def run() -> None:
            with suppress(InvalidStateError):  # the request has ended
                try:
                    self.deadline.check()
                    future.set_result(queued.pop()())
                except Exception as error:
                    future.set_exception(error)

        self._admission.pools[pool].submit(run)
        try:
            return await self.until_disconnect(asyncio.wrap_future(future))
        finally:
            queued.clear()

    async def until_disconnect(self, work: Awaitable[Answer]) -> Answer:
        """Return the result of ``work``; cancel it if the client disconnects or the deadline passes.

        Raises:
            TimeoutError: the deadline passed.
            ClientDisconnect: the client disconnected.
            EngineError: the server is shutting down.
        """
        ended, _ = await self.within(race(work, disconnection(self.request.receive)))
        if ended is None:
            raise ClientDisconnect
        answer: Answer = ended.result()
        return answer


class AdmissionControl:
    """The admission control of the server: bounds the number of requests and their bytes, and runs blocking work.

    Args:
        options: server options.
        backend: backend that computes answers.
        metrics: metrics to update.

    Attributes:
        active: number of requests whose body has arrived and that have not ended.
    """

    def __init__(self, options: ServeOptions, backend: EngineClient, metrics: ServerMetrics) -> None:
        self.options, self.backend, self.metrics = options, backend, metrics
        self.draining = False
        self.bodies = 0
        self.active = 0
        self._slots: set[AdmissionSlot] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.pools = {name: DaemonThreads(size, f"panscan-{name}") for name, size in _POOLS.items()}

    @property
    def waiting(self) -> int:
        """Number of requests that were accepted, but not yet sent to an engine."""
        return sum(slot.waiting for slot in self._slots)

    @contextmanager
    def admit(self, request: Request) -> Iterator[AdmissionSlot]:
        """Yield a slot for a new request, whose body has not arrived. :meth:`take` counts it.

        The slot is released at the end, unless :attr:`AdmissionSlot.streaming` is set.

        Raises:
            RefusedError: the server is draining, not ready, or at capacity.
            FieldError: the header ``X-Request-Timeout`` is not a number of seconds.
        """
        self._check_accepting()
        seconds, given = self.options.request_timeout, request.headers.get(_TIMEOUT_HEADER)
        if given is not None:
            try:
                seconds = min(float(given), seconds)  # in this order, "nan" stays one
            except ValueError:
                seconds = 0.0
            if not seconds > 0:
                message = f"the header X-Request-Timeout must be a number of seconds above 0, got {shorten(given)}"
                raise FieldError(message)
        slot = AdmissionSlot(self, request, seconds)
        self._slots.add(slot)
        try:
            yield slot
        finally:
            if not slot.streaming:
                slot.release()

    def take(self, slot: AdmissionSlot, *, generates: bool) -> None:
        """Count a request whose body has arrived.

        Args:
            slot: slot of the request.
            generates: whether the request will be sent to the engine, for the number of waiting requests.

        Raises:
            RefusedError: the server is draining or at capacity.
        """
        self._check_accepting()
        slot.taken, slot.waiting = True, generates
        self.active += 1
        self._idle.clear()

    def leave(self, slot: AdmissionSlot) -> None:
        """Forget a request."""
        self._slots.discard(slot)
        self.bodies -= slot.size
        if slot.taken:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def drain(self) -> bool:
        """Refuse new requests and wait for running ones; return False if the drain timeout expires first."""
        self.draining = True
        for slot in [slot for slot in self._slots if not slot.taken]:
            slot.stop()
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End all requests, and the threads after their current document. Nothing waits for the threads."""
        self.draining = True
        for slot in list(self._slots):
            slot.stop()
        for pool in self.pools.values():
            pool.shutdown()

    def check_queue(self, active: int) -> None:
        """Refuse a request beyond those that may run and wait.

        Args:
            active: number of requests that are running or waiting.

        Raises:
            RefusedError: the server is at capacity.
        """
        most = self.backend.info.max_concurrency + self.options.max_queued_requests if self.backend.info else 0
        if active >= most:
            message = f"the server is at capacity: {most} requests are running or waiting"
            raise RefusedError(429, message, self.metrics.retry_after, "queue_full")

    def _check_accepting(self) -> None:
        """Refuse a request that cannot be accepted now.

        Raises:
            RefusedError: the server is draining, not ready, or at capacity.
        """
        if self.draining:
            raise RefusedError(503, SHUTTING_DOWN, 5)
        if self.backend.info is None:
            raise RefusedError(503, "the model is loading", 5)
        self.check_queue(self.active)


async def disconnection(receive: Receive) -> None:
    """Return once the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(slot: AdmissionSlot, admission: AdmissionControl, *, generates: bool) -> bytes:
    """Return the JSON of a request, once the slot is taken; the slot gets the files of a multipart body.

    Everything stays in memory, within the limits of ``--max-body-mb`` and of all bodies in flight.

    Args:
        slot: slot of a request whose body has not been read.
        admission: admission control that issued the slot.
        generates: see :meth:`AdmissionControl.take`.

    Raises:
        RefusedError: the content type is neither JSON nor multipart, the body arrives too slowly, the bodies in flight
            are too large, or the server is draining or at capacity.
        TimeoutError: the deadline passed.
        ClientDisconnect: the client disconnected.
        FieldError: the multipart body is malformed.
        BodyTooLargeError: see :mod:`panscan.serve.guards`.
    """
    kind, parameters = parse_options_header(slot.request.headers.get("content-type", ""))
    if kind not in (b"application/json", b"multipart/form-data"):
        raise RefusedError(415, "the content type must be application/json or multipart/form-data")
    start = asyncio.get_running_loop().time()
    chunks: list[bytes] = []
    more = True
    while more:
        limit = body_limit(start, slot.size)
        try:
            message = await slot.within(slot.request.receive(), limit)
        except EngineError as error:
            raise RefusedError(503, str(error), 5, close=True) from None
        except TimeoutError:
            if slot.ends <= limit:  # not the clock: a timer of uvloop may fire up to 1 ms early
                raise
            limits = f"{_BODY_RATE / 1024:g} kB/s on average after {_BODY_GRACE:g} s, {_BODY_SECONDS:g} s in total"
            raise RefusedError(408, f"the body arrives too slowly ({limits})", close=True) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        slot.grow(len(chunks[-1]))
        more = message.get("more_body", False)
    content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    del chunks
    admission.take(slot, generates=generates)
    if kind == b"application/json":
        return content
    form = partial(parse_form, content, parameters.get(b"boundary", b""), admission.options.max_images)
    content, slot.uploads = form() if len(content) < _INLINE else await slot.in_thread(form, "parse")
    return content


def body_limit(start: float, size: int) -> float:
    """Return the time at which a body is given up: 4 kB/s on average after 10 s, and 120 s in total.

    Args:
        start: time at which the server began to read it.
        size: bytes received so far.
    """
    return start + min(_BODY_SECONDS, _BODY_GRACE + size / _BODY_RATE)


def parse_form(content: bytes, boundary: bytes, most_files: int) -> tuple[bytes, dict[str, bytes]]:
    """Return the JSON of a multipart body, and its files by field name. The work is linear in the size of the body.

    Args:
        content: whole body.
        boundary: boundary that the content type names.
        most_files: maximum number of files.

    Raises:
        FieldError: the body is malformed, has too many files, repeats or lacks a field, or has an unsupported one.
    """
    files: dict[str, bytes] = {}
    body: bytes | None = None
    for name, is_file, data in _form_parts(content, boundary, most_files + 1):
        shown = name[:100] if name.isprintable() else shorten(name)
        if name == "request" and body is None:
            body = data
        elif name == "request" or name in files:
            raise FieldError(f"{shown}: the multipart body repeats this field", shown)
        elif is_file:
            files[name] = data
        else:
            raise FieldError(f"{shown} is not supported; send files, and the JSON body in the field request", shown)
    if body is None:
        raise FieldError("request: this field of the multipart body is missing; it must hold the JSON body", "request")
    return body, files


def _form_parts(content: bytes, boundary: bytes, most: int) -> list[tuple[str, bool, bytes]]:
    """Return (field name, whether it has a file name, content) of each part.

    Raises:
        FieldError: the body is malformed, or has too many parts.
    """
    if not 0 < len(boundary) <= 70:  # RFC 2046
        raise _malformed_form("the content type must name a boundary of 1 to 70 characters")
    delimiter = b"\r\n--" + boundary
    position = 0 if content.startswith(delimiter[2:]) else content.find(delimiter) + 2
    if position == 1:
        raise _malformed_form("the boundary does not occur")
    position += len(delimiter) - 2
    parts: list[tuple[str, bool, bytes]] = []
    while content[position : position + 2] != b"--":
        if len(parts) == most:
            raise FieldError(f"request: the multipart body has more than {most - 1} files (--max-images)", "request")
        start = content.find(b"\r\n\r\n", position, position + _PART_HEAD)
        if start < 0 or content[position : position + 2] != b"\r\n":
            raise _malformed_form(f"a part has no headers, or more than {_PART_HEAD} bytes of them")
        heads = (line.partition(b":") for line in content[position + 2 : start].split(b"\r\n"))
        dispositions = (value.strip() for key, _, value in heads if key.strip().lower() == b"content-disposition")
        fields = (parse_options_header(disposition)[1] for disposition in dispositions)
        options = next((field for field in fields if b"name" in field), None)
        if options is None:
            raise _malformed_form("a part has no field name")
        try:
            name = options[b"name"].decode()
        except UnicodeDecodeError as error:
            raise _malformed_form("a field name is not UTF-8") from error
        position = content.find(delimiter, start + 2)
        if position < 0:
            raise _malformed_form("it ends before the final boundary")
        parts.append((name, b"filename" in options, content[start + 4 : position]))
        position += len(delimiter)
    return parts


def _malformed_form(problem: str) -> FieldError:
    return FieldError(f"request: the multipart body is malformed: {problem}", "request")
