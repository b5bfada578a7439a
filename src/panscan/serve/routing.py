"""Replica selection by predicted work and cached images. Independent of Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random

from msgspec import Struct, field

from panscan.core.model_names import IMAGE_TOKENS
from panscan.plan.cost import OUTPUT_COST, VIEW_COST
from panscan.serve.client import RequestWork

_EXPECTED_OUTPUT = 256  # cap on the predicted output tokens: max_new_tokens is often far above the real length
_IMAGES = 2048  # most recently used images remembered per replica


def cost_of(work: RequestWork) -> float:
    """Return the cost of a request on a replica that has seen none of its images."""
    output = min(work.max_new_tokens, _EXPECTED_OUTPUT) * OUTPUT_COST
    return work.views * VIEW_COST + work.prompt_tokens + output


def saved_cost(work: RequestWork, known: Sequence[bool]) -> float:
    """Return the cost that the caches save: views of known images, and the prefix before the first unknown one.

    Args:
        work: the request. Its views are assumed to be spread evenly over its images.
        known: whether a replica has seen each image of ``work.keys``.
    """
    if not known:
        return 0.0
    views = work.views / len(known)
    prefix = known.index(False) if False in known else len(known)
    return views * (sum(known) * VIEW_COST + prefix * IMAGE_TOKENS)


class _Replica(Struct):
    """The state of one replica: its running requests with their costs, and the images that it has seen."""

    running: dict[str, float] = {}
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    load: float = 0.0
    last: int = 0


class Router:
    """A router that tracks the load of all replicas and ranks them for a request.

    A request goes to the replica with the least outstanding work. A replica that has cached its images is preferred,
    unless it is behind by more than ``patience`` times the work that the caches save: another replica would compute
    the request in full, and later questions about its images would be split between two replicas.

    While requests that must be alone are in flight, the first replica takes only them, one at a time.
    Not thread-safe, except for :attr:`replicas`.

    Args:
        policy: routing policy, one of ``--routing``.
        patience: factor on the saved work; with 1, each request goes where it would finish first. In a simulation of
            follow-up questions about documents, 8 kept 98% of one engine's cache hits and 1 kept 90%, and 8 finished
            13% sooner (see ``test_follow_ups_keep_their_cache`` in tests/serve/test_routing.py).
    """

    def __init__(self, policy: str = "affinity", *, patience: float = 8.0) -> None:
        self._policy, self._patience = policy, patience
        self._random = Random(0)
        self._replicas: dict[str, _Replica] = {}
        self._alone: set[str] = set()  # ids of requests that must be alone
        self._routed = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        """The ids of the replicas that can take requests, the oldest first."""
        return tuple(self._replicas)

    @property
    def running(self) -> int:
        """Number of requests that are assigned to a replica."""
        return sum(len(replica.running) for replica in self._replicas.values())

    def set_replicas(self, ids: Iterable[str]) -> None:
        """Replace the set of replicas. Removed ones lose their state; new ones start empty and come last."""
        present = dict.fromkeys(ids)
        order = [*(id for id in self._replicas if id in present), *present]
        self._replicas = {id: self._replicas.get(id) or _Replica() for id in order}

    def rank(self, request_id: str, work: RequestWork, candidates: Iterable[str] | None = None) -> list[str]:
        """Return the candidates (default: all replicas) that may take a request, best first.

        Ties: the fewest running requests first, then the replica that was used least recently.
        """
        names = self.replicas if candidates is None else candidates
        names = [name for name in names if name in self._replicas]
        if work.alone:
            self._alone.add(request_id)
        if self._alone:
            reserved = next(iter(self._replicas), "")
            if work.alone:
                idle = reserved in names and self._replicas[reserved].running.keys() <= {request_id}
                return [reserved] if idle else []
            names = [name for name in names if name != reserved]
        if self._policy == "random":
            return self._random.sample(names, len(names))

        def key(name: str) -> tuple[float, int, int]:
            replica = self._replicas[name]
            saved = saved_cost(work, _seen_images(replica, work)) if self._policy == "affinity" else 0.0
            return replica.load - self._patience * saved, len(replica.running), replica.last

        return sorted(names, key=key)

    def assign(self, request_id: str, id: str, work: RequestWork) -> None:
        """Assign a request to a replica. Assigning it to another one moves it there.

        Args:
            request_id: unique among requests in flight.
            id: replica id; ignored if unknown, because the replica may have died since it was chosen.
            work: estimated work of the request, and its images.
        """
        for other in self._replicas:
            if other != id:
                self.release(request_id, other)
        replica = self._replicas.get(id)
        if replica is None or request_id in replica.running:
            return
        cost = max(cost_of(work) - saved_cost(work, _seen_images(replica, work)), 0.0)
        self._routed += 1
        replica.running[request_id] = cost
        replica.load += cost
        replica.last = self._routed
        for image in work.keys:
            replica.seen[image] = None
            replica.seen.move_to_end(image)
        while len(replica.seen) > _IMAGES:
            replica.seen.popitem(last=False)

    def is_running(self, request_id: str) -> bool:
        """Return whether a request is assigned to a replica."""
        return any(request_id in replica.running for replica in self._replicas.values())

    def release(self, request_id: str, id: str) -> None:
        """Remove a request from a replica, which may be unknown or not have it."""
        replica = self._replicas.get(id)
        if replica is not None and (cost := replica.running.pop(request_id, None)) is not None:
            replica.load = replica.load - cost if replica.running else 0.0  # no rounding errors on an idle replica
        if not self.is_running(request_id):
            self._alone.discard(request_id)

    def abandon(self, request_id: str) -> None:
        """Remove a request from all replicas."""
        for id in ("", *self._replicas):
            self.release(request_id, id)


def _seen_images(replica: _Replica, work: RequestWork) -> list[bool]:
    return [image in replica.seen for image in work.keys]


_ROUTERS: dict[str, Router] = {}


def create_router(app: str, policy: str = "affinity") -> Router:
    """Create and return the router of an application (``policy``: see :class:`Router`).

    Ray creates its routers on one of its threads, from a copy of their module. This module is not copied, so
    :func:`router_of` finds the router here.
    """
    _ROUTERS[app] = Router(policy)
    return _ROUTERS[app]


def router_of(app: str) -> Router | None:
    """Return the router of an application in this process; None before Ray has created it."""
    return _ROUTERS.get(app)
