"""Everything that a report shows, as plain data derived from a run's records alone. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from panscan.analysis.candidates import cell_names
from panscan.analysis.cells import (
    MeasuredCell,
    Unmeasured,
    alias_lines,
    count,
    measured_rows,
    memory_metric,
    queueing_note,
    shared_settings,
    short_name,
    speedup_lines,
    unmeasured,
)
from panscan.analysis.floors import Floor, floor_of, ratios
from panscan.analysis.quantization import TradeoffTable, tradeoff_table
from panscan.analysis.recommend import recommend
from panscan.analysis.setting_words import label
from panscan.analysis.task_cost import TaskCost, cost_lines, costs_of_cells
from panscan.core import RecordsError
from panscan.records.metrics import ReplicaShare
from panscan.records.quality import Quality, metric_title, quality_of
from panscan.records.schema import STAGES
from panscan.records.store import Run
from panscan.records.summary import replica_shares
from panscan.records.verdict import Verdict, is_quantized, token_lines
from panscan.report import definitions
from panscan.report.answers import Answers, answers_of
from panscan.report.charts import ChartGroup, Front, comparisons, decision_charts, front_of
from panscan.report.formatting import Measured, clean, measured
from panscan.report.latency_groups import by_request

__all__ = ["Advice", "ReportCell", "ReportData", "report_data_of"]


_SHOWN_LATENCIES = {"median_ttft_ms", "median_tpot_ms", "p95_e2el_ms"}


@dataclass(frozen=True, slots=True)
class ReportCell:
    """A measured cell.

    Args:
        number: its row in the table, from 1.
        cell: its id.
        name: its preset and settings in words.
        footnote: the number of the reason why it is unverified; None if it is not.
        stages: mean milliseconds, in the order of :data:`panscan.records.requests.STAGES`.
        cost: the accuracy cost of its verdict; None for an exact cell, and without accepted answers.
        ratios: see :func:`panscan.analysis.floors.ratios`.
        replicas: empty for a run of one process.
    """

    number: int
    cell: str
    name: str
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
    def too_quick(self) -> set[str]:
        """The names in ``ratios`` of times and rates below their floor: their ceilings were measured too low."""
        return {name for name, ratio in self.ratios.items() if ratio < 1 and name != "peak_allocated_bytes"}


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation, see :class:`panscan.analysis.recommend.Recommendation`; ``rejected`` holds (name, reason)."""

    cell: ReportCell
    decision: str
    reason: str
    costs: tuple[str, ...]
    runner_up: ReportCell | None
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """A report.

    Args:
        advice: None if no cell qualifies; ``no_advice`` then says why.
        decision: charts of the recommended cell and its alternatives.
        note: a caveat about the model; may be empty.
        warnings: caveats about the figures.
        constant: settings that all cells share, as text.
        dataset: origin and number of the questions, as text.
        memory: whose peak memory is shown, GPU or RSS.
        footnotes: why cells are unverified.
        aliases: cells that stand for other settings that lead to the same work.
        tradeoffs: table of quantisation trade-offs, with names of cells; None without quantised cells.
        costs: explanation of the column "accuracy vs exact"; empty if no cell has one.
        tokens: result of comparing measured tokens, line by line.
        speedups: how many times faster the engine is than other runners.
        quality_title: name of the run's metric of quality.
        answers: None for a run without scores.
    """

    run_id: str
    models: tuple[str, ...]
    machine: str
    created: str
    advice: Advice | None
    no_advice: str
    decision: ChartGroup
    note: str
    warnings: tuple[str, ...]
    constant: str
    dataset: str
    queueing: str
    uncertified: bool
    cells: tuple[ReportCell, ...]
    memory: str
    footnotes: tuple[str, ...]
    aliases: tuple[str, ...]
    tradeoffs: TradeoffTable | None
    costs: tuple[str, ...]
    tokens: tuple[str, ...]
    speedups: tuple[str, ...]
    comparisons: tuple[ChartGroup, ...]
    quality_title: str
    answers: Answers | None
    front: Front | None
    latency: ChartGroup
    unmeasured: tuple[Unmeasured, ...]
    references: tuple[definitions.ReferenceSummary, ...]
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
    names = {cell: clean(name) for cell, name in cell_names(run).items()}
    cells, footnotes = _cells(run, rows, names)
    numbers = {cell.cell: cell.number for cell in cells}
    advice, no_advice, compared = _advice(run, cells, names)
    best = None if advice is None else advice.cell.number
    qualities = {cell.cell: cell.quality for cell in cells}
    settings = [row.display_settings for row in rows] or list(run.cells.values())
    return ReportData(
        run_id=clean(run.header.run_id),
        models=tuple(definitions.model_names(run)),
        machine=definitions.machine(run),
        created=clean(run.header.created),
        advice=advice,
        no_advice=no_advice,
        decision=decision_charts(rows, qualities, names, compared, metric_title(run)),
        note=definitions.random_note(run, settings),
        warnings=tuple(_warnings(run, cells, footnotes)),
        constant=clean(_constant(settings)),
        dataset=_dataset(run),
        queueing=queueing_note(rows),
        uncertified=any(_SHOWN_LATENCIES & set(row.metrics.uncertified) for row in rows),
        cells=cells,
        memory=memory_metric(rows)[1],
        footnotes=footnotes,
        aliases=tuple(map(clean, alias_lines(run, names))),
        tradeoffs=_tradeoffs(run, rows, names),
        costs=tuple(cost_lines({cell.cell: cell.cost for cell in cells if cell.cost is not None})),
        tokens=tuple(clean(line) for line in token_lines([row.verdict for row in rows])),
        speedups=tuple(speedup_lines(rows)),
        comparisons=tuple(comparisons(rows, names)),
        quality_title=metric_title(run),
        answers=answers_of(run, rows, names),
        front=front_of(rows, qualities, numbers, names, best, metric_title(run)),
        latency=by_request(run, rows, names),
        unmeasured=tuple(_unmeasured(run)),
        references=tuple(definitions.references(run, names)),
        environment=tuple(definitions.environment(run)),
        definitions=tuple(definitions.definitions()),
        command=clean(shlex.join(run.header.command)),
    )


