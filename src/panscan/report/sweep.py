"""Everything that a report of a sweep shows, as plain data derived from a run's records alone; its tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from panscan.analysis.accuracy import Accuracy, Standings, standings_of
from panscan.analysis.cells import (
    MeasuredCell,
    Unmeasured,
    alias_lines,
    cell_names,
    measured_rows,
    memory_metric,
    queueing_note,
    shared_settings,
    speedup_lines,
    unmeasured,
)
from panscan.analysis.floors import Floor, floor_of, ratios
from panscan.analysis.recommend import Recommendation, recommend
from panscan.analysis.setting_words import CROPS, label
from panscan.core import RecordsError
from panscan.core.text import capitalised, count
from panscan.records.fields import STAGES
from panscan.records.metrics import ReplicaShare, shares_of
from panscan.records.quality import metric_title
from panscan.records.store import Run
from panscan.report import definitions
from panscan.report.answers import Answers, answers_of
from panscan.report.charts import ChartGroup, Panel, by_request, comparisons, decision_charts, front_of
from panscan.report.formatting import verdict_figures
from panscan.report.table import (
    Column,
    Measured,
    Medium,
    Table,
    TableCell,
    measured,
    plain_text,
    quality_cell,
    with_interval,
)
from panscan.verdict.judgement import Verdict, is_quantized, token_lines

_SHOWN_LATENCIES = {"median_ttft_ms", "median_tpot_ms", "p95_e2el_ms"}


@dataclass(frozen=True, slots=True)
class ReportCell:
    """A measured cell.

    Args:
        number: its row in the table, from 1.
        row: its metrics and verdict.
        memory: the metric that is its peak memory.
        standing: its accuracy against the baseline's; None for the baseline, and without accepted answers.
        ratios: see :func:`panscan.analysis.floors.ratios`.
        weight_bytes: size of its weights; None if its load was not recorded.
        replicas: empty for a run of one process.
    """

    number: int
    row: MeasuredCell
    memory: str
    standing: Accuracy | None
    floor: Floor | None
    ratios: Mapping[str, float]
    weight_bytes: int | None
    replicas: tuple[ReplicaShare, ...]

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def verdict(self) -> Verdict:
        return self.row.verdict

    def measured(self, metric: str) -> Measured:
        """Return a metric with its interval."""
        return measured(self.row.metrics, metric)

    @property
    def memory_gib(self) -> Measured:
        """Return the peak memory."""
        return Measured(_gib(self.row.metrics.values[self.memory]))

    @property
    def stages(self) -> tuple[float | None, ...]:
        """Mean milliseconds, in the order of :data:`panscan.records.fields.STAGES`."""
        return tuple(self.row.metrics.values[f"mean_{stage}_ms"] for stage in STAGES)

    @property
    def e2e(self) -> float | None:
        """Mean milliseconds from accepted to the last token."""
        return self.row.metrics.values["mean_e2el_ms"]

    @property
    def too_quick(self) -> set[str]:
        """The names in ``ratios`` of times and rates below their floor: their ceilings were measured too low."""
        return {name for name, ratio in self.ratios.items() if ratio < 1}


_WEIGHTS: Column[ReportCell] = Column("weights GiB", lambda cell: Measured(_gib(cell.weight_bytes)), on=Medium.PAGES)


def _metric(title: str, metric: str, spare: int, terminal: str = "") -> Column[ReportCell]:
    return Column(title, lambda cell: cell.measured(metric), spare=spare, terminal=terminal)


def _mean(title: str, metric: str, spare: int) -> Column[ReportCell]:
    """Return a column of counts, without decimals on the terminal where there are none."""

    def read(cell: ReportCell) -> TableCell:
        figure = cell.measured(metric)
        value = figure.value
        rounded = value is not None and (value == round(value) or value >= 100)
        terminal = "-" if value is None else f"{value:,.0f}" if rounded else f"{value:.1f}"
        return TableCell(figure.text, value, figure.bounds, terminal=terminal)

    return Column(title, read, spare=spare)


class SweepReport(definitions.RunFacts):
    """The report of a sweep; also of one without a measured cell. Every part is computed when it is first read.

    Raises:
        RecordsError: a cell's stamps contradict its counts.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.rows, self.names = measured_rows(run), cell_names(run)
        self.settings = [row.display_settings for row in self.rows] or [cell.settings for cell in run.cells.values()]
        self.models = definitions.model_names(run)
        self.machine = definitions.machine(run)
        self.note = definitions.weights_note(run)
        self.quality_title = metric_title(run)
        self.queueing = queueing_note(self.rows)
        self.speedups = speedup_lines(self.rows)
        facts = run.header.settings.dataset
        self.dataset = "" if facts is None else f"Dataset {facts.text}."
        self.aliases = alias_lines(run, self.names)
        self.tokens = token_lines([row.verdict for row in self.rows])
        self.memory_metric, self.memory = memory_metric(self.rows)
        self.unmeasured = unmeasured(run)
        self.uncertified = any(_SHOWN_LATENCIES & set(row.metrics.uncertified) for row in self.rows)

    @cached_property
    def standings(self) -> Standings:
        """The accuracy of the cells against the baseline's."""
        return standings_of(self.run, self.rows)

    @cached_property
    def cells(self) -> tuple[ReportCell, ...]:
        """The measured cells."""
        floors = [floor_of(self.run, row.cell) for row in self.rows]
        loads = [self.run.loads.get(row.cell) for row in self.rows]
        return tuple(
            ReportCell(
                number=number,
                row=row,
                memory=self.memory_metric,
                standing=self.standings.cells.get(row.cell),
                floor=floor,
                ratios={} if floor is None else ratios(floor, row.metrics),
                weight_bytes=None if load is None else load.weight_bytes,
                replicas=tuple(shares_of(self.run.repeats_of(row.cell))),
            )
            for number, (row, floor, load) in enumerate(zip(self.rows, floors, loads, strict=True), 1)
        )

    @cached_property
    def by_id(self) -> dict[str, ReportCell]:
        """The measured cells by their id."""
        return {cell.row.cell: cell for cell in self.cells}

    @cached_property
    def columns(self) -> tuple[Column[ReportCell], ...]:
        """The columns of the measured cells: a new one is a line here."""
        title = self.quality_title
        return (
            Column("setting", lambda cell: cell.name, on=~Medium.MARKDOWN, text=Medium.ALL),
            Column("setting", self._marked_setting, on=Medium.MARKDOWN),
            Column(
                title,
                lambda cell: quality_cell(cell.row.quality),
                optional=Medium.ALL,
                markdown=f"{title}, 95%",
                spare=14,
            ),
            Column("accuracy vs baseline", _standing_cell, on=~Medium.TERMINAL, optional=Medium.ALL),
            Column(
                "requests/s",
                lambda cell: with_interval(cell.measured("request_throughput")),
                terminal="req/s",
                markdown="requests/s (95%)",
            ),
            _metric("TTFT ms", "median_ttft_ms", 11),
            _metric("TPOT ms", "median_tpot_ms", 10),
            _metric("p95 E2E ms", "p95_e2el_ms", 12, "E2E p95\nms"),
            Column("verdict", lambda cell: cell.verdict.word, text=Medium.HTML),
        )

    @cached_property
    def details(self) -> tuple[Column[ReportCell], ...]:
        """The columns that pages fold and narrow terminals leave out."""
        return (
            Column("id", lambda cell: cell.row.cell, on=Medium.PAGES, text=Medium.HTML),
            Column("distance from the reference", _distance, on=Medium.PAGES, text=Medium.HTML),
            _mean("views", "mean_views", spare=2),
            _mean("image tokens", "mean_image_tokens", spare=1),
            Column(f"{self.memory} GiB", lambda cell: cell.memory_gib, spare=3),
            *([_WEIGHTS] if len({load.weight_bytes for load in self.run.loads.values()}) > 1 else ()),
        )

    def _marked_setting(self, cell: ReportCell) -> TableCell:
        """Return a setting's name, the recommended one in bold."""
        return TableCell(cell.name, markdown=f"**{plain_text(cell.name)}**" if cell is self.best else "")

    @cached_property
    def table(self) -> Table[ReportCell]:
        """The table of measured cells, on pages."""
        return Table(self.columns, self.cells)

    @cached_property
    def details_table(self) -> Table[ReportCell]:
        """What only some readers need: ids, distances from the reference, views and memory."""
        return Table((Column("setting", lambda cell: cell.name, text=Medium.ALL), *self.details), self.cells)

    @cached_property
    def whole_table(self) -> Table[ReportCell]:
        """The table of measured cells with its details, on the terminal."""
        return Table((*self.columns, *self.details), self.cells)

    @cached_property
    def _recommended(self) -> tuple[Recommendation | None, str]:
        """The recommendation, or why there is none."""
        try:
            return recommend(self.run), ""
        except RecordsError as error:
            return None, str(error).removeprefix(f"{self.run.path}: ")

    @property
    def advice(self) -> Recommendation | None:
        """The recommendation; None if no cell qualifies."""
        return self._recommended[0]

    @property
    def no_advice(self) -> str:
        """Why no cell is recommended; empty if one is."""
        return self._recommended[1]

    @property
    def recommendation(self) -> str:
        """The recommendation in one sentence, or why there is none."""
        return f"No recommendation: {self.no_advice}." if self.advice is None else self.advice.decision

    @property
    def best(self) -> ReportCell | None:
        """The recommended cell."""
        return None if self.advice is None else self.by_id[self.advice.cell]

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(name, reason) of each measured cell that does not qualify."""
        rejected = {} if self.advice is None else self.advice.rejected
        return [(self.names[cell], why) for cell, why in rejected.items() if cell in self.by_id]

    @cached_property
    def decision(self) -> ChartGroup:
        """Charts of the recommended cell and its alternatives."""
        chosen = self.advice
        compared = () if chosen is None else (chosen.cell, chosen.alternative, chosen.runner_up)
        return decision_charts(self.rows, list(filter(None, compared)), self.quality_title)

    @cached_property
    def comparisons(self) -> list[ChartGroup]:
        """Throughput and latency over each swept setting."""
        return comparisons(self.rows)

    @cached_property
    def front(self) -> Panel | None:
        """Speed against quality, or against the distance from the reference."""
        best = None if self.advice is None else self.advice.cell
        return front_of(self.rows, best, self.quality_title, self.standings)

    @cached_property
    def latency(self) -> ChartGroup:
        """Latency by view count and aspect ratio."""
        return by_request(self.run, self.rows)

    @cached_property
    def answers(self) -> Answers | None:
        """Answers against the baseline; None for a run without scores."""
        return answers_of(self.run, self.rows, self.standings)

    @cached_property
    def references(self) -> list[definitions.ReferenceSummary]:
        """The references, and what was compared with them."""
        return definitions.references(self.run, self.names)

    @cached_property
    def constant(self) -> str:
        """The settings that are alike; those of crops mean nothing in a cell without any."""
        every, crops = shared_settings(self.settings), {}
        if not all(cell.get("do_pan_and_scan", True) for cell in self.settings):
            crops = {name: every.pop(name) for name in list(every) if name.startswith(CROPS)}
        return "; ".join(filter(None, (label(every), f"{label(crops)} with pan and scan" if crops else "")))

    @property
    def failures(self) -> str:
        """How many requests failed; empty if none did."""
        failed = sum(request.error is not None for requests in self.run.requests.values() for request in requests)
        return f"{count(failed, 'request')} failed and {'is' if failed == 1 else 'are'} excluded." if failed else ""

    @cached_property
    def warnings(self) -> list[str]:
        """Caveats about the figures."""
        words = Counter(cell.verdict.word for cell in self.cells)
        lines = []
        if words["unverified"]:
            every = words["unverified"] == len(self.cells)
            who = "No setting was" if every else _some_of(words["unverified"], len(self.cells), "was", "were") + " not"
            reasons = "; ".join(dict.fromkeys(filter(None, map(_unverified_reason, self.cells))))
            compared = f"{who} compared with the reference" + (f": {reasons}." if reasons else ".")
            lines.append(f"{compared} Faster settings may have changed the model's answers.")
        if words["different"]:
            different = [cell.row.cell for cell in self.cells if cell.verdict.word == "different"]
            why = ": the weights are quantised" if all(is_quantized(self.run, cell) for cell in different) else ""
            who = _some_of(len(different), len(self.cells), "gives", "give")
            lines.append(f"{who} different answers from the reference{why}.")
        lines += filter(None, [self.failures])
        if any(cell.too_quick for cell in self.cells):
            lines.append(
                "Some times are below their floor: the machine was busy when its ceilings were measured, so these"
                " floors are too high."
            )
        return lines + [f"{capitalised(note)}." for note in self.run.notes]


def _some_of(some: int, every: int, one: str, several: str) -> str:
    return f"{some} of {count(every, 'setting')} {one if some == 1 else several}"


def unmeasured_text(group: Unmeasured) -> str:
    """Return how many cells have a fate, why, and the settings that they share."""
    reason, shared = (f": {group.reason}" if group.reason else ""), (f" ({group.shared})" if group.shared else "")
    return f"{count(len(group.cells), 'setting')} {group.outcome}{reason}{shared}"


def _standing_cell(cell: ReportCell) -> TableCell:
    if cell.standing is None:
        return TableCell("-")
    return TableCell(cell.standing.short_text, cell.standing.difference.value)


def _distance(cell: ReportCell) -> str:
    """Return how far a cell is from the reference, or why that is not known."""
    return ", ".join(verdict_figures(cell.verdict)) or _unverified_reason(cell) or "-"


def _unverified_reason(cell: ReportCell) -> str:
    return cell.verdict.reason if cell.verdict.word == "unverified" else ""


def _gib(size: float | None) -> float | None:
    return None if size is None else size / 2**30
