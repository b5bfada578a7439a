"""The measured cells of a run: the settings that tell them apart, sweeps, speedups, and cells without a result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from panscan.analysis.setting_words import CROPS, label, runner_words, setting_words, shown
from panscan.analysis.significance import repeated_rates
from panscan.core import RecordsError
from panscan.core.groups import grouped
from panscan.core.text import clean, number_text, times
from panscan.records.intervals import ALPHA, LOOKED_AT, Interval
from panscan.records.load_runs import is_load_run, load_settings, measured_blocks
from panscan.records.metrics import Metrics, RepeatWork, metrics_of, work_of
from panscan.records.quality import Quality, quality_of
from panscan.records.store import CellSettings, Run, outcome_of
from panscan.settings import ALL_AT_ONCE, ENGINE_AXES, REMOVED_SETTINGS, VLLM_AXES, VLLM_LIMITS, axes, foreign_settings
from panscan.verdict.judgement import Verdict, verdict_of

_NAMED_ELSEWHERE = ("model", "runner", "device", "model_shape", "random_weights")
"""What reports name beside all cells: settings that no name of a single cell repeats."""
_CROPS_SWEEP, _VIEWS_SWITCH = f"{CROPS}max_num_crops", "do_pan_and_scan"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one throughput is another, with its 95% interval; None if too little was repeated."""

    value: float
    interval: Interval | None

    @property
    def text(self) -> str:
        """``1.52x (1.48 to 1.56)``."""
        if self.interval is None:
            return times(self.value)
        return f"{times(self.value)} ({' to '.join(map(number_text, self.interval))})"


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A cell with metrics.

    Args:
        cell: id of the cell.
        name: its preset and settings in words (see :func:`cell_names`).
        settings: its settings, from :func:`effective_settings`.
        display_settings: its settings, from :func:`display_settings`.
        metrics: measured values.
        verdict: comparison with the reference.
        quality: accuracy; None without accepted answers.
        views: mean views per request, the highest of all cells with the same crops.
        work: what each repeat did, by its number.
    """

    cell: str
    name: str
    settings: CellSettings
    display_settings: CellSettings
    metrics: Metrics
    verdict: Verdict
    quality: Quality | None
    views: float
    work: Mapping[int, RepeatWork]

    @property
    def crops(self) -> CellSettings:
        """The pan-and-scan settings."""
        return {name: value for name, value in self.settings.items() if "pan_and_scan" in name}

    @property
    def pan_and_scan(self) -> bool:
        """Whether images may have crops."""
        return bool(self.settings.get(_VIEWS_SWITCH, True))

    @property
    def speed(self) -> float:
        """Requests per second, 0 where they could not be had."""
        return self.metrics.values["request_throughput"] or 0.0

    @property
    def interval(self) -> Interval | None:
        """95% interval of the throughput; None without repeats."""
        return self.metrics.intervals.get("request_throughput")

    def speed_over(self, other: MeasuredCell) -> Ratio | None:
        """Return how many times the other's throughput this one is, paired by repeat; None without a throughput."""
        if not self.speed or not other.speed:
            return None
        shared, bounds = sorted(self.work.keys() & other.work.keys()), None
        if shared:
            a, b = (np.array([row.work[i] for i in shared]).T[[0, 2]] for row in (other, self))
            bounds = repeated_rates(a, b).interval()
        ratio = self.speed / other.speed
        return Ratio(ratio, bounds and (min(ratio, bounds[0] + 1), max(ratio, bounds[1] + 1)))

    def within_noise_of(self, other: MeasuredCell) -> bool:
        """Whether the repeats of both do not show which is faster. Without repeats, the figures decide."""
        ratio = self.speed_over(other)
        if self is other or ratio is None:
            return True
        low, high = ratio.interval or (ratio.value, ratio.value)
        return low <= 1 <= high

    @property
    def all_at_once(self) -> bool:
        """Whether all requests are submitted at once, so that latencies include queueing."""
        return self.settings.get("runner") in ALL_AT_ONCE and not self.settings.get("max_concurrency")

    @property
    def p95_ms(self) -> float | None:
        """95th percentile of E2E, in milliseconds; None if it was not measured."""
        return self.metrics.values["p95_e2el_ms"]

    @property
    def accuracy(self) -> float:
        """The mean score of the answers, 0 without accepted answers."""
        return 0.0 if self.quality is None else self.quality.mean


