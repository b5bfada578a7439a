"""README's chart of the engine, vLLM and ``generate()`` as SVG, which follows the reader's light or dark theme."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.markdown import number

_WIDTH, _PANEL, _LABEL, _BAR, _TOP = 820, 400, 104, 15, 62
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1a1d21 }
.title { font-weight: 600 } .muted { fill: #59616b }
.engine { fill: #0063a8 } .vllm-exact { fill: #c04a00 } .generate { fill: #8b939c } line { stroke: #8b939c }
@media (prefers-color-scheme: dark) {
text { fill: #e4e7ea } .muted { fill: #a0a9b3 } .engine { fill: #5cb3ee } .vllm-exact { fill: #ff9a57 }
}"""
Sides = Mapping[str, Sequence[float]]
"""The turns of each side."""


def speed_chart(panels: Mapping[str, Mapping[str, Sides]], digits: Sequence[int], titles: Mapping[str, str]) -> str:
    """Return the chart: a panel beside another, each with a group of bars per workload.

    Args:
        panels: title -> name of the workload -> what each side measured; a side without values has no bar.
        digits: decimal places of each panel's values.
        titles: what the key calls each side.
    """
    bar_groups = [
        [_group(name, sides, groups, places) for name, sides in groups.items()]
        for groups, places in zip(panels.values(), digits, strict=True)
    ]
    height = _TOP + max(sum(lines for lines, _ in groups) * _BAR + 14 * len(groups) for groups in bar_groups)
    parts = [_key(titles)]
    for left, title, groups in zip((0, _WIDTH - _PANEL), panels, bar_groups, strict=True):
        parts.append(f'<text class="title" x="{left}" y="{_TOP - 14}">{escape(title)}</text>')
        y = _TOP
        for lines, bars in groups:
            parts.append(f'<g transform="translate({left} {y})">{bars}</g>')
            y += lines * _BAR + 14
        parts.append(f'<line x1="{left + _LABEL}" x2="{left + _LABEL}" y1="{_TOP - 4}" y2="{y - 8}"/>')
    described = "; ".join(f"{title}: {_words(groups, titles)}" for title, groups in panels.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{escape(described)}</title>\n<style>{_STYLE}\n</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _key(titles: Mapping[str, str]) -> str:
    entries = (
        f'<rect class="{side}" x="{200 * index}" y="6" width="12" height="12"/>'
        f'<text x="{200 * index + 18}" y="16">{escape(title, quote=False)}</text>'
        for index, (side, title) in enumerate(titles.items())
    )
    return "\n".join(entries)


def _group(name: str, sides: Sides, groups: Mapping[str, Sides], digits: int) -> tuple[int, str]:
    """Return the number of bars of a workload, and its bars."""
    longest = max(statistics.median(values) for group in groups.values() for values in group.values() if values)
    room = (_PANEL - _LABEL - 50) / longest
    medians = {side: statistics.median(values) for side, values in sides.items() if values}
    bars = [
        f'<rect class="{side}" x="{_LABEL}" y="{_BAR * row}" width="{median * room:.1f}" height="{_BAR - 3}"/>'
        f'<text x="{_LABEL + median * room + 6:.1f}" y="{_BAR * row + 11}">{number(median, digits)}</text>'
        for row, (side, median) in enumerate(medians.items())
    ]
    lines = name.split("\n")
    labels = [
        f'<text class="{"muted" if row else "title"}" y="{_BAR * row + 11}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    return max(len(medians), len(lines)), "".join([*labels, *bars])


def _words(groups: Mapping[str, Sides], titles: Mapping[str, str]) -> str:
    return ", ".join(
        f"{' '.join(name.split())} {titles[side]} {statistics.median(values):.3g}"
        for name, sides in groups.items()
        for side, values in sides.items()
        if values
    )
