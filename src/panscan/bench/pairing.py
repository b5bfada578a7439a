"""Which requests of two cells answer the same question, and which of them share their fate: clusters of batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from panscan.bench.batches import Batch, batches_of
from panscan.bench.records import Record, Run

__all__ = ["PairedRequests", "RequestPair", "Work", "pair_requests"]

_Key = tuple[int, int, str, tuple[str, ...], str]
"""Repeat, replica, request id, hashes of its images, hash of its prompt."""


@dataclass(frozen=True, slots=True)
class RequestPair:
    """Two ``request`` records of the same question, and the cluster that they are in (from 0, without gaps)."""

    a: Record
    b: Record
    cluster: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one side's batches of a cluster did in their repeat's window: answered requests, output tokens, seconds."""

    requests: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PairedRequests:
    """Paired requests of two cells.

    Args:
        pairs: in an order that depends on nothing but what they are.
        work: of each cluster, A's and B's.
        alone: answered requests of A and of B without a partner.
        failed: requests of A and of B that failed.
    """

    pairs: tuple[RequestPair, ...]
    work: tuple[tuple[Work, Work], ...]
    alone: tuple[int, int]
    failed: tuple[int, int]


def pair_requests(a: Run, cell_a: str, b: Run, cell_b: str) -> PairedRequests:
    """Pair the requests of two cells by repeat, replica, id, images and prompt.

    A cluster is the smallest set of batches of both that no pair leaves: with equal batches on both sides, a batch.
    """
    records_a, records_b = _answered(a, cell_a), _answered(b, cell_b)
    keys = sorted(records_a.keys() & records_b.keys())
    batches = [(("A", *_batch(records_a[key])), ("B", *_batch(records_b[key]))) for key in keys]
    clusters = _components(batches)
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters[ours] for ours, _ in batches))}
    pairs = [
        RequestPair(records_a[key], records_b[key], numbers[clusters[ours]])
        for key, (ours, _) in zip(keys, batches, strict=True)
    ]
    sides = [_work(run, cell, side, clusters, numbers) for side, run, cell in (("A", a, cell_a), ("B", b, cell_b))]
    return PairedRequests(
        tuple(pairs),
        tuple(zip(*sides, strict=True)),
        (len(records_a) - len(keys), len(records_b) - len(keys)),
        (_failed(a, cell_a), _failed(b, cell_b)),
    )


def _answered(run: Run, cell: str) -> dict[_Key, Record]:
    return {
        (record["repeat"], record.get("replica", 0), record["request"], *_content(record)): record
        for key, records in run.requests.items()
        if key[0] == cell
        for record in records
        if record["error"] is None
    }


def _content(record: Record) -> tuple[tuple[str, ...], str]:
    return tuple(map(str, record["image_sha256"])), record["prompt_sha256"]


def _failed(run: Run, cell: str) -> int:
    records = (record for key, group in run.requests.items() if key[0] == cell for record in group)
    return sum(record["error"] is not None for record in records)


def _batch(record: Record) -> tuple[int, int, int]:
    return record["repeat"], record.get("replica", 0), record["batch"]


def _components(links: Iterable[tuple[Hashable, Hashable]]) -> dict[Hashable, Hashable]:
    """One member of its connected component, the same one for all of them, by node."""
    above: dict[Hashable, Hashable] = {}

    def top(node: Hashable) -> Hashable:
        while above.setdefault(node, node) != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    for one, other in links:
        above[top(one)] = top(other)
    return {node: top(node) for node in above}


def _work(
    run: Run, cell: str, side: str, clusters: dict[Hashable, Hashable], numbers: dict[Hashable, int]
) -> Sequence[Work]:
    groups: list[list[Batch]] = [[] for _ in numbers]
    for key in sorted(key for key in run.repeats if key[0] == cell):
        for batch in batches_of(run.repeats[key], run.requests[key]):
            cluster = clusters.get((side, key[1], *batch.key)) if batch.key is not None else None
            if cluster is not None:
                groups[numbers[cluster]].append(batch)
    return [
        Work(
            sum(batch.requests_inside for batch in group),
            sum(batch.tokens_inside for batch in group),
            sum(batch.seconds_inside for batch in group),
        )
        for group in groups
    ]
