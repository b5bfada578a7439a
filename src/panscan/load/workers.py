"""Sends requests from one event loop: at their arrival times, or as earlier ones end. In this process or a child."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from panscan.core import now
from panscan.core.child import Parent
from panscan.core.daemons import DaemonThreads
from panscan.load.chat import ChatRequest, ChatStream, Endpoint, RequestOutcome
from panscan.load.connection import ConnectionPool

_TICK = 0.02  # seconds
_BURST = 64  # requests sent before responses are received
_SPARE_FILES = 256  # besides one per connection

HEARTBEAT = 1.0
"""Longest silence of a child process, in seconds."""


class WorkerSignal(Enum):
    """Messages without data between this process and a child, which receives its :class:`LevelShare` first."""

    READY = auto()
    """From a child: it has its share, and waits for the time of the start."""
    CANCEL = auto()
    """To a child that has started: drop the open requests and end."""


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
        delays = [0.0]  # of the event loop, in seconds
        try:
            while True:
                ended = self._ended == self._count
                batch, self._batch = self._batch, []
                self._on_batch(batch)
                if ended or self._is_cancelled():
                    break
                expected = self._loop.time() + _TICK
                await asyncio.sleep(_TICK)
                delays.append(self._loop.time() - expected)
            seconds = time.perf_counter() - since
            delay = sorted(delays)[int(0.99 * len(delays))]
            return SenderLoad(min(1.0, (time.thread_time() - cpu) / seconds), delay)
        finally:
            self._closed = True
            await self._pool.close()

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
    had_frozen = gc.get_freeze_count() > 0
    gc.collect()  # what is garbage, of an earlier level for example, would be frozen too and stay
    gc.freeze()  # else, each full collection would traverse the modules and the requests
    try:
        yield
    finally:
        if not had_frozen:  # unfreezing is for all objects, also those that the caller has frozen
            gc.unfreeze()


def main() -> None:
    """Run a child process: send the share once the parent names the start, and report outcomes."""
    parent = Parent()
    share: LevelShare = parent.receive()
    with prepared_process(share.max_concurrency or len(share.requests)):
        parent.send(WorkerSignal.READY)
        start: float = parent.receive()
        cancelled = threading.Event()

        def await_cancellation() -> None:
            parent.receive()  # the parent's only further message
            cancelled.set()

        threading.Thread(target=await_cancellation, daemon=True).start()
        reports = DaemonThreads(1, "panscan-report")  # a slow parent must not hold up the event loop
        last_report = time.monotonic()

        def report(batch: Outcomes) -> None:
            nonlocal last_report
            if batch or time.monotonic() - last_report >= HEARTBEAT:
                last_report = time.monotonic()
                reports.submit(partial(parent.send, batch))

        load = asyncio.run(Sender(share, report, cancelled.is_set).run(start))
    reports.submit(partial(parent.send, load))
    threading.Event().wait()  # until the parent closes the connection, which ends this process
