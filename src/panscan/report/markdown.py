"""A report as markdown for an issue tracker: the recommendation, one table, what was not measured, how to repeat it."""

from __future__ import annotations

import re

from panscan.analysis.cells import Unmeasured, count
from panscan.analysis.quantization import TradeoffTable
from panscan.analysis.task_cost import TITLE
from panscan.report.answers import Answers, Groups, quality_text
from panscan.report.formatting import verdict_figures
from panscan.report.markdown_text import code_block, plain_text, table_lines
from panscan.report.report_data import ReportCell, ReportData

__all__ = ["render_markdown"]

_UNFIT = re.compile(r"[^\w.-]")  # for code in a table: no id of panscan's own has any


def render_markdown(facts: ReportData) -> str:
    """Return GitHub-flavoured markdown. Foreign text is escaped, and mentions no person and no other issue."""
    parts = [f"### {plain_text(', '.join(facts.models))} on {plain_text(facts.machine)}", _headline(facts), facts.note]
    parts += [f"> {plain_text(warning)}" for warning in facts.warnings]
    parts += [f"All settings: {plain_text(facts.constant)}" if facts.constant else "", plain_text(facts.dataset)]
    if facts.cells:
        lines = map(plain_text, (*facts.aliases, *facts.costs, *facts.speedups))
        parts += [_table(facts), _legend(facts), *lines, _details(facts)]
    if facts.tradeoffs is not None:
        parts += _tradeoffs(facts.tradeoffs)
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
    lines = [f"**{plain_text(advice.decision)}**", f"Reason: {plain_text(advice.reason)}."]
    if advice.runner_up is not None:
        lines.append(f"Runner-up: {plain_text(advice.runner_up.name)}.")
    notes = [*advice.costs, *(f"rejected: {name}: {why}" for name, why in advice.rejected)]
    return "\n\n".join([*lines, "\n".join(f"- {plain_text(note)}" for note in notes)]).rstrip()


def _table(facts: ReportData) -> str:
    quality = any(cell.quality for cell in facts.cells)
    headings = [
        "setting",
        *([f"{facts.quality_title}, 95%"] if quality else []),
        *([TITLE] if facts.costs else []),
        *("requests/s (95%)", "TTFT ms", "TPOT ms", "p95 E2E ms", "verdict"),
    ]
    best = None if facts.advice is None else facts.advice.cell
    rows = [_row(cell, chosen=cell is best, quality=quality, costs=bool(facts.costs)) for cell in facts.cells]
    return table_lines(headings, rows)


def _row(cell: ReportCell, *, chosen: bool, quality: bool, costs: bool) -> list[str]:
    return [
        f"**{plain_text(cell.name)}**" if chosen else plain_text(cell.name),
        *([quality_text(cell.quality)] if quality else []),
        *([plain_text(cell.cost.text) if cell.cost else "-"] if costs else []),
        plain_text(cell.throughput.whole),
        *(plain_text(each.text) for each in (cell.ttft, cell.tpot, cell.p95)),
        cell.verdict.word,
    ]


def _details(facts: ReportData) -> str:
    """Return what only some readers need, folded: ids, distances from the reference, views and memory."""
    headings = ["setting", "id", "distance from the reference", "views", "image tokens", f"{facts.memory} GiB"]
    rows = []
    for cell in facts.cells:
        figures = "; ".join(verdict_figures(cell.verdict)) or cell.verdict.reason
        texts = (cell.views.text, cell.image_tokens.text, cell.memory_gib.text)
        distance = plain_text(" ".join(figures.split())) or "-"
        rows.append([plain_text(cell.name), f"`{_UNFIT.sub('_', cell.cell)}`", distance, *map(plain_text, texts)])
    return f"<details><summary>Details</summary>\n\n{table_lines(headings, rows)}\n\n</details>"


def _tradeoffs(found: TradeoffTable) -> list[str]:
    rows = [[plain_text(cell), *map(plain_text, texts)] for cell, texts in zip(found.cells, found.rows, strict=True)]
    table = table_lines(["setting", *map(plain_text, found.headings)], rows)
    return ["#### Quantisation trade-offs", table, plain_text(found.note)]


def _answers(found: Answers) -> list[str]:
    """Every metric, cells against the baseline, and the breakdowns."""
    against = [] if found.baseline is None else [f"against {plain_text(found.baseline)}"]
    rows = [
        [
            plain_text(cell.name),
            *map(quality_text, cell.scores),
            "-" if cell.empty is None else str(cell.empty),
            *([plain_text(cell.against) or "-"] if against else []),
        ]
        for cell in found.cells
    ]
    table = table_lines(["setting", *(f"{each}, 95%" for each in found.metrics), "empty answers", *against], rows)
    return ["#### Answers", table, *(_breakdown(found.metrics[0], groups) for groups in found.groups)]


def _breakdown(metric: str, groups: Groups) -> str:
    rows = [[plain_text(name), *map(quality_text, qualities)] for name, qualities in groups.rows]
    left_out = f" ({count(groups.left_out, 'smaller group')} not shown)" if groups.left_out else ""
    title = f"{metric[:1].upper()}{metric[1:]} by {groups.name}, question counts in parentheses{left_out}"
    table = table_lines(["setting", *map(plain_text, groups.headings)], rows)
    if groups.small:
        return f"<details><summary>{plain_text(title)}</summary>\n\n{table}\n\n</details>"
    return f"{plain_text(title)}:\n\n{table}"


def _legend(facts: ReportData) -> str:
    legend = (
        "TTFT and TPOT are medians; 95% intervals in parentheses; the verdict compares with float32 eager attention."
    )
    marked = any(each.uncertified for cell in facts.cells for each in (cell.ttft, cell.tpot, cell.p95))
    return legend + (r" \~ has too few samples for 99% confidence." if marked else "")


def _group(group: Unmeasured) -> str:
    text = f"{count(len(group.cells), 'setting')} {group.outcome}" + (f": {group.reason}" if group.reason else "")
    return plain_text(text + (f" ({group.shared})" if group.shared else ""))


def _origin(facts: ReportData) -> str:
    parts = [f"Reference: {each.model}, {count(each.requests, 'request')}, {each.origin}." for each in facts.references]
    versions = "; ".join(f"{name}: {text}" for name, text in facts.environment)
    return plain_text(" ".join([*parts, f"{facts.created}; {versions}" if versions else facts.created]))
