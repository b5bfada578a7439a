"""One engine replica on a Ray cluster: an actor that holds a loaded model."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from panscan.core import EngineError, Request, Result, Stats, TokenEvent, now
from panscan.images.pool import decode_in_children
from panscan.model.machine import resolve_device, set_thread_count
from panscan.serve.backend import ModelInfo, RequestWork, TokenCounts
from panscan.serve.loaded_model import open_model
from panscan.serve.watchdog import Watchdog
from panscan.settings import Settings

log = logging.getLogger("panscan.serve")

_STATS_SECONDS = 2.0  # longest wait for one replica when metrics are scraped
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 20.0  # longest time without a heartbeat; the event loop never blocks that long
_HANG_SECONDS = {"cpu": 600.0, "cuda": 60.0}  # longest step; on a CPU, one may take minutes


class EngineReplica:
    """A loaded model in an actor. All methods run in the actor's event loop.

    Methods that compute take the keyword argument ``work``, which the router reads. If the engine fails, the replica
    exits; if the process hangs, a watchdog kills it. In both cases, Ray replaces the replica at once, and its requests
    are retried. After failed health checks, Ray would wait for the requests first.

    Args:
        settings: settings of the model and its runner.
        replicas: number of replicas that share this machine's CPU cores; ignored on a GPU.
        id: name of this replica.
        threads: number of CPU threads; None: an equal share of this machine's cores. Ignored on a GPU.
    """

    def __init__(self, settings: Settings, replicas: int, *, id: str, threads: int | None = None) -> None:
        on_gpu = resolve_device(settings.device).type == "cuda"
        if not on_gpu:
            set_thread_count(threads or max(1, (os.cpu_count() or 1) // replicas))
        self._hang_seconds = _HANG_SECONDS["cuda" if on_gpu else "cpu"]
        decode_in_children()
        self._model = open_model(settings)
        self._id = id
        self._probe: asyncio.Future[Stats] | None = None
        self._probed = 0.0
        self._watchdog = Watchdog(_SILENT_SECONDS)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def answer(self, request: Request, *, work: RequestWork) -> Result:
        """Answer a request as a whole. Cancelling the call cancels the request."""
        async with aclosing(self._items(request, streams=False)) as items:
            result = await anext(items)
        assert isinstance(result, Result)  # without events, it is the only item
        return result

    async def stream(self, request: Request, *, work: RequestWork) -> AsyncGenerator[list[TokenEvent] | Result, None]:
        """Answer a request as a stream: yield lists of pending events, and the result last.

        Cancelling the call, or closing the iterator, cancels the request.
        """
        async with aclosing(self._items(request, streams=True)) as items:
            async for item in items:
                yield item

    async def _items(self, request: Request, *, streams: bool) -> AsyncGenerator[list[TokenEvent] | Result, None]:
        """Yield what :meth:`stream` does; without ``streams``, the result alone."""
        loop = asyncio.get_running_loop()
        pending: asyncio.Queue[TokenEvent | Result] = asyncio.Queue()  # bounded by max_new_tokens

        def put(item: TokenEvent | Result) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the replica has ended
                loop.call_soon_threadsafe(pending.put_nowait, item)

        cancel, ended = self._start(request, put if streams else None, put), False
        try:
            while not ended:
                items = [await pending.get()]
                while not pending.empty():
                    items.append(pending.get_nowait())
                ended = isinstance(items[-1], Result)
                if events := [item for item in items if isinstance(item, TokenEvent)]:
                    yield events
                if isinstance(items[-1], Result):
                    yield self._checked(items[-1])
        finally:
            if not ended:
                cancel()

    async def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt; see :class:`panscan.serve.backend.ServeBackend`."""
        return await asyncio.to_thread(self._model.count, request)

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens."""
        return await asyncio.to_thread(self._model.token_texts, ids)

    async def stats(self) -> tuple[str, Stats | None]:
        """Return this replica's id and its statistics, or None if the engine does not answer in time."""
        probe = self._ask_engine()
        await asyncio.wait({probe}, timeout=_STATS_SECONDS)
        answered = probe.done() and probe.exception() is None
        return self._id, probe.result() if answered else None

    async def info(self) -> ModelInfo:
        """Return the properties of the model."""
        return self._model.info

    async def check_health(self) -> None:
        """Check that the engine's thread still answers. Ray calls this periodically.

        Raises:
            EngineError: the engine has stopped, or its current step has taken too long.
        """
        probe = self._ask_engine()
        await asyncio.wait({probe}, timeout=_STATS_SECONDS)
        if probe.done():
            probe.result()
        elif time.monotonic() - self._probed > self._hang_seconds:
            raise EngineError(f"the engine has not finished a step for {self._hang_seconds:g} s")

    async def close(self) -> None:
        """Free the model."""
        self._beating.cancel()
        self._watchdog.close()
        await asyncio.to_thread(self._model.engine.close)

    async def _beat(self) -> None:
        """Send heartbeats to the watchdog while the event loop runs."""
        while True:
            self._watchdog.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    def _ask_engine(self) -> asyncio.Future[Stats]:
        """Return the pending query for statistics, or start one, so that at most one thread waits for the engine."""
        if self._probe is None or self._probe.done():
            self._probed = time.monotonic()
            self._probe = asyncio.get_running_loop().run_in_executor(None, self._model.engine.stats)
        return self._probe

    def _start(
        self, request: Request, on_event: Callable[[TokenEvent], None] | None, on_end: Callable[[Result], None]
    ) -> Callable[[], None]:
        try:
            return self._model.engine.start(request, on_event, on_end)
        except EngineError as error:
            on_end(Result.unanswered(request.id, now(), error))
            return lambda: None

    def _checked(self, result: Result) -> Result:
        """Return a result, or exit the process if the engine itself has failed."""
        if isinstance(result.error, EngineError):
            log.error("the engine has failed, replica %s exits: %s", self._id, result.error)
            logging.shutdown()
            os._exit(1)
        return result


class DeployedReplica(EngineReplica):
    """An :class:`EngineReplica` as a Ray Serve deployment, with the id that Ray Serve has given it."""

    def __init__(self, settings: Settings, replicas: int) -> None:
        from ray import serve

        super().__init__(settings, replicas, id=str(serve.get_replica_context().replica_id.unique_id))

    async def __del__(self) -> None:
        """Free the model. Ray calls this once the replica has drained."""
        if hasattr(self, "_beating"):  # the model was loaded
            await self.close()
