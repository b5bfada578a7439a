"""The metrics of a run's cells."""

from __future__ import annotations

from panscan.core import RecordsError
from panscan.records.metrics import Metrics, Repeat, ReplicaShare, metrics_of, shares_of
from panscan.records.store import Run

__all__ = ["cell_metrics", "replica_shares"]


def cell_metrics(run: Run, cell_id: str, *, seed: int = 0) -> Metrics | None:
    """Metrics of one cell over its complete repeats; None if no request of them succeeded.

    Raises:
        RecordsError: the run has no such cell, or its stamps contradict its counts.
    """
    if cell_id not in run.cells:
        raise RecordsError(f"{run.path}: the run has no cell {cell_id!r}")
    return metrics_of(_repeats(run, cell_id), seed=seed)


def replica_shares(run: Run, cell_id: str) -> list[ReplicaShare]:
    """Each replica's part of a cell's ``request_throughput``; empty for a run of one process."""
    return shares_of(_repeats(run, cell_id))


def _repeats(run: Run, cell_id: str) -> list[Repeat]:
    return [(run.repeats[key], run.requests[key]) for key in sorted(run.repeats) if key[0] == cell_id]
