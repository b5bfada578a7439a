"""Figures of stamps and kernel intervals. Pure: no device, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from panscan.core import Result, Stamps

Interval = tuple[float, float]
"""Start and end, in any unit of time."""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of repeated measurements, and all of them."""
    return {"median": median(values), "all": list(values)}


def decode_window(stamps: Sequence[Stamps]) -> Interval | None:
    """Return the time in which all of these requests decode: from the latest first token to the earliest last one.

    Returns:
        Seconds of :func:`panscan.core.now`; None if one ended before another began.
    """
    start, end = max(times.tokens[0] for times in stamps), min(times.tokens[-1] for times in stamps)
    return (start, end) if start < end else None


def step_ms(stamps: Sequence[Stamps]) -> tuple[float, int] | None:
    """Return the mean milliseconds of the decode steps that all of these requests take part in, and their number.

    Returns:
        None if there are no two tokens of a request in the window.
    """
    window = decode_window(stamps)
    if window is None:
        return None
    # Every step has a token of each request.
    times = [time for time in stamps[0].tokens if window[0] <= time <= window[1]]
    steps = len(times) - 1
    return (1e3 * (times[-1] - times[0]) / steps, steps) if steps > 0 else None


def idle_share(intervals: Sequence[Interval]) -> float | None:
    """Return the share of time, from the first start to the last end, in which nothing runs. Intervals may overlap.

    Returns:
        None without intervals, or if they take no time.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    begin = reached = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - begin) if reached > begin else None


def stage_means(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean milliseconds of each stage; a result without a stage spent no time in it."""
    stages = [result.stages_ms for result in results]
    names = dict.fromkeys(name for result_stages in stages for name in result_stages)
    return {name: sum(result_stages.get(name, 0.0) for result_stages in stages) / len(stages) for name in names}


def latencies(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return the median, 95th and 99th percentile of TTFT, TPOT and end-to-end latency, by ``numpy.percentile``,
    in milliseconds."""
    milliseconds = {
        "ttft_ms": [ttft_ms(result) for result in results],
        "e2e_ms": [e2e_ms(result) for result in results],
        "tpot_ms": [_tpot(result) for result in results if result.output_tokens > 1],
    }
    return {
        name: {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 95, 99)}
        for name, values in milliseconds.items()
        if values
    }


def ttft_ms(result: Result) -> float:
    """Of a result with tokens."""
    return 1e3 * _known(result.stamps.ttft)


def e2e_ms(result: Result) -> float:
    """Of a result with tokens."""
    return 1e3 * _known(result.stamps.e2e)


def _known(seconds: float | None) -> float:
    if seconds is None:
        raise ValueError("a result without tokens has no latency")
    return seconds


def _tpot(result: Result) -> float:
    times = result.stamps.tokens
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)
