"""Tables and numbers as the pages show them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from panscan.analysis.accuracy import Accuracy, decide_accuracy, paired_difference
from panscan.core.text import listed


def table(headings: list[str], rows: list[list[str]], text: Collection[int] = (0,)) -> str:
    """Return a table; columns at the positions ``text`` hold text, the others numbers."""
    lines = [headings, ["---" if column in text else "---:" for column in range(len(headings))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def days(times: Iterable[str]) -> str:
    """Return the days of times in ISO 8601, each once: ``2026-11-23, 2026-11-24 and 2026-11-25``."""
    return listed(sorted({time[:10] for time in times}), "and")


def number(value: float | None, digits: int) -> str:
    """Return a number with thousands separators; ``-`` for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def ranged(values: Sequence[float], digits: int) -> str:
    """Return the median, and the range of several."""
    median = number(statistics.median(values), digits)
    if len(values) < 2:
        return median
    return f"{median} ({number(min(values), digits)}-{number(max(values), digits)})"


def times_text(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the ratio of two medians, and the range of all pairs if there are several: ``1.28x (1.26-1.31)``."""
    ratio = f"{statistics.median(over) / statistics.median(under):.2f}x"
    if len(over) < 2 and len(under) < 2:
        return ratio
    return f"{ratio} ({min(over) / max(under):.2f}-{max(over) / min(under):.2f})"


def accuracies(variants: Mapping[str, Any], base: str) -> dict[str, Accuracy]:
    """Return what the rule for accuracy says of the answers of each variant, against those of the base."""
    differences = {}
    for name, variant in variants.items():
        ours, others = variant["exact_match"], variants[base]["exact_match"]
        if name != base:
            means = [one - other for one, other in zip(ours, others, strict=True)]
            same = variant.get("answers", 0) == variants[base].get("answers", 1)
            differences[name] = paired_difference(means, identical=same)
    return decide_accuracy(differences)
