"""A report as markdown for an issue tracker: the result, its tables, what was not measured, how to repeat it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from panscan.analysis.levels import VERIFY_HINT
from panscan.core.text import count
from panscan.report.answers import Breakdown
from panscan.report.definitions import RunFacts
from panscan.report.load import LoadReport
from panscan.report.sweep import SweepReport, unmeasured_text
from panscan.report.table import plain_text

_UNCERTIFIED = r" \~ has too few samples for 99% confidence."


def render_markdown(facts: SweepReport | LoadReport) -> str:
    """Return GitHub-flavoured markdown. Foreign text is escaped, and mentions no person and no other issue."""
    parts = _load_parts(facts) if isinstance(facts, LoadReport) else _sweep_parts(facts)
    longest = max(map(len, re.findall("`+", facts.command)), default=0)
    fence = "`" * max(3, longest + 1)  # longer than any in the command
    return "\n\n".join(filter(None, [*parts, f"{fence}sh\n{facts.command}\n{fence}"])) + "\n"


def _sweep_parts(facts: SweepReport) -> list[str]:
    parts = [f"### {plain_text(', '.join(facts.models))} on {plain_text(facts.machine)}", _headline(facts), facts.note]
    parts += [f"> {plain_text(warning)}" for warning in facts.warnings]
    parts += [f"All settings: {plain_text(facts.constant)}" if facts.constant else "", plain_text(facts.dataset)]
    if facts.cells:
        legend = (
            "TTFT and TPOT are medians; 95% intervals in parentheses; the verdict compares with float32 eager"
            " attention."
        )
        parts += [facts.table.markdown(), legend + _UNCERTIFIED * facts.uncertified]
        parts += map(plain_text, (*facts.aliases, *facts.speedups))
        parts.append(_folded("Details", facts.details_table.markdown()))
    if facts.answers is not None:
        parts += ["#### Answers", facts.answers.table.markdown()]
        parts += [_breakdown(title, grouping, table.markdown()) for title, grouping, table in facts.answers.grouped]
    parts.append(_bullets("Not measured:", map(unmeasured_text, facts.unmeasured)))
    origins = [
        f"Reference: {reference.truth.model}, {count(reference.truth.requests, 'request')}, {reference.origin}."
        for reference in facts.references
    ]
    return [*parts, _origin(facts, " ".join([*origins, facts.created]))]


def _headline(facts: SweepReport) -> str:
    advice = facts.advice
    if advice is None:
        return f"**No recommendation:** {plain_text(facts.no_advice)}"
    lines = [f"**{plain_text(advice.decision)}**", f"Reason: {plain_text(advice.reason)}."]
    if advice.runner_up is not None:
        lines.append(f"Runner-up: {plain_text(facts.names[advice.runner_up])}.")
    notes = [*advice.cost, *(f"rejected: {name}: {why}" for name, why in facts.rejected)]
    return "\n\n".join([*lines, "\n".join(f"- {plain_text(note)}" for note in notes)]).rstrip()


def _breakdown(title: str, grouping: Breakdown, table: str) -> str:
    left_out = f" ({count(grouping.left_out, 'smaller group')} not shown)" if grouping.left_out else ""
    title = plain_text(f"{title}, question counts in parentheses{left_out}")
    return _folded(title, table) if grouping.small else f"{title}:\n\n{table}"


def _load_parts(facts: LoadReport) -> list[str]:
    shared = "; ".join(f"{name}: {text}" for name, text in facts.shared if name not in ("endpoint", "model"))
    parts = [f"### {plain_text(facts.title)}", f"**{plain_text(facts.headline)}.**"]
    parts += [f"{plain_text(note)}." for note in facts.notes]
    parts += [f"> {plain_text(warning)}" for warning in facts.warnings]
    parts += [plain_text(VERIFY_HINT), plain_text(shared)]
    if facts.rows:
        legend = f"{plain_text(facts.steadiness)} Milliseconds.{_UNCERTIFIED * facts.uncertified}"
        parts += [facts.whole_table.markdown(), f"{legend}\n\n{facts.latencies.markdown()}"]
    errors = (f"{group.kind}, {group.requests} requests: {group.example}" for group in facts.errors)
    parts += [_bullets("Errors:", errors), _bullets("Without a result:", facts.unfinished)]
    return [*parts, _origin(facts, facts.created)]


def _bullets(title: str, lines: Iterable[str]) -> str:
    """Return a list with its title; nothing for an empty list."""
    items = [f"- {plain_text(line)}" for line in lines]
    return "\n".join((f"{title}\n", *items)) if items else ""


def _folded(summary: str, table: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{table}\n\n</details>"


def _origin(facts: RunFacts, text: str) -> str:
    versions = "; ".join(f"{name}: {value}" for name, value in facts.environment)
    return plain_text(f"{text}; {versions}" if versions else text)
