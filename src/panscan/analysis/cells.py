"""The measured cells of a run: the settings that tell them apart, sweeps, speedups, and cells without a result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from panscan.analysis.setting_words import CROPS, label, shown
from panscan.analysis.summary import cell_metrics
from panscan.records.metrics import Metrics
from panscan.records.store import Run, outcome_of
from panscan.settings import ENGINE_AXES, REMOVED_SETTINGS, VLLM_AXES, VLLM_LIMITS, axes, foreign_settings
from panscan.verdict.judgement import Verdict, verdict_of


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A cell with metrics.

    Args:
        cell: id of the cell.
        settings: its settings, from :func:`effective_settings`.
        metrics: measured values.
        verdict: comparison with the reference.
        preset: preset that the cell started from, if any.
        aliases: settings of its aliases (see :func:`panscan.bench.grid.merge_equal_work`).
    """

    cell: str
    settings: Mapping[str, Any]
    metrics: Metrics
    verdict: Verdict
    preset: str | None = None
    aliases: Sequence[Mapping[str, Any]] = ()

    @property
    def display_settings(self) -> Mapping[str, Any]:
        """Settings for display (see :func:`display_settings`)."""
        return display_settings(self.settings, self.aliases)

    def label(self, names: Sequence[str]) -> str:
        """Return the named settings in words, aliases included."""
        values = self.display_settings
        return label({name: values.get(name) for name in names})


def measured_rows(run: Run) -> list[MeasuredCell]:
    """Return the measured cells of a run. Settings without effect are None (see :func:`effective_settings`).

    Raises:
        RecordsError: see :func:`panscan.analysis.summary.cell_metrics`.
    """
    measured = ((cell, settings, cell_metrics(run, cell)) for cell, settings in run.cells.items())
    return [
        MeasuredCell(
            cell,
            effective_settings(settings),
            metrics,
            verdict_of(run, cell),
            preset_of(run, cell),
            aliases_of(run, cell),
        )
        for cell, settings, metrics in measured
        if metrics is not None
    ]


def effective_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
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


