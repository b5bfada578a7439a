"""One request's answer as an asynchronous stream of events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from panscan.core.errors import EngineError, SettingError
from panscan.core.result import Result, TokenEvent

FORKED = "the engine was created in another process: create the Engine after the fork, or start processes with 'spawn'"


class Stream:
    """An asynchronous iterator over a request's events; the last has a ``finish_reason``.

    If the request fails, the iteration ends by raising its error. Only one reader at a time is allowed. Leaving an
    ``async for`` early cancels the request once the iterator is closed or garbage-collected.

    Args:
        id: request id, as :meth:`panscan.engine.engine.Engine.cancel` takes it.
        cancel: callback that cancels the request.
    """

    def __init__(self, id: str, cancel: Callable[[], None]) -> None:
        self.id = id
        self.cancel = cancel
        self._asyncio = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._result: asyncio.Future[Result] = self._asyncio.create_future()
        self._ended = self._reading = False
        self._process = os.getpid()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        self._check_process()
        if self._reading:
            raise SettingError(f"request {self.id!r}: its stream already has a reader; submit it once per reader")
        self._reading = True
        try:
            while not self._ended:
                event = await self._events.get()
                self._ended = event.finish_reason is not None
                yield event
        finally:
            self._reading = False
            if not self._ended:
                self.cancel()
        if (error := (await self.result()).error) is not None:
            raise error

    async def result(self) -> Result:
        """Return the result once the request has ended. A failed request's result has its ``error``."""
        self._check_process()
        return await asyncio.shield(self._result)

    def on_event(self, event: TokenEvent) -> None:
        """Add an event, from any thread."""
        self._call(self._events.put_nowait, event)

    def on_end(self, result: Result) -> None:
        """Set the result, from any thread."""
        self._call(self._result.set_result, result)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(FORKED)

    def _call(self, function: Callable[[Any], object], argument: TokenEvent | Result) -> None:
        try:
            self._asyncio.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the event loop is closed, so there is no reader
            self.cancel()
