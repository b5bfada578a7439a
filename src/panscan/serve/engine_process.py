"""Management of the engine process by the HTTP server: start, monitoring, restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, NoReturn

from msgspec import Struct
from typing_extensions import override

from panscan.core import EngineError, PanscanError, Request, Result, Stats, TokenEvent
from panscan.core.child import Child
from panscan.core.daemons import DaemonThreads
from panscan.serve.client import EngineClient, EngineLostError, ModelInfo, PendingRequest, Question
from panscan.settings import Settings

log = logging.getLogger("panscan.serve")

_RESTARTS = 3  # consecutive restarts without an answered request
_QUERY_SECONDS = 30.0
_WATCH_SECONDS = 5.0
_HANG_SECONDS = 600.0  # longest step; on a CPU, one may take minutes


class Submit(Struct, frozen=True):
    """To the engine: answer a request. ``stream``: whether its events are sent, or only its result. ``model``: by which
    of the models; None: the base."""

    request: Request
    stream: bool
    model: str | None


class Cancel(Struct, frozen=True):
    """To the engine: cancel a request; it keeps the tokens so far. Ignored if the request has ended."""

    id: str


class Query(Struct, frozen=True):
    """To the engine: call a method of :class:`panscan.serve.loaded_model.LoadedModel`.

    Args:
        number: identifies the reply.
        method: name of the method.
        arguments: its arguments.
    """

    number: int
    method: Question
    arguments: tuple[Any, ...] = ()


class QueryReply(Struct, frozen=True):
    """From the engine: the reply to a query, or the error that it raised."""

    number: int
    value: Any


class Ended(Struct, frozen=True):
    """From the engine: a request has ended; its events have been sent."""

    id: str
    result: Result


class EngineProcess(EngineClient):
    """A client of one engine in a child process, which is restarted if it dies.

    The first message to the process is its settings and adapters; then :class:`Submit`, :class:`Cancel` and
    :class:`Query`. It sends lists: of its :class:`ModelInfo` or the error of loading, later of :class:`Ended`,
    :class:`QueryReply`, and (request id, event).

    Args:
        settings: settings of the model and its runner.
        adapters: models with adapters that the process also loads, by their names in the API.
    """

    def __init__(self, settings: Settings, adapters: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self._models = settings, dict(adapters)
        self._child: Child | None = None
        self._transmitter = DaemonThreads(1, "panscan-transmit")
        self._sent: dict[str, tuple[PendingRequest, asyncio.Future[Result]]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._ready = asyncio.Event()  # also set once no process can be started
        self._deaths = 0  # consecutive
        self._failed = asyncio.Event()

    @property
    @override
    def ready(self) -> bool:
        return self._ready.is_set() and not self._failed.is_set()

    @override
    async def start(self) -> None:
        await self._open()
        self._spawn(self._end_hung_process())

    @override
    async def watch(self) -> NoReturn:
        await self._failed.wait()
        raise EngineError("the engine's process died too often; its log is above")

    @override
    async def close(self) -> None:
        await super().close()
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
        self._transmitter.shutdown()

    @override
    async def stats(self) -> Mapping[str, Stats]:
        try:
            stats: Mapping[str, Stats] = await self._ask("stats")
        except EngineError:
            return {}
        return stats

    async def _open(self) -> None:
        """Start a process and wait until it is ready.

        Raises:
            PanscanError: the process cannot load the model, or died.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[ModelInfo] = loop.create_future()
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
        # The keys are for HTTP clients: the engine does not need them.
        environment = {name: value for name, value in os.environ.items() if name != "PANSCAN_API_KEYS"}
        self._child = child = Child("panscan.serve.engine_worker", environment=environment)

        def receive(messages: list[Any] | None) -> None:
            content = f"the engine's process {child.ending()}" if messages is None else messages
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
                loop.call_soon_threadsafe(self._take, child, content, opened)

        child.listen(receive)
        self._transmit(self._models)
        self.info = await opened
        self._ready.set()

    def _transmit(self, message: object) -> None:
        """Send a message in another thread. If the process has died, the listening thread reports it."""
        if self._child is not None:
            self._transmitter.submit(partial(self._child.send_if_alive, message))

    def _take(self, child: Child, messages: list[Any] | str, opened: asyncio.Future[ModelInfo]) -> None:
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
            match message:
                case (id, TokenEvent() as event):
                    if id in self._sent:
                        self._sent[id][0].on_event(event)
                case Ended():
                    self._deaths = 0
                    if message.id in self._sent:
                        _resolve(self._sent[message.id][1], message.result)
                case QueryReply():
                    _resolve(self._replies.pop(message.number, None), message.value)
                case ModelInfo() | PanscanError():
                    _resolve(opened, message)  # a signal may have cancelled it

    @override
    async def _attempt(self, pending: PendingRequest) -> Result:
        while not self._ready.is_set():
            await self._ready.wait()
        if self._failed.is_set():
            raise EngineError("the engine is not running")
        ended: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._sent[pending.request.id] = pending, ended
        self._transmit(Submit(pending.request, pending.streams, pending.work.model))
        try:
            return await ended
        finally:
            del self._sent[pending.request.id]

    def _cancel(self, pending: PendingRequest) -> None:
        """Have the engine end a request, which keeps its tokens; end it here if the engine does not know it."""
        id = pending.request.id
        if id in self._sent and self.ready:
            pending.cancelled = True
            self._transmit(Cancel(id))
        else:
            super()._cancel(pending)

    def _on_exit(self, reason: str) -> None:
        """Handle an unexpected exit of the process: end streams, keep requests to retry, and restart the process."""
        self._ready.clear()
        log.error("%s", reason)
        lost = EngineLostError(reason)
        for reply in self._replies.values():
            _resolve(reply, lost)
        self._replies.clear()
        for pending, ended in list(self._sent.values()):
            if pending.cancelled:
                super()._cancel(pending)
            else:
                _resolve(ended, lost)
        self._spawn(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        """Start another process. One that dies while it loads, or cannot load, counts like any other death.

        The memory of a GPU may be freed some time after the process that used it has died.
        """
        while True:
            self._deaths += 1
            if self._deaths > _RESTARTS:
                log.error("the engine's process died %d times in a row: %s", self._deaths, reason)
                self._failed.set()
                self._ready.set()
                return
            await asyncio.sleep(2.0 ** (self._deaths - 1) - 1)
            log.warning("restarting the engine's process")
            try:
                await self._open()
            except (PanscanError, OSError) as error:  # OSError: no process can be started now
                reason = str(error)
                log.error("the engine's process could not be restarted: %s", reason)
            else:
                return

    @override
    async def _ask(self, method: Question, *arguments: Any, seconds: float = _QUERY_SECONDS) -> Any:
        if not self.ready:
            raise EngineError("the engine is not ready")
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._transmit(Query(number, method, arguments))
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {seconds:g} s") from None
        finally:
            self._replies.pop(number, None)

    async def _end_hung_process(self) -> None:
        """Kill the process if it hangs; its exit is then handled like any other."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            child = self._child
            if not self.ready or child is None:
                continue
            try:
                await self._ask("stats", seconds=_HANG_SECONDS)
            except EngineError:
                if self.ready and child is self._child:
                    log.error("the engine has not answered for %g s: killing its process", _HANG_SECONDS)
                    child.kill()


def _resolve(future: asyncio.Future[Any] | None, value: Any) -> None:
    """Set a future's result, or its exception if the value is one; does nothing without a future that waits."""
    if future is None or future.done():
        return
    if isinstance(value, PanscanError):
        future.set_exception(value)
    else:
        future.set_result(value)