def cell_metrics(run: Run, cell_id: str) -> Metrics | None:
    """Metrics of one cell over its complete repeats; None if no request of them succeeded.

    Raises:
        RecordsError: the run has no such cell, or its stamps contradict its counts.
    """
    if cell_id not in run.cells:
        raise RecordsError(f"{run.path}: the run has no cell {cell_id!r}")
    repeats = run.repeats_of(cell_id)
    if not is_load_run(run):
        settings = run.header.settings
        adaptive = settings.precision is not None and (settings.replicas or 1) == 1
        return metrics_of(repeats, alpha=LOOKED_AT if adaptive else ALPHA)
    percentiles = load_settings(run).metric_percentiles
    return metrics_of(list(map(measured_blocks, repeats)), percentiles=percentiles, blocks=True)


def measured_rows(run: Run) -> list[MeasuredCell]:
    """Return the measured cells of a run. Settings without effect are None (see :func:`effective_settings`).

    Raises:
        RecordsError: see :func:`cell_metrics`.
    """
    names = cell_names(run)
    rows = [
        MeasuredCell(
            cell,
            names[cell],
            effective_settings(recorded.settings),
            display_settings(recorded.forms),
            metrics,
            verdict_of(run, cell),
            quality_of(run, cell),
            metrics.values["mean_views"] or 0.0,
            {repeat.repeat: work_of((repeat, requests)) for repeat, requests in run.repeats_of(cell)},
        )
        for cell, recorded in run.cells.items()
        if (metrics := cell_metrics(run, cell)) is not None
    ]
    crops = [repr(sorted(row.crops.items())) for row in rows]
    views: dict[str, float] = defaultdict(float)
    for key, row in zip(crops, rows, strict=True):
        views[key] = max(views[key], row.views)
    return [replace(row, views=views[key]) for key, row in zip(crops, rows, strict=True)]


def cell_names(run: Run) -> dict[str, str]:
    """Return each cell's preset and settings in words, without those that all cells share; by cell id.

    A cell's id follows where these words would not tell it from another cell; see :func:`plain_name` for a cell
    without any.
    """
    shown_settings = {id: display_settings(cell.forms) for id, cell in run.cells.items()}
    varying = distinguishing_names(list(shown_settings.values()))
    words = {}
    for id, cell in run.cells.items():
        names, settings = list(varying), shown_settings[id]
        if cell.aliases:  # name what the choice leaves open, even if all cells do
            effective = effective_settings(cell.settings)
            names += [name for name, value in settings.items() if value != effective[name]]
        parts = filter(None, (cell.preset_words, label(settings, names)))
        words[id] = clean(", ".join(parts)) or plain_name(settings)
    times = Counter(words.values())
    return {id: text if times[text] == 1 else f"{text} ({clean(id)})" for id, text in words.items()}


def plain_name(settings: CellSettings) -> str:
    """Return what a cell is that no other stands beside: ``the defaults (pan and scan, up to 4 crops)``.

    Reports name the model, the runner and the device above their tables.
    """
    crops = {name: settings.get(name) for name in (_VIEWS_SWITCH, _CROPS_SWEEP)}
    views = ", ".join(setting_words(name, value) for name, value in crops.items() if value is not None)
    changed = shared_settings([settings])
    words = label({name: value for name, value in changed.items() if name not in (*crops, *_NAMED_ELSEWHERE)})
    if words:
        return ", ".join(filter(None, (words, views)))
    return f"the defaults ({views})" if views else "the defaults"


def effective_settings(settings: CellSettings) -> CellSettings:
    """Return settings with None for those without effect.

    These are crop settings without pan and scan, the checkpoint of random weights, and settings of other runners.
    Removed settings of older records are left out where they were off.
    """
    idle = () if settings.get("do_pan_and_scan", True) else tuple(name for name in settings if name.startswith(CROPS))
    if settings.get("random_weights"):
        idle += ("model",)
    idle += _foreign(settings)
    return {
        name: None if name in idle else value
        for name, value in settings.items()
        if name not in REMOVED_SETTINGS or value != REMOVED_SETTINGS[name]
    }


def display_settings(forms: Sequence[CellSettings]) -> CellSettings:
    """Return a cell's effective settings for display: ``4 or 6`` where an alias has a different value.

    Args:
        forms: the settings of the cell, then those of its aliases.
    """
    effective = [effective_settings(form) for form in forms]
    texts = {name: dict.fromkeys(shown(form.get(name)) for form in effective) for name in effective[0]}
    return {name: " or ".join(texts[name]) if len(texts[name]) > 1 else value for name, value in effective[0].items()}


