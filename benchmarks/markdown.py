"""Tables as the pages show them."""

from __future__ import annotations

__all__ = ["table"]


def table(headings: list[str], rows: list[list[str]]) -> str:
    """The first column is text, the others are numbers."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
