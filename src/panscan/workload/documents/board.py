"""Wide boards of several panels: menus and departures. Layouts: coloured headings, frames, dots; and one held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from panscan.workload.documents.invoice import money
from panscan.workload.documents.sheet import Document, Flow, Sheet
from panscan.workload.documents.words import GOODS, TOWNS

LAYOUTS = 4
"""The last one is held out."""

_HEADINGS = ("Breakfast", "Lunch", "Dinner", "Drinks", "Sweets", "Starters", "Mains", "Sides", "Salads", "Soups")
_STATIONS = ("Platform 1", "Platform 2", "Platform 3", "North gate", "South gate", "Bay 4", "Bay 5", "Pier 6")


def _open_panel(flow: Flow, layout: int, heading: str) -> None:
    sheet = flow.sheet
    if layout == 0:
        flow.feed(1.2)
        gap = 0.3 * sheet.style.size
        box = (flow.left - gap, flow.y - 0.72 * sheet.step, flow.right + gap, flow.y + 0.32 * sheet.step)
        sheet.draw.rectangle(box, fill=sheet.style.accent)
        sheet.text(flow.left, flow.y, heading, bold=True, fill="#ffffff")
        flow.feed(0.3)
    elif layout == 3:
        flow.line(heading, 1.15)
        flow.feed(0.15)
    else:
        flow.line(heading, 1.15, bold=True, centred=True)
        flow.rule()


def _panels(sheet: Sheet, layout: int) -> list[Flow]:
    """Columns about as wide as the sheet is high."""
    count = max(1, min(len(_STATIONS), round(sheet.width / sheet.height)))
    margin, gap = 0.05 * sheet.height, 0.09 * sheet.height
    width = (sheet.width - 2 * margin - (count - 1) * gap) / count
    flows = []
    for index in range(count):
        left = margin + index * (width + gap)
        flows.append(Flow(sheet, left, left + width, 0.15 * sheet.step, sheet.height - 0.5 * sheet.step))
        if layout == 1:
            edge = 0.45 * min(margin, gap)
            box = (left - edge, 0.2 * sheet.step, left + width + edge, sheet.height - 0.25 * sheet.step)
            sheet.draw.rectangle(box, outline=sheet.style.grey, width=max(1, sheet.style.size // 14))
    return flows


def _prices(rng: Random, sign: str) -> Iterator[str]:
    """Yield the widest price of a panel, then its prices."""
    cents = rng.choice(((150, 990), (290, 2450), (1000, 9999)))
    yield money(cents[1], sign)
    while True:
        yield money(rng.randint(*cents), sign)


def _times(rng: Random) -> Iterator[str]:
    """Yield the widest time of a panel, then its times, ascending."""
    minutes = rng.randint(5 * 60, 9 * 60)
    yield "00:00"
    while True:
        minutes += rng.randint(3, 40)
        yield f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _fill_panels(
    rng: Random,
    sheet: Sheet,
    layout: int,
    headings: tuple[str, ...],
    goods: tuple[str, ...],
    values_of: Callable[[], Iterator[str]],
    *,
    invented: float = 0.0,
    dots: bool = False,
) -> dict[str, str]:
    """Fill panels with names and values; return the value of each name."""
    flows, names, values = _panels(sheet, layout), list[str](), list[str]()
    for flow, heading in zip(flows, rng.sample(headings, len(flows)), strict=True):
        _open_panel(flow, layout, heading)
        drawn = values_of()
        limit = flow.width - sheet.long(next(drawn)) - 0.8 * sheet.style.size
        while flow.room >= 1:
            name = sheet.new_name(rng, goods, limit, names, invented=invented)
            values.append(next(drawn))
            flow.pair(name, values[-1], dots=dots)
    return dict(zip(names, values, strict=True))


def board(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A board that fills the sheet, a panel for about each square of it; ``layout`` is below :data:`LAYOUTS`."""
    sign = rng.choice(("$", "$", ""))
    if rng.random() < 0.6:
        prices = partial(_prices, rng, sign)
        rows = _fill_panels(rng, sheet, layout, _HEADINGS, GOODS, prices, dots=layout == 2)
        question, kind, inverse = "What is the price of {}?", "price", "Which item costs {}?"
    else:
        rows = _fill_panels(rng, sheet, layout, _STATIONS, TOWNS, partial(_times, rng), invented=0.25)
        question, kind, inverse = "When does {} leave?", "time", "Which one leaves at {}?"
    counts = Counter(rows.values())
    for name, value in rows.items():
        sheet.ask(question.format(name), kind, *dict.fromkeys((value, value.removeprefix(sign))))
        if counts[value] == 1:
            sheet.ask(inverse.format(value), "item", name)
    return sheet.document("board")