def alias_lines(run: Run, names: Mapping[str, str]) -> list[str]:
    """Return a line for each cell with aliases, naming their settings; ``names`` has the names of cells by id."""
    lines = []
    for id, cell in run.cells.items():
        if id not in names or not cell.aliases:
            continue
        alike = [effective_settings(form) for form in cell.forms]
        apart = varying_names(alike)
        others = "; ".join(label(settings, apart) for settings in alike[1:])
        lines.append(f"Measured once for {names[id]} and {others}: the views of every document are the same.")
    return lines


def varying_names(cells: Sequence[CellSettings]) -> list[str]:
    """Return the settings that differ between cells, in order."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    return [name for name in names if len({shown(cell.get(name)) for cell in cells}) > 1]


def distinguishing_names(cells: Sequence[CellSettings]) -> list[str]:
    """Return the varying settings, except those that differ only by having no effect (None) in some cells."""
    return [name for name in varying_names(cells) if not _off_or_the_same(cells, name)]


def _off_or_the_same(cells: Sequence[CellSettings], name: str) -> bool:
    if name.startswith(CROPS):
        on = [cell for cell in cells if cell.get("do_pan_and_scan", True)]
    else:
        on = [cell for cell in cells if name not in _foreign(cell)]
        if len(on) == len(cells):
            return False
    return len({shown(cell.get(name)) for cell in on}) == 1


def _foreign(settings: CellSettings) -> tuple[str, ...]:
    """Return settings that the runner does not have, except the engine's attention, which has one value."""
    runner = settings.get("runner", "generate")
    return tuple(name for name in foreign_settings(runner) if (runner, name) != ("engine", "attention"))


def shared_settings(cells: Sequence[CellSettings]) -> dict[str, Any]:
    """Return the model and all other settings with the same non-default value wherever they have an effect."""
    varying = distinguishing_names(cells)
    names = dict.fromkeys(name for cell in cells for name in cell if name not in varying)
    constant = {name: next((cell[name] for cell in cells if cell.get(name) is not None), None) for name in names}
    return {
        name: value
        for name, value in constant.items()
        if value is not None and (name == "model" or name not in axes() or value != axes()[name].default)
    }


def queueing_note(rows: Sequence[MeasuredCell]) -> str:
    """Return what a reader must know of latencies where all requests are submitted at once; empty elsewhere."""
    flooded = [row for row in rows if row.all_at_once]
    if not flooded:
        return ""
    runners = " and ".join(runner_words(runner) for runner in dict.fromkeys(row.settings["runner"] for row in flooded))
    text = f"With {runners}, all requests are submitted at once, so TTFT and E2E include queueing"
    return f"{text}; do not compare them with other runners."


def memory_metric(rows: Sequence[MeasuredCell]) -> tuple[str, str]:
    """Return metric and label of peak memory: of the GPU, or of the process (RSS) if a cell ran without a GPU."""
    if all(row.metrics.values["peak_allocated_bytes"] is not None for row in rows):
        return "peak_allocated_bytes", "GPU"
    return "peak_rss_bytes", "RSS"


def cell_title(cell: str, settings: CellSettings, varying: Sequence[str]) -> str:
    """Return ``settings (id)``: the settings in words that tell a cell from others, and its id."""
    text = label(settings, [name for name in varying if name in axes() or settings.get(name) is not None])
    return f"{text} ({cell})" if text else f"cell {cell}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One setting, and the cells that differ in nothing else.

    Args:
        name: the setting.
        numeric: whether its values are numbers; then they ascend, else they stand in the order of the rows.
        values: the distinct values. None counts as a value where it is a choice (no quantisation), not where the
            setting has no effect (crops without pan and scan).
        series: rows in the order of ``values``, by the label of their other varying settings; in the cells' order.
    """

    name: str
    numeric: bool
    values: tuple[Any, ...]
    series: Mapping[str, Sequence[MeasuredCell]]

    def index(self, row: MeasuredCell) -> int:
        """Where a row of the series stands among the values. Charts draw them at equal distances: sweeps double more
        often than they add."""
        return self.values.index(_swept_value(row, self.name))

    def fastest(self, most: int) -> dict[str, Sequence[MeasuredCell]]:
        """Return the fastest ``most`` series, in their order."""
        best = sorted(self.series, key=lambda name: -max(row.speed for row in self.series[name]))[:most]
        return {name: rows for name, rows in self.series.items() if name in best}

    @property
    def ticks(self) -> tuple[str, ...]:
        """The values as text, with those of aliases where they are the same in all series."""
        texts: list[dict[str, None]] = [{} for _ in self.values]
        for rows in self.series.values():
            for row in rows:
                none = self.name == _CROPS_SWEEP and not row.pan_and_scan
                texts[self.index(row)]["none" if none else shown(row.display_settings.get(self.name))] = None
        pairs = zip(self.values, texts, strict=True)
        return tuple(next(iter(names)) if len(names) == 1 else shown(value) for value, names in pairs)


def sweeps(rows: Sequence[MeasuredCell]) -> list[Sweep]:
    """The settings that were swept: some cells differ in that setting alone."""
    varying = distinguishing_names([row.settings for row in rows])
    swept = [_sweep(rows, name, varying) for name in varying]
    return [sweep for sweep in swept if any(len(points) > 1 for points in sweep.series.values())]


def _swept_value(row: MeasuredCell, name: str) -> Any:
    """Return a cell's value of a swept setting: no pan and scan is the least number of crops."""
    return 0 if name == _CROPS_SWEEP and not row.pan_and_scan else row.settings.get(name)


