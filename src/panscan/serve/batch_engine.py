"""Replicas on a Ray cluster as one engine that is not asynchronous, for batch jobs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count, islice
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

from panscan.core import EngineError, InputError, Request, Result
from panscan.core.model_names import IMAGE_TOKENS
from panscan.images.files import Page, PageBytes
from panscan.serve.client import EngineLostError, RequestWork
from panscan.serve.deployment import Scale, deployed_replicas
from panscan.serve.replica import EngineReplica
from panscan.settings import Settings, range_of

if TYPE_CHECKING:
    from panscan.serve.replica_client import ReplicaClient

T = TypeVar("T")

IndexedResult = tuple[int, Result]

_AHEAD = 8  # requests per replica that are prepared while others compute; with more, the last ones are spread unevenly
_START_SECONDS = 1800.0  # without a replica; a first start may download the checkpoint
_NO_REPLICA = f"no replica has started within {_START_SECONDS:g} s: the cluster may be full"
_LOST_IN_A_ROW = 3  # requests that failed because each lost its replicas, without an answer in between
_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 30.0


class BatchEngine:
    """Engine replicas behind the interface that :func:`panscan.batch.dispatch.answer` uses.

    Replicas read files themselves. A replica on a machine without the files receives their contents.

    Args:
        settings: settings of the model.
        replicas: number of replicas.
        ray_address: address of a Ray cluster; None: start one on this machine.
        actor: class of the replicas.

    Raises:
        SettingError: the number of replicas is out of range, there is no cluster at the address, or the machine has
            too few GPUs.
        UnsupportedError: Ray is not installed.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: int,
        ray_address: str | None = None,
        *,
        actor: type[EngineReplica] = EngineReplica,
    ) -> None:
        range_of("replicas", "batch").check("--replicas", replicas)
        self._most = settings.max_num_seqs + _AHEAD
        self._max_concurrency = settings.max_concurrency
        self._numbers = count()
        self._lost_in_a_row = 0
        self._loop = asyncio.new_event_loop()
        with ExitStack() as stack:  # what has begun ends if a later step fails
            deployed = deployed_replicas(
                settings, Scale(replicas), ray_address, show_logs=False, queued=0, drain_timeout=0.0, actor=actor
            )
            self._client: ReplicaClient = stack.enter_context(deployed)
            threading.Thread(target=self._loop.run_forever, name="panscan-replicas", daemon=True).start()
            stack.callback(self._end_requests)
            try:
                self._submit(self._client.start()).result(_START_SECONDS)
            except TimeoutError:
                raise EngineError(_NO_REPLICA) from None
            self._watching = self._submit(self._client.watch())
            stack.callback(self._watching.cancel)
            self._had_replica = monotonic()
            self._stack = stack.pop_all()

    @property
    def replicas(self) -> int:
        """Number of replicas that have loaded the model."""
        return self._client.replicas

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[IndexedResult]:
        """Answer requests and yield (index, result) as they finish.

        Requests are read as others finish. Closing the iterator cancels the requests in flight.

        Args:
            requests: requests whose images Ray can send to replicas.
            max_concurrency: maximum number of requests in flight; None: the setting, or enough to keep all replicas
                busy.

        Raises:
            EngineError: no replica is left.
            SettingError: ``max_concurrency`` is out of range.
        """
        if max_concurrency is not None:
            range_of("max_concurrency", "bench").check("max_concurrency", max_concurrency)
        return self._results(requests, max_concurrency or self._max_concurrency)

    def close(self) -> None:
        """End the replicas, and leave the cluster, or shut it down if this job started it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _results(self, requests: Iterable[Request], most: int | None) -> Generator[IndexedResult, None, None]:
        finished: SimpleQueue[Future[IndexedResult]] = SimpleQueue()
        inflight: dict[int, Future[IndexedResult]] = {}
        source = enumerate(requests)
        try:
            while True:
                room = (most or max(1, self._client.replicas) * self._most) - len(inflight)
                for index, request in islice(source, max(0, room)):
                    inflight[index] = self._submit(self._answer(index, request))
                    inflight[index].add_done_callback(finished.put)
                if not inflight:
                    return
                with suppress(Empty):
                    index, result = finished.get(timeout=_POLL_SECONDS).result()
                    del inflight[index]
                    yield index, self._checked(result)
                self._check_replicas()
        finally:
            for answering in inflight.values():
                answering.cancel()

    async def _answer(self, index: int, request: Request) -> IndexedResult:
        numbered = replace(request, id=str(next(self._numbers)))
        stream = self._client.submit(numbered, _estimated_work(request), stream=False)
        try:
            result = await stream.result()
        except asyncio.CancelledError:
            stream.cancel()
            raise
        result.id = request.id
        return index, result

    def _checked(self, result: Result) -> Result:
        """Return a result. A request that has killed its replicas has failed, but the job continues.

        Raises:
            EngineError: too many such requests, without an answer in between.
        """
        if not isinstance(result.error, EngineLostError):
            self._lost_in_a_row = 0
            return result
        self._lost_in_a_row += 1
        if self._lost_in_a_row == _LOST_IN_A_ROW:
            raise EngineError(f"{_LOST_IN_A_ROW} requests in a row failed: {result.error}")
        result.error = InputError(str(result.error))
        return result

    def _check_replicas(self) -> None:
        """Check that the job can go on.

        Raises:
            EngineError: the cluster was lost, or no replica has run for too long.
        """
        if self._watching.done():
            self._watching.result()
        if self._client.replicas:
            self._had_replica = monotonic()
        elif monotonic() - self._had_replica > _START_SECONDS:
            raise EngineError(_NO_REPLICA)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_requests(self) -> None:
        with suppress(TimeoutError):
            self._submit(self._client.close()).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


def _estimated_work(request: Request) -> RequestWork:
    """Return the estimated work of a request. No image is opened, so each counts as one view."""
    names = [image.name if isinstance(image, Page | PageBytes) else image for image in request.images]
    paths = [os.fspath(name) for name in names if isinstance(name, str | os.PathLike)]
    keys = [hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=16).digest() for path in paths]
    views = len(names)
    return RequestWork(
        views, views * IMAGE_TOKENS, request.sampling.max_new_tokens, tuple(keys) if len(keys) == views else ()
    )
