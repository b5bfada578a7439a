"""Everything that a report shows, as plain data derived from a run's records alone. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from panscan.analysis.cells import (
    MeasuredCell,
    Unmeasured,
    alias_lines,
    count,
    distinguishing,
    label,
    measured_rows,
    memory_metric,
    short,
    shown,
    speedup_lines,
    telling,
    unmeasured,
)
from panscan.analysis.floors import Floor, floor_of, ratios
from panscan.analysis.quantization import PriceTable, is_quantized, price_table
from panscan.analysis.recommend import recommend
from panscan.analysis.task_cost import TaskCost, cost_lines, costs_of_cells
from panscan.core import RecordsError
from panscan.quality.datasets import facts_of_header
from panscan.records.metrics import ReplicaShare
from panscan.records.quality import Quality, metric_title, quality_of
from panscan.records.requests import STAGES
from panscan.records.store import Run
from panscan.records.summary import replica_shares
from panscan.records.verdict import Verdict, token_lines
from panscan.report import definitions
from panscan.report.answers import Answers, answers_of
from panscan.report.charts import ChartGroup, Front, comparisons, front_of
from panscan.report.formatting import Measured, clean, measured
from panscan.report.latency_groups import by_request

__all__ = ["Advice", "ReportCell", "ReportData", "report_data_of"]


@dataclass(frozen=True, slots=True)
class ReportCell:
    """A measured cell.

    Args:
        number: its place in the table, from 1.
        brief: its preset and swept settings; empty if nothing was swept.
        settings: values of the swept settings, in the order of :attr:`ReportData.swept`.
        footnote: the number of the reason why it is unverified, None if it is not.
        stages: mean milliseconds, in the order of :data:`panscan.records.requests.STAGES`.
        cost: what its verdict costs in accuracy; None of an exact cell, and without accepted answers.
        ratios: see :func:`panscan.analysis.floors.ratios`.
        replicas: empty for a run of one process.
    """

    number: int
    cell: str
    brief: str
    preset: str
    settings: tuple[str, ...]
    throughput: Measured
    ttft: Measured
    tpot: Measured
    p95: Measured
    views: Measured
    image_tokens: Measured
    memory_gib: Measured
    verdict: Verdict
    footnote: int | None
    quality: Quality | None
    cost: TaskCost | None
    stages: tuple[float | None, ...]
    e2e: float | None
    floor: Floor | None
    ratios: Mapping[str, float]
    replicas: tuple[ReplicaShare, ...]

    @property
    def name(self) -> str:
        """Its number, preset and swept settings."""
        return f"{self.number} · {self.brief}" if self.brief else str(self.number)

    @property
    def too_quick(self) -> set[str]:
        """The names in ``ratios`` of times and rates below their floor: their ceilings were measured too low."""
        return {name for name, ratio in self.ratios.items() if ratio < 1 and name != "peak_allocated_bytes"}


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended cell, why, and what the choice costs; ``rejected``: why not the others, by number."""

    cell: ReportCell
    reason: str
    costs: tuple[str, ...]
    runner_up: ReportCell | None
    rejected: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """A report.

    Args:
        advice: None if no cell qualifies; ``no_advice`` then says why.
        note: what a reader must know of the model, or nothing.
        warnings: what a reader must know before believing a figure.
        swept: settings that differ between measured cells.
        constant: the others that are worth saying, as text.
        dataset: where the questions came from and what became of them, as text.
        memory: whose peak memory, GPU or RSS.
        footnotes: why cells are unverified.
        aliases: cells that were measured for settings that lead to the same work, too.
        prices: table of quantisation trade-offs, with cell numbers; None without quantised cells.
        costs: what a reader of the accuracy vs exact must know; empty where no cell has one.
        tokens: what comparing measured tokens found, line by line.
        speedups: how many times faster the engine is than other runners.
        quality_title: what people call the metric that is the run's quality.
        answers: None for a run without scores.
    """

    run_id: str
    models: tuple[str, ...]
    machine: str
    created: str
    advice: Advice | None
    no_advice: str
    note: str
    warnings: tuple[str, ...]
    swept: tuple[str, ...]
    constant: str
    dataset: str
    cells: tuple[ReportCell, ...]
    memory: str
    footnotes: tuple[str, ...]
    aliases: tuple[str, ...]
    prices: PriceTable | None
    costs: tuple[str, ...]
    tokens: tuple[str, ...]
    speedups: tuple[str, ...]
    comparisons: tuple[ChartGroup, ...]
    quality_title: str
    answers: Answers | None
    front: Front | None
    latency: ChartGroup
    unmeasured: tuple[Unmeasured, ...]
    truths: tuple[definitions.TruthSummary, ...]
    environment: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    command: str

    def numbered(self, number: int) -> ReportCell:
        return self.cells[number - 1]


