"""The adapter between Ray Serve's request router and :class:`panscan.serve.routing.Router`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any
from weakref import WeakSet

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from panscan.serve.client import RequestWork
from panscan.serve.routing import create_router

log = logging.getLogger("panscan.serve")

_NO_WORK = RequestWork(views=0, prompt_tokens=0, max_new_tokens=0)


class WorkRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped here
    """A router by predicted work, which calls pass as the keyword argument ``work`` (default: no work).

    A call with the keyword argument ``replica`` goes to the replica with this id, or to any other if it is gone: a call
    that waits for it would occupy one of the few tasks with which Ray routes all calls.

    Ray may report a short call as completed before it reports where it went (``on_request_routed``). That report is
    therefore not used: the future that receives the chosen replica ends before the call is sent.
    """

    def initialize_state(self, policy: str = "affinity", **_options: Any) -> None:
        """Create the router's state. Ray calls this once, before the first replica is known."""
        self._router = create_router(self.app_name, policy)
        self._watched: WeakSet[asyncio.Future[RunningReplica]] = WeakSet()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the running replicas."""
        self._router.set_replicas(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica."""
        super().on_replica_actor_died(replica_id)
        if replica_id.unique_id in self._router.replicas:
            log.warning("replica %s was lost: Ray starts another one", replica_id.unique_id)
        self._router.set_replicas(id for id in self._router.replicas if id != replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first, and assign the request to the best one.

        Ray chooses one of them later. Requests that are routed in the meantime must already take this one into account.
        """
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        free = {replica.replica_id.unique_id for replica in self.select_available_replicas(candidate_replicas)}
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once if none can take it
        if (named := pending_request.kwargs.get("replica")) is not None:
            return [[by_id[named]]] if named in by_id else [[replica] for replica in candidate_replicas]
        request_id, work = pending_request.metadata.internal_request_id, _work_of(pending_request)
        ranked = self._router.rank(request_id, work, by_id)
        ranked.sort(key=lambda id: id not in free)  # stable; full ones last
        if ranked:
            self._router.assign(request_id, ranked[0], work)
        if pending_request.future not in self._watched:  # Ray asks again and again while no replica is free
            self._watched.add(pending_request.future)
            pending_request.future.add_done_callback(partial(self._on_choice, request_id, work))
        return [[by_id[id]] for id in ranked]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a request that has ended, with or without an error."""
        self._router.release(internal_request_id, replica_id.unique_id)

    def _on_choice(self, request_id: str, work: RequestWork, future: asyncio.Future[RunningReplica]) -> None:
        """Move a request to the replica that Ray has chosen, or remove it if it was cancelled before."""
        if future.cancelled():
            self._router.abandon(request_id)
        elif self._router.is_running(request_id):  # otherwise it has ended: Ray failed to send it
            self._router.assign(request_id, future.result().replica_id.unique_id, work)


def _work_of(request: PendingRequest) -> RequestWork:
    work = request.kwargs.get("work")
    return work if isinstance(work, RequestWork) else _NO_WORK
