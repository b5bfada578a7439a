"""The replicas on a Ray cluster as one engine: routing by Ray Serve, retries, and the state of the deployment."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from typing_extensions import override

from panscan.core import EngineError, ImageError, ModelError, PanscanError, Request, Result, Stats
from panscan.images.files import PageBytes, expand_images
from panscan.serve.client import ATTEMPTS, EngineClient, EngineLostError, ModelInfo, PendingRequest, Question
from panscan.serve.replica import FilesMissingError
from panscan.serve.routing import router_of

log = logging.getLogger("panscan.serve")
T = TypeVar("T")

_QUERY_SECONDS = 30.0
_STATS_SECONDS = 5.0
_START_PAUSE_SECONDS = 0.5
_WATCH_SECONDS = 5.0


class ReplicaClient(EngineClient):
    """A client of a Ray Serve deployment of :class:`panscan.serve.replica.EngineReplica`.

    A request that has lost two replicas is alone on the third one, so that it fails only if it is the cause.

    Args:
        replicas: Ray's handle of the deployment.
        app: name of the Ray Serve application.
        most: maximum number of replicas.
    """

    def __init__(self, replicas: Any, *, app: str, most: int) -> None:
        super().__init__()
        self._replicas, self._app, self._most = replicas, app, most
        self._name = uuid.uuid4().hex
        self._calls = count()
        self._cancelled: list[Any] = []  # calls to cancel on their replicas
        self._streams: dict[str, dict[str, tuple[PendingRequest, asyncio.Future[bool]]]] = {}  # by replica and id
        self._readers: dict[str, asyncio.Task[None]] = {}  # of events, by replica

    @property
    def replicas(self) -> int:
        """Number of replicas that have loaded the model."""
        router = router_of(self._app)
        return 0 if router is None else len(router.replicas)

    @property
    @override
    def ready(self) -> bool:
        return self.info is not None and not self._closed and self.replicas > 0

    async def start(self) -> None:
        """See :class:`EngineClient`. Returns once the first replica has loaded the model."""
        loaded = asyncio.ensure_future(self._first_info())
        try:
            while not loaded.done():
                await asyncio.wait({loaded}, timeout=_START_PAUSE_SECONDS)
                status = await asyncio.to_thread(self._status)
                if status is not None and status.status == "DEPLOY_FAILED" and not loaded.done():
                    raise ModelError(f"the replicas cannot start: {_failure_message(status)}")
        finally:
            loaded.cancel()
        info = loaded.result()
        self.info = replace(info, max_concurrency=self._most * info.max_concurrency)

    async def watch(self) -> NoReturn:
        """See :class:`EngineClient`. Logs changes in the status of the deployment."""
        before = "RUNNING"
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                status = await asyncio.to_thread(self._status)
            except (RayError, RayServeException) as error:
                raise EngineError(f"lost the connection to the Ray cluster: {type(error).__name__}") from error
            if status is None:
                raise EngineError(f"the application {self._app!r} was removed from the Ray cluster")
            if status.status != before:
                log.warning("replicas: %s %s", status.status.value, _failure_message(status))
            before = status.status

    @override
    async def close(self) -> None:
        await super().close()
        if self._inflight:
            await asyncio.wait(self._inflight.values(), timeout=_QUERY_SECONDS)
        if self._tasks:  # cancellations
            await asyncio.wait(self._tasks, timeout=_STATS_SECONDS)

    async def stats(self) -> Mapping[str, Stats]:
        """See :class:`EngineClient`. Empty while a replica hangs, until Ray replaces it."""
        try:
            response = self._replicas.broadcast("stats")
            replies = await response.results_async(timeout_s=_STATS_SECONDS, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return {}
        known = [reply for reply in replies if not isinstance(reply, BaseException)]
        return {id: stats for id, stats in known if stats is not None}

    async def _attempt(self, pending: PendingRequest) -> Result:
        """See :class:`EngineClient`. A replica on a machine without the request's files gets their contents."""
        keywords = {
            "work": replace(pending.work, alone=pending.lost == ATTEMPTS - 1),
            "call": f"{self._name}-{next(self._calls)}",
        }
        try:
            if pending.streams:
                return await self._stream(pending, keywords)
            try:
                return await _called(self._replicas.answer.remote(pending.request, **keywords))
            except FilesMissingError:
                pending.request = await asyncio.to_thread(_with_contents, pending.request)
                return await _called(self._replicas.answer.remote(pending.request, **keywords))
        except asyncio.CancelledError:
            self._cancelled.append(keywords["call"])
            if len(self._cancelled) == 1:
                self._spawn(self._send_cancellations())
            raise

    async def _send_cancellations(self) -> None:
        """Cancel calls on their replicas, which need not be known; those of one pass of the event loop together."""
        calls, self._cancelled = self._cancelled, []
        with suppress(TimeoutError, RayError, RayServeException):
            response = self._replicas.broadcast("cancel", calls)
            await response.results_async(timeout_s=_STATS_SECONDS, return_exceptions=True)

    async def _stream(self, pending: PendingRequest, keywords: Mapping[str, Any]) -> Result:
        generator = self._replicas.options(stream=True).stream.remote(pending.request, client=self._name, **keywords)
        delivered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        id, replica = pending.request.id, ""

        async def read() -> Result:
            nonlocal replica
            async for item in generator:
                if isinstance(item, Result):
                    if not await delivered:  # the last event may arrive after the result
                        break
                    return item
                if delivered.done() and not delivered.result():  # its events were lost
                    break
                replica = item
                self._streams.setdefault(replica, {})[id] = pending, delivered
                self._listen(replica)
            raise EngineLostError("the stream of a replica ended early")

        try:
            return await _called(generator, read())
        finally:
            self._streams.get(replica, {}).pop(id, None)

    def _listen(self, replica: str) -> None:
        """Read the events of a replica as long as it has streams, in an empty context (see :func:`_fresh`)."""
        if replica not in self._readers:
            self._readers[replica] = self._spawn(self._read_events(replica))

    async def _read_events(self, replica: str) -> None:
        streams = self._streams[replica]
        generator = self._replicas.options(stream=True).events.remote(replica=replica, client=self._name)
        try:
            async for events in generator:
                for id, event in events:
                    if id not in streams:
                        continue  # it was cancelled
                    pending, delivered = streams[id]
                    pending.on_event(event)
                    if event.finish_reason is not None and not delivered.done():
                        delivered.set_result(True)
        except (RayError, RayServeException, asyncio.CancelledError):
            generator.cancel()
            for _, delivered in streams.values():
                if not delivered.done():
                    delivered.set_result(False)
            streams.clear()
        finally:
            del self._readers[replica]
        if streams:  # one that began while the call ended
            self._listen(replica)

    async def _first_info(self) -> ModelInfo:
        while True:
            with suppress(EngineLostError):
                info: ModelInfo = await _fresh(self._replicas.info.remote)
                return info
            await asyncio.sleep(_START_PAUSE_SECONDS)

    def _status(self) -> Any:
        """Return the state of the application as Ray Serve reports it; None if there is none."""
        return serve.status().applications.get(self._app)

    async def _ask(self, method: Question, *arguments: Any) -> Any:
        """See :class:`EngineClient`. Calls any replica, and another one if it is lost."""
        try:
            async with asyncio.timeout(_QUERY_SECONDS):
                for _ in range(ATTEMPTS):
                    with suppress(EngineLostError):
                        return await _fresh(lambda: self._replicas.ask.remote(method, *arguments))
        except TimeoutError:
            raise EngineError(f"no replica answered within {_QUERY_SECONDS:g} s") from None
        raise EngineError(f"{ATTEMPTS} replicas were lost while answering")


