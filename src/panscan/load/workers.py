"""Sends requests from one event loop: at their arrival times, or as earlier ones end. In this process or a subprocess.

A subprocess exits when its connection closes, so that nothing keeps running if its parent is killed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from panscan.core import now
from panscan.core.process import join_time_line, time_line
from panscan.load.chat import ChatRequest, ChatStream, Endpoint, RequestOutcome
from panscan.load.connection import ConnectionPool

__all__ = [
    "CANCEL",
    "HEARTBEAT",
    "LevelShare",
    "Outcomes",
    "Sender",
    "SenderLoad",
    "frame",
    "main",
    "prepared_process",
    "read_frame",
    "share_frames",
]

_TICK = 0.02  # seconds
_BURST = 64  # requests sent before responses are received
_SPARE_FILES = 256  # besides one per connection
_SMALL_SEGMENT = 64 * 1024  # bytes
_LENGTH = struct.Struct("!Q")

HEARTBEAT = 1.0
"""Longest silence of a subprocess, in seconds."""
CANCEL = "cancel"
"""Message to a subprocess: drop the open requests and end."""

Outcomes = list[tuple[int, RequestOutcome]]
"""Positions of requests in a share, with their outcomes."""


@dataclass(frozen=True, slots=True)
class LevelShare:
    """The requests of a level that one process sends.

    Args:
        endpoint: endpoint to send to.
        requests: requests, in the order of their arrival.
        arrivals: ascending seconds from the start of the level, one per request; None: a closed loop.
        max_concurrency: maximum number of requests in flight; None: no limit.
    """

    endpoint: Endpoint
    requests: Sequence[ChatRequest]
    arrivals: Sequence[float] | None
    max_concurrency: int | None


@dataclass(frozen=True, slots=True)
class SenderLoad:
    """How busy a process was.

    Args:
        cpu_share: share of one core that it used, 0 to 1.
        delay_p99: 99th percentile of the delay of its event loop, seconds.
    """

    cpu_share: float
    delay_p99: float


class Sender:
    """Sends a share in one event loop: at the arrival times, or when earlier requests end.

    Args:
        share: requests to send.
        on_batch: called from :meth:`run` with outcomes, every few milliseconds; empty if there are none.
        is_cancelled: polled as often.
    """

    def __init__(
        self, share: LevelShare, on_batch: Callable[[Outcomes], None], is_cancelled: Callable[[], bool]
    ) -> None:
        self._share, self._on_batch, self._is_cancelled = share, on_batch, is_cancelled
        self._count = len(share.requests)
        self._most = share.max_concurrency or self._count
        self._head = share.endpoint.head("POST", "/v1/chat/completions", accept="text/event-stream")
        self._next = 0
        self._ended = 0
        self._in_flight = 0
        self._waiting: deque[tuple[int, float]] = deque()  # position of a request without a slot, and since when
        self._batch: Outcomes = []
        self._closed = False

    async def run(self, start: float) -> SenderLoad:
        """Send everything; return when the last response has ended, or soon after a cancellation.

        A cancellation drops the open requests, which then have no outcome.

        Args:
            start: time of :func:`panscan.core.now` at which the level starts.
        """
        self._loop = asyncio.get_running_loop()
        self._pool = ConnectionPool(self._share.endpoint.address)
        self._start = start
        await asyncio.sleep(max(0.0, start - now()))
        cpu, since = time.thread_time(), time.perf_counter()
        if self._share.arrivals is not None:
            self._send_due()
        else:
            while self._next < min(self._most, self._count):
                self._send_next(start)
        try:
            delays = await self._watch()
            seconds = time.perf_counter() - since
            return SenderLoad(min(1.0, (time.thread_time() - cpu) / seconds), delays[int(0.99 * len(delays))])
        finally:
            self._closed = True
            await self._pool.close()

    async def _watch(self) -> list[float]:
        """Deliver outcomes until the level ends; return the ascending delays of the event loop, in seconds."""
        delays = [0.0]
        while True:
            done = self._ended == self._count
            batch, self._batch = self._batch, []
            self._on_batch(batch)
            if done or self._is_cancelled():
                return sorted(delays)
            expected = self._loop.time() + _TICK
            await asyncio.sleep(_TICK)
            delays.append(self._loop.time() - expected)

    def _send_due(self) -> None:
        """Open loop: send or queue the requests that are due, and schedule the next one."""
        arrivals = self._share.arrivals
        assert arrivals is not None  # an open loop
        for _ in range(_BURST):
            if self._next == self._count or self._closed:
                return
            due, at = self._start + arrivals[self._next], now()
            if due > at:
                self._loop.call_later(due - at, self._send_due)
                return
            if self._in_flight < self._most:
                self._send_next(due)
            else:
                self._waiting.append((self._next, at))
                self._next += 1
        self._loop.call_soon(self._send_due)

    def _send_next(self, due: float) -> None:
        self._send(self._next, due, 0.0)
        self._next += 1

    def _send(self, position: int, due: float, queued: float) -> None:
        request = self._share.requests[position]
        self._in_flight += 1
        exchange = RequestOutcome(request.id, due, queued, now())
        stream = ChatStream(exchange, request.max_tokens, lambda exchange, at: self._take(position, exchange, at))
        head = b"%s%d\r\n\r\n" % (self._head, sum(map(len, request.body)))
        self._pool.send(head, request.body, stream, self._share.endpoint.timeout)

    def _take(self, position: int, exchange: RequestOutcome, at: float) -> None:
        """Take an outcome, and give its slot to the next request."""
        self._batch.append((position, exchange))
        self._ended += 1
        self._in_flight -= 1
        if self._closed:
            return
        if self._share.arrivals is None:
            if self._next < self._count:
                self._send_next(at)
        elif self._waiting:
            waiting, since = self._waiting.popleft()
            self._send(waiting, self._start + self._share.arrivals[waiting], max(0.0, at - since))


@contextmanager
def prepared_process(connections: int) -> Iterator[None]:
    """Keep the garbage collector's pauses short, and allow enough open files.

    Args:
        connections: largest number of simultaneous connections.
    """
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = connections + _SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < needed:
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    gc.freeze()  # else, each full collection would traverse the modules and the requests
    try:
        yield
    finally:
        gc.unfreeze()


# Messages between a subprocess and its parent: pickles and raw bytes, each after its length


def frame(message: Any) -> bytes:
    """Return a message with its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: the connection is closed.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def share_frames(share: LevelShare) -> Iterator[bytes]:
    """Yield the messages that transfer a share: a description, then each segment of the bodies once."""
    numbers: dict[int, int] = {}  # by identity: equal images are the same object
    segments: list[bytes] = []
    requests = []
    for request in share.requests:
        for segment in request.body:
            if id(segment) not in numbers:
                numbers[id(segment)] = len(segments)
                segments.append(segment)
        requests.append((request.id, request.max_tokens, [numbers[id(segment)] for segment in request.body]))
    yield frame((time_line(), share.endpoint, share.arrivals, share.max_concurrency, requests, len(segments)))
    small = bytearray()  # segments that are sent together
    for segment in segments:
        small += _LENGTH.pack(len(segment))
        if len(segment) < _SMALL_SEGMENT:
            small += segment
        if len(segment) >= _SMALL_SEGMENT or len(small) >= _SMALL_SEGMENT:
            yield bytes(small)
            small.clear()
        if len(segment) >= _SMALL_SEGMENT:
            yield segment
    yield bytes(small)


