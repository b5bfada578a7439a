"""The replicas of a batch job: start, health checks, replacement.

Import this module inside :func:`panscan.serve.ray_session.ray_session`: Ray reads the environment on import.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayTaskError, TaskCancelledError

from panscan.core import EngineError, PanscanError
from panscan.core.access import remote_access
from panscan.serve.backend import ReplicaLostError
from panscan.serve.batch_replica import BatchReplica
from panscan.serve.routing import Router
from panscan.settings import Settings

log = logging.getLogger("panscan.batch")

_HEALTH_SECONDS = 5.0
_START_SECONDS = 1800.0  # a first start may download the checkpoint
_CALLS = 65_536  # concurrent calls to a replica; the engine bounds requests in flight
_LOSSES = 6  # consecutive losses without an answer in between, in addition to one per replica

OnDone = Callable[[Any, Exception | None], None]


@dataclass(slots=True, eq=False)
class FleetReplica:
    """A replica that accepts requests.

    Args:
        id: name of the replica.
        actor: Ray's handle.
        running: number of requests in flight.
        sees_files: whether it can open the job's files; otherwise it receives their contents.
        checked: whether no health check is pending.
    """

    id: str
    actor: Any
    running: int = 0
    sees_files: bool = True
    checked: bool = True


class ReplicaFleet:
    """A fixed number of :class:`BatchReplica` actors. Not thread-safe.

    A replica that dies is replaced. A replica that cannot load the model is dropped if there are others.

    Args:
        settings: settings of the model.
        replicas: number of replicas.
        gpus: GPUs per replica.
        actor: class of the replicas.

    Attributes:
        ready: replicas that have loaded the model, by id.
        router: tracks the outstanding work and the cached images of each replica.
    """

    def __init__(self, settings: Settings, replicas: int, gpus: int, actor: type[BatchReplica]) -> None:
        self._settings, self._replicas, self._gpus, self._actor = settings, replicas, gpus, actor
        self.ready: dict[str, FleetReplica] = {}
        self.router = Router()
        self._starting: dict[str, Any] = {}
        self._done: SimpleQueue[tuple[OnDone, Any, Exception | None]] = SimpleQueue()
        self._numbers = count()
        self._losses = 0
        self._checked = self._ready_at = monotonic()

    def start(self) -> None:
        """Start the replicas and return once the first one has loaded the model; the others join later.

        Raises:
            PanscanError: the model cannot be loaded, or no replica has started in time.
        """
        for _ in range(self._replicas):
            self._start_one()
        while not self.ready:
            self.process_next()

    def call(self, ref: Any, on_done: OnDone) -> None:
        """Register a callback for a remote call; :meth:`process_next` calls it with the result or the error.

        The error is the exception that the remote method raised, or :class:`ReplicaLostError`.
        """
        ref.future().add_done_callback(partial(_put, self._done, on_done))

    def process_next(self) -> None:
        """Wait until a remote call ends or a health check is due, and handle it.

        Raises:
            PanscanError: there are no replicas, and none can be started.
        """
        if (wait := self._checked + _HEALTH_SECONDS - monotonic()) <= 0:
            self._check()
            wait = _HEALTH_SECONDS
        with suppress(Empty):
            on_done, result, error = self._done.get(timeout=wait)
            on_done(result, error)

    def answered(self) -> None:
        """Record that a replica has answered a request."""
        self._losses = 0

    def lose(self, replica: FleetReplica, reason: str) -> None:
        """Replace a replica that has died or failed a health check. Does nothing if it was already replaced.

        Raises:
            EngineError: too many replicas have died without an answer in between.
        """
        if self.ready.pop(replica.id, None) is not None:
            self.router.set_replicas(self.ready)
            self._replace(replica.id, replica.actor, reason)

    def close(self) -> None:
        """Kill all replicas."""
        for actor in (*self._starting.values(), *(replica.actor for replica in self.ready.values())):
            _kill(actor)
        self.ready.clear()
        self._starting.clear()

    def _start_one(self) -> None:
        id = f"replica-{next(self._numbers)}"
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_concurrency": _CALLS, "max_restarts": 0}
        remote = ray.remote(**options)(self._actor)
        actor = remote.remote(self._settings, self._replicas, id, _threads(), str(Path.cwd()), remote_access())
        self._starting[id] = actor
        self.call(actor.load.remote(), partial(self._loaded, id))

    def _replace(self, id: str, actor: Any, reason: str) -> None:
        self._losses += 1
        _kill(actor)
        if self._losses >= _LOSSES + self._replicas:
            raise EngineError(f"{self._losses} replicas died in a row without an answer: {reason}")
        log.warning("%s was lost (%s): starting another one", id, reason)
        self._start_one()

    def _loaded(self, id: str, _info: Any, error: Exception | None) -> None:
        actor = self._starting.pop(id)
        if error is None:
            self.ready[id] = FleetReplica(id, actor)
            self.router.set_replicas(self.ready)
        elif isinstance(error, ReplicaLostError) or (self._losses and not self.ready and not self._starting):
            self._replace(id, actor, str(error))  # without a replica: a dead one's GPU memory may not be free yet
        elif not self.ready and not (self._starting and self._losses):
            raise error if isinstance(error, PanscanError) else EngineError(f"a replica cannot start: {error}")
        else:
            _kill(actor)
            log.warning("%s cannot load the model, continuing with the others: %s", id, error)

    def _check(self) -> None:
        """Start a health check of each replica that has no pending one.

        Raises:
            EngineError: no replica has been ready for too long.
        """
        self._checked = monotonic()
        if self.ready:
            self._ready_at = self._checked
        elif self._checked - self._ready_at > _START_SECONDS:
            gpus = f" (it needs {self._replicas * self._gpus} GPUs)" if self._gpus else ""
            raise EngineError(f"no replica has started within {_START_SECONDS:g} s: the cluster may be full{gpus}")
        for replica in self.ready.values():
            if replica.checked:
                replica.checked = False
                self.call(replica.actor.check_health.remote(), partial(self._health, replica))

    def _health(self, replica: FleetReplica, _result: Any, error: Exception | None) -> None:
        replica.checked = True
        if error is not None:
            self.lose(replica, str(error))


def _threads() -> int | None:
    """Return OMP_NUM_THREADS of the job, or None. Inside a replica, Ray overrides the variable."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdecimal() and int(chosen) else None


def _kill(actor: Any) -> None:
    ray.kill(actor, no_restart=True)


def _put(done: SimpleQueue[tuple[OnDone, Any, Exception | None]], on_done: OnDone, future: Any) -> None:
    """Queue the result or the error of a call. Runs in one of Ray's threads."""
    error = future.exception()
    if isinstance(error, RayTaskError):
        error = error.cause
    elif isinstance(error, TaskCancelledError):
        error = EngineError("the call was cancelled")
    elif error is not None:
        error = ReplicaLostError(type(error).__name__)
    done.put((on_done, None if error is not None else future.result(), error))
