"""The replicas of a cluster as one backend of the HTTP server: bounded queue, routing, retries."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from panscan.core import EngineError, PanscanError, Request, Result, Stats, Stream
from panscan.serve.backend import ModelInfo, PendingRequest, ReplicaLostError, RequestWork, TokenCounts
from panscan.serve.routing import router_of

log = logging.getLogger("panscan.serve")
T = TypeVar("T")

_ATTEMPTS = 3  # attempts per request, so that a request that kills its replica fails eventually
_QUERY_SECONDS = 30.0
_STATS_SECONDS = 5.0
_START_PAUSE_SECONDS = 0.5


class ReplicaBackend:
    """A :class:`panscan.serve.backend.ServeBackend` over a Ray Serve deployment of :class:`EngineReplica`.

    If a replica dies, its requests are retried on another one, unless an event was already delivered.

    Args:
        engines: Ray's handle of the deployment.
        app: name of the Ray Serve application.
        replicas: maximum number of replicas.
    """

    def __init__(self, engines: Any, *, app: str, replicas: int) -> None:
        self._engines, self._app, self._replicas = engines, app, replicas
        self._inflight: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self.info: ModelInfo | None = None
        self.retried = 0

    @property
    def ready(self) -> bool:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        router = router_of(self._app)
        return self.info is not None and not self._closed and router is not None and bool(router.replicas)

    @property
    def inflight(self) -> int:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        return len(self._inflight)

    async def start(self) -> None:
        """See :class:`panscan.serve.backend.ServeBackend`. Returns once the first replica has loaded the model."""
        while self.info is None:
            with suppress(ReplicaLostError):
                info: ModelInfo = await _fresh(self._engines.info.remote)
                self.info = replace(info, max_concurrency=self._replicas * info.max_concurrency)
                return
            await asyncio.sleep(_START_PAUSE_SECONDS)

    async def close(self) -> None:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        self._closed = True
        for task in self._inflight.values():
            task.cancel()
        if self._inflight:
            await asyncio.wait(self._inflight.values(), timeout=_QUERY_SECONDS)

    def submit(self, request: Request, work: RequestWork, *, stream: bool) -> Stream:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        if self._closed:
            raise EngineError("the server is shutting down")
        if self.info is None:
            raise EngineError("no replica has loaded the model yet")
        loop = asyncio.get_running_loop()
        entry = PendingRequest(request, Stream(request.id, lambda: _cancel(loop, task)), stream)
        task = loop.create_task(self._run(entry, work), context=contextvars.Context())
        self._inflight[request.id] = task
        return entry.stream

    async def count(self, request: Request) -> TokenCounts:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        counts: TokenCounts = await self._ask(lambda: self._engines.count.remote(request))
        return counts

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """See :class:`panscan.serve.backend.ServeBackend`."""
        texts: list[bytes] = await self._ask(lambda: self._engines.token_texts.remote(tuple(ids)))
        return texts

    async def stats(self) -> Mapping[str, Stats]:
        """See :class:`panscan.serve.backend.ServeBackend`. Empty while a replica hangs, until Ray replaces it."""
        try:
            response = self._engines.broadcast("stats")
            replies = await response.results_async(timeout_s=_STATS_SECONDS, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return {}
        known = [reply for reply in replies if not isinstance(reply, BaseException)]
        return {id: stats for id, stats in known if stats is not None}

    async def _run(self, entry: PendingRequest, work: RequestWork) -> None:
        """Answer one request, and always deliver a result."""
        error: PanscanError | None
        try:
            entry.stream.on_end(await self._attempt(entry, work))
            return
        except asyncio.CancelledError:  # raised by Stream.cancel or close; nothing else holds this task
            error = None
        except PanscanError as known:
            error = known
        except Exception as bug:  # it must not leave the client waiting
            log.exception("request %s", entry.request.id)
            error = EngineError(f"{type(bug).__name__}: {bug}")
        finally:
            self._inflight.pop(entry.request.id, None)
        entry.fail(error)

    async def _attempt(self, entry: PendingRequest, work: RequestWork) -> Result:
        """Answer a request, retrying on another replica if one is lost.

        Raises:
            EngineError: the replica was lost, and the request cannot be retried.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                result = await (self._stream(entry, work) if entry.streams else self._answer(entry, work))
            except ReplicaLostError as error:
                if entry.delivered:
                    raise EngineError(f"the replica was lost during the answer ({error}); retry the request") from None
                if attempt == _ATTEMPTS:
                    break
                self.retried += 1
                log.warning("request %s: %s; retrying", entry.request.id, error)
            else:
                result.stamps.accepted = min(result.stamps.accepted, entry.accepted)
                return result
        raise EngineError(f"{_ATTEMPTS} replicas were lost while computing this request")

    async def _answer(self, entry: PendingRequest, work: RequestWork) -> Result:
        result: Result = await _called(self._engines.answer.remote(entry.request, work=work))
        return result

    async def _stream(self, entry: PendingRequest, work: RequestWork) -> Result:
        generator = self._engines.options(stream=True).stream.remote(entry.request, work=work)

        async def read() -> Result:
            async for item in generator:
                if isinstance(item, Result):
                    return item
                for event in item:
                    entry.delivered = True
                    entry.stream.on_event(event)
            raise ReplicaLostError("the stream of a replica ended early")

        return await _called(generator, read())

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Call any replica, and another one if it is lost.

        Raises:
            EngineError: no replica answered in time.
            PanscanError: the error of the call itself.
        """
        try:
            async with asyncio.timeout(_QUERY_SECONDS):
                for _ in range(_ATTEMPTS):
                    with suppress(ReplicaLostError):
                        return await _fresh(call)
        except TimeoutError:
            raise EngineError(f"no replica answered within {_QUERY_SECONDS:g} s") from None
        raise EngineError(f"{_ATTEMPTS} replicas were lost while answering")


async def _called(response: Any, reading: Awaitable[T] | None = None) -> T:
    """Wait for a call to a replica, and cancel it there if this task is cancelled.

    Args:
        response: Ray's response.
        reading: awaitable that reads the response; None: the response itself.

    Raises:
        ReplicaLostError: the replica died, or cannot be reached.
        PanscanError: the error of the call itself.
    """
    try:
        result: T = await (response if reading is None else reading)
        return result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # Ray reports some calls to a stopping replica as cancelled
            raise ReplicaLostError("the replica cancelled the call") from None
        response.cancel()
        raise
    except RayTaskError as error:
        if isinstance(error.cause, PanscanError):
            raise error.cause from None
        raise EngineError(f"a replica failed: {type(error.cause).__name__}: {error.cause}") from error
    except DeploymentUnavailableError as error:
        raise EngineError(f"no replica can be started: {error}") from None
    except (RayError, RayServeException) as error:
        raise ReplicaLostError(f"the replica was lost: {type(error).__name__}") from None


async def _fresh(call: Callable[[], Any]) -> Any:
    """Make a call in an empty context: Ray treats calls with the same request id in the context as one call."""

    async def run() -> Any:
        return await _called(call())

    return await asyncio.get_running_loop().create_task(run(), context=contextvars.Context())


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(task.cancel)
