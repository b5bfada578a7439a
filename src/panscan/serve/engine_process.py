"""Management of the engine process by the HTTP server: start, monitoring, restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from panscan.core import (
    EngineError,
    PanscanError,
    QueueFullError,
    Request,
    Result,
    Stats,
    Stream,
    TokenEvent,
    now,
)
from panscan.core.process import time_line, worker_command
from panscan.serve.backend import ModelInfo, RequestWork, TokenCounts
from panscan.serve.messages import (
    AskQuery,
    Cancel,
    CountTokens,
    Ended,
    EngineReady,
    Events,
    LoadFailed,
    Open,
    Query,
    QueryAnswer,
    ReadStats,
    Submit,
    TokenTexts,
)
from panscan.settings import Settings

__all__ = ["EngineProcess"]

log = logging.getLogger("panscan.serve")

_ATTEMPTS = 3  # attempts per request, so that a request that kills its process fails eventually
_RESTARTS = 3  # consecutive restarts without an answered request
_QUERY_SECONDS = 30.0
_WATCH_SECONDS = 5.0
_HANG_SECONDS = 600.0  # longest step; on a CPU, one may take minutes
_EXIT_SECONDS = 10.0


class EngineProcess:
    """A :class:`panscan.serve.backend.ServeBackend` over one engine process.

    If the process dies, the backend restarts it and retries non-streaming requests; streams end with an error.
    ``failed`` is set once the process has died too often.

    Args:
        settings: settings of the model and its runner.
        max_queued_requests: maximum number of queued requests, in addition to running ones.
    """

    def __init__(self, settings: Settings, *, max_queued_requests: int) -> None:
        self._settings, self._max_queued = settings, max_queued_requests
        self._child: _Child | None = None
        self._inflight: dict[str, _InFlight] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._ready = asyncio.Event()
        self._deaths = 0  # consecutive
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._info: ModelInfo | None = None
        self._retried = 0
        self.failed = asyncio.Event()

    @property
    def info(self) -> ModelInfo | None:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        return self._info

    @property
    def retried(self) -> int:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        return self._retried

    @property
    def ready(self) -> bool:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        return self._ready.is_set()

    @property
    def inflight(self) -> int:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        return len(self._inflight)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None if there is no process."""
        return None if self._child is None else self._child.process.pid

    async def start(self) -> None:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        await self._open()
        self._spawn(self._watch())

    async def close(self) -> None:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        self._closed = True
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
        self._end_all(EngineError("the server is shutting down"))

    def submit(self, request: Request, work: RequestWork, *, stream: bool) -> Stream:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        if self.failed.is_set() or self._closed or self._info is None:
            raise EngineError("the engine is not running")
        most = self._info.max_concurrency + self._max_queued
        if len(self._inflight) >= most:
            raise QueueFullError(f"{most} requests are running or waiting (--max-queued-requests {self._max_queued})")
        entry = _InFlight(request, Stream(request.id, lambda: self._cancel(request.id)), stream)
        self._inflight[request.id] = entry
        if self.ready:
            self._send(entry)
        return entry.stream

    async def count(self, request: Request) -> TokenCounts:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        found: TokenCounts = await self._ask(CountTokens(request))
        return found

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        found: list[bytes] = await self._ask(TokenTexts(tuple(ids)))
        return found

    async def stats(self) -> Mapping[str, Stats]:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        try:
            return {"0": await self._ask(ReadStats())}
        except EngineError:
            return {}

    async def _open(self) -> None:
        """Start a process and wait until it is ready.

        Raises:
            PanscanError: the process cannot load the model, or died.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[EngineReady] = loop.create_future()
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
        child = _Child(lambda child, messages: _call(loop, lambda: self._take(child, messages, opened)))
        self._child = child
        child.send(Open(self._settings, time_line()))
        ready = await opened
        self._info = ready.info
        self._ready.set()
        for entry in list(self._inflight.values()):
            self._send(entry)

    def _take(self, child: _Child, messages: list[Any] | str, opened: asyncio.Future[EngineReady]) -> None:
        """Handle messages from a process, or the reason for its exit."""
        if child is not self._child:  # a process that was replaced
            return
        if isinstance(messages, str):
            if not opened.done():
                opened.set_exception(EngineError(messages))
            elif not self._closed and not opened.cancelled() and opened.exception() is None:
                self._on_exit(messages)
            return
        for message in messages:
            self._take_one(message, opened)

    def _take_one(self, message: Any, opened: asyncio.Future[EngineReady]) -> None:
        match message:
            case Events():
                self._deliver(message)
            case Ended():
                self._deaths = 0
                if (entry := self._inflight.pop(message.id, None)) is not None:
                    entry.end(message.result)
            case QueryAnswer():
                if (answer := self._answers.pop(message.number, None)) is not None and not answer.done():
                    _resolve(answer, message.answer)
            case EngineReady() if not opened.done():  # a signal may have cancelled it
                opened.set_result(message)
            case LoadFailed() if not opened.done():
                opened.set_exception(message.error)

    def _deliver(self, message: Events) -> None:
        for id, event in message.events:
            if (entry := self._inflight.get(id)) is not None:
                entry.stream.on_event(event)

    def _send(self, entry: _InFlight) -> None:
        assert self._child is not None  # it is ready
        entry.attempts += 1
        self._child.send(Submit(entry.request, entry.streams))

    def _cancel(self, id: str) -> None:
        if (entry := self._inflight.get(id)) is None:
            return
        entry.cancelled = True
        if self.ready and self._child is not None:
            self._child.send(Cancel(id))
        else:  # waiting for the process to restart
            del self._inflight[id]
            entry.fail(None)

    def _on_exit(self, reason: str) -> None:
        """Handle an unexpected exit of the process: end streams, keep requests to retry, and restart the process."""
        self._ready.clear()
        log.error("%s", reason)
        error = EngineError(f"{reason}; send the request again")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
        for id, entry in list(self._inflight.items()):
            if entry.cancelled:
                del self._inflight[id]
                entry.fail(None)
            elif entry.streams or entry.attempts >= _ATTEMPTS:
                del self._inflight[id]
                entry.fail(error)
            else:
                self._retried += 1
        self._spawn(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        """Start another process. One that dies while it loads, or cannot load, counts like any other death.

        The memory of a GPU may be freed some time after the process that used it has died.
        """
        while True:
            self._deaths += 1
            if self._deaths > _RESTARTS:
                self._give_up(f"the engine's process died {self._deaths} times in a row: {reason}")
                return
            await asyncio.sleep(2.0 ** (self._deaths - 1) - 1)
            log.warning("restarting the engine's process")
            try:
                await self._open()
            except PanscanError as error:
                reason = str(error)
                log.error("the engine's process could not be restarted: %s", reason)
            else:
                return

    def _give_up(self, reason: str) -> None:
        log.error("%s", reason)
        self._end_all(EngineError(reason))
        self.failed.set()

    def _end_all(self, error: EngineError) -> None:
        for entry in self._inflight.values():
            entry.fail(error)
        self._inflight.clear()

    async def _ask(self, query: Query, seconds: float = _QUERY_SECONDS) -> Any:
        if not self.ready or self._child is None:
            raise EngineError("the engine is not ready")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._child.send(AskQuery(number, query))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {seconds:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def _watch(self) -> None:
        """Kill the process if it hangs; its exit is then handled like any other."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            child = self._child
            if not self.ready or child is None:
                continue
            try:
                await self._ask(ReadStats(), _HANG_SECONDS)
            except EngineError:
                if self.ready and child is self._child:
                    log.error("the engine has not answered for %g s: killing its process", _HANG_SECONDS)
                    child.kill()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True, eq=False)