def report_data_of(run: Run) -> ReportData:
    """The report of a run; also of one without a measured cell.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """
    rows = measured_rows(run)
    cells, footnotes, swept = _cells(run, rows)
    numbers = {cell.cell: cell.number for cell in cells}
    advice, no_advice = _advice(run, cells)
    best = None if advice is None else advice.cell.number
    settings = [row.told for row in rows] or list(run.cells.values())
    return ReportData(
        run_id=clean(run.header["run_id"]),
        models=tuple(definitions.model_names(run)),
        machine=definitions.machine(run),
        created=clean(run.header["created"]),
        advice=advice,
        no_advice=no_advice,
        note=definitions.random_note(run, settings),
        warnings=tuple(_warnings(run, cells, footnotes)),
        swept=tuple(clean(short(name)) for name in swept),
        constant=clean(_constant(settings)),
        dataset=_dataset(run),
        cells=cells,
        memory=memory_metric(rows)[1],
        footnotes=footnotes,
        aliases=tuple(map(clean, alias_lines(run, {cell.cell: f"Cell {cell.name}" for cell in cells}))),
        prices=_prices(run, rows, numbers),
        costs=tuple(cost_lines({cell.cell: cell.cost for cell in cells if cell.cost is not None})),
        tokens=tuple(clean(line) for line in token_lines([row.verdict for row in rows])),
        speedups=tuple(speedup_lines(rows)),
        comparisons=tuple(comparisons(rows, numbers, {cell.cell: f"{cell.number} {cell.brief}" for cell in cells})),
        quality_title=metric_title(run),
        answers=answers_of(run, rows, numbers),
        front=front_of(rows, {cell.cell: cell.quality for cell in cells}, numbers, best, metric_title(run)),
        latency=by_request(run, rows, numbers, {cell.cell: cell.name for cell in cells}),
        unmeasured=tuple(_unmeasured(run)),
        truths=tuple(definitions.truths(run)),
        environment=tuple(definitions.environment(run)),
        definitions=tuple(definitions.definitions()),
        command=clean(shlex.join(map(str, run.header["command"]))),
    )


def _prices(run: Run, rows: Sequence[MeasuredCell], numbers: Mapping[str, int]) -> PriceTable | None:
    found = price_table(run, rows)
    if found is None:
        return None
    texts = tuple(tuple(map(clean, row)) for row in found.rows)
    return replace(found, cells=tuple(str(numbers[cell]) for cell in found.cells), rows=texts)


def _dataset(run: Run) -> str:
    facts = facts_of_header(run.header)
    return "" if facts is None else clean(f"Dataset {facts.text}.")


def _constant(cells: Sequence[Mapping[str, Any]]) -> str:
    """The settings that are alike; those of crops mean nothing in a cell without any."""
    every, crops = telling(cells), {}
    if not all(cell.get("do_pan_and_scan", True) for cell in cells):
        crops = {name: every.pop(name) for name in list(every) if short(name) != name}
    return "; ".join(filter(None, (label(every), f"{label(crops)} where pan and scan is on" if crops else "")))


def _cells(run: Run, rows: Sequence[MeasuredCell]) -> tuple[tuple[ReportCell, ...], tuple[str, ...], list[str]]:
    """(cells, reasons of those that are unverified, swept settings)."""
    swept = distinguishing([row.told for row in rows])
    memory = memory_metric(rows)[0]
    reasons = [clean(row.verdict.reason) for row in rows if row.verdict.word == "unverified"]
    footnotes = tuple(dict.fromkeys(reasons))
    costs = costs_of_cells(run)
    cells = tuple(
        _cell(run, row, number, swept, memory, footnotes, costs.get(row.cell)) for number, row in enumerate(rows, 1)
    )
    return cells, footnotes, swept


