"""Everything that the report of a load run shows, as plain data derived from its records alone. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from panscan.analysis.cells import count, number_text
from panscan.analysis.levels import (
    TIME_NAMES,
    ErrorGroup,
    LoadResult,
    MeasuredLevel,
    error_groups,
    levels_of,
    limits_text,
    load_result,
    load_warnings,
    unfinished_levels,
)
from panscan.records.load_runs import load_settings
from panscan.records.metrics import LEAST_SAMPLES, percentile_name
from panscan.records.schema import LoadRunSettings
from panscan.records.store import Run
from panscan.report import definitions
from panscan.report.charts import Panel
from panscan.report.formatting import Measured, clean, measured, percent
from panscan.report.load_charts import latency_curves, throughput_curves

__all__ = ["LevelRow", "LoadReport", "load_report_of"]

VERIFY_HINT = (
    "A load run measures speed, not answers: panscan verify URL --model CHECKPOINT checks an endpoint's answers."
)

_ARRIVALS = {
    "poisson": "Poisson arrivals",
    "gamma": "gamma arrivals",
    "constant": "constant intervals",
    "ramp": "ramped rate",
    "trace": "trace replay",
    "burst": "all requests at once",
    "closed": "closed loop",
}
_COUNTED = {"image_tokens": "image tokens", "views": "views"}


@dataclass(frozen=True, slots=True)
class LevelRow:
    """A measured level, as tables show it.

    Args:
        number: its place in the table, from 1.
        name: of the level.
        chosen: whether the main message is about it.
        offered: requests per second.
        achieved: answered requests per second.
        output: output tokens per second.
        goodput: requests per second that meet the limits.
        attainment: the share of requests that meet them, with its 95% interval, in percent; empty without limits.
        sent: requests.
        failed: requests without an answer.
        keeps_up: ``yes``, ``no``, or ``-`` for a closed loop.
        queued: mean milliseconds of waiting for ``--max-concurrency``.
        lag: median and 99th percentile of the load generator's delay in milliseconds, as text.
        cpu: share of one core that the generator's busiest process used, as text.
        limited: whether the load generator was the limit.
        times: percentiles in milliseconds, by time, in the order of :attr:`LoadReport.percentiles`.
        means: mean milliseconds by time.
    """

    number: int
    name: str
    chosen: bool
    offered: Measured
    achieved: Measured
    output: Measured
    goodput: Measured
    attainment: Measured
    sent: int
    failed: int
    keeps_up: str
    queued: Measured
    lag: str
    cpu: str
    limited: bool
    times: Mapping[str, tuple[Measured, ...]]
    means: Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a load run.

    Args:
        title: the model and the endpoint.
        limits: the goodput's limits as text; empty without limits.
        target: the share of requests that must meet them, as text.
        warnings: what a reader must know before believing a figure.
        settings: what all levels share, as (name, text).
        times: the times shown, by name of the field: (``ttft``, ``TTFT``), ...
        percentiles: their percentiles: ``median``, ``p99``, ...
        rows: measured levels.
        latency: throughput-latency curves, which share a legend of percentiles.
        throughput: answered over offered requests, and the share that meets the limits.
        unfinished: levels without a result, as text.
        search: what the search for the highest rate adds to the result; empty if nothing.
    """

    run_id: str
    title: str
    created: str
    result: LoadResult
    limits: str
    target: str
    warnings: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    times: tuple[tuple[str, str], ...]
    percentiles: tuple[str, ...]
    rows: tuple[LevelRow, ...]
    latency: tuple[Panel, ...]
    throughput: tuple[Panel, ...]
    errors: tuple[ErrorGroup, ...]
    unfinished: tuple[str, ...]
    search: str
    environment: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    command: str

    @property
    def legend(self) -> tuple[str, ...]:
        """Return the names of the series of the latency curves."""
        return tuple(series.label for series in self.latency[0].series) if self.latency else ()


def load_report_of(run: Run) -> LoadReport:
    """Return the report of a load run; also of one without a measured level.

    Raises:
        RecordsError: stamps contradict counts.
    """
    settings, levels = load_settings(run), levels_of(run)
    result = load_result(run, levels)
    return LoadReport(
        run_id=clean(run.header.run_id),
        title=clean(f"{settings.model} at {settings.endpoint}"),
        created=clean(run.header.created),
        result=replace(result, headline=clean(result.headline), notes=tuple(map(clean, result.notes))),
        limits=limits_text(settings.goodput),
        target=percent(settings.attainment),
        warnings=tuple(f"{clean(warning).rstrip('.')}." for warning in load_warnings(run, levels)),
        settings=tuple((name, clean(text)) for name, text in _settings(run, settings)),
        times=tuple((time, TIME_NAMES[time]) for time in settings.percentile_metrics),
        percentiles=tuple(percentile_name(each) for each in sorted(settings.metric_percentiles)),
        rows=tuple(_row(level, number, result, settings) for number, level in enumerate(levels, 1)),
        latency=tuple(latency_curves(levels, settings)),
        throughput=tuple(throughput_curves(levels, settings)),
        errors=tuple(
            replace(each, kind=clean(each.kind), example=clean(each.example)) for each in error_groups(run, levels)
        ),
        unfinished=tuple(_unfinished(run)),
        search=_search_note(run, result),
        environment=tuple(definitions.environment(run)),
        definitions=tuple(_definitions()),
        command=clean(shlex.join(run.header.command)),
    )


