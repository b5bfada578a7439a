"""Which replica answers a request: least predicted work, where its images are cached. No Ray in here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from panscan.serve.backend import Work

__all__ = ["CostModel", "Router", "books", "open_books"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative costs of the parts of a request. The unit is one prompt token in prefill.

    The defaults follow from :mod:`panscan.model.shapes` for the 4B model: the vision tower takes 3.5 TFLOP per view,
    and prefill 7.8 GFLOP per token. A decode step is limited by memory bandwidth and shared by a batch, so an output
    token costs several prompt tokens. Only ratios matter, and a factor of two in any of them changes few decisions.

    Args:
        view: one view through the vision tower.
        output_token: one decode step of one request.
        expected_output: output tokens that an answer has at most on average; ``max_new_tokens`` is often far above it.
        tokens_per_view: image tokens of one view.
    """

    view: float = 440.0
    output_token: float = 4.0
    expected_output: int = 256
    tokens_per_view: int = 256

    def of(self, work: Work) -> float:
        """Return the cost of a request on a replica that has seen none of its images."""
        output = min(work.max_new_tokens, self.expected_output) * self.output_token
        return work.views * self.view + work.prompt_tokens + output

    def saved(self, work: Work, known: Sequence[bool]) -> float:
        """Return the cost that caches save: views of known images, and the prefix up to the first unknown one.

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
    """The books of one replica: requests that it computes, with their costs, and images that it has seen."""

    running: dict[str, float] = field(default_factory=dict)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    load: float = 0.0
    last: int = 0


class Router:
    """Keeps the books of all replicas and ranks them for a request.

    A request goes to the replica with the least outstanding work. One that has its images in the cache is preferred,
    unless it is behind by more than ``patience`` times the work that the caches save: a request that moves is computed
    in full, and later questions about its images are then split between two replicas.
    Not thread-safe: all methods belong to one thread, except for :attr:`replicas` and :attr:`hits`.

    Args:
        cost: what requests cost.
        keys_per_replica: images remembered per replica, the most recently used ones.
        patience: with 1, each request goes where it would finish first. Simulated follow-up questions about documents
            kept 98% of the cache hits of one engine with 8, and 90% with 1, and ended 13% sooner (see
            ``test_follow_ups_keep_their_cache`` in tests/serve/test_routing.py).
        policy: one of :data:`panscan.serve.options.ROUTING`.
    """

    def __init__(
        self, cost: CostModel | None = None, *, keys_per_replica: int = 2048, patience: float = 8.0,
        policy: str = "affinity",
    ) -> None:  # fmt: skip
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
        """Replace the set of replicas. A replica that is gone loses its books; a new one starts with empty ones."""
        self._replicas = {id: self._replicas.get(id) or _Replica() for id in ids}

    def outstanding(self, id: str) -> float:
        """Return the cost of the requests that a replica has not finished; 0 for an unknown replica."""
        replica = self._replicas.get(id)
        return 0.0 if replica is None else replica.load

    def rank(self, work: Work, candidates: Iterable[str] | None = None) -> list[str]:
        """Return the candidates (default: all replicas), best first.

        Equal ones: fewest requests first, then the one that has waited longest for a request.
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

    def assign(self, request_id: str, id: str, work: Work) -> None:
        """Book a request on a replica. Booking it again on another one moves it there.

        Args:
            request_id: unique among requests in flight.
            id: the replica; ignored if unknown, because it may have died since it was chosen.
            work: what the request costs, and its images.
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
        """Remove a request from a replica's books. Nothing happens if it is not there."""
        replica = self._replicas.get(id)
        if replica is None or (cost := replica.running.pop(request_id, None)) is None:
            return
        replica.load = replica.load - cost if replica.running else 0.0  # no rounding errors on an idle replica


def _known(replica: _Replica, work: Work) -> list[bool]:
    return [image in replica.seen for image in work.keys]


_BOOKS: dict[str, Router] = {}


def open_books(app: str, policy: str = "affinity") -> Router:
    """Return new books for the router of an application (``policy``: see :class:`Router`).

    Ray creates its routers, on a thread that belongs to Ray, from a copy of their module. This module is not copied, so
    :func:`books` finds them here.
    """
    _BOOKS[app] = Router(policy=policy)
    return _BOOKS[app]


def books(app: str) -> Router | None:
    """Return the books of an application's router in this process; None before Ray has created the router."""
    return _BOOKS.get(app)
