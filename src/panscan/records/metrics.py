"""Metrics of measured requests, derived from their records' time stamps and counts and from nothing else.

Percentiles are ``numpy.percentile``'s; times in records are seconds, and milliseconds in names that end with ``_ms``.

Several replicas start a repeat together but end it one by one. Throughput counts what they did while all of them
worked: in the common window, from the latest start to the earliest end. A batch that reaches over the window's edge
counts by the fraction of its time that lies inside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf, log, log1p
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from panscan.core.groups import grouped
from panscan.records.fields import LIMITED_TIMES, STAGES, TIMES
from panscan.records.intervals import (
    ALPHA,
    LOOKED_AT,
    Floats,
    Interval,
    around,
    cluster_intervals,
    log_deviations,
    log_error,
    rate_deviations,
    ratio_interval,
)
from panscan.records.request_records import Process, RepeatRecord, RequestRecord
from panscan.records.store import Repeat

MetricValues = dict[str, float | None]
"""Metrics by name; None where nothing was measured."""


class RepeatWork(NamedTuple):
    """What a repeat, or a part of it, did in the repeat's window."""

    requests: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a repeat.

    Args:
        key: (replica, batch) in the records; None where every request of the replica failed.
        requests: number of completed requests.
        tokens: output tokens of these requests.
        latency: seconds from accepted to the last token of any request; None where tokens were not stamped.
        start: the end of the batch before; of the first one, the start of the process.
        end: its own end; of the last one, that of the process.
        inside: the fraction of the time between that lies in the repeat's window.
        replica: whose batch it is.
        replicas: number of replicas that ran this repeat.
    """

    key: tuple[int, int] | None
    requests: int
    tokens: int
    latency: float | None
    start: float
    end: float
    inside: float = 1.0
    replica: int = 0
    replicas: int = 1

    @property
    def work(self) -> RepeatWork:
        """Its work in the window. Seconds add up to the window over all batches of all replicas."""
        inside, seconds = self.inside, self.end - self.start
        return RepeatWork(self.requests * inside, self.tokens * inside, seconds * inside / self.replicas)


def window_seconds(repeat: RepeatRecord) -> float:
    """Return the length of a repeat's window; 0 if a replica ended before another one started."""
    seconds = repeat.ended - repeat.started
    return max(seconds, 0.0) if repeat.replicas else seconds


def batches_of(repeat: RepeatRecord, requests: Sequence[RequestRecord]) -> list[Batch]:
    """Return the batches of a repeat and its requests by replica and end time.

    Requests that failed are left out.
    """
    if not repeat.replicas:
        return _timed(repeat, requests)
    batches = []
    for process in repeat.replicas:
        number = process.replica
        for batch in _timed(process, [request for request in requests if request.replica == number]):
            start, end = batch.start, batch.end
            if end <= start:  # a batch of zero duration
                inside = float(repeat.started <= end <= repeat.ended)
            else:
                inside = max(0.0, min(end, repeat.ended) - max(start, repeat.started)) / (end - start)
            batches.append(replace(batch, inside=inside, replica=number, replicas=len(repeat.replicas)))
    return batches


def _timed(process: Process, requests: Sequence[RequestRecord]) -> list[Batch]:
    """Return the batches of one process by their end."""
    groups = grouped(((request.replica, request.batch), request) for request in requests if request.error is None)
    if not groups:  # every request failed: the time passed all the same
        return [Batch(None, 0, 0, None, process.started, process.ended)]
    batches = []
    for key, group in groups.items():
        latency, end = None, process.ended
        if all(request.stamps.tokens for request in group):
            end = max(request.stamps.tokens[-1] for request in group)
            latency = end - min(request.stamps.accepted for request in group)
        tokens = sum(request.output_tokens for request in group)
        batches.append(Batch(key, len(group), tokens, latency, process.started, end))
    batches.sort(key=attrgetter("end"))
    batches[-1] = replace(batches[-1], end=process.ended)
    return [batches[0], *(replace(batch, start=before.end) for before, batch in pairwise(batches))]


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
LEAST_SAMPLES: dict[float, int] = {percent: least_samples(percent) for percent in _SHOWN}
"""Fewer samples do not certify a percentile with 99% confidence (see :func:`least_samples`)."""

