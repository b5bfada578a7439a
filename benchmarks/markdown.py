"""Tables as the pages show them."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["table"]


def table(headings: list[str], rows: list[list[str]], text: Collection[int] = (0,)) -> str:
    """Return a table; columns at the positions ``text`` hold text, the others numbers."""
    lines = [headings, ["---" if at in text else "---:" for at in range(len(headings))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
