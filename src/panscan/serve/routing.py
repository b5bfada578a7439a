"""Replica selection by predicted work and cached images. Independent of Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from panscan.core.model_names import IMAGE_TOKENS
from panscan.plan.cost import OUTPUT_COST, VIEW_COST
from panscan.serve.backend import RequestWork

__all__ = ["CostModel", "Router", "create_router", "router_of"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative costs of the parts of a request. The unit is one prompt token in prefill.

    Only ratios matter, and a factor of two in any of them changes few decisions.

    Args:
        view: one view through the vision tower.
        output_token: one decode step of one request.
        expected_output: cap on the predicted output tokens; ``max_new_tokens`` is often far above the real length.
        tokens_per_view: image tokens of one view.
    """

    view: float = VIEW_COST
    output_token: float = OUTPUT_COST
    expected_output: int = 256
    tokens_per_view: int = IMAGE_TOKENS

    def of(self, work: RequestWork) -> float:
        """Return the cost of a request on a replica that has seen none of its images."""
        output = min(work.max_new_tokens, self.expected_output) * self.output_token
        return work.views * self.view + work.prompt_tokens + output

    def saved(self, work: RequestWork, known: Sequence[bool]) -> float:
        """Return the cost that the caches save: views of known images, and the prefix before the first unknown one.

        Args:
            work: the request. Its views are assumed to be spread evenly over its images.
            known: whether a replica has seen each image of ``work.keys``.
        """
        if not known:
            return 0.0
        views = work.views / len(known)
        prefix = known.index(False) if False in known else len(known)
        return views * (sum(known) * self.view + prefix * self.tokens_per_view)


@dataclass(slots=True)
class _Replica:
    """The state of one replica: its running requests with their costs, and the images that it has seen."""

    running: dict[str, float] = field(default_factory=dict)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    load: float = 0.0
    last: int = 0


class Router:
    """A router that tracks the load of all replicas and ranks them for a request.

    A request goes to the replica with the least outstanding work. A replica that has cached its images is preferred,
    unless it is behind by more than ``patience`` times the work that the caches save: another replica would compute
    the request in full, and later questions about its images would be split between two replicas.
    Not thread-safe, except for :attr:`replicas` and :attr:`hits`.

    Args:
        cost: cost model of requests.
        keys_per_replica: number of most recently used images remembered per replica.
        patience: factor on the saved work; with 1, each request goes where it would finish first. In a simulation of
            follow-up questions about documents, 8 kept 98% of one engine's cache hits and 1 kept 90%, and 8 finished
            13% sooner (see ``test_follow_ups_keep_their_cache`` in tests/serve/test_routing.py).
        policy: routing policy, one of ``--routing``.
    """

    def __init__(
        self,
        cost: CostModel | None = None,
        *,
        keys_per_replica: int = 2048,
        patience: float = 8.0,
        policy: str = "affinity",
    ) -> None:
        self._cost = CostModel() if cost is None else cost
        self._keys, self._patience, self._policy = keys_per_replica, patience, policy
        self._random = Random(0)
        self._replicas: dict[str, _Replica] = {}
        self._routed = 0
        self.hits = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        """The ids of the replicas that can take requests."""
        return tuple(self._replicas)

    def set_replicas(self, ids: Iterable[str]) -> None:
        """Replace the set of replicas. The state of removed replicas is discarded; new ones start empty."""
        self._replicas = {id: self._replicas.get(id) or _Replica() for id in ids}

    def outstanding(self, id: str) -> float:
        """Return the cost of the requests that a replica has not finished; 0 for an unknown replica."""
        replica = self._replicas.get(id)
        return 0.0 if replica is None else replica.load

    def rank(self, work: RequestWork, candidates: Iterable[str] | None = None) -> list[str]:
        """Return the candidates (default: all replicas), best first.

        Ties: the fewest running requests first, then the replica that was used least recently.
        """
        names = self.replicas if candidates is None else candidates
        found = {name: self._replicas[name] for name in names if name in self._replicas}

        if self._policy == "random":
            return self._random.sample(list(found), len(found))

        def key(name: str) -> tuple[float, int, int]:
            replica = found[name]
            saved = self._cost.saved(work, _known(replica, work)) if self._policy == "affinity" else 0.0
            return replica.load - self._patience * saved, len(replica.running), replica.last

        return sorted(found, key=key)

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
        known = _known(replica, work)
        self.hits += any(known)
        self._routed += 1
        cost = max(self._cost.of(work) - self._cost.saved(work, known), 0.0)
        replica.running[request_id] = cost
        replica.load += cost
        replica.last = self._routed
        for image in work.keys:
            replica.seen[image] = None
            replica.seen.move_to_end(image)
        while len(replica.seen) > self._keys:
            replica.seen.popitem(last=False)

    def release(self, request_id: str, id: str) -> None:
        """Remove a request from a replica; ignored if it is not assigned to it."""
        replica = self._replicas.get(id)
        if replica is None or (cost := replica.running.pop(request_id, None)) is None:
            return
        replica.load = replica.load - cost if replica.running else 0.0  # no rounding errors on an idle replica


def _known(replica: _Replica, work: RequestWork) -> list[bool]:
    return [image in replica.seen for image in work.keys]


_ROUTERS: dict[str, Router] = {}


def create_router(app: str, policy: str = "affinity") -> Router:
    """Create and return the router of an application (``policy``: see :class:`Router`).

    Ray creates its routers on one of its threads, from a copy of their module. This module is not copied, so
    :func:`router_of` finds the router here.
    """
    _ROUTERS[app] = Router(policy=policy)
    return _ROUTERS[app]


def router_of(app: str) -> Router | None:
    """Return the router of an application in this process; None before Ray has created it."""
    return _ROUTERS.get(app)
