"""Lines on the terminal, verdicts in figures, and the templates of pages."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

from panscan.core import escape_controls
from panscan.core.text import clean, count, number_text, percent, times
from panscan.records.fields import FLOOR
from panscan.verdict.judgement import Verdict

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console
    from rich.text import Text


FEW = 20
"""Groups of fewer samples are too small to compare settings: they are folded."""
_ASCII = str.maketrans({"±": "+-", "≤": "<=", "–": "-", "█": "#", "─": "-", "│": "|"} | dict.fromkeys("┌┐└┘├┤┬┴┼", "+"))


def verdict_figures(verdict: Verdict) -> tuple[str, ...]:
    """What a verdict rests on: times the noise by kind of position, top-1 agreement, equal tokens where compared."""
    figures = [
        f"{name} below {FLOOR:g} nats" if divergence.negligible else f"{name} {times(divergence.ratio)}"
        for name, divergence in (("answer", verdict.answer), ("image", verdict.image))
        if divergence is not None
    ]
    if verdict.top1 is not None:
        figures.append(f"top-1 {percent(verdict.top1.share)}")
    if verdict.equal_tokens is not None:
        figures.append("tokens equal" if verdict.equal_tokens else "tokens differ")
    return tuple(figures)


def safe_text(console: Console, text: str) -> Text:
    """Never markup or control characters, and only what the console can encode: names and reasons come from outside."""
    from rich.text import Text

    text = escape_controls(text) if console.is_terminal else text
    return Text(text.translate(_ASCII) if console.options.ascii_only else text)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a paragraph, wrapped by the console; commands and paths, which are copied, need ``soft_wrap`` instead."""
    console.print(safe_text(console, " ".join(text.split())), style=style)


@cache
def templates() -> Environment:
    """The pages' templates: what is filled in is cleaned and escaped, and a name that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("panscan.report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or str(value).isprintable() else clean(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number_text, percent=percent, times=times, count=count)
    return environment
