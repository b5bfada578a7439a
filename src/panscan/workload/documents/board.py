"""Wide boards of several panels: menus and departures. Layouts: coloured headings, frames, dots; and one held out."""

from __future__ import annotations

from random import Random

from panscan.workload.documents.invoice import money, money_answers
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
        flow.centre(heading, 1.15, bold=True)
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


def _menu(rng: Random, sheet: Sheet, layout: int, sign: str) -> None:
    """Panels of dishes and their prices."""
    flows, names, prices = _panels(sheet, layout), list[str](), list[int]()
    for flow, heading in zip(flows, rng.sample(_HEADINGS, len(flows)), strict=True):
        _open_panel(flow, layout, heading)
        cents = rng.choice(((150, 990), (290, 2450), (1000, 9999)))
        limit = flow.width - sheet.long(money(cents[1], sign)) - 0.8 * sheet.style.size
        while flow.room >= 1:
            name = sheet.new_name(rng, GOODS, limit, names)
            prices.append(rng.randint(*cents))
            flow.pair(name, money(prices[-1], sign), dots=layout == 2)
    for name, price in zip(names, prices, strict=True):
        sheet.ask(f"What is the price of {name}?", "price", *money_answers(price, sign))
        if prices.count(price) == 1:
            sheet.ask(f"Which item costs {money(price, sign)}?", "item", name)


def _departures(rng: Random, sheet: Sheet, layout: int) -> None:
    """Panels of places and times."""
    flows, places, times = _panels(sheet, layout), list[str](), list[str]()
    for flow, heading in zip(flows, rng.sample(_STATIONS, len(flows)), strict=True):
        _open_panel(flow, layout, heading)
        minutes = rng.randint(5 * 60, 9 * 60)
        limit = flow.width - sheet.long("00:00") - 0.8 * sheet.style.size
        while flow.room >= 1:
            place = sheet.new_name(rng, TOWNS, limit, places, invented=0.25)
            minutes += rng.randint(3, 40)
            times.append(f"{minutes // 60 % 24:02d}:{minutes % 60:02d}")
            flow.pair(place, times[-1])
    for place, time in zip(places, times, strict=True):
        sheet.ask(f"When does {place} leave?", "time", time)
        if times.count(time) == 1:
            sheet.ask(f"Which one leaves at {time}?", "item", place)


def board(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A board that fills the sheet, a panel for about each square of it; ``layout`` is below :data:`LAYOUTS`."""
    sign = rng.choice(("$", "$", ""))
    if rng.random() < 0.6:
        _menu(rng, sheet, layout, sign)
    else:
        _departures(rng, sheet, layout)
    return sheet.document("board")
