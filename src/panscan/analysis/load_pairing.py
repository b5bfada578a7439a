"""What a comparison of two load runs needs beyond that of two sweeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from panscan.core import RecordsError
from panscan.records.goodput import Limits, missed_limits
from panscan.records.load_runs import block_size, in_blocks, is_load_run, load_settings
from panscan.records.store import Record, Run

__all__ = ["ATTAINMENT", "LOAD_WORKLOAD", "comparable", "load_differences"]

ATTAINMENT = "attainment"
"""The name of a request's score that is 1 if it meets the limits of both runs, else 0."""
LOAD_WORKLOAD = ("arrival", "scenario", "image_reuse", "num_prompts", "seed", "ignore_eos")
"""Settings of a load run that make its requests, or when they arrive."""
_SHOWN = ("endpoint", "server", "model", *LOAD_WORKLOAD, "goodput", "attainment")


def comparable(a: Run, b: Run) -> tuple[Run, Run]:
    """Return two runs with the requests that a comparison tests.

    The batches of load runs become blocks of consecutive requests (:func:`panscan.records.load_runs.in_blocks`), of the
    same size in both runs. Each answered request is scored by :data:`ATTAINMENT` if both runs have the same limits.
    Sweeps are unchanged.

    Raises:
        RecordsError: one is a load run, the other is not; or stamps contradict counts.
    """
    if is_load_run(a) != is_load_run(b):
        load, sweep = (a, b) if is_load_run(a) else (b, a)
        raise RecordsError(
            f"{load.path.parent} is a load run of an endpoint and {sweep.path.parent} is a sweep of panscan bench:"
            " compare two of the same kind"
        )
    if not is_load_run(a):
        return a, b
    limits, others = load_settings(a).goodput, load_settings(b).goodput
    shared = limits if limits == others else {}
    sizes = _block_sizes(a), _block_sizes(b)
    largest = {key: max(side.get(key, 1) for side in sizes) for key in sizes[0] | sizes[1]}
    return _tested(a, shared, largest), _tested(b, shared, largest)


def _block_sizes(run: Run) -> dict[tuple[str, int], int]:
    return {key: block_size((run.repeats[key], records)) for key, records in run.requests.items()}


def _tested(run: Run, limits: Limits, sizes: Mapping[tuple[str, int], int]) -> Run:
    requests: dict[tuple[str, int], list[Record]] = {}
    for key, records in run.requests.items():
        _, blocks = in_blocks((run.repeats[key], records), sizes[key])
        requests[key] = [_scored(record, limits) for record in blocks]
    return replace(run, requests=requests)


def _scored(record: Mapping[str, Any], limits: Limits) -> Record:
    if not limits or record["error"] is not None:
        return dict(record)
    return {**record, "scores": {ATTAINMENT: float(not missed_limits(record, limits))}}


def load_differences(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Return in what the settings of two load runs differ, as (A's value, B's value); nothing for sweeps."""
    if not is_load_run(a):
        return {}
    ours, theirs = asdict(load_settings(a)), asdict(load_settings(b))
    return {name: (_text(ours[name]), _text(theirs[name])) for name in _SHOWN if ours[name] != theirs[name]}


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{name}:{limit:g}" for name, limit in value.items()) or None
    return value
