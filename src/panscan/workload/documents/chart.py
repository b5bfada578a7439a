"""Bar charts with a value at every bar. Layouts: to the right in one colour or many, upwards, values in bars; one more.

That one, with its values at the right edge, is held out.
"""

from __future__ import annotations

from random import Random

from panscan.workload.documents.sheet import Document, Sheet
from panscan.workload.documents.words import PEOPLE, TOWNS

LAYOUTS = 5
"""The last one is held out."""

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7a5195", "#b8860b", "#4c72a0", "#c44e52")
_TOPICS = ("Visitors", "Rainfall, mm", "Parcels", "Books lent", "Bikes", "Points", "Hours", "Tickets sold", "Trees")


def _across(rng: Random, sheet: Sheet, layout: int, bars: dict[str, int], top: float) -> None:
    """Bars that grow to the right, the value behind each; layout 3 writes it into the bar if it fits, 4 at the edge."""
    margin, size = 0.04 * sheet.width, sheet.style.size
    left = margin + max(map(sheet.long, bars)) + 0.5 * size
    right = max(left + 0.1 * sheet.width, sheet.width - margin - sheet.long("0000") - 0.5 * size)
    pitch = max(4.0, (sheet.height - top - 0.4 * sheet.step) / len(bars))
    colour = rng.choice(_COLOURS)
    for index, (label, value) in enumerate(bars.items()):
        y = top + pitch * (index + 0.5)
        end = left + max(2.0, (right - left) * value / max(bars.values()))
        fill = colour if layout != 1 else _COLOURS[index % len(_COLOURS)]
        sheet.draw.rectangle((left, y - pitch * 0.3, end, y + pitch * 0.3), fill=fill)
        baseline = y + 0.35 * size
        sheet.text(left - 0.4 * size, baseline, label, anchor="rs")
        if layout == 4:
            sheet.text(sheet.width - margin, baseline, str(value), anchor="rs")
        elif layout == 3 and end - left > sheet.long(str(value)) + 0.6 * size and pitch * 0.6 > size:
            sheet.text(end - 0.3 * size, baseline, str(value), anchor="rs", fill="#ffffff")
        else:
            sheet.text(end + 0.3 * size, baseline, str(value), bold=layout == 1)


def _upwards(rng: Random, sheet: Sheet, bars: dict[str, int], top: float) -> None:
    """Bars that grow upwards, the value above each."""
    margin = 0.04 * sheet.width
    bottom = sheet.height - 1.5 * sheet.step
    pitch, colour = (sheet.width - 2 * margin) / len(bars), rng.choice(_COLOURS)
    sheet.rule(margin, sheet.width - margin, round(bottom))
    for index, (label, value) in enumerate(bars.items()):
        x = margin + pitch * (index + 0.5)
        y = bottom - max(2.0, (bottom - top - sheet.step) * value / max(bars.values()))
        sheet.draw.rectangle((x - pitch * 0.3, y, x + pitch * 0.3, bottom - 1), fill=colour)
        sheet.text(x, y - 0.3 * sheet.style.size, str(value), anchor="ms", bold=True)
        sheet.text(x, bottom + 0.95 * sheet.step, label, anchor="ms")


def chart(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A bar chart that fills the sheet; ``layout`` is below :data:`LAYOUTS`. Values are all different."""
    top, size = 1.5 * sheet.step, sheet.style.size
    title = rng.choice(_TOPICS)
    sheet.text(0.04 * sheet.width, 1.1 * sheet.step, title, 1.2, bold=True)
    upright = layout == 2
    if upright:
        count = rng.randint(2, max(2, min(5, int(sheet.width / (4.4 * size)))))
        limit = sheet.width * 0.92 / count - 0.5 * size
    else:
        count = rng.randint(3, max(3, min(9, int((sheet.height - top) / (1.05 * sheet.step)))))
        limit = 0.4 * sheet.width
    pool = rng.choice((TOWNS, tuple(person.split()[0] for person in PEOPLE)))
    labels: list[str] = []
    while len(labels) < count:
        labels.append(sheet.pick(rng, lambda r: sheet.name(r, pool, 0.2).split()[0], limit, known=labels))
    most = rng.choice((90, 400, 1000))
    bars = dict(zip(labels, rng.sample(range(most // 10, most), count), strict=True))
    if upright:
        _upwards(rng, sheet, bars, top)
    else:
        _across(rng, sheet, layout, bars, top)
    for label, value in bars.items():
        sheet.ask(f"What is the value of {label}?", "value", str(value))
    for label, value in bars.items():
        sheet.ask(f"Which bar has the value {value}?", "item", label)
    sheet.ask("Which bar is the highest?", "highest", max(bars, key=bars.__getitem__))
    sheet.ask("Which bar is the lowest?", "lowest", min(bars, key=bars.__getitem__))
    sheet.ask("What is the title?", "title", title)
    return sheet.document("chart")
