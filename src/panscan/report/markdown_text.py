"""Foreign text, tables and code in GitHub-flavoured markdown. Pure."""

from __future__ import annotations

import re

__all__ = ["code_block", "plain_text", "table_lines"]

_SPECIAL = re.compile(r"([\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_]))")  # a single _ within a word is literal
_MENTION = re.compile(r"(?<=[@#])(?=\w)")


def plain_text(text: str) -> str:
    """Return text escaped to render literally: no markup, no mentions, no references."""
    return _MENTION.sub("<!-- -->", _SPECIAL.sub(r"\\\1", text))


def table_lines(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are markdown already."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *rows))


def code_block(text: str) -> str:
    """Return a block of code, in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"
