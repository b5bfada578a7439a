"""One load level: requests sent to an endpoint by one or several processes."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

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
    cancelled = cancelled or threading.Event()
    processes = min(processes, len(requests) or 1, max_concurrency or processes)
    outcomes: list[RequestOutcome | None] = [None] * len(requests)
    shares = [
        LevelShare(
            endpoint,
            requests[first::processes],
            None if arrivals is None else arrivals[first::processes],
            None if max_concurrency is None else len(range(first, max_concurrency, processes)),
        )
        for first in range(processes)
    ]

    def take(batch: Outcomes, first: int = 0) -> None:
        for position, outcome in batch:
            outcomes[first + position * processes] = outcome
            if on_done is not None:
                on_done(outcome)

    if processes == 1:
        with prepared_process(max_concurrency or len(requests)):
            started = now() + _LEAD
            loads = [asyncio.run(Sender(shares[0], take, cancelled.is_set).run(started))]
    else:
        started, loads, failures = _run_processes(shares, take, cancelled)
        for number, request in enumerate(requests) if not cancelled.is_set() else ():
            position, first = divmod(number, processes)
            if outcomes[number] is None and (failure := failures.get(first)) is not None:
                due = started + (0.0 if arrivals is None else arrivals[number])
                end = max(now(), due)
                lost = RequestOutcome(request.id, due, 0.0, due, end=end, error=failure, error_kind="client")
                take([(position, lost)], first)
    exchanges = [outcome for outcome in outcomes if outcome is not None]
    ended = now()
    # Requests that are due at once are sent one after the other, however fast the client is.
    burst = arrivals is not None and len(set(arrivals)) <= 1
    client = _client_figures(processes, exchanges, loads, ended - started, burst=burst)
    return LevelResult(exchanges, started, max((outcome.end for outcome in exchanges), default=ended), client)


def _client_figures(
    processes: int, exchanges: Sequence[RequestOutcome], loads: Sequence[SenderLoad], seconds: float, *, burst: bool
) -> ClientFigures:
    """Return whether the load generator kept up in a level of so many seconds."""
    lags = [exchange.lag for exchange in exchanges if exchange.error_kind != "client"] or [0.0]
    median, p99 = (float(np.percentile(lags, rank)) for rank in (50, 99))
    cpu = max((load.cpu_share for load in loads), default=0.0)
    delay = max((load.delay_p99 for load in loads), default=0.0)
    failure = next((exchange.error for exchange in exchanges if exchange.error_kind == "client"), None)
    if failure is not None:
        reason = failure
    elif cpu > _MOST_CPU and seconds > _SHORTEST:
        reason = f"a load process used {100 * cpu:.0f}% of a core"
    elif not burst and (median > _MOST_LAG_MEDIAN or p99 > _MOST_LAG_P99):
        reason = f"requests were sent late: {1e3 * median:.1f} ms at the median, {1e3 * p99:.1f} ms at p99"
    elif delay > _MOST_LAG_P99:
        reason = f"a load process had to wait for a core: {1e3 * delay:.1f} ms at p99"
    else:
        reason = ""
    return ClientFigures(processes, 1e3 * median, 1e3 * p99, cpu, bool(reason), reason)


def _run_processes(
    shares: Sequence[LevelShare], take: Callable[[Outcomes, int], None], cancelled: threading.Event
) -> tuple[float, list[SenderLoad], dict[int, str]]:
    """Run each share in a child process.

    Args:
        shares: requests of each process.
        take: takes outcomes, and the number of the process that sent them.
        cancelled: stops the level when set.

    Returns:
        When the level started, how busy the processes were, and why processes failed, by their number.
    """
    inbox: Inbox = queue.SimpleQueue()
    started, told = 0.0, False
    ready: set[int] = set()
    loads: dict[int, SenderLoad] = {}
    failures: dict[int, str] = {}
    with ExitStack() as stack:
        children = [stack.enter_context(Child("panscan.load.workers")) for _ in shares]
        for child, share in zip(children, shares, strict=True):
            child.listen_into(inbox)
            threading.Thread(target=child.send_if_alive, args=(share,), daemon=True).start()
        heard = dict.fromkeys(range(len(children)), time.monotonic())
        while running := heard.keys() - loads.keys() - failures.keys():
            if not started and running <= ready:
                started = now() + _LEAD_PROCESSES
                heard = dict.fromkeys(heard, time.monotonic())
                _broadcast(children, started)
            if cancelled.is_set() and not told:
                if not started:
                    break
                told = True
                _broadcast(children, WorkerSignal.CANCEL)
            with suppress(queue.Empty):
                child, message = inbox.get(timeout=_POLL_SECONDS)
                number = children.index(child)
                heard[number] = time.monotonic()
                match message:
                    case None:  # it has ended
                        if number not in loads:
                            failures.setdefault(number, f"a load process {child.ending()}")
                    case WorkerSignal():
                        ready.add(number)
                    case SenderLoad():
                        loads[number] = message
                    case _:
                        take(message, number)
            # Before the start, and if a process waits for a core, it may be silent for longer than a heartbeat.
            limit = _SILENCE_SECONDS + HEARTBEAT if started else _START_SECONDS
            for number in running:
                if time.monotonic() - heard[number] > limit:
                    failures.setdefault(number, f"a load process was silent for {limit:g} s")
                    children[number].kill()
    return started or now(), list(loads.values()), failures


def _broadcast(children: Sequence[Child], message: object) -> None:
    for child in children:
        child.send_if_alive(message)
