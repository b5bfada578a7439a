"""Bar charts, square, with its value over every bar."""

from __future__ import annotations

from random import Random

from panscan.images.documents.sheet import GREY, INK, Ask, Document, Sheet, choose
from panscan.images.documents.words import PEOPLE, TOWNS
from panscan.images.ink import text_width

__all__ = ["chart"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7a5195")
_TOPICS = (
    ("Visitors per town", "thousands, last year", TOWNS),
    ("Rainfall by station", "millimetres in autumn", TOWNS),
    ("Deliveries per driver", "parcels in one week", tuple(name.split()[0] for name in PEOPLE)),
    ("Books lent by branch", "hundreds in one month", TOWNS),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 36, 120, 64  # pixels from each edge to the bars
_STEPS = 5  # grid lines above zero
_LEAST_BAR = 84  # pixels from one bar to the next


def _axis(sheet: Sheet, tick: int) -> None:
    """Grid lines with their values."""
    bottom = sheet.width - _BOTTOM
    for index in range(_STEPS + 1):
        y = round(bottom - (bottom - _TOP) * index / _STEPS)
        sheet.rule(_LEFT, sheet.width - _RIGHT, y, fill="#d7dade" if index else INK)
        sheet.text(_LEFT - 8, y, str(tick * index), 12, anchor="rm", fill=GREY)


def _bars(sheet: Sheet, bars: dict[str, int], most: int, colour: str) -> None:
    """A bar for each label, ``most`` being as high as the highest grid line."""
    bottom, pitch = sheet.width - _BOTTOM, (sheet.width - _LEFT - _RIGHT) / len(bars)
    for index, (label, value) in enumerate(bars.items()):
        x, y = _LEFT + pitch * (index + 0.5), bottom - (bottom - _TOP) * value / most
        sheet.draw.rectangle((round(x - pitch * 0.3), round(y), round(x + pitch * 0.3), bottom - 1), fill=colour)
        sheet.text(x, y - 6, str(value), 14, anchor="ms", bold=True)
        sheet.text(x, bottom + 24, label, 13, anchor="ms")


def chart(rng: Random, variant: int) -> Document:
    """A bar chart, 448-900 pixels square; ``variant`` picks topic and colour."""
    side = rng.randrange(448, 901, 4)
    sheet = Sheet(side, side, rng.choice(("#ffffff", "#fcfbf7", "#f7f9fb")))
    title, unit, names = _TOPICS[variant % len(_TOPICS)]
    sheet.text(_RIGHT, 50, title, 24, bold=True)
    sheet.text(_RIGHT, 75, unit, 14, fill=GREY)
    tick = rng.choice((20, 50, 100))
    count = (side - _LEFT - _RIGHT) // _LEAST_BAR
    labels = rng.sample([name for name in names if text_width(name, 13) < _LEAST_BAR - 4], count)
    # No multiples of ten: a value stands in the picture once, never on the axis.
    values = rng.sample([value for value in range(tick // 2, tick * _STEPS) if value % 10], count)
    bars = dict(zip(labels, values, strict=True))
    _axis(sheet, tick)
    _bars(sheet, bars, tick * _STEPS, _COLOURS[variant % len(_COLOURS)])
    first, *others = [Ask(f"What is the value of {label}?", (str(value),), "value") for label, value in bars.items()]
    others.append(Ask("Which bar is the highest?", (max(bars, key=bars.__getitem__),), "highest"))
    others.append(Ask("Which bar is the lowest?", (min(bars, key=bars.__getitem__),), "lowest"))
    return sheet.document("chart", choose(rng, first, others))