def _row(level: MeasuredLevel, number: int, result: LoadResult, settings: LoadRunSettings) -> LevelRow:
    client, goodput = level.client, level.goodput
    low, high = goodput.interval
    limited = bool(settings.goodput)
    names = [percentile_name(each) for each in sorted(settings.metric_percentiles)]
    return LevelRow(
        number=number,
        name=level.name,
        chosen=result.level is level and result.meets is not False,
        offered=Measured(level.offered),
        achieved=_measured(level, "request_throughput"),
        output=_measured(level, "output_throughput"),
        goodput=Measured(goodput.throughput if limited else None),
        attainment=Measured(100 * goodput.attainment, 100 * low, 100 * high) if limited else Measured(None),
        sent=goodput.sent,
        failed=level.failed,
        keeps_up={None: "-", True: "yes", False: "no"}[level.keeps_up],
        queued=Measured(level.queued_ms),
        lag="-" if client is None else f"{number_text(client.lag_median_ms)} / {number_text(client.lag_p99_ms)}",
        cpu="-" if client is None or client.cpu_share is None else percent(client.cpu_share),
        limited=level.client_limited,
        times={
            time: tuple(_measured(level, f"{name}_{time}_ms") for name in names) for time in settings.percentile_metrics
        },
        means={time: _measured(level, f"mean_{time}_ms") for time in settings.percentile_metrics},
    )


def _measured(level: MeasuredLevel, metric: str) -> Measured:
    return Measured(None) if level.metrics is None else measured(level.metrics, metric)


def _settings(run: Run, settings: LoadRunSettings) -> list[tuple[str, str]]:
    """Return what all levels share, and what the probe found."""
    reuse = settings.image_reuse
    arrival = _ARRIVALS[settings.arrival]
    found = [
        ("endpoint", settings.endpoint),
        ("server", settings.server or ""),
        ("model", settings.model),
        ("arrivals", f"{arrival}, seed {settings.seed}"),
        ("requests", f"{settings.num_prompts:,} per level after {count(settings.num_warmups, 'warm-up request')}"),
        ("scenario", settings.scenario or ""),
        ("image reuse", "" if reuse is None else f"{percent(reuse)} of requests repeat an image that was sent before"),
        ("output length", "fixed (ignore_eos)" if settings.ignore_eos else "decided by the model"),
        ("goodput", limits_text(settings.goodput)),
        ("image tokens", _probe_text(run)),
        ("prompts", _prompt_text(run)),
    ]
    return [(name, text) for name, text in found if text]


def _probe_text(run: Run) -> str:
    """Return what the probe before the run found about image tokens; empty if it found nothing."""
    probe = run.probe
    if probe is None or probe.image_prompt_tokens is None or probe.text_prompt_tokens is None:
        return ""
    counted = probe.image_prompt_tokens - probe.text_prompt_tokens
    expected = "" if probe.expected_image_tokens is None else f", {probe.expected_image_tokens:,} expected"
    return f"the same prompt with an image has {counted:,} more prompt tokens{expected}"


def _prompt_text(run: Run) -> str:
    """Return what the endpoint counted in the prompts of answered requests; empty if it counted nothing."""
    answered = [request for requests in run.requests.values() for request in requests if request.error is None]
    totals = {}
    for name in ("prompt_tokens", "image_tokens", "views", "cached_tokens"):
        known = [value for request in answered if (value := getattr(request, name)) is not None]
        if known:
            totals[name] = sum(known) / len(known)
    if not totals.get("prompt_tokens"):
        return ""
    parts = [f"{number_text(totals['prompt_tokens'])} tokens on average"]
    parts += [f"{number_text(totals[name])} {text}" for name, text in _COUNTED.items() if name in totals]
    if "cached_tokens" in totals:
        parts.append(f"{percent(totals['cached_tokens'] / totals['prompt_tokens'])} of the tokens cached")
    return ", ".join(parts)


def _search_note(run: Run, result: LoadResult) -> str:
    """Return what the search says, unless the result says it, too."""
    if run.search is None:
        return ""
    highest = result.highest
    stopped = any(level.limited for level in run.search.levels)
    said = not stopped and highest is not None and highest.short is not None and highest.rate == run.search.rate
    return "" if said else clean(run.search.note)


def _unfinished(run: Run) -> list[str]:
    return [
        clean(f"{name}: {outcome}" + (f", {reason}" if reason else ""))
        for name, outcome, reason in unfinished_levels(run)
    ]


def _definitions() -> Sequence[tuple[str, str]]:
    samples = ", ".join(f"{least} for p{percent}" for percent, least in LEAST_SAMPLES.items())
    return [
        ("Offered", "requests per second that the arrival process sends."),
        ("Answered", "answered requests over the time from the first request to the last answer."),
        ("TTFT", "time to first token: from sending the request to its first content chunk."),
        ("TPOT", "from the first to the last content chunk, over the output tokens after the first."),
        ("ITL", "time between content chunks; a chunk may hold several tokens."),
        ("E2E", "from sending the request to its last content chunk."),
        (
            "Goodput",
            "requests per second that meet all limits; a failed request meets none. The wait for a slot of "
            "--max-concurrency counts towards the limits on TTFT and E2E.",
        ),
        (
            "Keeps up",
            "whether completions follow arrivals: their 10th and 90th percentiles lie at most a ninth further apart.",
        ),
        (
            "Queued",
            "mean time that requests waited for --max-concurrency; excluded from latencies, counted in goodput.",
        ),
        ("Lag", "how late the load generator sent requests, excluding waits for --max-concurrency: median / p99."),
        ("Generator CPU", "share of one core that the load generator's busiest process used."),
        (
            "Intervals",
            "95% confidence by a seeded bootstrap over blocks of consecutive requests, at least as many as are in "
            "flight together; omitted for fewer than two blocks. Shares of requests have Wilson intervals.",
        ),
        (
            "~",
            f"a percentile of too few samples for 99% confidence (at least {samples}: MLPerf's early-stopping rule).",
        ),
    ]
