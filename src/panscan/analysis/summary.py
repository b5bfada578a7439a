"""What each cell measured: its metrics, and ``summary.csv``, one tidy row per cell for spreadsheets and data frames.

The cells of a load run are its levels.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from panscan.analysis.cells import cell_metrics
from panscan.analysis.levels import MeasuredLevel, measured_level
from panscan.core import RecordsError
from panscan.core.files import write_file
from panscan.records.fields import EXACT_MATCH, STAGES, TIMES
from panscan.records.load_runs import is_load_run, load_settings
from panscan.records.metrics import (
    COLUMNS,
    INTERVALS,
    LAUNCHER,
    Metrics,
    ReplicaShare,
    percentile_name,
    shares_of,
)
from panscan.records.quality import empty_answers, metric_of, metrics_in, quality_of
from panscan.records.store import Run, outcome_of
from panscan.verdict.judgement import verdict_of

_LOAD = (
    "offered_rate",
    "sent",
    "goodput",
    *(f"attainment{bound}" for bound in ("", "_low", "_high")),
    "keeps_up",
    "steady_seconds",
    "mean_queued_ms",
    *(f"client_{name}" for name in ("processes", "lag_median_ms", "lag_p99_ms", "cpu_share", "limited")),
)


def replica_shares(run: Run, cell_id: str) -> list[ReplicaShare]:
    """Return each replica's part of a cell's ``request_throughput``; empty for a run of one process."""
    return shares_of(run.repeats_of(cell_id))


def summary_columns(run: Run) -> list[str]:
    """Return the columns of the summary, in order: see :func:`write_summary`."""
    settings = list(dict.fromkeys(name for cell in run.cells.values() for name in cell))
    if is_load_run(run):
        dropped = {*LAUNCHER, "measured_batches", *(f"mean_{stage}_ms" for stage in STAGES)}
        shown = [name for name in COLUMNS if name not in dropped and not name.startswith("peak_")]
        asked = [
            f"{percentile_name(percentile)}_{time}_ms"
            for time in TIMES
            for percentile in load_settings(run).metric_percentiles
        ]
        return [
            "level",
            *settings,
            "outcome",
            "reason",
            *_LOAD,
            *_with_bounds(list(dict.fromkeys([*shown, *asked]))),
            "uncertified",
        ]
    measured = _with_bounds(COLUMNS)
    scores = [f"{name}{bound}" for name in _metrics(run) for bound in ("", "_low", "_high")]
    counts = ["quality_metric", "empty_answers"] if metrics_in(run) else []
    answers = ["verdict", "verdict_ratio", *scores, *counts]
    return ["cell", *settings, "outcome", "reason", *answers, *measured, "uncertified", "aliases"]


def _with_bounds(names: Sequence[str]) -> list[str]:
    return [f"{name}{bound}" for name in names for bound in (("", "_low", "_high") if name in INTERVALS else ("",))]


def write_summary(run: Run, path: Path, more: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the summary of a run as UTF-8 CSV; an older one is replaced in one step.

    One row per cell in the order of the run, also of cells that were skipped or failed. Columns, in this order:

    - ``cell``: its id; then every setting of any cell, in order of first mention (``true``/``false``, lists as JSON);
    - ``outcome``: ``done``, ``skipped``, ``failed``, ``oom`` or ``unfinished``; ``reason``;
    - ``verdict`` and ``verdict_ratio`` (how many times the rounding noise); ``exact_match`` of the dataset's answers,
      with its 95% interval in ``exact_match_low`` and ``exact_match_high``; the same of every other metric that the
      run's answers have (:data:`panscan.records.fields.METRICS`), then ``quality_metric``, the one that is this run's
      quality, and ``empty_answers``;
    - the first launcher's ``latency_p50_ms``, ``latency_p95_ms`` (of batches), ``throughput_req_s`` and
      ``tokens_per_s_mean``;
    - every other name of :data:`panscan.records.metrics.COLUMNS`; those with a 95% interval
      (:data:`panscan.records.metrics.INTERVALS`) are followed by ``_low`` and ``_high``;
    - ``uncertified``: names of the percentiles of too few samples, separated by spaces;
    - ``aliases``: settings of the cells that lead to the same work, where they differ from this row's (list as JSON).

    The summary of a load run has one row per level instead: ``level``, its settings, ``outcome``, ``reason``,
    ``offered_rate``, ``sent``, ``goodput`` (requests per second that meet the limits), ``attainment`` (their share of
    all requests sent, with its 95% interval), ``keeps_up``, ``steady_seconds`` (empty without a steady state: then the
    metrics are of the whole level), ``mean_queued_ms``, ``client_*`` (how busy the load
    generator was), the metrics that an endpoint has, and ``uncertified``. Without limits, ``goodput`` counts all
    answered requests.

    ``more`` are further columns by cell id, which stand behind these.

    A cell that measured nothing, or a metric that it could not have, leaves its fields empty.

    Raises:
        RecordsError: the file could not be written, or a cell's stamps contradict its counts.
    """
    text = io.StringIO()
    more = more or {}
    columns = [
        *summary_columns(run),
        *dict.fromkeys(name for columns_of_cell in more.values() for name in columns_of_cell),
    ]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for cell, settings in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        row = {name: _text(value) for name, value in settings.items()} | {"outcome": outcome, "reason": reason}
        row |= {name: _text(value) for name, value in more.get(cell, {}).items()}
        if is_load_run(run):
            measured = {name: text for name, text in _measured(cell_metrics(run, cell)).items() if name in columns}
            uncertified = measured.get("uncertified", "").split()
            measured["uncertified"] = " ".join(name for name in uncertified if name in columns)
            level = measured_level(run, cell) if run.repeats_of(cell) else None
            writer.writerow({"level": cell} | row | (_level(level) if level else {}) | measured)
        else:
            settings_of_cell = run.cells[cell]
            others = [alias.settings.items() for alias in run.aliases.get(cell, ())]
            apart = [
                {name: value for name, value in settings if value != settings_of_cell.get(name)} for settings in others
            ]
            row |= {"cell": cell, "aliases": (json.dumps(apart) if apart else "")}
            writer.writerow(row | _answers(run, cell) | _measured(cell_metrics(run, cell)))
    write_file(path, text.getvalue(), RecordsError)


