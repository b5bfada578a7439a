"""What a run of the load generator says: its settings, its levels, and how busy the generator was."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec
import numpy as np

from panscan.records.goodput import Goodput, follows_arrivals, goodput_of
from panscan.records.load_records import LoadRunSettings
from panscan.records.metrics import window_seconds
from panscan.records.request_records import ClientFigures, ReplicaRecord, RequestRecord
from panscan.records.store import Repeat, Run

BLOCKS = 20
"""The most blocks of a level's requests that intervals and tests draw from. Requests that are in flight together share
the endpoint's queue, so they are not independent; blocks that are longer nearly are (the method of batch means)."""

LEAST_STEADY = 10
"""Fewer answers make no steady state."""


def is_load_run(run: Run) -> bool:
    """Return whether a run is that of a load generator, whose cells are load levels."""
    return run.header.settings.load is not None


def load_settings(run: Run) -> LoadRunSettings:
    """Return the settings of a load run (see :func:`is_load_run`)."""
    load = run.header.settings.load
    assert load is not None  # the caller asked
    return load


def client_figures(run: Run, cell: str) -> ClientFigures | None:
    """Return how busy the generator was in a level's last repeat; None if the run does not say."""
    figures = [repeat.load.client for repeat, _ in run.repeats_of(cell) if repeat.load is not None]
    return figures[-1] if figures else None


def level_goodput(run: Run, cell: str) -> Goodput:
    """Return the goodput of a level under the run's limits.

    Raises:
        RecordsError: stamps contradict counts.
    """
    limits, has_rate = load_settings(run).goodput, _arrives_over_time(run, cell)
    repeats = [
        goodput_of(
            records,
            limits,
            window_seconds(window),
            has_rate=has_rate,
            block=block_size(records, window_seconds(window)),
        )
        for window, records in run.repeats_of(cell)
    ]
    return sum(repeats, goodput_of((), limits, 0.0))


def offered_rate(run: Run, cell: str) -> float | None:
    """Return the offered requests per second of a level; None for a closed loop and for all requests at once.

    That is the level's ``request_rate``. Where the rate changes (a ramp, a trace), it is the mean over the arrivals.
    """
    rate = run.level(cell).request_rate
    if rate is not None or not _arrives_over_time(run, cell):
        return rate
    spans = [
        sorted(request.due for request in requests if request.due is not None) for _, requests in run.repeats_of(cell)
    ]
    seconds = sum(times[-1] - times[0] for times in spans if times)
    return sum(len(times) - 1 for times in spans if times) / seconds if seconds > 0 else None


def _arrives_over_time(run: Run, cell: str) -> bool:
    """Return whether a level is an open loop whose requests do not all arrive at once.

    The run's arrival process does not decide: a sweep of ``--request-rate 2,inf`` has levels of both kinds.
    """
    return run.level(cell).request_rate is not None or load_settings(run).arrival in ("ramp", "trace")


def keeps_up(run: Run, cell: str) -> bool | None:
    """Return whether the endpoint answers requests as fast as they arrive; None if unknown, or not an open loop.

    See :func:`panscan.records.goodput.follows_arrivals`.
    """
    if not _arrives_over_time(run, cell):
        return None
    return follows_arrivals(records for _, records in run.repeats_of(cell))


def queued_ms(run: Run, cell: str) -> float | None:
    """Return the mean milliseconds that requests waited for ``--max-concurrency``; None if the run does not say."""
    waits = [request.queued for request in run.requests_of(cell) if request.queued is not None]
    return 1e3 * sum(waits) / len(waits) if waits else None


def steady_level(repeat: Repeat) -> Repeat | None:
    """Return a repeat of a load level with the window of its steady state; None if it has none.

    The ramp, in which fewer requests are in flight than later, lasts as long as 90% of the requests at most. The drain
    begins with the last arrival. Between lie at least :data:`LEAST_STEADY` answers and twice the ramp's time, else the
    level is hardly more than both.
    """
    window, requests = repeat
    done = [request.stamps for request in requests if request.error is None and request.stamps.tokens]
    if not done:
        return None
    ramp = float(np.percentile([stamps.tokens[-1] - stamps.accepted for stamps in done], 90))
    started, ended = window.started + ramp, max(stamps.accepted for stamps in done)
    if ended - started < 2 * ramp or sum(started <= stamps.tokens[-1] <= ended for stamps in done) < LEAST_STEADY:
        return None
    process = ReplicaRecord(replica=0, device="", started=window.started, ended=window.ended)
    return msgspec.structs.replace(window, started=started, ended=ended, replicas=[process]), requests


def steady_seconds(run: Run, cell: str) -> float | None:
    """Return how long the steady state of a level lasted; None if a repeat had none."""
    levels = list(map(steady_level, run.repeats_of(cell)))
    return sum(window_seconds(level[0]) for level in levels if level is not None) if all(levels) and levels else None


def measured_blocks(repeat: Repeat) -> Repeat:
    """Return what the metrics of a level are computed from: the blocks of its steady state, else of all of it."""
    blocks = in_blocks(repeat)
    return steady_level(blocks) or blocks


def block_size(requests: Sequence[RequestRecord], seconds: float) -> int:
    """Return how many consecutive requests make a block: as many as are in flight on average, and more if there would
    be more than :data:`BLOCKS` blocks.

    Args:
        requests: of a level.
        seconds: from the start of the level to its end.
    """
    stamps = [request.stamps for request in requests if request.error is None and request.stamps.tokens]
    busy = sum(stamp.tokens[-1] - stamp.accepted for stamp in stamps)
    return max(1, ceil(len(requests) / BLOCKS), ceil(busy / seconds) if seconds > 0 else 1)


def in_blocks(repeat: Repeat, size: int | None = None) -> Repeat:
    """Return a repeat of a load level whose ``batch`` numbers are those of blocks of requests in order of arrival.

    Args:
        repeat: a repeat with one ``batch`` per request.
        size: requests per block; by default :func:`block_size`.
    """
    window, requests = repeat
    size = block_size(requests, window_seconds(window)) if size is None else size
    return window, [msgspec.structs.replace(request, batch=request.batch // size) for request in requests]
