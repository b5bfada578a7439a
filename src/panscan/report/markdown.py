"""A report as markdown for an issue tracker: the recommendation, one table, what was not measured, how to repeat it."""

from __future__ import annotations

import re

from panscan.analysis.cells import Unmeasured, count, number_text
from panscan.analysis.quantization import PriceTable
from panscan.analysis.task_cost import TITLE
from panscan.report.answers import Answers, Groups, quality_text
from panscan.report.formatting import verdict_figures
from panscan.report.markdown_text import code_block, plain_text, table_lines
from panscan.report.report_data import ReportCell, ReportData

__all__ = ["render_markdown"]

_UNFIT = re.compile(r"[^\w.-]")  # for code in a table: no id of panscan's own has any


def render_markdown(facts: ReportData) -> str:
    """GitHub-flavoured markdown. Foreign text is escaped, and mentions no person and no other issue."""
    parts = [f"### {plain_text(', '.join(facts.models))} on {plain_text(facts.machine)}", _headline(facts), facts.note]
    parts += [f"> {plain_text(warning)}" for warning in facts.warnings]
    parts += [plain_text(facts.constant), plain_text(facts.dataset)]
    if facts.cells:
        parts += [_table(facts), *map(plain_text, (*facts.aliases, *facts.costs, *facts.speedups)), _legend(facts)]
    if facts.prices is not None:
        parts += _prices(facts.prices)
    if facts.answers is not None:
        parts += _answers(facts.answers)
    if facts.unmeasured:
        parts.append("Not measured:\n\n" + "\n".join(f"- {_group(group)}" for group in facts.unmeasured))
    parts += [_origin(facts), code_block(facts.command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(facts: ReportData) -> str:
    advice = facts.advice
    if advice is None:
        return f"**No recommendation:** {plain_text(facts.no_advice)}"
    lines = [f"**Recommended: cell {plain_text(advice.cell.name)}.** {plain_text(advice.reason)}"]
    if advice.runner_up is not None:
        lines.append(f"Runner-up: cell {plain_text(advice.runner_up.name)}.")
    return "\n\n".join([*lines, "\n".join(f"- {plain_text(cost)}" for cost in advice.costs)]).rstrip()


def _table(facts: ReportData) -> str:
    presets, quality = any(cell.preset for cell in facts.cells), any(cell.quality for cell in facts.cells)
    headings = [
        "cell",
        *(["preset"] if presets else []),
        *map(plain_text, facts.swept),
        *("req/s (95%)", "verdict"),
        *([TITLE] if facts.costs else []),
        *("TTFT ms", "TPOT ms", "p95 E2E ms", "views", "image tokens", f"{facts.memory} GiB"),
        *([f"{facts.quality_title}, 95%"] if quality else []),
    ]
    rows = [_row(cell, presets=presets, quality=quality, costs=bool(facts.costs)) for cell in facts.cells]
    return table_lines(headings, rows)


def _row(cell: ReportCell, *, presets: bool, quality: bool, costs: bool) -> list[str]:
    figures = "; ".join(verdict_figures(cell.verdict)) or cell.verdict.reason
    return [
        f"{cell.number} `{_UNFIT.sub('_', cell.cell)}`",
        *([plain_text(cell.preset) or "-"] if presets else []),
        *map(plain_text, cell.settings),
        plain_text(cell.throughput.whole),
        plain_text(f"{cell.verdict.word} ({' '.join(figures.split())})" if figures else cell.verdict.word),
        *([plain_text(cell.cost.text) if cell.cost else "-"] if costs else []),
        *(plain_text(each.text) for each in (cell.ttft, cell.tpot, cell.p95, cell.views, cell.image_tokens)),
        cell.memory_gib.text,
        *([quality_text(cell.quality)] if quality else []),
    ]


def _prices(found: PriceTable) -> list[str]:
    rows = [[cell, *map(plain_text, texts)] for cell, texts in zip(found.cells, found.rows, strict=True)]
    table = table_lines(["cell", *map(plain_text, found.headings)], rows)
    return ["#### Quantisation trade-offs", table, plain_text(found.note)]


def _answers(found: Answers) -> list[str]:
    """Every metric, cells against the baseline, and the breakdowns."""
    against = [] if found.baseline is None else [f"against cell {found.baseline}"]
    rows = [
        [
            str(cell.number),
            *map(quality_text, cell.scores),
            "-" if cell.empty is None else str(cell.empty),
            *([plain_text(cell.against) or "-"] if against else []),
        ]
        for cell in found.cells
    ]
    table = table_lines(["cell", *(f"{each}, 95%" for each in found.metrics), "empty answers", *against], rows)
    return ["#### Answers", table, *(_breakdown(found.metrics[0], groups) for groups in found.groups)]


def _breakdown(metric: str, groups: Groups) -> str:
    rows = [[str(number), *map(quality_text, qualities)] for number, qualities in groups.rows]
    left_out = f" ({count(groups.left_out, 'smaller group')} left out)" if groups.left_out else ""
    title = f"{metric} by {groups.name}, number of questions in brackets{left_out}:"
    return f"{plain_text(title)}\n\n{table_lines(['cell', *map(plain_text, groups.headings)], rows)}"


def _legend(facts: ReportData) -> str:
    legend = "TTFT and TPOT are medians; brackets hold 95% intervals; verdicts compare with float32 eager attention."
    marked = any(each.uncertified for cell in facts.cells for each in (cell.ttft, cell.tpot, cell.p95))
    return legend + (r" \~ has too few samples for 99% confidence." if marked else "")


def _group(group: Unmeasured) -> str:
    text = f"{count(len(group.cells), 'cell')} {group.outcome}" + (f": {group.reason}" if group.reason else "")
    return plain_text(text + (f" ({group.shared})" if group.shared else ""))


def _origin(facts: ReportData) -> str:
    parts = [
        f"Truth: {truth.model}, {count(truth.requests, 'request')}, {truth.origin} in {number_text(truth.seconds)} s."
        for truth in facts.truths
    ]
    versions = "; ".join(f"{name}: {text}" for name, text in facts.environment)
    return plain_text(" ".join([*parts, f"{facts.created}; {versions}" if versions else facts.created]))
