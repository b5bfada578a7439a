"""One load level: requests sent to an endpoint by one or several processes."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from panscan.core import now
from panscan.core.child import Child, Inbox
from panscan.load.chat import ChatRequest, Endpoint, RequestOutcome
from panscan.load.workers import HEARTBEAT, LevelShare, Outcomes, Sender, SenderLoad, WorkerSignal, prepared_process
from panscan.records.request_records import ClientFigures

_LEAD = 0.02  # seconds from the decision to start to the start
_LEAD_PROCESSES = 0.25  # with the message to the subprocesses
_START_SECONDS = 120.0  # longest start of a subprocess, with the transfer of its requests
_SILENCE_SECONDS = 30.0
_POLL_SECONDS = 0.05  # until a cancellation or a silent process is noticed
_MOST_CPU = 0.9  # share of a core
_SHORTEST = 0.5  # seconds of a level whose share of a core says something
_MOST_LAG_MEDIAN = 0.005  # seconds
_MOST_LAG_P99 = 0.05


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The outcomes of one level. Times are seconds of :func:`panscan.core.now`.

    Args:
        exchanges: outcomes in the order of the requests; after a cancellation, only of those that had ended.
        started: origin of the arrival times.
        ended: when the last response had ended.
        client: whether the load generator kept up.
    """

    exchanges: list[RequestOutcome]
    started: float
    ended: float
    client: ClientFigures


def run_level(
    endpoint: Endpoint,
    requests: Sequence[ChatRequest],
    arrivals: Sequence[float] | None,
    *,
    max_concurrency: int | None = None,
    processes: int = 1,
    on_done: Callable[[RequestOutcome], None] | None = None,
    cancelled: threading.Event | None = None,
) -> LevelResult:
    """Send requests to an endpoint and return their outcomes. Blocks; not for use inside an event loop.

    Endpoint faults are outcomes of requests, never exceptions. With several processes, requests are dealt round-robin,
    and each process gets an equal part of ``max_concurrency``; one process runs inside this one.

    Args:
        endpoint: endpoint to send to.
        requests: encoded requests.
        arrivals: ascending seconds from the start, one per request; None: a closed loop of ``max_concurrency``, in
            which each request is sent when an earlier one ends.
        max_concurrency: maximum number of requests in flight; None: no limit.
        processes: number of processes that send requests.
        on_done: called with each outcome, within milliseconds; the sending process waits for it.
        cancelled: stops the level when set.
    """
    level = _Level(len(requests), on_done, cancelled or threading.Event())
    processes = min(processes, len(requests) or 1, max_concurrency or processes)
    shares = [
        LevelShare(
            endpoint,
            requests[first::processes],
            None if arrivals is None else arrivals[first::processes],
            None if max_concurrency is None else len(range(first, max_concurrency, processes)),
        )
        for first in range(processes)
    ]
    if processes == 1:
        with prepared_process(max_concurrency or len(requests)):
            asyncio.run(level.run_here(shares[0]))
    else:
        level.run_processes(shares)
    return level.result(shares)


