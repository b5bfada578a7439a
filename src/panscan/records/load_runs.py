"""Runs of the load generator: their settings, the steady state of a level, and blocks of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec
import numpy as np

from panscan.records.load_records import LoadRunSettings
from panscan.records.metrics import window_seconds
from panscan.records.request_records import ReplicaRecord, RequestRecord
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


def measured_blocks(repeat: Repeat) -> Repeat:
    """Return what the metrics of a level are computed from: the blocks of its steady state, else of all of it."""
    window, requests = repeat
    blocks = window, in_blocks(requests, block_size(requests, window_seconds(window)))
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


def in_blocks(requests: Sequence[RequestRecord], size: int) -> list[RequestRecord]:
    """Return requests of a load level, each a ``batch``, with the number of their block as their ``batch`` instead."""
    return [msgspec.structs.replace(request, batch=request.batch // size) for request in requests]
