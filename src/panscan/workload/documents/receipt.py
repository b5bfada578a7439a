"""Till receipts. Layouts: market, hardware shop, restaurant, plain till; and a kiosk's, which training never sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from panscan.images.ink import rounded
from panscan.workload.documents.invoice import Bill, Line, item_questions, money, money_answers
from panscan.workload.documents.sheet import Document, Flow, Question, Sheet
from panscan.workload.documents.words import (
    COMPANIES,
    GOODS,
    PEOPLE,
    SHOPS,
    STREETS,
    TOWNS,
    a_date,
    a_name,
    a_phone,
)

_FAREWELLS = ("Thank you", "See you again", "Have a nice day", "Keep this receipt", "Open every day")
_PLACES = ("Till", "Counter", "Table", "Desk")


def _centred_head(flow: Flow, shop: str, lines: list[str]) -> None:
    flow.feed(0.2)
    flow.centre(shop, 1.5, bold=True)
    for text in lines:
        flow.centre(text, 0.9, fill=flow.sheet.style.grey)


def _logo_head(flow: Flow, shop: str, lines: list[str]) -> None:
    """A disc for a logo, the name beside it."""
    sheet, side = flow.sheet, round(1.5 * flow.sheet.step)
    top = round(flow.y + 0.3 * sheet.step)
    rounded(sheet.image, (round(flow.left), top, round(flow.left) + side, top + side), side // 2, sheet.style.accent)
    aside = flow.left + side + sheet.style.size * 0.6
    scale = sheet.fitting(shop, flow.right - aside, 1.35, bold=True)
    sheet.text(aside, top + side * 0.68, shop, scale, bold=True)
    flow.y = top + side - 0.2 * sheet.step
    for text in lines:
        flow.line(text, 0.9, fill=sheet.style.grey)


def _left_head(flow: Flow, shop: str, lines: list[str]) -> None:
    flow.feed(0.2)
    flow.line(shop, flow.sheet.fitting(shop, flow.width, 1.4, bold=True), bold=True)
    for text in lines:
        flow.line(text, 0.9)


def _plain_line(flow: Flow, line: Line, sign: str) -> None:
    flow.pair(line.name, money(line.amount, sign))
    if line.count > 1:
        flow.feed(0.9)
        text = f"{line.count} x {money(line.each, sign)}"
        flow.sheet.text(flow.left + flow.sheet.style.size, flow.y, text, 0.9, fill=flow.sheet.style.grey)


def _counted_line(flow: Flow, line: Line, sign: str) -> None:
    """The quantity in a separate column, at the left."""
    flow.feed()
    sheet = flow.sheet
    sheet.text(flow.left, flow.y, str(line.count), fill=sheet.style.ink)
    sheet.text(flow.left + 1.6 * sheet.style.size, flow.y, line.name)
    sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


def _dotted_line(flow: Flow, line: Line, sign: str) -> None:
    name = f"{line.count} {line.name}" if line.count > 1 else line.name
    flow.pair(name, money(line.amount, sign), dots=True)


def _stacked_line(flow: Flow, line: Line, sign: str) -> None:
    """The name on one line, numbers on the next."""
    flow.line(line.name)
    flow.feed(0.95)
    text = f"{line.count} x {money(line.each, sign)}"
    flow.sheet.text(flow.left + flow.sheet.style.size, flow.y, text, fill=flow.sheet.style.grey)
    flow.sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


@dataclass(frozen=True, slots=True)
class _Layout:
    head: Callable[[Flow, str, list[str]], None]
    line: Callable[[Flow, Line, str], None]
    lines_each: float
    dash: bool
    bold_total: float  # scale of the total
    margin: float  # of the sheet's width


LAYOUTS = (
    _Layout(_centred_head, _plain_line, 1.5, True, 1.3, 0.05),
    _Layout(_logo_head, _counted_line, 1, False, 1.2, 0.04),
    _Layout(_centred_head, _dotted_line, 1, False, 1.4, 0.06),
    _Layout(_left_head, _plain_line, 1.5, True, 1.0, 0.03),
    _Layout(_left_head, _stacked_line, 1.95, False, 1.25, 0.045),
)
"""The last one is held out."""


def _item_lines(rng: Random, flow: Flow, layout: _Layout, until: float, invented: float, sign: str) -> list[Line]:
    """Goods until the sheet's room is down to ``until`` pixels."""
    sheet, lines, names = flow.sheet, list[Line](), set[str]()
    cents = rng.choice(((79, 999), (15, 780), (290, 2450), (1000, 99999)))
    limit = flow.width - sheet.long(money(cents[1] * 4, sign)) - 2.2 * sheet.style.size
    while not lines or (flow.bottom - flow.y - layout.lines_each * sheet.step > until and len(lines) < 60):
        name = sheet.pick(rng, lambda r: a_name(r, GOODS, invented), limit, known=names)
        line = Line(name, rng.choice((1, 1, 1, 2, 3, 4)), rng.randint(*cents))
        layout.line(flow, line, sign)
        names.add(name)
        lines.append(line)
    return lines


