"""Numbers and foreign text as the report writes them. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from panscan.analysis.cells import count, number_text
from panscan.core import escape_controls
from panscan.records.schema import FLOOR
from panscan.records.verdict import Verdict

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "FEW",
    "clean",
    "cut",
    "nats",
    "percent",
    "print_line",
    "safe_text",
    "templates",
    "times",
    "verdict_figures",
]

FEW = 20
"""Groups of fewer samples are too small to compare settings: they are folded."""
_ASCII = str.maketrans({"±": "+-", "≤": "<=", "–": "-", "█": "#", "─": "-", "│": "|"} | dict.fromkeys("┌┐└┘├┤┬┴┼", "+"))


def clean(text: object) -> str:
    """One line of foreign text: no line breaks, and nothing that XML or UTF-8 cannot hold or that turns text around."""
    line = " ".join(str(text).split())
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_unfit(letter) else letter for letter in line)


def _is_unfit(letter: str) -> bool:
    """Control characters, lone surrogates, noncharacters, and the marks that reverse what follows."""
    code = ord(letter)
    if unicodedata.category(letter) in ("Cc", "Cs") or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return True
    return unicodedata.bidirectional(letter) in ("RLO", "LRO", "RLE", "LRE", "RLI", "LRI", "FSI", "PDF", "PDI")


def cut(text: str, most: int) -> str:
    """At most so many characters; an ellipsis stands for the rest."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def nats(divergence: float | None) -> str:
    """A KL divergence: two digits, or a dash."""
    return "-" if divergence is None else f"{divergence:.2g}"


def times(ratio: float) -> str:
    """How many times: ``1.02x``."""
    return f"{number_text(ratio)}x"


def percent(share: float) -> str:
    """A share from 0 to 1; ``100%`` only for all of it."""
    text = f"{100 * share:.1f}"
    return "99.9%" if text == "100.0" and share < 1 else re.sub(r"\.0$", "", text) + "%"


def verdict_figures(verdict: Verdict) -> tuple[str, ...]:
    """What a verdict rests on: times the noise by kind of position, top-1 agreement, equal tokens where compared."""
    found = [
        f"{name} below {FLOOR:g} nats" if divergence.negligible else f"{name} {times(divergence.ratio)}"
        for name, divergence in (("answer", verdict.answer), ("image", verdict.image))
        if divergence is not None
    ]
    if verdict.top1 is not None:
        found.append(f"top-1 {percent(verdict.top1.share)}")
    if verdict.equal_tokens is not None:
        found.append("tokens equal" if verdict.equal_tokens else "tokens differ")
    return tuple(found)


def safe_text(console: Console, text: str) -> Text:
    """Never markup or control characters, and only what the console can encode: names and reasons come from outside."""
    from rich.text import Text

    text = escape_controls(text) if console.is_terminal else text
    return Text(text.translate(_ASCII) if console.options.ascii_only else text)


def print_line(console: Console, text: str) -> None:
    """One line, wrapped by the console."""
    console.print(safe_text(console, " ".join(text.split())))


def templates() -> Environment:
    """The pages' templates: everything that is filled in is escaped, and a name that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("panscan.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number_text, percent=percent, times=times, count=count, clean=clean)
    return environment
