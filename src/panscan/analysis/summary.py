"""What each cell measured: its metrics, and ``summary.csv``, one tidy row per cell for spreadsheets and data frames.

The cells of a load run are its levels.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from panscan.analysis.accuracy import ACCURACY_COLUMNS, accuracy_columns
from panscan.analysis.cells import cell_metrics, measured_rows
from panscan.analysis.levels import MeasuredLevel, measured_level
from panscan.core import RecordsError
from panscan.core.files import write_file
from panscan.records.fields import EXACT_MATCH, STAGES, TIMES
from panscan.records.load_runs import is_load_run, load_settings
from panscan.records.metrics import (
    COLUMNS,
    INTERVALS,
    LAUNCHER,
    percentile_name,
)
from panscan.records.quality import empty_answers, metric_of, metrics_in, quality_of
from panscan.records.schema import RecordedCell
from panscan.records.store import Run, outcome_of
from panscan.verdict.judgement import verdict_of

SummaryRow = dict[str, Any]
"""Typed values by column; None for what a cell does not have."""
_CLIENT = ("processes", "lag_median_ms", "lag_p99_ms", "cpu_share", "limited")
LEVEL_COLUMNS = (
    "offered_rate",
    "sent",
    "goodput",
    *(f"attainment{bound}" for bound in ("", "_low", "_high")),
    "keeps_up",
    "steady_seconds",
    "mean_queued_ms",
    *(f"client_{name}" for name in _CLIENT),
)


def summary_columns(run: Run) -> list[str]:
    """Return the columns of the summary, in order: see :func:`write_summary`."""
    settings = list(dict.fromkeys(name for cell in run.cells.values() for name in cell.settings))
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
            *LEVEL_COLUMNS,
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


def write_summary(run: Run, path: Path) -> None:
    """Write the summary of a run as UTF-8 CSV; an older one is replaced in one step.

    One row per cell in the order of the run, also of cells that were skipped or failed. docs/output.md defines the
    columns. A cell that measured nothing, or a metric that it could not have, leaves its fields empty.

    Args:
        run: a sweep or a load run.
        path: file to write.

    Raises:
        RecordsError: the file could not be written, or a cell's stamps contradict its counts.
    """
    text = io.StringIO()
    rows = summary_rows(run)
    writer = csv.DictWriter(text, list(rows[0]) if rows else summary_columns(run), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        names = {"uncertified": " ".join(row["uncertified"])}
        writer.writerow({name: _text(value) for name, value in (row | names).items()})
    write_file(path, text.getvalue(), RecordsError)


def summary_rows(run: Run) -> list[SummaryRow]:
    """Return the rows of :func:`write_summary` with typed values; None for what a cell does not have.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """
    accuracies = {} if is_load_run(run) else accuracy_columns(run, measured_rows(run))
    columns = [*summary_columns(run), *(ACCURACY_COLUMNS if accuracies else ())]
    rows = []
    for cell, recorded in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        row = {**recorded.settings, "outcome": outcome, "reason": reason, **_measured(run, cell)}
        if is_load_run(run):
            row |= {"level": cell, **(_level(measured_level(run, cell)) if run.repeats_of(cell) else {})}
        else:
            row |= {"cell": cell, "aliases": _alias_settings(recorded), **_answers(run, cell)}
            row |= accuracies.get(cell, {})
        row["uncertified"] = [name for name in row.get("uncertified", ()) if name in columns]
        rows.append({name: row.get(name) for name in columns})
    return rows


def _alias_settings(cell: RecordedCell) -> list[SummaryRow] | None:
    """Return the settings of cells with the same work, where they differ from this one's; None without any."""
    return [
        {name: value for name, value in alias.settings.items() if value != cell.settings.get(name)}
        for alias in cell.aliases
    ] or None


def _level(level: MeasuredLevel) -> SummaryRow:
    """Return what only a load level has: its row for the columns of :data:`LEVEL_COLUMNS`."""
    client = (None,) * len(_CLIENT) if level.client is None else attrgetter(*_CLIENT)(level.client)
    rate = level.offered, level.goodput.sent, level.good_throughput
    attainment = level.goodput.attainment, *level.goodput.interval
    figures = (*rate, *attainment, level.keeps_up, level.steady_seconds, level.queued_ms, *client)
    return dict(zip(LEVEL_COLUMNS, figures, strict=True))


def _metrics(run: Run) -> list[str]:
    return list(dict.fromkeys((EXACT_MATCH, *metrics_in(run))))


def _answers(run: Run, cell: str) -> SummaryRow:
    verdict = verdict_of(run, cell)
    row: SummaryRow = {"verdict": verdict.word, "verdict_ratio": verdict.ratio}
    for name in _metrics(run):
        quality = quality_of(run, cell, metric=name)
        if quality is not None:
            row |= {name: quality.mean, f"{name}_low": quality.low, f"{name}_high": quality.high}
            row |= {"quality_metric": metric_of(run), "empty_answers": empty_answers(run, cell)}
    return row


def _measured(run: Run, cell: str) -> SummaryRow:
    metrics = cell_metrics(run, cell)
    if metrics is None:
        return {}
    row: SummaryRow = dict(metrics.values)
    for name, (low, high) in metrics.intervals.items():
        row |= {f"{name}_low": low, f"{name}_high": high}
    return row | {"uncertified": metrics.uncertified}


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)
