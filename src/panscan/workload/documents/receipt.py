"""Till receipts. Layouts: market, hardware shop, restaurant, plain till; and a kiosk's, which training never sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from panscan.images.ink import rounded
from panscan.workload.documents.invoice import Bill, Line, ask_lines, draw_lines, money, money_answers
from panscan.workload.documents.sheet import Document, Flow, Sheet
from panscan.workload.documents.words import (
    COMPANIES,
    PEOPLE,
    SHOPS,
    STREETS,
    TOWNS,
    a_date,
    a_phone,
)

_FAREWELLS = ("Thank you", "See you again", "Have a nice day", "Keep this receipt", "Open every day")
_PLACES = ("Till", "Counter", "Table", "Desk")


def _centred_head(flow: Flow, shop: str, lines: list[str]) -> None:
    flow.feed(0.2)
    flow.line(shop, 1.5, bold=True, centred=True)
    for text in lines:
        flow.line(text, 0.9, fill=flow.sheet.style.grey, centred=True)


def _logo_head(flow: Flow, shop: str, lines: list[str]) -> None:
    """A disc for a logo, the name beside it."""
    sheet, side = flow.sheet, round(1.5 * flow.sheet.step)
    left, top = round(flow.left), round(flow.y + 0.3 * sheet.step)
    rounded(sheet.image, (left, top, left + side, top + side), side // 2, sheet.style.accent)
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


def _count(flow: Flow, line: Line, sign: str, scale: float) -> None:
    """The quantity and the price of a piece, indented."""
    style = flow.sheet.style
    text = f"{line.count} x {money(line.each, sign)}"
    flow.sheet.text(flow.left + style.size, flow.y, text, scale, fill=style.grey)


def _plain_line(flow: Flow, sign: str, line: Line) -> None:
    flow.pair(line.name, money(line.amount, sign))
    if line.count > 1:
        flow.feed(0.9)
        _count(flow, line, sign, 0.9)


def _counted_line(flow: Flow, sign: str, line: Line) -> None:
    """The quantity in a separate column, at the left."""
    flow.feed()
    sheet = flow.sheet
    sheet.text(flow.left, flow.y, str(line.count))
    sheet.text(flow.left + 1.6 * sheet.style.size, flow.y, line.name)
    sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


def _dotted_line(flow: Flow, sign: str, line: Line) -> None:
    name = f"{line.count} {line.name}" if line.count > 1 else line.name
    flow.pair(name, money(line.amount, sign), dots=True)


def _stacked_line(flow: Flow, sign: str, line: Line) -> None:
    """The name on one line, numbers on the next."""
    flow.line(line.name)
    flow.feed(0.95)
    _count(flow, line, sign, 1.0)
    flow.sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


class _Layout(NamedTuple):
    head: Callable[[Flow, str, list[str]], None]
    line: Callable[[Flow, str, Line], None]
    lines_each: float
    dash: bool
    total: float  # its scale; bold if above 1
    margin: float  # of the sheet's width


LAYOUTS = (
    _Layout(_centred_head, _plain_line, 1.5, True, 1.3, 0.05),
    _Layout(_logo_head, _counted_line, 1, False, 1.2, 0.04),
    _Layout(_centred_head, _dotted_line, 1, False, 1.4, 0.06),
    _Layout(_left_head, _plain_line, 1.5, True, 1.0, 0.03),
    _Layout(_left_head, _stacked_line, 1.95, False, 1.25, 0.045),
)
"""The last one is held out."""


def _slip(rng: Random, flow: Flow) -> None:
    """Date, time and who served, as far as there is room."""
    sheet, day = flow.sheet, a_date(rng)
    text = rng.choice((day.isoformat(), day.strftime("%d.%m.%Y"), day.strftime("%d/%m/%Y")))
    flow.pair("Date", text)
    sheet.ask("What is the date of purchase?", "date", text)
    if flow.room > 12:
        clock = f"{rng.randint(7, 22):02d}:{rng.randrange(60):02d}"
        flow.pair("Time", clock)
        sheet.ask("What is the time of purchase?", "time", clock)
    if flow.room > 14:
        place, number = rng.choice(_PLACES), str(rng.randint(1, 99))
        flow.pair(place, number)
        sheet.ask(f"What is the {place.lower()} number?", "number", number)
    if flow.room > 16:
        server = sheet.name(rng, PEOPLE).split()[0]
        flow.pair("Served by", server)
        sheet.ask("Who served?", "name", server)


def _sum(flow: Flow, label: str, cents: int, sign: str, scale: float = 1.0) -> None:
    flow.pair(label, money(cents, sign), scale, bold=scale > 1)
    name = label.split()[0].lower()
    flow.sheet.ask(f"What is the {name}?", name, *money_answers(cents, sign))


def _draw_sums(rng: Random, flow: Flow, bill: Bill, total: float, dash: float, *, paid: bool) -> list[int]:
    """The sums of a bill; return what was paid in cash and the change, if ``paid``."""
    given = -(-bill.total // 1000) * 1000 + rng.choice((0, 1000, 2000)) if paid else 0
    flow.rule(dash=dash)
    if bill.tax_rate:
        _sum(flow, "Subtotal", bill.subtotal, bill.sign)
        _sum(flow, bill.tax_label, bill.tax, bill.sign)
    flow.feed(0.15)
    _sum(flow, "Total", bill.total, bill.sign, total)
    if not paid:
        return []
    _sum(flow, "Cash", given, bill.sign)
    _sum(flow, "Change", given - bill.total, bill.sign)
    return [given, given - bill.total]


def _foot(rng: Random, flow: Flow) -> None:
    """As room allows: a farewell, and a bar code over its number."""
    sheet, size = flow.sheet, flow.sheet.style.size
    if flow.room >= 1:
        flow.feed(0.3)
        flow.line(rng.choice(_FAREWELLS), 0.9, fill=sheet.style.grey, centred=True)
    if flow.room >= 3:
        x, end = round(flow.middle - 5 * size), round(flow.middle + 5 * size)
        unit, top = max(1, size // 12), flow.y + 0.6 * sheet.step
        while x < end:
            bar = rng.choice((1, 1, 2, 3)) * unit
            sheet.draw.rectangle((x, top, x + bar - 1, top + 1.3 * sheet.step), fill=sheet.style.ink)
            x += bar + rng.choice((1, 2, 2, 3)) * unit


def receipt(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A receipt that fills the sheet; ``layout`` picks one of :data:`LAYOUTS`."""
    chosen = LAYOUTS[layout]
    flow = sheet.flow(0.3, margin=chosen.margin)
    room, sign, dash = flow.room, rng.choice(("$", "$", "$", "")), sheet.style.size / 3 if chosen.dash else 0
    address = [f"{rng.randint(2, 98)} {rng.choice(STREETS)}", sheet.name(rng, TOWNS), f"Tel. {a_phone(rng)}"]
    shop = sheet.name(rng, SHOPS + COMPANIES)
    chosen.head(flow, shop, address[: max(0, (room - 10) // 3)])
    sheet.ask("What is the name of the shop?", "name", shop)
    flow.rule(dash=dash)
    if room > 9:
        _slip(rng, flow)
        flow.rule(dash=dash)
    taxed, paid = room > 8, room > 12
    below = 1.2 + 0.9 * chosen.total + 2 * taxed + 2 * paid + (room > 15) * 3
    lines = draw_lines(
        rng,
        flow,
        sign,
        partial(chosen.line, flow, sign),
        until=(below + chosen.lines_each) * sheet.step,
        most=60,
        cents=rng.choice(((79, 999), (15, 780), (290, 2450), (1000, 99999))),
        counts=(1, 1, 1, 2, 3, 4),
        beside=2.2,
    )
    bill = Bill(lines, rng.choice((500, 625, 700, 825)) if taxed else 0, sign)
    others = _draw_sums(rng, flow, bill, chosen.total, dash, paid=paid)
    _foot(rng, flow)
    ask_lines(sheet, bill, *others)
    return sheet.document("receipt")