async def _called(response: Any, reading: Awaitable[T] | None = None) -> T:
    """Wait for a call to a replica, and cancel it there if this task is cancelled.

    Args:
        response: Ray's response.
        reading: awaitable that reads the response; None: the response itself.

    Raises:
        EngineLostError: the replica died, or cannot be reached.
        PanscanError: the error of the call itself.
    """
    try:
        result: T = await (response if reading is None else reading)
        return result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # Ray reports some calls to a stopping replica as cancelled
            raise EngineLostError("the replica cancelled the call") from None
        response.cancel()
        raise
    except RayTaskError as error:
        if isinstance(error.cause, PanscanError):
            raise error.cause from None
        raise PanscanError(f"a replica failed: {type(error.cause).__name__}: {error.cause}") from error
    except DeploymentUnavailableError as error:
        raise EngineError(f"no replica can be started: {error}") from None
    except (RayError, RayServeException) as error:
        raise EngineLostError(f"the replica was lost: {type(error).__name__}") from None


async def _fresh(call: Callable[[], Any]) -> Any:
    """Make a call in an empty context: Ray treats calls with the same request id in the context as one call."""

    async def run() -> Any:
        return await _called(call())

    return await asyncio.get_running_loop().create_task(run(), context=contextvars.Context())


def _failure_message(status: Any) -> str:
    """Return the exception message from the traceback that Ray reports for a failed deployment."""
    messages = [deployment.message for deployment in status.deployments.values()]
    lines = [line.strip() for text in (*messages, status.message) for line in text.splitlines() if "Error" in line]
    return str(lines[-1].rpartition("Error: ")[2] if lines else status.message)


def _with_contents(request: Request) -> Request:
    """Return a request with its local paths replaced by the files' contents.

    Raises:
        ImageError: a file cannot be read.
    """
    images: list[Any] = []
    page: Any
    for image in request.images:
        if not isinstance(image, str | os.PathLike) or "://" in os.fspath(image):
            images.append(image)
            continue
        for page in expand_images([os.fspath(image)], max_pages=request.max_pages):
            try:
                images.append(PageBytes(Path(page.source).read_bytes(), page.page or 1, page.name))
            except OSError as error:
                raise ImageError(f"{page.name}: {error.strerror or error}") from error
    return replace(request, images=images)