def _tradeoffs(run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]) -> TradeoffTable | None:
    found = tradeoff_table(run, rows)
    if found is None:
        return None
    texts = tuple(tuple(map(clean, row)) for row in found.rows)
    return replace(found, cells=tuple(names[cell] for cell in found.cells), rows=texts)


def _dataset(run: Run) -> str:
    facts = run.header.settings.dataset
    return "" if facts is None else clean(f"Dataset {facts.text}.")


def _constant(cells: Sequence[Mapping[str, Any]]) -> str:
    """The settings that are alike; those of crops mean nothing in a cell without any."""
    every, crops = shared_settings(cells), {}
    if not all(cell.get("do_pan_and_scan", True) for cell in cells):
        crops = {name: every.pop(name) for name in list(every) if short_name(name) != name}
    return "; ".join(filter(None, (label(every), f"{label(crops)} with pan and scan" if crops else "")))


def _cells(
    run: Run, rows: Sequence[MeasuredCell], names: Mapping[str, str]
) -> tuple[tuple[ReportCell, ...], tuple[str, ...]]:
    """Return (cells, reasons of those that are unverified)."""
    memory = memory_metric(rows)[0]
    reasons = [clean(row.verdict.reason) for row in rows if row.verdict.word == "unverified"]
    footnotes = tuple(dict.fromkeys(reasons))
    costs = costs_of_cells(run)
    cells = tuple(
        _cell(run, row, number, names[row.cell], memory, footnotes, costs.get(row.cell))
        for number, row in enumerate(rows, 1)
    )
    return cells, footnotes


def _cell(
    run: Run,
    row: MeasuredCell,
    number: int,
    name: str,
    memory: str,
    footnotes: Sequence[str],
    cost: TaskCost | None,
) -> ReportCell:
    metrics, unverified = row.metrics, row.verdict.word == "unverified"
    peak = metrics.values[memory]
    floor = floor_of(run, row.cell)
    return ReportCell(
        number=number,
        cell=row.cell,
        name=name,
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


def _advice(
    run: Run, cells: Sequence[ReportCell], names: Mapping[str, str]
) -> tuple[Advice | None, str, tuple[str, ...]]:
    """Return (recommendation, why there is none, ids of the recommended cell and of those it is compared with)."""
    by_id = {cell.cell: cell for cell in cells}
    try:
        found = recommend(run)
    except RecordsError as error:
        return None, clean(str(error).removeprefix(f"{run.path}: ")), ()
    rejected = tuple((names[cell], clean(why)) for cell, why in found.rejected.items() if cell in by_id)
    cell, runner_up = by_id[found.cell], None if found.runner_up is None else by_id[found.runner_up]
    costs = tuple(map(clean, found.cost))
    advice = Advice(cell, clean(found.decision), clean(found.reason), costs, runner_up, rejected)
    return advice, "", tuple(filter(None, (found.cell, found.alternative, found.runner_up)))


def _warnings(run: Run, cells: Sequence[ReportCell], footnotes: Sequence[str]) -> list[str]:
    words = Counter(cell.verdict.word for cell in cells)
    found = []
    if words["unverified"]:
        every = words["unverified"] == len(cells)
        who = "No setting was" if every else _of(words["unverified"], len(cells), "was", "were") + " not"
        reasons = "; ".join(filter(None, footnotes))
        compared = f"{who} compared with the reference" + (f": {reasons}." if reasons else ".")
        found.append(f"{compared} Faster settings may have changed the model's answers.")
    if words["different"]:
        who = _of(words["different"], len(cells), "gives", "give")
        found.append(f"{who} different answers from the reference{_why(run, cells)}.")
    failed = sum(request.error is not None for requests in run.requests.values() for request in requests)
    if failed:
        found.append(f"{count(failed, 'request')} failed and {'is' if failed == 1 else 'are'} excluded.")
    if any(cell.too_quick for cell in cells):
        found.append(
            "Some times are below their floor: the machine was busy when its ceilings were measured, so these floors"
            " are too high."
        )
    return found + [clean(f"{note[:1].upper()}{note[1:]}.") for note in run.notes]


def _why(run: Run, cells: Sequence[ReportCell]) -> str:
    """Return an explanation if all cells with other answers have quantised weights; otherwise nothing."""
    different = [cell.cell for cell in cells if cell.verdict.word == "different"]
    return ": the weights are quantised" if all(is_quantized(run, cell) for cell in different) else ""


def _of(some: int, every: int, one: str, several: str) -> str:
    return f"{some} of {count(every, 'setting')} {one if some == 1 else several}"


def _unmeasured(run: Run) -> list[Unmeasured]:
    return [
        Unmeasured(group.outcome, clean(group.reason), group.cells, clean(group.shared)) for group in unmeasured(run)
    ]
