"""A load run as markdown for an issue tracker: the result, one table of levels, one of latencies, the command."""

from __future__ import annotations

from panscan.analysis.levels import VERIFY_HINT
from panscan.report.load_data import LoadReport
from panscan.report.markdown_text import code_block, plain_text, table_lines

__all__ = ["render_load_markdown"]


def render_load_markdown(facts: LoadReport) -> str:
    """Return GitHub-flavoured markdown. Foreign text is escaped."""
    parts = [f"### {plain_text(facts.title)}", f"**{plain_text(facts.result.headline)}.**"]
    parts += [f"{plain_text(note)}." for note in facts.result.notes]
    parts += [f"> {plain_text(warning)}" for warning in facts.warnings]
    parts += [plain_text(VERIFY_HINT), _settings(facts)]
    if facts.rows:
        parts += [_levels(facts), _latencies(facts)]
    parts += _lists(facts)
    parts += [plain_text(f"{facts.created}; " + "; ".join(f"{name}: {text}" for name, text in facts.environment))]
    return "\n\n".join(part for part in [*parts, code_block(facts.command)] if part) + "\n"


def _settings(facts: LoadReport) -> str:
    return plain_text(
        "; ".join(f"{name}: {text}" for name, text in facts.settings if name not in ("endpoint", "model"))
    )


def _levels(facts: LoadReport) -> str:
    limited = ["goodput req/s", "within limits, %"] if facts.limits else []
    headings = ["level", "offered req/s", "answered req/s", "output tokens/s", *limited]
    headings += ["failed", "keeps up", "queued ms", "lag ms"]
    rows = [
        [
            plain_text(row.name) + (" (generator-limited)" if row.limited else ""),
            *(plain_text(each.whole) for each in (row.offered, row.achieved, row.output)),
            *([row.goodput.text, plain_text(row.attainment.whole)] if facts.limits else []),
            f"{row.failed} of {row.sent}",
            row.keeps_up,
            row.queued.text,
            row.lag,
        ]
        for row in facts.rows
    ]
    return table_lines(headings, rows)


def _latencies(facts: LoadReport) -> str:
    headings = ["level", *(f"{name} {each}" for _, name in facts.times for each in facts.percentiles)]
    rows = [
        [plain_text(row.name), *(plain_text(each.text) for time, _ in facts.times for each in row.times[time])]
        for row in facts.rows
    ]
    marked = any(each.uncertified for row in facts.rows for time, _ in facts.times for each in row.times[time])
    legend = r" \~ has too few samples for 99% confidence." if marked else ""
    return f"Milliseconds.{legend}\n\n{table_lines(headings, rows)}"


def _lists(facts: LoadReport) -> list[str]:
    """Return errors and levels without a result."""
    errors = [f"- {plain_text(f'{each.kind}, {each.requests} requests: {each.example}')}" for each in facts.errors]
    levels = [f"- {plain_text(line)}" for line in facts.unfinished]
    found = ["Errors:\n\n" + "\n".join(errors)] if errors else []
    return found + (["Without a result:\n\n" + "\n".join(levels)] if levels else [])
