"""One load level: requests sent to an endpoint by one or several processes."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from panscan.core import SettingError, now
from panscan.core.process import worker_command
from panscan.load.chat import ChatRequest, Endpoint, RequestOutcome
from panscan.load.workers import (
    CANCEL,
    HEARTBEAT,
    LevelShare,
    Outcomes,
    Sender,
    SenderLoad,
    frame,
    prepared_process,
    read_frame,
    share_frames,
)
from panscan.records.schema import ClientFigures

__all__ = ["ClientFigures", "LevelResult", "run_level"]

_LEAD = 0.02  # seconds from the decision to start to the start
_LEAD_PROCESSES = 0.25  # with the message to the subprocesses
_START_SECONDS = 120.0  # longest start of a subprocess, with the transfer of its requests
_SILENCE_SECONDS = 30.0
_EXIT_SECONDS = 5.0
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
        arrivals: ascending seconds from the start, one per request; None: a closed loop, in which each request is sent
            when an earlier one ends.
        max_concurrency: maximum number of requests in flight; None: no limit.
        processes: number of processes that send requests.
        on_done: called with each outcome, within milliseconds; the sending process waits for it.
        cancelled: stops the level when set.

    Raises:
        SettingError: the arguments do not fit together.
    """
    _check(requests, arrivals, max_concurrency, processes)
    level = _Level(len(requests), on_done, cancelled or threading.Event())
    processes = min(processes, len(requests) or 1, max_concurrency or processes)
    shares = [
        LevelShare(
            endpoint,
            requests[each::processes],
            None if arrivals is None else arrivals[each::processes],
            None if max_concurrency is None else len(range(each, max_concurrency, processes)),
        )
        for each in range(processes)
    ]
    if processes == 1:
        with prepared_process(max_concurrency or len(requests)):
            asyncio.run(level.run_here(shares[0]))
    else:
        asyncio.run(level.run_processes(shares))
    return level.result(shares)


def _check(
    requests: Sequence[ChatRequest], arrivals: Sequence[float] | None, max_concurrency: int | None, processes: int
) -> None:
    if processes < 1:
        raise SettingError(f"the number of processes: expected at least 1, got {processes}")
    if max_concurrency is not None and max_concurrency < 1:
        raise SettingError(f"--max-concurrency: expected at least 1, got {max_concurrency}")
    if arrivals is None and max_concurrency is None:
        raise SettingError("--max-concurrency is required without --request-rate: a closed loop needs a limit")
    if arrivals is not None and len(arrivals) != len(requests):
        raise SettingError(f"expected one arrival time per request, got {len(arrivals)} for {len(requests)} requests")
    if arrivals is not None and any(later < earlier for earlier, later in pairwise(arrivals)):
        raise SettingError("the arrival times are not ascending: sort them")


