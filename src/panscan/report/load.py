"""Everything that the report of a load run shows, as plain data derived from its records alone; its tables. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from panscan.analysis.levels import (
    TIME_NAMES,
    MeasuredLevel,
    error_groups,
    levels_of,
    limits_text,
    load_result,
    load_warnings,
    unfinished_levels,
)
from panscan.core.text import count, number_text, percent
from panscan.records.load_runs import load_settings
from panscan.records.metrics import percentile_name
from panscan.records.store import Run
from panscan.report import definitions
from panscan.report.charts import Panel, attainment, latency_curves, throughput_curves
from panscan.report.table import Column, Measured, Medium, Table, TableCell, measured, plain_text, with_interval

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

TimeRow: TypeAlias = tuple[MeasuredLevel, str]
"""A level and one of its times: ``ttft``, ``tpot``, ..."""


class LoadReport(definitions.RunFacts):
    """The report of a load run; also of one without a measured level. Every part is computed when it is first read.

    Raises:
        RecordsError: stamps contradict counts.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.settings, self.rows = load_settings(run), levels_of(run)
        self.title = f"{self.settings.model} at {self.settings.endpoint}"
        self.found = load_result(run, self.rows)
        self.limits = limits_text(self.settings.goodput)
        self.warnings = [f"{warning.rstrip('.')}." for warning in load_warnings(run, self.rows)]
        self.times = [(time, TIME_NAMES[time]) for time in self.settings.percentile_metrics]
        self.percentiles = [percentile_name(percent) for percent in sorted(self.settings.metric_percentiles)]
        # The main message, as a sentence without its full stop; sentences that qualify it; the level that it is about.
        self.headline, self.notes = self.found.headline, self.found.notes
        self.best = None if self.found.meets is False else self.found.level
        self.doubtful = not self.best or (not self.found.meets and (bool(self.limits) or self.best.rate is not None))
        self.errors = error_groups(run, self.rows)
        self.unfinished = [
            f"{name}: {', '.join(filter(None, (outcome, reason)))}" for name, outcome, reason in unfinished_levels(run)
        ]

    @property
    def columns(self) -> list[Column[MeasuredLevel]]:
        """The columns of the levels: a new one is a line here."""
        goodput: list[Column[MeasuredLevel]] = [
            Column("goodput req/s", lambda level: level.good_throughput),
            Column("within limits, %", _attainment_cell, terminal="within\nlimits"),
        ]
        return [
            Column("level", self._name, text=Medium.ALL),
            Column("offered req/s", lambda level: level.offered),
            Column("answered req/s", lambda level: with_interval(measured(level.metrics, "request_throughput"))),
            Column(
                "output tokens/s",
                lambda level: with_interval(measured(level.metrics, "output_throughput"), terminal=False),
                terminal="output\ntok/s",
            ),
            *(goodput if self.limits else ()),
            Column("sent", lambda level: level.goodput.sent, on=Medium.HTML | Medium.CSV),
            Column(
                "failed",
                lambda level: TableCell(
                    str(level.failed), level.failed, markdown=f"{level.failed} of {level.goodput.sent}"
                ),
            ),
            Column("keeps up", lambda level: {None: "-", True: "yes", False: "no"}[level.keeps_up]),
            Column("steady s", lambda level: level.steady_seconds or "none", on=Medium.HTML | Medium.CSV),
            Column("queued ms", lambda level: level.queued_ms, optional=Medium.HTML),
            Column("lag ms", _lag, terminal="lag ms\np50 / p99"),
            Column("generator CPU", _generator_cpu, on=Medium.HTML | Medium.CSV),
        ]

    @property
    def whole_table(self) -> Table[MeasuredLevel]:
        """The table of levels; the terminal leaves out columns that no level fills."""
        return Table(self.columns, self.rows, "Levels", sparse=Medium.TERMINAL)

    def _name(self, level: MeasuredLevel) -> TableCell:
        terminal = f"{level.name}{' *' if level is self.best else ''}{' !' if level.client_limited else ''}"
        limited = " (generator-limited)" if level.client_limited else ""
        return TableCell(level.name, terminal=terminal, markdown=plain_text(level.name) + limited)

    @property
    def latencies(self) -> Table[TimeRow]:
        """The mean and the percentiles in milliseconds: a row per level and time, however many they are."""
        first = self.times[0][0] if self.times else ""

        def name(row: TimeRow) -> TableCell:
            level, time = row
            return TableCell(level.name, terminal=level.name if time == first else " ")

        def figure(statistic: str) -> Callable[[TimeRow], Measured]:
            return lambda row: measured(row[0].metrics, f"{statistic}_{row[1]}_ms")

        columns: list[Column[TimeRow]] = [
            Column("level", name, text=Medium.ALL),
            Column("ms", lambda row: TIME_NAMES[row[1]], text=Medium.ALL),
            *(Column(statistic, figure(statistic)) for statistic in ("mean", *self.percentiles)),
        ]
        return Table(columns, [(level, time) for level in self.rows for time, _ in self.times], "Latency")

    @property
    def steadiness(self) -> str:
        """What the figures of levels are of."""
        unsteady = [level.name for level in self.rows if level.steady_seconds is None]
        seconds = [level.steady_seconds for level in self.rows if level.steady_seconds is not None]
        if not seconds:
            return "No level has a steady state: throughput and latencies are of whole levels, with ramp and drain."
        text = (
            f"Throughput and latencies are of the steady state, at least {number_text(min(seconds))} s a level: without"
            " the ramp (as long as the p90 of E2E) and the drain after the last arrival."
        )
        return text + (f" Without one, they are of the whole level: {', '.join(unsteady)}." if unsteady else "")

    @property
    def uncertified(self) -> bool:
        """Whether a shown percentile has too few samples for 99% confidence."""
        names = {f"{percentile}_{time}_ms" for percentile in self.percentiles for time, _ in self.times}
        return any(level.metrics is not None and names & set(level.metrics.uncertified) for level in self.rows)

    @cached_property
    def latency(self) -> list[Panel]:
        """Latencies over the load, which share a legend."""
        return latency_curves(self.rows, self.settings)

    @cached_property
    def throughput(self) -> list[Panel]:
        """Answered over offered requests, and the share that meets the limits."""
        return throughput_curves(self.rows, self.settings)

    @cached_property
    def shared(self) -> list[tuple[str, str]]:
        """What all levels share, and what the probe found, as (name, text)."""
        settings, reuse = self.settings, self.settings.image_reuse
        warm_ups = count(settings.num_warmups, "warm-up request")
        repeated = "" if reuse is None else f"{percent(reuse)} of requests repeat an image that was sent before"
        facts = [
            ("endpoint", settings.endpoint),
            ("server", settings.server or ""),
            ("model", settings.model),
            ("arrivals", f"{_ARRIVALS[settings.arrival]}, seed {settings.seed}"),
            ("requests", f"{settings.num_prompts:,} per level after {warm_ups}"),
            ("scenario", settings.scenario or ""),
            ("image reuse", repeated),
            ("output length", "fixed (ignore_eos)" if settings.ignore_eos else "decided by the model"),
            ("goodput", self.limits),
            ("image tokens", _probe_text(self.run)),
            ("prompts", _prompt_text(self.run)),
        ]
        return [(name, text) for name, text in facts if text]

    @property
    def search(self) -> str:
        """What the search for the highest rate says, unless the headline says it, too."""
        search, highest = self.run.search, self.found.highest
        if search is None:
            return ""
        stopped = any(level.limited for level in search.levels)
        in_headline = not stopped and highest is not None and highest.short is not None and highest.rate == search.rate
        return "" if in_headline else search.note


def _attainment_cell(level: MeasuredLevel) -> TableCell:
    share = attainment(level)
    return replace(with_interval(share), terminal=f"{share.text}%")


def _lag(level: MeasuredLevel) -> str:
    """Return the median and the 99th percentile of the load generator's delay."""
    client = level.client
    return "-" if client is None else f"{number_text(client.lag_median_ms)} / {number_text(client.lag_p99_ms)}"


def _generator_cpu(level: MeasuredLevel) -> str:
    """Return the share of one core that the generator's busiest process used."""
    return "-" if level.client is None or level.client.cpu_share is None else percent(level.client.cpu_share)


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