class _Level:
    """The state of a running level in the calling process."""

    def __init__(
        self, count: int, on_done: Callable[[RequestOutcome], None] | None, cancelled: threading.Event
    ) -> None:
        self._on_done, self._cancelled = on_done, cancelled
        self._outcomes: list[RequestOutcome | None] = [None] * count
        self._loads: list[SenderLoad] = []
        self._started = self._ended = 0.0

    async def run_here(self, share: LevelShare) -> None:
        """Run the level in this process."""
        self._started = now() + _LEAD
        sender = Sender(share, lambda batch: self._take(batch, 0, 1), self._cancelled.is_set)
        self._loads.append(await sender.run(self._started))
        self._ended = now()

    def run_processes(self, shares: Sequence[LevelShare]) -> None:
        """Run each share in a child process."""
        inbox: Inbox = queue.SimpleQueue()
        with ExitStack() as stack:
            workers = [_Worker(stack.enter_context(Child("panscan.load.workers")), share) for share in shares]
            for worker in workers:
                worker.child.listen_into(inbox)
                threading.Thread(target=worker.child.send_if_alive, args=(worker.share,), daemon=True).start()
            try:
                while any(worker.load is None and worker.failure is None for worker in workers):
                    if self._started == 0.0 and all(worker.ready or worker.failure for worker in workers):
                        self._started = now() + _LEAD_PROCESSES
                        for worker in workers:
                            worker.heard = time.monotonic()
                            worker.child.send_if_alive(self._started)
                    with suppress(queue.Empty):
                        child, message = inbox.get(timeout=_POLL_SECONDS)
                        first = next(number for number, worker in enumerate(workers) if worker.child is child)
                        self._take(workers[first].take(message), first, len(workers))
                    for worker in workers:
                        worker.check_silence(started=self._started != 0.0)
                        if self._cancelled.is_set() and self._started and not worker.cancelled:
                            worker.cancelled = True
                            worker.child.send_if_alive(WorkerSignal.CANCEL)
                    if self._cancelled.is_set() and not self._started:
                        break
            finally:
                self._ended = now()
        self._started = self._started or self._ended
        self._loads += [worker.load for worker in workers if worker.load is not None]
        if not self._cancelled.is_set():
            for first, worker in enumerate(workers):
                self._take(self._lost(worker, first, len(workers)), first, len(workers))

    def _lost(self, worker: _Worker, first: int, step: int) -> Outcomes:
        """Return failures of the requests that a process left without an outcome."""
        ended, batch = now(), []
        for position, request in enumerate(worker.share.requests):
            if self._outcomes[first + position * step] is None:
                arrivals = worker.share.arrivals
                due = self._started + (0.0 if arrivals is None else arrivals[position])
                lost = RequestOutcome(
                    request.id, due, 0.0, due, end=max(ended, due), error=worker.failure, error_kind="client"
                )
                batch.append((position, lost))
        return batch

    def _take(self, batch: Outcomes, first: int, step: int) -> None:
        for position, exchange in batch:
            self._outcomes[first + position * step] = exchange
            if self._on_done is not None:
                self._on_done(exchange)

    def result(self, shares: Sequence[LevelShare]) -> LevelResult:
        """Return the result of the level that has run."""
        exchanges = [exchange for exchange in self._outcomes if exchange is not None]
        ended = max((exchange.end for exchange in exchanges), default=self._ended)
        lags = [exchange.lag for exchange in exchanges if exchange.error_kind != "client"] or [0.0]
        median, p99 = (float(np.percentile(lags, rank)) for rank in (50, 99))
        cpu = max((load.cpu_share for load in self._loads), default=0.0)
        delay = max((load.delay_p99 for load in self._loads), default=0.0)
        failure = next((exchange.error for exchange in exchanges if exchange.error_kind == "client"), None)
        # Requests that are due at once are sent one after the other, however fast the client is.
        burst = all(share.arrivals is not None and len(set(share.arrivals)) <= 1 for share in shares)
        late = not burst and (median > _MOST_LAG_MEDIAN or p99 > _MOST_LAG_P99)
        if failure is not None:
            reason = failure
        elif cpu > _MOST_CPU and self._ended - self._started > _SHORTEST:
            reason = f"a load process used {100 * cpu:.0f}% of a core"
        elif late:
            reason = f"requests were sent late: {1e3 * median:.1f} ms at the median, {1e3 * p99:.1f} ms at p99"
        elif delay > _MOST_LAG_P99:
            reason = f"a load process had to wait for a core: {1e3 * delay:.1f} ms at p99"
        else:
            reason = ""
        client = ClientFigures(len(shares), 1e3 * median, 1e3 * p99, cpu, bool(reason), reason)
        return LevelResult(exchanges, self._started, ended, client)


@dataclass(eq=False, slots=True)
class _Worker:
    """A child process that sends a share.

    Args:
        child: the process.
        share: requests that it sends.
        ready: whether it waits for the start.
        cancelled: whether it was told to drop its open requests.
        load: how busy it was, once it has sent everything.
        failure: why it failed.
        heard: time of its last message, in seconds of ``time.monotonic()``.
    """

    child: Child
    share: LevelShare
    ready: bool = False
    cancelled: bool = False
    load: SenderLoad | None = None
    failure: str | None = None
    heard: float = field(default_factory=time.monotonic)

    def take(self, message: WorkerSignal | SenderLoad | Outcomes | None) -> Outcomes:
        """Handle a message, None at the end of the process; return the outcomes in it."""
        self.heard = time.monotonic()
        match message:
            case None:
                if self.load is None and self.failure is None:
                    self.failure = f"a load process {self.child.ending()}"
            case WorkerSignal():
                self.ready = True
            case SenderLoad():
                self.load = message
            case _:
                return message
        return []

    def check_silence(self, *, started: bool) -> None:
        """Give the process up if it has sent nothing for too long."""
        # Before the start, and if the process waits for a core, it may be silent for longer than a heartbeat.
        limit = _SILENCE_SECONDS + HEARTBEAT if started else _START_SECONDS
        if self.load is None and self.failure is None and time.monotonic() - self.heard > limit:
            self.failure = (
                f"a load process was silent for {_SILENCE_SECONDS:g} s"
                if started
                else f"a load process did not start within {_START_SECONDS:g} s"
            )
            self.child.kill()