def _slip(rng: Random, flow: Flow, invented: float, questions: list[Question]) -> None:
    """Date, time and who served, as far as there is room."""
    day = a_date(rng)
    text = rng.choice((day.isoformat(), day.strftime("%d.%m.%Y"), day.strftime("%d/%m/%Y")))
    flow.pair("Date", text)
    questions.append(Question("What is the date of purchase?", (text,), "date"))
    if flow.room > 12:
        clock = f"{rng.randint(7, 22):02d}:{rng.randrange(60):02d}"
        flow.pair("Time", clock)
        questions.append(Question("What is the time of purchase?", (clock,), "time"))
    if flow.room > 14:
        place, number = rng.choice(_PLACES), str(rng.randint(1, 99))
        flow.pair(place, number)
        questions.append(Question(f"What is the {place.lower()} number?", (number,), "number"))
    if flow.room > 16:
        server = a_name(rng, PEOPLE, invented).split()[0]
        flow.pair("Served by", server)
        questions.append(Question("Who served?", (server,), "name"))


def _sums(flow: Flow, layout: _Layout, bill: Bill, cash: int | None, questions: list[Question]) -> None:
    def pair(label: str, cents: int, scale: float = 1.0, bold: bool = False) -> None:
        flow.pair(label, money(cents, bill.sign), scale, bold=bold)
        name = "tax" if label.startswith("Tax") else label.lower()
        questions.append(Question(f"What is the {name}?", money_answers(cents, bill.sign), name))

    flow.rule(dash=flow.sheet.style.size / 3 if layout.dash else 0)
    if bill.tax_rate:
        pair("Subtotal", bill.subtotal)
        pair(bill.tax_label, bill.tax)
    flow.feed(0.15)
    pair("Total", bill.total, layout.bold_total, layout.bold_total > 1)
    if cash is not None:
        pair("Cash", cash)
        pair("Change", cash - bill.total)


def _foot(rng: Random, flow: Flow) -> None:
    """As room allows: a farewell, and a bar code over its number."""
    sheet = flow.sheet
    if flow.room >= 1:
        flow.feed(0.3)
        flow.centre(rng.choice(_FAREWELLS), 0.9, fill=sheet.style.grey)
    if flow.room >= 3:
        x, end = round(flow.middle - 5 * sheet.style.size), round(flow.middle + 5 * sheet.style.size)
        unit, top = max(1, sheet.style.size // 12), flow.y + 0.6 * sheet.step
        while x < end:
            bar = rng.choice((1, 1, 2, 3)) * unit
            sheet.draw.rectangle((x, top, x + bar - 1, top + 1.3 * sheet.step), fill=sheet.style.ink)
            x += bar + rng.choice((1, 2, 2, 3)) * unit


def receipt(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """A receipt that fills the sheet; ``layout`` picks one of :data:`LAYOUTS`."""
    chosen = LAYOUTS[layout]
    flow = sheet.flow(0.3, margin=chosen.margin)
    room, sign, questions = flow.room, rng.choice(("$", "$", "$", "")), list[Question]()
    address = [f"{rng.randint(2, 98)} {rng.choice(STREETS)}", a_name(rng, TOWNS, invented), f"Tel. {a_phone(rng)}"]
    shop = a_name(rng, SHOPS + COMPANIES, invented)
    chosen.head(flow, shop, address[: max(0, (room - 10) // 3)])
    questions.append(Question("What is the name of the shop?", (shop,), "name"))
    flow.rule(dash=sheet.style.size / 3 if chosen.dash else 0)
    if room > 9:
        _slip(rng, flow, invented, questions)
        flow.rule(dash=sheet.style.size / 3 if chosen.dash else 0)
    taxed, paid = room > 8, room > 12
    below = 1.2 + 0.9 * chosen.bold_total + 2 * taxed + 2 * paid + (room > 15) * 3
    lines = _item_lines(rng, flow, chosen, below * sheet.step, invented, sign)
    bill = Bill(tuple(lines), rng.choice((500, 625, 700, 825)) if taxed else 0, sign)
    cash = -(-bill.total // 1000) * 1000 + rng.choice((0, 1000, 2000)) if paid else None
    _sums(flow, chosen, bill, cash, questions)
    _foot(rng, flow)
    others = () if cash is None else (cash, cash - bill.total)
    return sheet.document("receipt", [*questions, *item_questions(bill, others)])
