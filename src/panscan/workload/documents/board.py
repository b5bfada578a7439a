"""Wide boards of several panels: menus and departures. Layouts: coloured headings, frames, dots; and one held out."""

from __future__ import annotations

from random import Random

from panscan.workload.documents.invoice import money, money_answers
from panscan.workload.documents.sheet import Document, Flow, Question, Sheet
from panscan.workload.documents.words import GOODS, TOWNS, a_name

LAYOUTS = 4
"""The last one is held out."""

_HEADINGS = ("Breakfast", "Lunch", "Dinner", "Drinks", "Sweets", "Starters", "Mains", "Sides", "Salads", "Soups")
_STATIONS = ("Platform 1", "Platform 2", "Platform 3", "North gate", "South gate", "Bay 4", "Bay 5", "Pier 6")


def _open(flow: Flow, layout: int, heading: str) -> None:
    """The heading of a panel."""
    sheet = flow.sheet
    if layout == 0:
        flow.feed(1.2)
        base, gap = flow.y, 0.3 * sheet.style.size
        box = (flow.left - gap, base - 0.72 * sheet.step, flow.right + gap, base + 0.32 * sheet.step)
        sheet.draw.rectangle(box, fill=sheet.style.accent)
        sheet.text(flow.left, base, heading, bold=True, fill="#ffffff")
        flow.feed(0.3)
    elif layout == 3:
        flow.line(heading, 1.15)
        flow.feed(0.15)
    else:
        flow.centre(heading, 1.15, bold=True)
        flow.rule()


def _prices(rng: Random, flow: Flow, layout: int, invented: float, sign: str, known: set[str]) -> list[tuple[str, int]]:
    sheet, rows = flow.sheet, list[tuple[str, int]]()
    cents = rng.choice(((150, 990), (290, 2450), (1000, 9999)))
    limit = flow.width - sheet.long(money(cents[1], sign)) - 0.8 * sheet.style.size
    while flow.room >= 1:
        name = sheet.pick(rng, lambda r: a_name(r, GOODS, invented), limit, known=known)
        known.add(name)
        rows.append((name, rng.randint(*cents)))
        flow.pair(name, money(rows[-1][1], sign), dots=layout == 2)
    return rows


def _departures(rng: Random, flow: Flow, invented: float, known: set[str]) -> list[tuple[str, str]]:
    sheet, rows = flow.sheet, list[tuple[str, str]]()
    minutes = rng.randint(5 * 60, 9 * 60)
    limit = flow.width - sheet.long("00:00") - 0.8 * sheet.style.size
    while flow.room >= 1:
        place = sheet.pick(rng, lambda r: a_name(r, TOWNS, max(invented, 0.25)), limit, known=known)
        known.add(place)
        minutes += rng.randint(3, 40)
        rows.append((place, f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"))
        flow.pair(*rows[-1])
    return rows


def _panels(sheet: Sheet, layout: int) -> list[Flow]:
    """Columns about as wide as the sheet is high."""
    count = max(1, min(len(_STATIONS), round(sheet.width / sheet.height)))
    margin, gap = 0.05 * sheet.height, 0.09 * sheet.height
    width = (sheet.width - 2 * margin - (count - 1) * gap) / count
    top, bottom = 0.15 * sheet.step, sheet.height - 0.5 * sheet.step
    flows = []
    for index in range(count):
        left = margin + index * (width + gap)
        flows.append(Flow(sheet, left, left + width, top, bottom))
        if layout == 1:
            edge = 0.45 * min(margin, gap)
            box = (left - edge, 0.2 * sheet.step, left + width + edge, sheet.height - 0.25 * sheet.step)
            sheet.draw.rectangle(box, outline=sheet.style.grey, width=max(1, sheet.style.size // 14))
    return flows


def board(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """A board that fills the sheet, a panel for about each square of it; ``layout`` is below :data:`LAYOUTS`."""
    flows, known, questions = _panels(sheet, layout), set[str](), list[Question]()
    sign = rng.choice(("$", "$", ""))
    if rng.random() < 0.6:
        prices = list[tuple[str, int]]()
        for flow, heading in zip(flows, rng.sample(_HEADINGS, len(flows)), strict=True):
            _open(flow, layout, heading)
            prices += _prices(rng, flow, layout, invented, sign, known)
        sums = [cents for _, cents in prices]
        for name, cents in prices:
            questions.append(Question(f"What is the price of {name}?", money_answers(cents, sign), "price"))
            if sums.count(cents) == 1:
                questions.append(Question(f"Which item costs {money(cents, sign)}?", (name,), "item"))
        return sheet.document("board", questions)
    times = list[tuple[str, str]]()
    for flow, heading in zip(flows, rng.sample(_STATIONS, len(flows)), strict=True):
        _open(flow, layout, heading)
        times += _departures(rng, flow, invented, known)
    leaving = [time for _, time in times]
    for place, time in times:
        questions.append(Question(f"When does {place} leave?", (time,), "time"))
        if leaving.count(time) == 1:
            questions.append(Question(f"Which one leaves at {time}?", (place,), "item"))
    return sheet.document("board", questions)
