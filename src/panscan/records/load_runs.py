"""What a run of the load generator says: its settings, its levels, and how busy the generator was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

from panscan.records.goodput import Goodput, Limits, follows_arrivals, goodput_of
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


@dataclass(frozen=True, slots=True)
class LoadRunSettings:
    """The settings of a load run, as :data:`panscan.records.schema.LOAD_SETTINGS` lists them.

    Args:
        endpoint: URL of the endpoint.
        server: server software that the endpoint reports; None if unknown.
        model: name of the model at the endpoint.
        goodput: limits in milliseconds; empty if none were given.
        attainment: the share of requests that must meet them.
        arrival: one of :data:`panscan.records.schema.ARRIVALS`.
        scenario: name of the scenario; None without one.
        image_reuse: the share of requests whose image was sent before; None if images were not prepared for it.
        num_prompts: requests per level.
        num_warmups: requests before the first level.
        seed: seed of arrivals and content.
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
        processes: number of processes that sent requests.
        lag_median_ms: delay of sending against the arrival process, waiting for ``--max-concurrency`` left out.
        lag_p99_ms: the same, 99th percentile.
        cpu_share: CPU time of the busiest process as a share of one core, 0 to 1.
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
    limits, has_rate = load_settings(run).goodput, _arrives_over_time(run, cell)
    repeats = [
        goodput_of(records, limits, window_seconds(window), has_rate=has_rate)
        for window, records in level_repeats(run, cell)
    ]
    return sum(repeats, goodput_of((), limits, 0.0))


def offered_rate(run: Run, cell: str) -> float | None:
    """Return the offered requests per second of a level; None for a closed loop and for all requests at once.

    That is the level's ``request_rate``. Where the rate changes (a ramp, a trace), it is the mean over the arrivals.
    """
    rate: float | None = run.cells[cell].get("request_rate")
    if rate is not None or not _arrives_over_time(run, cell):
        return rate
    spans = [_arrivals(records) for _, records in level_repeats(run, cell)]
    seconds = sum(times[-1] - times[0] for times in spans if times)
    return sum(len(times) - 1 for times in spans if times) / seconds if seconds > 0 else None


def _arrives_over_time(run: Run, cell: str) -> bool:
    """Return whether a level is an open loop whose requests do not all arrive at once.

    The run's arrival process does not decide: a sweep of ``--request-rate 2,inf`` has levels of both kinds.
    """
    return run.cells[cell].get("request_rate") is not None or load_settings(run).arrival in ("ramp", "trace")


def keeps_up(run: Run, cell: str) -> bool | None:
    """Return whether the endpoint answers requests as fast as they arrive; None if unknown, or not an open loop.

    See :func:`panscan.records.goodput.follows_arrivals`.
    """
    if not _arrives_over_time(run, cell):
        return None
    return follows_arrivals(records for _, records in level_repeats(run, cell))


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
        repeat: a repeat with one ``batch`` per request.
        size: requests per block; by default :func:`block_size`.
    """
    window, records = repeat
    size = block_size(repeat) if size is None else size
    return window, [{**record, "batch": record["batch"] // size} for record in records]
