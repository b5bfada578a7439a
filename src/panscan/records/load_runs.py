"""What a run of the load generator says: its settings, its levels, and how busy the generator was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

import numpy as np

from panscan.records.goodput import Goodput, Limits, goodput_of
from panscan.records.metrics import Repeat, window_seconds
from panscan.records.schema import LOAD_SETTINGS
from panscan.records.store import Run

__all__ = [
    "BLOCKS",
    "ClientFigures",
    "LoadRunSettings",
    "block_size",
    "client_figures",
    "in_blocks",
    "is_load_run",
    "keeps_up",
    "level_goodput",
    "level_repeats",
    "load_settings",
    "offered_rate",
    "queued_ms",
]

BLOCKS = 20
"""The most blocks of a level's requests that intervals and tests draw from. Requests that are in flight together share
the endpoint's queue, so they are not independent; blocks that are longer nearly are (the method of batch means)."""

_SUSTAINED = 0.9
"""Completions per arrival, over the middle of a level, below which its queue grows."""
_LEAST_ARRIVALS = 10


@dataclass(frozen=True, slots=True)
class LoadRunSettings:
    """The settings of a load run, as :data:`panscan.records.schema.LOAD_SETTINGS` lists them.

    Args:
        endpoint: its URL.
        server: what it says it is; None if unknown.
        model: its name at the endpoint.
        goodput: limits in milliseconds; empty if none were given.
        attainment: the share of requests that must meet them.
        arrival: of :data:`panscan.records.schema.ARRIVALS`.
        scenario: its name; None without one.
        image_reuse: the share of requests whose image was sent before; None if images were not prepared for it.
        num_prompts: requests per level.
        num_warmups: requests before the first level.
        seed: of arrivals and content.
        metric_percentiles: percentiles to show.
        percentile_metrics: the times to show them of, of :data:`panscan.records.schema.TIMES`.
        ignore_eos: whether answers had to reach their full length.
    """

    endpoint: str
    server: str | None
    model: str
    goodput: Limits
    attainment: float
    arrival: str
    scenario: str | None
    image_reuse: float | None
    num_prompts: int
    num_warmups: int
    seed: int
    metric_percentiles: Sequence[float]
    percentile_metrics: Sequence[str]
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """How busy the load generator was during a level.

    Args:
        processes: that sent requests.
        lag_median_ms: delay of sending against the arrival process, waiting for ``--max-concurrency`` left out.
        lag_p99_ms: the same, 99th percentile.
        cpu_share: of one core, of the busiest process, 0 to 1.
        limited: whether the generator, not the endpoint, limited the level; ``reason`` says how.
    """

    processes: int
    lag_median_ms: float | None
    lag_p99_ms: float | None
    cpu_share: float | None
    limited: bool
    reason: str


def is_load_run(run: Run) -> bool:
    """Return whether a run is that of a load generator, whose cells are load levels."""
    return "load" in run.header["settings"]


def load_settings(run: Run) -> LoadRunSettings:
    """Return the settings of a load run (see :func:`is_load_run`)."""
    kept: Mapping[str, Any] = run.header["settings"]["load"]
    return LoadRunSettings(**{name: kept[name] for name in LOAD_SETTINGS})


def client_figures(run: Run, cell: str) -> ClientFigures | None:
    """Return how busy the generator was in a level's last repeat; None if the run does not say."""
    lines = [line for (name, _), line in sorted(run.repeats.items()) if name == cell and line.get("load")]
    if not lines:
        return None
    kept = lines[-1]["load"]["client"]
    return ClientFigures(**{field.name: kept[field.name] for field in fields(ClientFigures)})


def level_repeats(run: Run, cell: str) -> list[Repeat]:
    """Return the complete repeats of a level."""
    return [(run.repeats[key], run.requests[key]) for key in sorted(run.repeats) if key[0] == cell]


def level_goodput(run: Run, cell: str) -> Goodput:
    """Return the goodput of a level under the run's limits.

    Raises:
        RecordsError: stamps contradict counts.
    """
    repeats = level_repeats(run, cell)
    seconds = sum(window_seconds(window) for window, _ in repeats)
    return goodput_of((record for _, records in repeats for record in records), load_settings(run).goodput, seconds)


def offered_rate(run: Run, cell: str) -> float | None:
    """Return the requests per second that a level asks for; None of a closed loop and of all requests at once.

    That is the level's ``request_rate``. Where the rate changes (a ramp, a trace), it is the mean over the arrivals.
    """
    rate: float | None = run.cells[cell].get("request_rate")
    if rate is not None or load_settings(run).arrival in ("closed", "burst"):
        return rate
    spans = [_arrivals(records) for _, records in level_repeats(run, cell)]
    seconds = sum(times[-1] - times[0] for times in spans if times)
    return sum(len(times) - 1 for times in spans if times) / seconds if seconds > 0 else None


def keeps_up(run: Run, cell: str) -> bool | None:
    """Return whether the endpoint answers requests as fast as they arrive; None if unknown, or not an open loop.

    It compares the time between the 10th and the 90th percentile of arrivals with that of completions. A constant
    latency, even a long one, leaves both equal; a growing queue stretches completions.
    """
    if load_settings(run).arrival in ("closed", "burst"):
        return None
    arrived = done = 0.0
    for _, records in level_repeats(run, cell):
        ends = [record["stamps"]["tokens"][-1] for record in _answered(records) if record["stamps"]["tokens"]]
        if len(ends) < _LEAST_ARRIVALS:
            return None
        arrived += _middle(_arrivals(records))
        done += _middle(ends)
    return arrived >= _SUSTAINED * done if arrived > 0 else None


def queued_ms(run: Run, cell: str) -> float | None:
    """Return the mean milliseconds that requests waited for ``--max-concurrency``; None if the run does not say."""
    waits = [record["queued"] for _, records in level_repeats(run, cell) for record in records if "queued" in record]
    known = [seconds for seconds in waits if seconds is not None]
    return 1e3 * sum(known) / len(known) if known else None


def _arrivals(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return when requests were due, in order."""
    return sorted(record["due"] for record in records if record.get("due") is not None)


def _answered(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in records if record["error"] is None]


def _middle(times: Sequence[float]) -> float:
    """Return the seconds between the 10th and the 90th percentile."""
    if not times:
        return 0.0
    low, high = np.percentile(times, (10, 90))
    return float(high - low)


def block_size(repeat: Repeat) -> int:
    """Return how many consecutive requests of a repeat make a block: as many as are in flight on average, and more if
    there would be more than :data:`BLOCKS` blocks."""
    window, records = repeat
    answered = [record for record in _answered(records) if record["stamps"]["tokens"]]
    busy = sum(record["stamps"]["tokens"][-1] - record["stamps"]["accepted"] for record in answered)
    seconds = window_seconds(window)
    return max(1, ceil(len(records) / BLOCKS), ceil(busy / seconds) if seconds > 0 else 1)


def in_blocks(repeat: Repeat, size: int | None = None) -> Repeat:
    """Return a repeat of a load level whose ``batch`` numbers are those of blocks of requests in order of arrival.

    Args:
        repeat: with one ``batch`` per request.
        size: requests per block; by default :func:`block_size`.
    """
    window, records = repeat
    size = block_size(repeat) if size is None else size
    return window, [{**record, "batch": record["batch"] // size} for record in records]
