"""Metrics of measured requests, derived from their records' time stamps and counts and from nothing else.

Percentiles are ``numpy.percentile``'s; times in records are seconds, and milliseconds in names that end with ``_ms``.

Several replicas start a repeat together but end it one by one. Throughput counts what they did while all of them
worked: in the common window, from the latest start to the earliest end. A batch that reaches over the window's edge
counts by the fraction of its time that lies inside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log, log1p
from typing import Any

import numpy as np

from panscan.records.intervals import Interval, cluster_intervals, ratio_interval
from panscan.records.requests import STAGES, RequestMetrics

__all__ = [
    "COLUMNS",
    "INTERVALS",
    "LAUNCHER",
    "LEAST_SAMPLES",
    "Batch",
    "Metrics",
    "Repeat",
    "ReplicaShare",
    "batches_of",
    "least_samples",
    "metrics_of",
    "percentile_name",
    "shares_of",
    "window_seconds",
]

Repeat = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""A ``repeat`` record and the ``request`` records of its window."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a repeat.

    Args:
        key: (replica, batch) in the records; None where every request of the replica failed.
        requests: number of completed requests.
        tokens: output tokens of these requests.
        latency: seconds from accepted to the last token of any request; None where tokens were not stamped.
        share: seconds from the end of the batch before to its own; a replica's shares add up to its wall time.
        inside: the fraction of the share that lies in the repeat's window.
        replica: whose batch it is.
        replicas: number of replicas that ran this repeat.
    """

    key: tuple[int, int] | None
    requests: int
    tokens: int
    latency: float | None
    share: float
    inside: float = 1.0
    replica: int = 0
    replicas: int = 1

    @property
    def requests_inside(self) -> float:
        return self.requests * self.inside

    @property
    def tokens_inside(self) -> float:
        return self.tokens * self.inside

    @property
    def seconds_inside(self) -> float:
        """Its part of the window: these add up to the window over all batches of all replicas."""
        return self.share * self.inside / self.replicas


def window_seconds(repeat: Mapping[str, Any]) -> float:
    """Return the length of a repeat's window; 0 if a replica ended before another one started."""
    seconds: float = repeat["ended"] - repeat["started"]
    return max(seconds, 0.0) if repeat.get("replicas") else seconds


def batches_of(repeat: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Batch]:
    """Return the batches of a ``repeat`` record and its ``request`` records by replica and end time.

    Requests that failed are left out.
    """
    replicas = repeat.get("replicas")
    if not replicas:
        return [batch for _, _, batch in _timed(repeat, records)]
    found = []
    for each in replicas:
        number = each["replica"]
        for at, until, batch in _timed(each, [record for record in records if record.get("replica", 0) == number]):
            inside = _inside(at, until, repeat["started"], repeat["ended"])
            found.append(replace(batch, inside=inside, replica=number, replicas=len(replicas)))
    return found


def _inside(at: float, until: float, opens: float, closes: float) -> float:
    """Return the fraction of ``[at, until]`` in the window; 0 or 1 for a batch of zero duration."""
    if until <= at:
        return float(opens <= until <= closes)
    return max(0.0, min(until, closes) - max(at, opens)) / (until - at)


