"""Numbers as reports write them, and foreign text that no terminal or page may obey."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import floor, log10

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"  # a lone carriage return overwrites its line
    r"|[\u202a-\u202e\u2066-\u2069]"  # these show text in another order
)
_NONCHARACTERS = "".join(chr(plane + last) for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF))
_UNFIT = re.compile(
    r"[\x00-\x1f\x7f-\x9f\ud800-\udfff"  # control characters, lone surrogates
    rf"\ufdd0-\ufdef{_NONCHARACTERS}"
    r"\u202a-\u202e\u2066-\u2069]"  # these turn text around
)


def escape_controls(text: str) -> str:
    """Write control characters and changes of direction as ``\\uXXXX``, as in JSON; tabs and line breaks stay."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def decimal_places(value: float) -> int:
    """Decimals that show three digits."""
    return max(0, 2 - floor(log10(abs(value)))) if value else 0


def number_text(value: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"{value:,.{decimal_places(value)}f}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Iterable[object], word: str = "or") -> str:
    """Items as a list: ``fp8, int8 or int4``."""
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last


def capitalised(text: str) -> str:
    """The text as the beginning of a sentence; other letters as they are."""
    return text[:1].upper() + text[1:]


def clean(text: object) -> str:
    """One line of foreign text: no line breaks, and nothing that XML or UTF-8 cannot hold or that turns text around."""
    line = " ".join(str(text).split())
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", line)


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