LAUNCHER = ("latency_p50_ms", "latency_p95_ms", "throughput_req_s", "tokens_per_s_mean")
_TOTALS = ("measured_repeats", "measured_batches", "completed", "failed", "duration")
_TOKENS = ("total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput")
_COUNTED = ("views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
COLUMNS = (
    *LAUNCHER,
    *_TOTALS,
    *_TOKENS,
    *(f"{statistic}_{time}_ms" for time in TIMES for statistic in ("mean", *_PERCENTILES)),
    *(f"mean_{stage}_ms" for stage in STAGES),
    *(f"mean_{name}" for name in _COUNTED),
    *_PEAKS,
)
_BOUNDED = ("mean", "median", "p95")
_RATES = ("request_throughput", "output_throughput")

INTERVALS = (
    *_RATES,
    *(f"{statistic}_{time}_ms" for time in LIMITED_TIMES for statistic in _BOUNDED),
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
        intervals: (low, high) with 95% confidence by names of :data:`INTERVALS`: how far another measurement of the
            same requests may differ. They are Student's over repeats, and absent below two; of a load level, a
            bootstrap over its blocks of requests.
        uncertified: percentiles of too few samples.
    """

    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    uncertified: tuple[str, ...]


def metrics_of(
    repeats: Sequence[Repeat],
    *,
    percentiles: Sequence[float] = (),
    blocks: bool = False,
    alpha: float = ALPHA,
) -> Metrics | None:
    """Metrics of measured repeats; None if no request of them succeeded.

    Args:
        repeats: each a window with its requests.
        blocks: whether batch numbers are those of blocks of a load level's requests, whose spread makes the intervals.
        percentiles: further ones of each time, which the values then have, too (see :func:`percentile_name`).
        alpha: :data:`panscan.records.intervals.LOOKED_AT` if the interval decided how many repeats there are.

    Raises:
        RecordsError: stamps contradict counts.
    """
    done = [request for _, requests in repeats for request in requests if request.error is None]
    if not done:
        return None
    batches = [batch for window, requests in repeats for batch in batches_of(window, requests)]
    duration = sum(window_seconds(window) for window, _ in repeats)
    work = _total_work(batches)
    requests_per_second = _ratio(work.requests, duration)
    values: MetricValues = dict.fromkeys(COLUMNS)
    values |= {
        "measured_repeats": len(repeats),
        "measured_batches": sum(batch.requests > 0 for batch in batches),
        "failed": sum(len(requests) for _, requests in repeats) - len(done),
        "completed": len(done),
        "duration": duration,
        "total_input_tokens": sum(request.prompt_tokens or 0 for request in done),
        "total_output_tokens": sum(request.output_tokens for request in done),
        "throughput_req_s": requests_per_second,
        "request_throughput": requests_per_second,
        "output_throughput": _ratio(work.tokens, duration),
    }
    values |= _means(done, batches)
    values |= {name: max(_known(getattr(window, name) for window, _ in repeats), default=None) for name in _PEAKS}
    latencies = _known(batch.latency for batch in batches)
    uncertified = _fill(values, latencies, {"latency_p50_ms": 50, "latency_p95_ms": 95})
    # Of a load level with a steady state, requests of the ramp are no sample.
    starts = {window.repeat: window.started if blocks else -inf for window, _ in repeats}
    samples = _samples([request for request in done if request.stamps.accepted >= starts[request.repeat]])
    shown = _PERCENTILES | {percentile_name(percent): percent for percent in percentiles}
    for time, sample in samples.items():
        columns = {f"{name}_{time}_ms": percent for name, percent in shown.items()}
        uncertified += _fill(values, [seconds for seconds, _ in sample], columns, f"mean_{time}_ms")
    intervals = _block_intervals(batches, samples) if blocks else _repeat_intervals(values, repeats, alpha)
    return Metrics(values, intervals, tuple(uncertified))


def shares_of(repeats: Sequence[Repeat]) -> list[ReplicaShare]:
    """Return each replica's part of the ``request_throughput`` of repeats; empty for a single process."""
    repeats = [(record, requests) for record, requests in repeats if record.replicas]
    seconds = sum(window_seconds(record) for record, _ in repeats)
    devices = {process.replica: process.device for record, _ in repeats for process in record.replicas}
    work = dict.fromkeys(devices, 0.0)
    for record, requests in repeats:
        for batch in batches_of(record, requests):
            work[batch.replica] += batch.work.requests
    total = sum(work.values())
    return [
        ReplicaShare(replica, device, _ratio(work[replica], seconds), _ratio(work[replica], total))
        for replica, device in sorted(devices.items())
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(part: float, total: float) -> float | None:
    return part / total if total > 0 else None


def _means(done: Sequence[RequestRecord], batches: Sequence[Batch]) -> MetricValues:
    rates = [batch.tokens / batch.latency for batch in batches if batch.latency]
    means: MetricValues = {"tokens_per_s_mean": float(np.mean(rates)) if rates else None}
    for name in _COUNTED:
        counts = _known(getattr(request, name) for request in done)
        means[f"mean_{name}"] = float(np.mean(counts)) if counts else None
    stages = [request.stamps.stages() for request in done]
    for stage in STAGES:
        times = _known(seconds[stage] for seconds in stages)
        means[f"mean_{stage}_ms"] = sum(times) / len(done) * 1e3 if times else None
    return means


def _fill(
    values: MetricValues, seconds: Sequence[float], percentiles: Mapping[str, float], mean: str | None = None
) -> list[str]:
    """Fill columns with percentiles and the mean, in milliseconds; return the percentiles of too few samples."""
    values |= dict.fromkeys(percentiles)
    if seconds:
        values |= {} if mean is None else {mean: float(np.mean(seconds)) * 1e3}
        points = np.percentile(seconds, list(percentiles.values())) * 1e3
        values |= zip(percentiles, points.tolist(), strict=True)
    return [name for name, percent in percentiles.items() if 0 < len(seconds) < least_samples(percent)]


_Sample = list[tuple[float, tuple[int, int]]]
"""Seconds, and the (repeat, batch) they come from."""


def _samples(answered: Sequence[RequestRecord]) -> dict[str, _Sample]:
    samples: dict[str, _Sample] = {time: [] for time in TIMES}
    for request in answered:
        batch = request.repeat, request.batch
        times = {"ttft": request.ttft, "tpot": request.tpot, "e2el": request.e2e}
        for time, seconds in times.items():
            if seconds is not None:
                samples[time].append((seconds, batch))
        samples["itl"] += [(gap, batch) for gap in request.itl]
    return samples


def _total_work(batches: Sequence[Batch]) -> RepeatWork:
    return RepeatWork(*(sum(part) for part in zip(*(batch.work for batch in batches), strict=True)))


def work_of(repeat: Repeat) -> RepeatWork:
    """Return what a repeat did in its window."""
    return _total_work(batches_of(*repeat))._replace(seconds=window_seconds(repeat[0]))


def relative_half_width(work: Sequence[RepeatWork]) -> float | None:
    """Return half of the 95% interval over the request throughput of some repeats; None if there is no interval."""
    if len(work) < 2:
        return None
    amounts, _, seconds = np.array(work).T
    if not amounts.sum() or not seconds.sum():
        return None
    low, high = around(1.0, log_error(rate_deviations(amounts, seconds)), len(work), LOOKED_AT)
    return (high - low) / 2


def _repeat_intervals(
    values: Mapping[str, float | None], repeats: Sequence[Repeat], alpha: float
) -> dict[str, Interval]:
    """Return intervals around the values, by how their repeats differ."""
    if len(repeats) < 2:
        return {}
    deviations: dict[str, Floats] = {}
    *amounts, seconds = np.array([work_of(repeat) for repeat in repeats]).T
    for name, parts in zip(_RATES, amounts, strict=True):
        if parts.sum() > 0 and seconds.sum() > 0:
            deviations[name] = rate_deviations(parts, seconds)
    samples = [_samples([request for request in requests if request.error is None]) for _, requests in repeats]
    for time in LIMITED_TIMES:
        parts = [np.array([value for value, _ in sample[time]]) for sample in samples]
        if all(part.size for part in parts):
            figures = np.array([[np.mean(part), *np.percentile(part, (50, 95))] for part in parts])
            names = [f"{name}_{time}_ms" for name in _BOUNDED]
            deviations |= zip(names, log_deviations(figures).T, strict=True)
    return {
        name: around(value, log_error(parts), len(repeats), alpha)
        for name, parts in deviations.items()
        if (value := values[name]) and np.isfinite(parts).all()
    }


def _block_intervals(batches: Sequence[Batch], samples: Mapping[str, _Sample]) -> dict[str, Interval]:
    intervals = {}
    *amounts, seconds = np.array([batch.work for batch in batches if batch.inside > 0]).reshape(-1, 3).T
    for name, parts in zip(_RATES, amounts, strict=True):
        throughput = ratio_interval(parts, seconds)
        if throughput is not None:
            intervals[name] = throughput
    for time in LIMITED_TIMES:
        milliseconds = [seconds * 1e3 for seconds, _ in samples[time]]
        bounds = cluster_intervals(milliseconds, [batch for _, batch in samples[time]], (50, 95))
        intervals |= {f"{name}_{time}_ms": interval for name, interval in zip(_BOUNDED, bounds or (), strict=False)}
    return intervals