class _InFlight:
    """An in-flight request.

    Args:
        request: request to answer.
        stream: stream that receives its events and its result.
        streams: whether the caller reads its events.
        attempts: number of processes that it was sent to.
        cancelled: whether its client has disconnected.
    """

    request: Request
    stream: Stream
    streams: bool
    attempts: int = 0
    cancelled: bool = False

    def end(self, result: Result) -> None:
        """Deliver the result."""
        self.stream.on_end(result)

    def fail(self, error: PanscanError | None) -> None:
        """End the request without an answer: failed with the error, or cancelled if there is none."""
        result = Result.unanswered(self.request.id, now(), error)
        if self.streams:
            self.stream.on_event(TokenEvent(None, "", now(), finish_reason=result.finish_reason))
        self.stream.on_end(result)


class _Child:
    """One engine process, its connection, and a thread for each direction.

    Args:
        take: called in the reading thread with the child and each list of messages, at last with the exit reason.
    """

    def __init__(self, take: Callable[[_Child, list[Any] | str], None]) -> None:
        self._take = take
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with theirs:
            self.process = subprocess.Popen(
                # A new session: Ctrl-C in a terminal must reach the server only, which lets the engine finish.
                worker_command("panscan.serve.engine_worker", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "PANSCAN_API_KEYS"},
            )
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._receive, "panscan-receive"), (self._transmit, "panscan-transmit"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Queue a message. If the process has died, the reading thread reports it."""
        self._outgoing.put(message)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def close(self) -> None:
        """Kill the process and wait until it has exited."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: there is nothing else to do
            self.process.wait(_EXIT_SECONDS)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(_EXIT_SECONDS)
        self._connection.close()

    def _exit_reason(self) -> str:
        """Return why the process exited. Call it once the connection has closed."""
        try:
            code = self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        if code == -signal.SIGKILL:
            return "the engine's process was killed by SIGKILL (by the kernel, if the host ran out of memory)"
        if code < 0:
            return f"the engine's process was killed by {signal.Signals(-code).name}"
        return f"the engine's process exited with code {code}; its log is above"

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):  # it exited, or was cut off
            while True:
                self._take(self, pickle.loads(self._connection.recv_bytes()))
        self._outgoing.put(None)  # stops the other thread
        self._take(self, self._exit_reason())

    def _transmit(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            except OSError:
                return


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    if isinstance(answer, PanscanError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
        loop.call_soon_threadsafe(function)