def _read_share(stream: BinaryIO) -> LevelShare:
    """Return the share that the parent sends, and join its time line.

    Raises:
        EOFError: the connection is closed.
    """
    origin, endpoint, arrivals, max_concurrency, requests, count = pickle.loads(_read_bytes(stream))
    join_time_line(origin)
    segments = [_read_bytes(stream) for _ in range(count)]
    built = [ChatRequest(id, tuple(segments[each] for each in body), most) for id, most, body in requests]
    return LevelShare(endpoint, built, arrivals, max_concurrency)


def _read_bytes(stream: BinaryIO) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


class _Child:
    """The subprocess's side of the connection."""

    def __init__(self, connection: socket.socket, share: LevelShare) -> None:
        self._connection, self._share = connection, share
        self._cancelled = False
        self._sent = time.monotonic()

    async def run(self) -> None:
        """Send the share once the parent names the start; report the outcomes."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._writer.write(frame("ready"))
        start = await read_frame(reader)
        listening = asyncio.create_task(self._listen(reader))
        load = await Sender(self._share, self._report, lambda: self._cancelled).run(start)
        self._writer.write(frame(load))
        await self._writer.drain()
        await listening  # until the parent closes the connection

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._cancelled = await read_frame(reader) == CANCEL
        except (asyncio.IncompleteReadError, OSError):
            os._exit(0)  # the parent has everything, or is gone

    def _report(self, batch: Outcomes) -> None:
        if batch or time.monotonic() - self._sent >= HEARTBEAT:
            self._sent = time.monotonic()
            self._writer.write(frame(batch))


def main() -> None:
    """Run a subprocess."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        with connection.makefile("rb") as stream:
            share = _read_share(stream)
        with prepared_process(share.max_concurrency or len(share.requests)):
            asyncio.run(_Child(connection, share).run())
    except (EOFError, OSError, asyncio.IncompleteReadError):  # the parent is gone
        sys.exit(1)