class _Level:
    """The state of a running level in the calling process."""

    def __init__(
        self, count: int, on_done: Callable[[RequestOutcome], None] | None, cancelled: threading.Event
    ) -> None:
        self._on_done, self._cancelled = on_done, cancelled
        self._found: list[RequestOutcome | None] = [None] * count
        self._loads: list[SenderLoad] = []
        self._started = self._ended = 0.0

    async def run_here(self, share: LevelShare) -> None:
        """Run the level in this process."""
        self._started = now() + _LEAD
        sender = Sender(share, lambda batch: self._take(batch, 0, 1), self._cancelled.is_set)
        self._loads.append(await sender.run(self._started))
        self._ended = now()

    async def run_processes(self, shares: Sequence[LevelShare]) -> None:
        """Run each share in a subprocess."""
        workers = [_Worker(share) for share in shares]
        watching = asyncio.create_task(self._watch(workers))
        try:
            await asyncio.gather(*(worker.open() for worker in workers))
            self._started = now() + _LEAD_PROCESSES
            if self._cancelled.is_set():  # while they started
                return
            await asyncio.gather(*(self._run(worker, each, len(workers)) for each, worker in enumerate(workers)))
        finally:
            self._ended = now()
            watching.cancel()
            for worker in workers:
                worker.close()

    async def _watch(self, workers: Sequence[_Worker]) -> None:
        while not self._cancelled.is_set():
            await asyncio.sleep(0.05)
        for worker in workers:
            worker.cancel()

    async def _run(self, worker: _Worker, first: int, step: int) -> None:
        load = await worker.run(self._started, lambda batch: self._take(batch, first, step))
        if load is not None:
            self._loads.append(load)
        elif not self._cancelled.is_set():
            self._take(self._lost(worker, first, step), first, step)

    def _lost(self, worker: _Worker, first: int, step: int) -> Outcomes:
        """Return failures of the requests that a subprocess left without an outcome."""
        at, batch = now(), []
        for position, request in enumerate(worker.share.requests):
            if self._found[first + position * step] is None:
                arrivals = worker.share.arrivals
                due = self._started + (0.0 if arrivals is None else arrivals[position])
                lost = RequestOutcome(
                    request.id, due, 0.0, due, end=max(at, due), error=worker.failure, error_kind="client"
                )
                batch.append((position, lost))
        return batch

    def _take(self, batch: Outcomes, first: int, step: int) -> None:
        for position, exchange in batch:
            self._found[first + position * step] = exchange
            if self._on_done is not None:
                self._on_done(exchange)

    def result(self, shares: Sequence[LevelShare]) -> LevelResult:
        """Return the result of the level that has run."""
        exchanges = [exchange for exchange in self._found if exchange is not None]
        ended = max((exchange.end for exchange in exchanges), default=self._ended)
        return LevelResult(exchanges, self._started, ended, self._client(exchanges, shares))

    def _client(self, exchanges: Sequence[RequestOutcome], shares: Sequence[LevelShare]) -> ClientFigures:
        lags = [exchange.lag for exchange in exchanges if exchange.error_kind != "client"] or [0.0]
        median, p99 = (float(np.percentile(lags, each)) for each in (50, 99))
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
        return ClientFigures(len(shares), 1e3 * median, 1e3 * p99, cpu, bool(reason), reason)


class _Worker:
    """A subprocess, as its parent manages it. Its failures are kept in ``failure``.

    Args:
        share: requests that it sends.
    """

    def __init__(self, share: LevelShare) -> None:
        self.share = share
        self.failure: str | None = None
        self._running = False
        self._writer: asyncio.StreamWriter | None = None
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # A new session: Ctrl-C in a terminal must reach the parent only.
                worker_command("panscan.load.workers", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    async def open(self) -> None:
        """Transfer the share, and wait until the subprocess is ready."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
                for part in share_frames(self.share):
                    self._writer.write(part)
                    await self._writer.drain()
                await read_frame(self._reader)
        except TimeoutError:
            self._fail(f"a load process did not start within {_START_SECONDS:g} s")
        except (asyncio.IncompleteReadError, OSError):
            self._fail(None)

    async def run(self, start: float, on_batch: Callable[[Outcomes], None]) -> SenderLoad | None:
        """Send the share; return how busy the subprocess was, or None if it failed.

        Args:
            start: when the level starts.
            on_batch: called with outcomes.
        """
        if self.failure is not None or self._writer is None:
            return None
        try:
            self._running = True
            self._writer.write(frame(start))
            while True:
                # Before the start, and if the process waits for a core, it may be silent for longer than a heartbeat.
                async with asyncio.timeout(_SILENCE_SECONDS + HEARTBEAT):
                    message = await read_frame(self._reader)
                if isinstance(message, SenderLoad):
                    return message
                on_batch(message)
        except TimeoutError:
            self._fail(f"a load process was silent for {_SILENCE_SECONDS:g} s")
        except (asyncio.IncompleteReadError, OSError):
            self._fail(None)
        return None

    def cancel(self) -> None:
        """Ask the subprocess to drop its open requests and end; kill it if it has not begun to send."""
        if not self._running:  # a message within the transfer of the share would be read as part of it
            self._process.kill()
        elif self._writer is not None and self.failure is None:
            self._writer.write(frame(CANCEL))

    def close(self) -> None:
        """Kill the subprocess, unless it has exited, and wait for it."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel cannot end it yet; nothing waits for it
            self._process.wait(_EXIT_SECONDS)

    def _fail(self, reason: str | None) -> None:
        """Record why the subprocess failed: the reason, or its exit."""
        if reason is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
            code = self._process.returncode
            if code is None:
                reason = "a load process closed its connection"
            elif code < 0:
                reason = f"a load process was killed by {signal.Signals(-code).name}"
            else:
                reason = f"a load process exited with code {code}"
        self.failure = reason
        self._process.kill()