def _timed(process: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, Batch]]:
    """Return each batch of one process with the end of the previous batch and its own end."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["error"] is None:
            groups[record.get("replica", 0), record["batch"]].append(record)
    ends = []
    for key, group in groups.items():
        seen = all(record["stamps"]["tokens"] for record in group)
        last = max(record["stamps"]["tokens"][-1] for record in group) if seen else process["ended"]
        ends.append((last, seen, key, group))
    at, ended = process["started"], process["ended"]
    if not ends:  # every request failed: the time passed all the same
        return [(at, ended, Batch(None, 0, 0, None, ended - at))]
    ends.sort(key=lambda batch: batch[0])
    found = []
    for index, (last, seen, key, group) in enumerate(ends, 1):
        until = last if index < len(ends) else ended
        latency = last - min(record["stamps"]["accepted"] for record in group) if seen else None
        tokens = sum(record["output_tokens"] for record in group)
        found.append((at, until, Batch(key, len(group), tokens, latency, until - at)))
        at = until
    return found


def percentile_name(percent: float) -> str:
    """Return the name of a percentile in metrics: ``median``, ``p99``, ``p99.9``."""
    return "median" if percent == 50 else f"p{percent:.10g}"


@cache
def least_samples(percent: float) -> int:
    """Return the number of samples that certify a percentile with 99% confidence: MLPerf's early-stopping rule.

    That many samples have at most one above the percentile with a probability of at most 1%. Percentiles below the
    median need as many as those above it.
    """
    share = max(percent, 100 - percent) / 100

    def certifies(count: int) -> bool:
        return count * log(share) + log1p(count * (1 - share) / share) <= log(0.01)

    most = 2
    while not certifies(most):
        most *= 2
    return bisect_left(range(most), True, key=certifies)


_SHOWN = (50, 90, 95, 99)
_PERCENTILES: dict[str, float] = {percentile_name(percent): percent for percent in _SHOWN}
LEAST_SAMPLES = {percent: least_samples(percent) for percent in _SHOWN}
"""Fewer samples do not certify a percentile with 99% confidence (see :func:`least_samples`)."""

LAUNCHER = ("latency_p50_ms", "latency_p95_ms", "throughput_req_s", "tokens_per_s_mean")
_TOTALS = ("measured_repeats", "measured_batches", "completed", "failed", "duration")
_TOKENS = ("total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput")
_TIMES = ("ttft", "tpot", "itl", "e2el")
_COUNTED = ("views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
COLUMNS = (
    *LAUNCHER,
    *_TOTALS,
    *_TOKENS,
    *(f"{statistic}_{time}_ms" for time in _TIMES for statistic in ("mean", *_PERCENTILES)),
    *(f"mean_{stage}_ms" for stage in STAGES),
    *(f"mean_{name}" for name in _COUNTED),
    *_PEAKS,
)
_BOUNDED = ("mean", "median", "p95")
_BOUNDED_TIMES = ("ttft", "tpot", "e2el")
INTERVALS = (
    "request_throughput",
    "output_throughput",
    *(f"{statistic}_{time}_ms" for time in _BOUNDED_TIMES for statistic in _BOUNDED),
)


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """What one of several replicas contributed to a cell, over its complete repeats.

    Args:
        replica: number of the replica.
        device: device that it ran on.
        request_throughput: requests per second inside of the common windows; None if these are empty.
        share: share of the sum over replicas, 0 to 1; None if that is 0 or unknown.
    """

    replica: int
    device: str
    request_throughput: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of requests over their repeats. Requests that failed are counted, and in no other number.

    Args:
        values: every name of :data:`COLUMNS`, None where nothing was measured. ``duration`` and the throughputs are in
            seconds; ``latency_*`` and ``tokens_per_s_mean`` are of batches, from accepted to the last token of any
            of its requests. Stage means are over all requests (one without a stage spent no time in it) and add up to
            ``mean_e2el_ms``. Peaks are the highest of the repeats.
        intervals: (low, high) with 95% confidence by names of :data:`INTERVALS`; absent below two batches.
        uncertified: percentiles of too few samples.
    """

    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    uncertified: tuple[str, ...]


def metrics_of(repeats: Sequence[Repeat], *, seed: int = 0, percentiles: Sequence[float] = ()) -> Metrics | None:
    """Metrics of measured repeats; None if no request of them succeeded.

    Args:
        repeats: each a window (``started``, ``ended``, perhaps peaks of memory and ``replicas``) with its requests: the
            fields of :func:`panscan.records.requests.request_fields`, ``request`` (an id) and ``batch``. Requests that
            one call answered share a ``batch``; a source that takes them one by one numbers each its own.
        seed: seed of the bootstrap.
        percentiles: further ones of each time, which the values then have, too (see :func:`percentile_name`).

    Raises:
        RecordsError: stamps contradict counts.
    """
    requests = [(number, record) for number, (_, records) in enumerate(repeats) for record in records]
    answered = [(number, record) for number, record in requests if record["error"] is None]
    done = [record for _, record in answered]
    if not done:
        return None
    single = [RequestMetrics.from_record(record) for record in done]
    batches = [batch for window, records in repeats for batch in batches_of(window, records)]
    duration = sum(window_seconds(window) for window, _ in repeats)
    values: dict[str, float | None] = dict.fromkeys(COLUMNS)
    values |= {
        "measured_repeats": len(repeats),
        "measured_batches": sum(batch.requests > 0 for batch in batches),
        "failed": len(requests) - len(done),
    }
    values |= _throughputs(done, batches, duration) | _means(done, single)
    values |= {name: max(_known(window.get(name) for window, _ in repeats), default=None) for name in _PEAKS}
    uncertified = _batch_latencies(values, batches)
    samples = _samples(answered, single)
    every = _PERCENTILES | {percentile_name(percent): percent for percent in percentiles}
    values |= {f"{name}_{time}_ms": None for name in every for time in _TIMES}
    for time, sample in samples.items():
        uncertified += _distribution(values, time, [seconds for seconds, _ in sample], every)
    return Metrics(values, _intervals(batches, samples, seed), tuple(uncertified))


