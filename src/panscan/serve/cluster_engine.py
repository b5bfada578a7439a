"""Engine replicas on a Ray cluster as one engine, for batch jobs."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from panscan.core import EngineError, ImageError, InputError, PanscanError, Request, Result, now
from panscan.core.model_names import IMAGE_TOKENS
from panscan.images.files import Page, PageBytes, expand_images
from panscan.serve.backend import ReplicaLostError, RequestWork
from panscan.serve.batch_replica import BatchReplica, InvisibleFiles
from panscan.serve.ray_session import check_gpus, gpus_per_replica, ray_session
from panscan.settings import Settings, range_of

if TYPE_CHECKING:
    from panscan.serve.fleet import FleetReplica


_ATTEMPTS = 3  # attempts per request, so that a request that kills its replica fails eventually
_AHEAD = 8  # requests per replica that are prepared while others compute; with more, the last ones are spread unevenly


class ClusterEngine:
    """Engine replicas behind the interface that :func:`panscan.batch.dispatch.answer` uses.

    If a replica dies, its requests are retried on another one. A request that has lost two replicas runs alone on the
    third one, so that it fails only if it is the cause.

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
        PanscanError: the model cannot be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: int,
        ray_address: str | None = None,
        *,
        actor: type[BatchReplica] = BatchReplica,
    ) -> None:
        range_of("replicas", "batch").check("--replicas", replicas)
        self._most = settings.max_num_seqs + _AHEAD
        self._max_concurrency = settings.max_concurrency
        self._stack = ExitStack()
        self._numbers = count()
        self._inflight: dict[int, _JobRequest] = {}
        self._waiting: deque[_JobRequest] = deque()
        self._suspects: deque[_JobRequest] = deque()
        self._finished: deque[tuple[int, Result]] = deque()
        try:
            self._stack.enter_context(ray_session(ray_address, replicas=replicas, show_logs=False))
            gpus = gpus_per_replica(settings)
            check_gpus(replicas, gpus, local=ray_address is None)
            from panscan.serve.fleet import ReplicaFleet

            self._fleet = ReplicaFleet(settings, replicas, gpus, actor)
            self._stack.callback(self._fleet.close)
            self._fleet.start()
        except BaseException:
            self._stack.close()
            raise
        self._replicas = replicas

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all replicas have loaded the model. Requests can be answered earlier.

        Raises:
            EngineError: the time has passed.
            PanscanError: the model cannot be loaded.
        """
        end = monotonic() + seconds
        while len(self._fleet.ready) < self._replicas:
            self._fleet.process_next()
            if monotonic() > end:
                raise EngineError(f"{len(self._fleet.ready)} of {self._replicas} replicas started in {seconds:g} s")

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Answer requests and yield (index, result) as they finish.

        Requests are read as others finish. Closing the iterator cancels the requests in flight. Only one iterator may
        be open at a time.

        Args:
            requests: requests whose images Ray can send to replicas.
            max_concurrency: maximum number of requests in flight; None: the setting, or enough to keep all replicas
                busy.

        Raises:
            EngineError: no replica is left, or another iterator is open.
            SettingError: ``max_concurrency`` is out of range.
        """
        if max_concurrency is not None:
            range_of("max_concurrency", "bench").check("max_concurrency", max_concurrency)
        if self._inflight:
            raise EngineError("another iterator over results is open: close it first")
        return self._results(requests, max_concurrency or self._max_concurrency or self._replicas * self._most)

    def close(self) -> None:
        """Kill the replicas, and leave the cluster, or shut it down if this job started it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _results(self, requests: Iterable[Request], most: int) -> Generator[tuple[int, Result], None, None]:
        source = enumerate(requests)
        try:
            while True:
                for index, request in islice(source, most - len(self._inflight)):
                    self._accept(index, request)
                if not self._inflight:
                    return
                self._place()
                while not self._finished:
                    self._fleet.process_next()
                    self._place()
                index, result = self._finished.popleft()
                del self._inflight[index]
                yield index, result
        finally:
            self._cancel()

    def _accept(self, index: int, request: Request) -> None:
        entry = _JobRequest(index, str(next(self._numbers)), request, _estimated_work(request), now())
        self._inflight[index] = entry
        self._waiting.append(entry)

    def _cancel(self) -> None:
        """Cancel the requests in flight. Their replies are ignored."""
        import ray

        for entry in self._inflight.values():
            if entry.ref is not None:
                with suppress(ValueError):  # the call has ended
                    ray.cancel(entry.ref)
        for queue in (self._inflight, self._waiting, self._suspects, self._finished):
            queue.clear()

    def _place(self) -> None:
        """Send waiting requests to replicas with free capacity.

        While there are suspects, requests that have lost two replicas, the first replica is reserved for them.
        """
        ready = self._fleet.ready
        reserved = next(iter(ready.values()), None) if self._suspects else None
        if reserved is not None and not reserved.running and self._suspects[0].ref is None:
            self._send(self._suspects[0], reserved)
        while self._waiting:
            free = [id for id, replica in ready.items() if replica.running < self._most and replica is not reserved]
            if not free:
                return
            entry = self._waiting.popleft()
            self._send(entry, ready[self._fleet.router.rank(entry.work, free)[0]])

    def _send(self, entry: _JobRequest, replica: FleetReplica) -> None:
        try:
            request = entry.request if replica.sees_files else _with_contents(entry.request)
        except ImageError as error:
            self._finish(entry, Result.unanswered(entry.request.id, entry.accepted, error))
            return
        entry.ref = replica.actor.answer.remote(request, entry.work)
        replica.running += 1
        self._fleet.router.assign(entry.name, replica.id, entry.work)
        self._fleet.call(entry.ref, partial(self._replied, entry, replica))

    def _replied(self, entry: _JobRequest, replica: FleetReplica, reply: Any, error: Exception | None) -> None:
        """Handle the reply of a replica.

        Raises:
            EngineError: see :meth:`ReplicaFleet.lose`.
        """
        replica.running -= 1
        self._fleet.router.release(entry.name, replica.id)
        entry.ref = None
        lost = isinstance(error, ReplicaLostError)
        if lost:
            self._fleet.lose(replica, str(error))
        if self._inflight.get(entry.index) is not entry:
            return  # cancelled
        if lost:
            self._retry(entry)
        elif isinstance(reply, InvisibleFiles):
            replica.sees_files = False
            if not self._suspects or self._suspects[0] is not entry:
                self._waiting.appendleft(entry)
        else:
            self._fleet.answered()
            self._finish(entry, reply if error is None else _failed(entry, error))

    def _retry(self, entry: _JobRequest) -> None:
        entry.lost += 1
        if entry.lost == _ATTEMPTS:
            error = InputError(f"{_ATTEMPTS} replicas were lost while computing this request")
            self._finish(entry, Result.unanswered(entry.request.id, entry.accepted, error))
        elif entry.lost == _ATTEMPTS - 1:
            self._suspects.append(entry)
        else:
            self._waiting.appendleft(entry)

    def _finish(self, entry: _JobRequest, result: Result) -> None:
        if self._suspects and self._suspects[0] is entry:
            self._suspects.popleft()
        result.retries = min(entry.lost, _ATTEMPTS - 1)
        self._finished.append((entry.index, result))


@dataclass(slots=True, eq=False)
class _JobRequest:
    """A request in flight.

    Args:
        index: index in the stream.
        name: name in the router.
        request: request to answer.
        work: estimated work.
        accepted: time of acceptance, seconds of :func:`panscan.core.now`.
        ref: pending call to a replica; None while it waits for one.
        lost: number of replicas that died while computing it.
    """

    index: int
    name: str
    request: Request
    work: RequestWork
    accepted: float
    ref: Any = None
    lost: int = 0


def _estimated_work(request: Request) -> RequestWork:
    """Return the estimated work of a request. No image is opened, so each counts as one view."""
    names = [image.name if isinstance(image, Page | PageBytes) else image for image in request.images]
    paths = [os.fspath(name) for name in names if isinstance(name, str | os.PathLike)]
    keys = [hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=16).digest() for path in paths]
    views = len(names)
    return RequestWork(
        views, views * IMAGE_TOKENS, request.sampling.max_new_tokens, tuple(keys) if len(keys) == views else ()
    )


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


def _failed(entry: _JobRequest, error: Exception) -> Result:
    """Return the result of a request whose call raised an error in the replica."""
    known = error if isinstance(error, PanscanError) else InputError(f"{type(error).__name__}: {error}")
    return Result.unanswered(entry.request.id, entry.accepted, known)
