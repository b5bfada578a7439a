"""One request's tokens as they come, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from panscan.core import Result, TokenEvent

__all__ = ["Stream"]


class Stream:
    """An asynchronous iterator of a request's events; the last has a ``finish_reason``. Of a request that fails, the
    iteration ends by raising its error.

    Leaving an ``async for`` before its end cancels the request, once the iterator is closed or collected.

    Args:
        id: of the request; :meth:`panscan.engine.engine.Engine.cancel` takes it.
        cancel: ends the request.
    """

    def __init__(self, id: str, cancel: Callable[[], None]) -> None:
        self.id = id
        self.cancel = cancel
        self._asyncio = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._result: asyncio.Future[Result] = self._asyncio.create_future()
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            while not self._ended:
                event = await self._events.get()
                self._ended = event.finish_reason is not None
                yield event
        finally:
            if not self._ended:
                self.cancel()
        if (error := (await self.result()).error) is not None:
            raise error

    async def result(self) -> Result:
        """What became of the request, once it has ended. A failed request's result has its ``error``."""
        return await asyncio.shield(self._result)

    def on_event(self, event: TokenEvent) -> None:
        """From the engine's thread."""
        self._call(lambda: self._events.put_nowait(event))

    def on_end(self, result: Result) -> None:
        """From the engine's thread."""
        self._call(lambda: self._result.set_result(result))

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._asyncio.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self.cancel()