def shares_of(repeats: Sequence[Repeat]) -> list[ReplicaShare]:
    """Return each replica's part of the ``request_throughput`` of repeats; empty for a single process."""
    repeats = [(record, requests) for record, requests in repeats if record.get("replicas")]
    seconds = sum(window_seconds(record) for record, _ in repeats)
    devices = {each["replica"]: each["device"] for record, _ in repeats for each in record["replicas"]}
    work = dict.fromkeys(devices, 0.0)
    for record, requests in repeats:
        for batch in batches_of(record, requests):
            work[batch.replica] += batch.requests_inside
    total = sum(work.values())
    return [
        ReplicaShare(replica, device, _ratio(work[replica], seconds), _ratio(work[replica], total))
        for replica, device in sorted(devices.items())
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _throughputs(
    done: Sequence[Mapping[str, Any]], batches: Sequence[Batch], duration: float
) -> dict[str, float | None]:
    requests_per_second = _ratio(sum(batch.requests_inside for batch in batches), duration)
    return {
        "throughput_req_s": requests_per_second,
        "completed": len(done),
        "duration": duration,
        "total_input_tokens": sum(_known(record["prompt_tokens"] for record in done)),
        "total_output_tokens": sum(record["output_tokens"] for record in done),
        "request_throughput": requests_per_second,
        "output_throughput": _ratio(sum(batch.tokens_inside for batch in batches), duration),
    }


def _means(done: Sequence[Mapping[str, Any]], single: Sequence[RequestMetrics]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in _COUNTED:
        counts = _known(record[name] for record in done)
        means[f"mean_{name}"] = float(np.mean(counts)) if counts else None
    for stage in STAGES:
        times = _known(getattr(one, stage) for one in single)
        means[f"mean_{stage}_ms"] = sum(times) / len(single) * 1e3 if times else None
    return means


def _batch_latencies(values: dict[str, float | None], batches: Sequence[Batch]) -> list[str]:
    """Fill the launcher's columns; returns those of too few samples."""
    latencies = _known(batch.latency for batch in batches)
    rates = [batch.tokens / batch.latency for batch in batches if batch.latency]
    values["tokens_per_s_mean"] = float(np.mean(rates)) if rates else None
    for percent in (50, 95) if latencies else ():
        values[f"latency_p{percent}_ms"] = float(np.percentile(latencies, percent)) * 1e3
    return [f"latency_p{percent}_ms" for percent in (50, 95) if 0 < len(latencies) < LEAST_SAMPLES[percent]]


def _distribution(
    values: dict[str, float | None], time: str, seconds: Sequence[float], percentiles: Mapping[str, float]
) -> list[str]:
    """Fill mean and percentiles, in milliseconds; returns the names of those of too few samples."""
    if not seconds:
        return []
    values[f"mean_{time}_ms"] = float(np.mean(seconds)) * 1e3
    points = np.percentile(seconds, list(percentiles.values())) * 1e3
    for name, point in zip(percentiles, points, strict=True):
        values[f"{name}_{time}_ms"] = float(point)
    return [f"{name}_{time}_ms" for name, percent in percentiles.items() if len(seconds) < least_samples(percent)]


_Sample = Sequence[tuple[float, tuple[int, int]]]
"""Seconds, and the (repeat, batch) they come from."""


def _samples(answered: Sequence[tuple[int, Mapping[str, Any]]], single: Sequence[RequestMetrics]) -> dict[str, _Sample]:
    found: dict[str, list[tuple[float, tuple[int, int]]]] = {time: [] for time in _TIMES}
    for (repeat, record), one in zip(answered, single, strict=True):
        batch = repeat, record["batch"]
        for time, seconds in (("ttft", one.ttft), ("tpot", one.tpot), ("e2el", one.e2e)):
            if seconds is not None:
                found[time].append((seconds, batch))
        found["itl"] += [(gap, batch) for gap in one.itl]
    return dict(found)


def _intervals(batches: Sequence[Batch], samples: Mapping[str, _Sample], seed: int) -> dict[str, Interval]:
    intervals = {}
    counted = [batch for batch in batches if batch.inside > 0]
    seconds = [batch.seconds_inside for batch in counted]
    for name in ("request", "output"):
        parts = [batch.requests_inside if name == "request" else batch.tokens_inside for batch in counted]
        throughput = ratio_interval(parts, seconds, seed)
        if throughput is not None:
            intervals[f"{name}_throughput"] = throughput
    for time in _BOUNDED_TIMES:
        milliseconds = [seconds * 1e3 for seconds, _ in samples[time]]
        found = cluster_intervals(milliseconds, [batch for _, batch in samples[time]], (50, 95), seed)
        intervals |= {f"{name}_{time}_ms": each for name, each in zip(_BOUNDED, found or (), strict=False)}
    return intervals