def display_settings(settings: Mapping[str, Any], aliases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a cell's effective settings for display: ``4 or 6`` where an alias has a different value."""
    own, others = effective_settings(settings), [effective_settings(alias) for alias in aliases]
    values = {name: dict.fromkeys(shown(each.get(name)) for each in (own, *others)) for name in own}
    return {name: " or ".join(values[name]) if len(values[name]) > 1 else value for name, value in own.items()}


def display_settings_of(run: Run, cell: str) -> Mapping[str, Any]:
    """Return the :func:`display_settings` of a cell of a run."""
    return display_settings(run.cells[cell], aliases_of(run, cell))


def aliases_of(run: Run, cell: str) -> list[Mapping[str, Any]]:
    """Return the settings of a cell's aliases."""
    return [alias.settings for alias in run.aliases.get(cell, ())]


def preset_of(run: Run, cell: str) -> str | None:
    """Return the preset that a cell started from, and those of its aliases; None without any."""
    aliases = [alias.preset for alias in run.aliases.get(cell, ())]
    return " or ".join(dict.fromkeys(filter(None, (run.presets.get(cell), *aliases)))) or None


def alias_lines(run: Run, names: Mapping[str, str]) -> list[str]:
    """Return a line for each cell with aliases, naming their settings; ``names`` has the names of cells by id."""
    lines = []
    for cell in run.aliases:
        if cell not in names:
            continue
        every = [effective_settings(settings) for settings in (run.cells[cell], *aliases_of(run, cell))]
        apart = varying_names(every)
        others = "; ".join(label({name: each.get(name) for name in apart}) for each in every[1:])
        lines.append(f"Measured once for {names[cell]} and {others}: the views of every document are the same.")
    return lines


def varying_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that differ between cells, in order."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    return [name for name in names if len({shown(cell.get(name)) for cell in cells}) > 1]


def distinguishing_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the varying settings, except those that differ only by having no effect (None) in some cells."""
    return [name for name in varying_names(cells) if not _off_or_the_same(cells, name)]


def _off_or_the_same(cells: Sequence[Mapping[str, Any]], name: str) -> bool:
    if name.startswith(CROPS):
        on = [cell for cell in cells if cell.get("do_pan_and_scan", True)]
    else:
        on = [cell for cell in cells if name not in _foreign(cell)]
        if len(on) == len(cells):
            return False
    return len({shown(cell.get(name)) for cell in on}) == 1


def _foreign(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings that the runner does not have, except the engine's attention, which has one value."""
    runner = settings.get("runner", "generate")
    return tuple(name for name in foreign_settings(runner) if (runner, name) != ("engine", "attention"))


def shared_settings(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
    flooded = [
        row for row in rows if row.settings.get("runner") == "engine" and not row.settings.get("max_concurrency")
    ]
    if not flooded:
        return ""
    text = "all requests are submitted at once, so TTFT and E2E include queueing."
    return f"A{text[1:]}" if len(flooded) == len(rows) else f"With the engine, {text}"


def memory_metric(rows: Sequence[MeasuredCell]) -> tuple[str, str]:
    """Return metric and label of peak memory: of the GPU, or of the process (RSS) if a cell ran without a GPU."""
    if all(row.metrics.values["peak_allocated_bytes"] is not None for row in rows):
        return "peak_allocated_bytes", "GPU"
    return "peak_rss_bytes", "RSS"


def cell_title(cell: str, settings: Mapping[str, Any], varying: Sequence[str]) -> str:
    """Return ``id (settings)``: a cell and the settings in words that tell it from others."""
    chosen = {name: settings.get(name) for name in varying if settings.get(name) is not None or _may_be_off(name)}
    return f"{cell} ({label(chosen)})" if chosen else cell


def _may_be_off(name: str) -> bool:
    return name in axes() and axes()[name].optional


def short_name(name: str) -> str:
    """Return a setting's name without the prefix of pan-and-scan settings."""
    return name.removeprefix(CROPS)


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

    def at(self, row: MeasuredCell) -> int:
        """Where a row of the series stands among the values. Charts draw them at equal distances: sweeps double more
        often than they add."""
        return self.values.index(row.settings.get(self.name))

    def fastest(self, most: int) -> dict[str, Sequence[MeasuredCell]]:
        """Return the fastest ``most`` series, in their order."""
        best = sorted(self.series, key=lambda name: -max(map(speed, self.series[name])))[:most]
        return {name: rows for name, rows in self.series.items() if name in best}

    @property
    def ticks(self) -> tuple[str, ...]:
        """The values as text, with those of aliases where they are the same in all series."""
        found: list[dict[str, None]] = [{} for _ in self.values]
        for rows in self.series.values():
            for row in rows:
                found[self.at(row)][shown(row.display_settings.get(self.name))] = None
        return tuple(
            next(iter(texts)) if len(texts) == 1 else shown(value)
            for value, texts in zip(self.values, found, strict=True)
        )


def speed(row: MeasuredCell) -> float:
    """Requests per second, 0 where they could not be had."""
    return row.metrics.values["request_throughput"] or 0.0


def sweeps(rows: Sequence[MeasuredCell]) -> list[Sweep]:
    """The settings that were swept: some cells differ in that setting alone."""
    varying = distinguishing_names([row.settings for row in rows])
    found = [_sweep(rows, name, varying) for name in varying]
    return [sweep for sweep in found if any(len(points) > 1 for points in sweep.series.values())]


def _sweep(rows: Sequence[MeasuredCell], name: str, varying: Sequence[str]) -> Sweep:
    series: dict[str, list[MeasuredCell]] = defaultdict(list)
    for row in rows:
        series[label({other: row.settings.get(other) for other in varying if other != name})].append(row)
    alone = [points[0] for points in series.values() if len(points) == 1]
    nothing = {row.cell for row in alone if row.settings.get(name) is None}
    values: list[Any] = []
    for row in rows:
        value = row.settings.get(name)
        if row.cell not in nothing and value not in values:  # a list: another version's values need not be hashable
            values.append(value)
    numeric = all(_is_number(value) for value in values)
    ordered = tuple(sorted(values)) if numeric else tuple(values)
    placed = {
        each: sorted(points, key=lambda row: ordered.index(row.settings.get(name)))
        for each, points in series.items()
        if points[0].cell not in nothing
    }
    return Sweep(name, numeric, ordered, placed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_OWN = {"runner", *ENGINE_AXES, *VLLM_AXES, *VLLM_LIMITS}
"""Settings that only say how a runner goes about the same requests."""


def speedup_lines(rows: Sequence[MeasuredCell]) -> list[str]:
    """One line for each other runner and each group of cells that ask the same: the engine's fastest cell to its.

    Nothing without cells of the engine and of another runner.
    """
    groups: dict[str, list[MeasuredCell]] = {}
    for row in rows:
        same = {name: value for name, value in row.settings.items() if name not in _OWN}
        groups.setdefault(repr(sorted(same.items())), []).append(row)
    return [line for group in groups.values() for line in _lines(group)]


def _lines(group: Sequence[MeasuredCell]) -> Iterator[str]:
    fastest: dict[str, MeasuredCell] = {}
    for row in sorted(group, key=speed):
        fastest[row.settings.get("runner", "generate")] = row
    engine = fastest.pop("engine", None)
    if engine is None:
        return
    for runner, row in fastest.items():
        ours, theirs = speed(engine), speed(row)
        if not ours or not theirs:
            continue
        size = row.settings.get("batch_size")
        batch = f" (batch size {size})" if size is not None and runner == "generate" else ""
        words = f"verdicts {engine.verdict.word} and {row.verdict.word}"
        alone = "request_throughput" not in engine.metrics.intervals
        doubt = "; measured once: use --repeats to estimate run-to-run noise" if alone else ""
        yield f"engine to {runner}{batch}: {ours / theirs:.2f}x the requests per second; {words}{doubt}."


_WORDS = {"oom": "out of memory"}
_NO_ANSWER = "without an answer"


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
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for cell, settings in run.cells.items():
        outcome, reason = outcome_of(run, cell)
        if outcome == "done":
            error = _only_error(run, cell)
            outcome, reason = (_NO_ANSWER, error) if error is not None else (outcome, reason)
        if outcome != "done":
            groups[_WORDS.get(outcome, outcome), reason][cell] = settings
    swept = varying_names(list(run.cells.values()))
    found = []
    for (outcome, reason), cells in groups.items():
        apart = set(varying_names(list(cells.values())))
        first = next(iter(cells.values()))
        shared = label({name: first.get(name) for name in swept if name not in apart})
        found.append(Unmeasured(outcome, reason, tuple(cells), shared))
    return found


def _only_error(run: Run, cell: str) -> str | None:
    """The first request's error where no request of a cell was answered; None where one was, or none was sent."""
    requests = run.requests_of(cell)
    if not requests or any(request.error is None for request in requests):
        return None
    return f"every request failed, the first with: {requests[0].error}"