def _sweep(rows: Sequence[MeasuredCell], name: str, varying: Sequence[str]) -> Sweep:
    others = [other for other in varying if other != name and (other, name) != (_VIEWS_SWITCH, _CROPS_SWEEP)]
    series = grouped((label(row.settings, others), row) for row in rows)
    alone = [points[0] for points in series.values() if len(points) == 1]
    without = {
        row.cell for row in alone if row.settings.get(name) is None or (name == _CROPS_SWEEP and not row.pan_and_scan)
    }
    values: list[Any] = []
    for row in rows:
        value = _swept_value(row, name)
        if row.cell not in without and value not in values:  # a list: another version's values need not be hashable
            values.append(value)
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) for value in values
    )
    if numeric:
        values.sort()
    placed = {
        other: sorted(points, key=lambda row: values.index(_swept_value(row, name)))
        for other, points in series.items()
        if points[0].cell not in without
    }
    return Sweep(name, numeric, tuple(values), placed)


_EXECUTION = {"runner", *ENGINE_AXES, *VLLM_AXES, *VLLM_LIMITS}
"""Settings that only say how a runner goes about the same requests."""


def speedup_lines(rows: Sequence[MeasuredCell]) -> list[str]:
    """One line for each other runner and each group of cells that ask the same: the engine's fastest cell to its.

    Nothing without cells of the engine and of another runner.
    """
    groups = grouped(
        (repr(sorted(setting for setting in row.settings.items() if setting[0] not in _EXECUTION)), row) for row in rows
    )
    lines = []
    for rows_alike in groups.values():
        by_speed = sorted(rows_alike, key=lambda row: row.speed)
        group = {row.settings.get("runner", "generate"): row for row in by_speed}  # the fastest of each runner
        engine = group.pop("engine", None)
        if engine is None:
            continue
        for runner, row in group.items():
            if (ratio := engine.speed_over(row)) is None:
                continue
            size = row.settings.get("batch_size")
            batch = f" (batch size {size})" if size is not None and runner == "generate" else ""
            words = f"verdicts {engine.verdict.word} and {row.verdict.word}"
            doubt = "; measured once, so noise is unknown (--repeats 5)" if ratio.interval is None else ""
            lines.append(f"engine to {runner}{batch}: {ratio.text} requests per second; {words}{doubt}.")
    return lines


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Cells with one fate.

    Args:
        outcome: in words: skipped, failed, out of memory, unfinished, or without an answer (every request failed).
        reason: empty if none is known.
        cells: their ids.
        shared: the swept settings that all of them have, as text; empty if there are none.
    """

    outcome: str
    reason: str
    cells: tuple[str, ...]
    shared: str


def unmeasured(run: Run) -> list[Unmeasured]:
    """One group for each outcome and reason of cells that are not done or have no answer, in the order of the run."""
    groups: dict[tuple[str, str], dict[str, CellSettings]] = defaultdict(dict)
    for cell, recorded in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        requests = run.requests_of(cell)
        if outcome == "done" and requests and all(request.error is not None for request in requests):
            outcome, reason = "without an answer", f"every request failed, the first with: {requests[0].error}"
        if outcome != "done":
            groups["out of memory" if outcome == "oom" else outcome, reason][cell] = recorded.settings
    swept = varying_names([cell.settings for cell in run.cells.values()])
    fates = []
    for fate, cells in groups.items():
        first, *_ = alike = list(cells.values())
        apart = varying_names(alike)
        shared = label(first, [name for name in swept if name not in apart])
        fates.append(Unmeasured(*fate, tuple(cells), shared))
    return fates