def _level(level: MeasuredLevel) -> dict[str, str]:
    """Return what only a load level has: its row for the columns of :data:`_LOAD`."""
    goodput = level.goodput
    values = {
        "offered_rate": level.offered,
        "sent": goodput.sent,
        "goodput": level.good_throughput,
        "attainment": goodput.attainment,
        "attainment_low": goodput.interval[0],
        "attainment_high": goodput.interval[1],
        "keeps_up": level.keeps_up,
        "steady_seconds": level.steady_seconds,
        "mean_queued_ms": level.queued_ms,
    }
    if level.client is not None:
        values |= {
            f"client_{name}": value for name, value in msgspec.structs.asdict(level.client).items() if name != "reason"
        }
    return {name: _text(value) for name, value in values.items()}


def _metrics(run: Run) -> list[str]:
    return list(dict.fromkeys((EXACT_MATCH, *metrics_in(run))))


def _answers(run: Run, cell: str) -> dict[str, str]:
    verdict = verdict_of(run, cell)
    row = {"verdict": _text(verdict.word), "verdict_ratio": _text(verdict.ratio)}
    for name in _metrics(run):
        quality = quality_of(run, cell, metric=name)
        if quality is not None:
            row |= {name: _text(quality.mean), f"{name}_low": _text(quality.low), f"{name}_high": _text(quality.high)}
            row |= {"quality_metric": metric_of(run), "empty_answers": _text(empty_answers(run, cell))}
    return row


def _measured(metrics: Metrics | None) -> dict[str, str]:
    if metrics is None:
        return {}
    row = {name: _text(value) for name, value in metrics.values.items()}
    for name, (low, high) in metrics.intervals.items():
        row |= {f"{name}_low": _text(low), f"{name}_high": _text(high)}
    return row | {"uncertified": " ".join(metrics.uncertified)}


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)