def _cell(
    run: Run,
    row: MeasuredCell,
    number: int,
    swept: Sequence[str],
    memory: str,
    footnotes: Sequence[str],
    cost: TaskCost | None,
) -> ReportCell:
    metrics, unverified = row.metrics, row.verdict.word == "unverified"
    peak = metrics.values[memory]
    floor = floor_of(run, row.cell)
    preset = clean(row.preset or "")
    swept_settings = row.label(swept)
    return ReportCell(
        number=number,
        cell=row.cell,
        brief=", ".join(filter(None, (preset, clean(swept_settings)))),
        preset=preset,
        settings=tuple(clean(shown(row.told.get(name))) for name in swept),
        throughput=measured(metrics, "request_throughput"),
        ttft=measured(metrics, "median_ttft_ms"),
        tpot=measured(metrics, "median_tpot_ms"),
        p95=measured(metrics, "p95_e2el_ms"),
        views=measured(metrics, "mean_views"),
        image_tokens=measured(metrics, "mean_image_tokens"),
        memory_gib=Measured(None if peak is None else peak / 2**30),
        verdict=row.verdict,
        footnote=footnotes.index(clean(row.verdict.reason)) + 1 if unverified else None,
        quality=quality_of(run, row.cell),
        cost=cost,
        stages=tuple(metrics.values[f"mean_{stage}_ms"] for stage in STAGES),
        e2e=metrics.values["mean_e2el_ms"],
        floor=floor,
        ratios={} if floor is None else ratios(floor, metrics),
        replicas=tuple(replica_shares(run, row.cell)),
    )


def _advice(run: Run, cells: Sequence[ReportCell]) -> tuple[Advice | None, str]:
    by_id = {cell.cell: cell for cell in cells}
    try:
        found = recommend(run)
    except RecordsError as error:
        return None, clean(str(error).removeprefix(f"{run.path}: "))
    rejected = tuple((by_id[cell].number, clean(why)) for cell, why in found.rejected.items() if cell in by_id)
    runner_up = None if found.runner_up is None else by_id[found.runner_up]
    return Advice(by_id[found.cell], clean(found.reason), tuple(map(clean, found.cost)), runner_up, rejected), ""


def _warnings(run: Run, cells: Sequence[ReportCell], footnotes: Sequence[str]) -> list[str]:
    words = Counter(cell.verdict.word for cell in cells)
    found = []
    if words["unverified"]:
        every = words["unverified"] == len(cells)
        who = "No cell was" if every else _of(words["unverified"], len(cells), "was", "were") + " not"
        reasons = "; ".join(filter(None, footnotes))
        compared = f"{who} compared with the reference" + (f": {reasons}." if reasons else ".")
        found.append(f"{compared} Nothing says that these speeds kept the model's answers.")
    if words["different"]:
        who = _of(words["different"], len(cells), "gives", "give")
        found.append(f"{who} other answers than the reference{_why(run, cells)}.")
    failed = sum(
        record["error"] is not None for key, records in run.requests.items() for record in records if key in run.repeats
    )
    if failed:
        found.append(f"{count(failed, 'request')} failed and {'is' if failed == 1 else 'are'} left out.")
    if any(cell.too_quick for cell in cells):
        found.append(
            "Some figures are below their floor: the machine was busy when its ceilings were measured, so floors are"
            " too high here."
        )
    return found + [clean(f"{note[:1].upper()}{note[1:]}.") for note in run.notes]


def _why(run: Run, cells: Sequence[ReportCell]) -> str:
    """Return an explanation if all cells with other answers have quantised weights; otherwise nothing."""
    different = [cell.cell for cell in cells if cell.verdict.word == "different"]
    return ": the weights are quantised" if all(is_quantized(run, cell) for cell in different) else ""


def _of(some: int, every: int, one: str, several: str) -> str:
    return f"{some} of {count(every, 'cell')} {one if some == 1 else several}"


def _unmeasured(run: Run) -> list[Unmeasured]:
    return [
        Unmeasured(group.outcome, clean(group.reason), group.cells, clean(group.shared)) for group in unmeasured(run)
    ]
