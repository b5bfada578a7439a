"""Till receipts: tall, narrow, in small print. Three layouts: market, hardware shop, restaurant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from panscan.images.documents.bill import Bill, Line, item_asks, money, money_answers
from panscan.images.documents.sheet import GREY, INK, Ask, Document, Sheet, choose
from panscan.images.documents.words import DISHES, GROCERIES, HARDWARE, PEOPLE, a_date, a_phone, an_address
from panscan.images.ink import rounded

__all__ = ["receipt"]

_TABLETOP = "#c9c2b8"
_EDGE = 8  # pixels of table top beside the paper


class _Roll:
    """A receipt while it is printed: ``y`` is the baseline, or the rule, that was printed last."""

    def __init__(self, width: int, paper: str) -> None:
        self.sheet = Sheet(width, 4 * width, paper)
        self.size = 12 + round((width - 448) / 113)
        self.step = round(self.size * 1.9)
        self.left = _EDGE + 2 * self.size
        self.right = width - self.left
        self.middle = width / 2
        self.y: float = 0

    def feed(self, lines: float = 1) -> None:
        self.y += self.step * lines

    def pair(self, label: str, value: str, *, grow: int = 0, bold: bool = False, fill: str = INK) -> None:
        """On the next line, a label at the left and its value at the right."""
        self.feed()
        self.sheet.text(self.left, self.y, label, self.size + grow, bold=bold, fill=fill)
        self.sheet.text(self.right, self.y, value, self.size + grow, anchor="rs", bold=bold, fill=fill)

    def centre(self, text: str, *, grow: int = 0, bold: bool = False, fill: str = INK) -> None:
        """On the next line, text in the middle."""
        self.feed()
        self.sheet.text(self.middle, self.y, text, self.size + grow, anchor="ms", bold=bold, fill=fill)

    def rule(self, *, dash: int = 0, weight: int = 1) -> None:
        self.feed(0.7)
        self.sheet.rule(self.left, self.right, round(self.y), dash=dash, weight=weight, fill=GREY)
        self.feed(0.1)


def _market_head(roll: _Roll, shop: str, address: tuple[str, str], phone: str) -> None:
    roll.feed(2)
    roll.centre(shop.upper(), grow=16, bold=True)
    roll.feed(0.3)
    for text in (*address, f"Tel. {phone}"):
        roll.centre(text, fill=GREY)
    roll.rule(dash=5)


def _market_line(roll: _Roll, line: Line) -> None:
    roll.pair(line.name, money(line.amount))
    if line.count > 1:
        roll.feed(0.85)
        each = f"{line.count} x {money(line.each)}"
        roll.sheet.text(roll.left + 2 * roll.size, roll.y, each, roll.size - 1, fill=GREY)


def _hardware_head(roll: _Roll, shop: str, address: tuple[str, str], phone: str) -> None:
    side, top = 3 * roll.step, round(1.5 * roll.step)
    rounded(roll.sheet.image, (roll.left, top, roll.left + side, top + side), 8, INK)
    # A washer for a logo.
    for inset, fill in ((side // 5, roll.sheet.paper), (side * 2 // 5, INK)):
        box = (roll.left + inset, top + inset, roll.left + side - inset, top + side - inset)
        rounded(roll.sheet.image, box, (side - 2 * inset) // 2, fill)
    aside = roll.left + side + roll.size
    roll.y = top + 0.9 * roll.step
    roll.sheet.text(aside, roll.y, shop, roll.size + 8, bold=True)
    for text in (address[0], f"{address[1]} · {phone}"):
        roll.feed(0.95)
        roll.sheet.text(aside, roll.y, text, roll.size, fill=GREY)
    roll.feed(0.5)
    roll.rule(weight=2)


def _hardware_columns(roll: _Roll) -> tuple[tuple[float, str], ...]:
    """Where quantity, article, price of one, and amount stand, with their anchors."""
    return (
        (roll.left, "ls"),
        (roll.left + 3 * roll.size, "ls"),
        (roll.right - 6 * roll.size, "rs"),
        (roll.right, "rs"),
    )


def _hardware_titles(roll: _Roll) -> None:
    roll.feed()
    for (x, anchor), title in zip(_hardware_columns(roll), ("Qty", "Article", "Each", "Amount"), strict=True):
        roll.sheet.text(x, roll.y, title, roll.size, anchor=anchor, bold=True)
    roll.feed(0.2)


def _hardware_line(roll: _Roll, line: Line) -> None:
    roll.feed()
    texts = (str(line.count), line.name, money(line.each), money(line.amount))
    for (x, anchor), text in zip(_hardware_columns(roll), texts, strict=True):
        roll.sheet.text(x, roll.y, text, roll.size, anchor=anchor)


def _restaurant_head(roll: _Roll, shop: str, address: tuple[str, str], phone: str) -> None:
    roll.feed(2)
    roll.centre(shop, grow=18)
    roll.feed(0.7)
    roll.sheet.rule(roll.middle - 4 * roll.size, roll.middle + 4 * roll.size, roll.y, weight=2)
    roll.feed(0.2)
    for text in (" · ".join(address), f"Bookings {phone}"):
        roll.centre(text, fill=GREY)
    roll.rule()


def _restaurant_line(roll: _Roll, line: Line) -> None:
    roll.feed()
    sheet, size = roll.sheet, roll.size
    sheet.text(roll.left, roll.y, str(line.count), size)
    start = sheet.text(roll.left + 2 * size, roll.y, line.name, size)[2]
    if line.count > 1:
        start = sheet.text(start + size // 2, roll.y, f"@ {money(line.each)}", size - 1, fill=GREY)[2]
    end = sheet.text(roll.right, roll.y, money(line.amount), size, anchor="rs")[0]
    for x in range(start + size // 2, end - size // 2, 6):
        sheet.rule(x, x + 1, roll.y - 1, fill=GREY)


@dataclass(frozen=True, slots=True)
class _Layout:
    head: Callable[[_Roll, str, tuple[str, str], str], None]
    titles: Callable[[_Roll], None] | None
    line: Callable[[_Roll, Line], None]
    goods: tuple[str, ...]
    cents: tuple[int, int]
    shops: tuple[str, ...]
    papers: tuple[str, ...]
    place: str
    farewell: str


_LAYOUTS = (
    _Layout(
        head=_market_head,
        titles=None,
        line=_market_line,
        goods=GROCERIES,
        cents=(79, 999),
        shops=("Greengate Market", "Corner Pantry", "Fennel & Co", "Daily Basket"),
        papers=("#fdfdfb", "#f8f8f4"),
        place="Till",
        farewell="Thank you for shopping with us",
    ),
    _Layout(
        head=_hardware_head,
        titles=_hardware_titles,
        line=_hardware_line,
        goods=HARDWARE,
        cents=(15, 780),
        shops=("Brackett Tools", "Ironside Hardware", "The Bolt Barn"),
        papers=("#f6f8fa", "#fbf6f4"),
        place="Counter",
        farewell="Goods can be returned within 30 days",
    ),
    _Layout(
        head=_restaurant_head,
        titles=None,
        line=_restaurant_line,
        goods=DISHES,
        cents=(290, 2450),
        shops=("Cafe Mirabel", "The Copper Pot", "Salt & Sorrel"),
        papers=("#fdf6e3", "#fbf3ec"),
        place="Table",
        farewell="We hope to see you again",
    ),
)


def _slip(roll: _Roll, rng: Random, place: str) -> str:
    """Date, time and who served; returns the date as drawn."""
    day, clock = a_date(rng).isoformat(), f"{rng.randint(8, 21):02d}:{rng.randrange(60):02d}"
    server = rng.choice(PEOPLE).split()[0]
    roll.pair("Date", f"{day}  {clock}", fill=GREY)
    roll.pair(place, f"{rng.randint(1, 19)} · served by {server}", fill=GREY)
    roll.rule(dash=5)
    return day


def _body(roll: _Roll, rng: Random, layout: _Layout, end: float) -> Bill:
    """Goods until the paper is ``end`` pixels long, or until there are no more."""
    if layout.titles:
        layout.titles(roll)
    lines = []
    for name in rng.sample(layout.goods, len(layout.goods)):
        if roll.y > end:
            break
        line = Line(name, rng.choice((1, 1, 1, 2, 3, 4)), rng.randint(*layout.cents))
        layout.line(roll, line)
        lines.append(line)
    return Bill(tuple(lines), rng.choice((500, 625, 700, 825)))


def _sums(roll: _Roll, bill: Bill, cash: int) -> None:
    roll.rule(dash=5)
    for label, cents in (("Subtotal", bill.subtotal), (bill.tax_label, bill.tax)):
        roll.pair(label, money(cents))
    roll.feed(0.5)
    roll.pair("Total", money(bill.total), grow=8, bold=True)
    roll.feed(0.4)
    for label, cents in (("Cash", cash), ("Change", cash - bill.total)):
        roll.pair(label, money(cents), fill=GREY)


def _foot(roll: _Roll, rng: Random, farewell: str) -> None:
    """A bar code over its number, and a farewell."""
    roll.feed()
    x, end = round(roll.middle - 8 * roll.size), round(roll.middle + 8 * roll.size)
    while x < end:
        bar = rng.choice((1, 1, 2, 3))
        roll.sheet.draw.rectangle((x, roll.y, x + bar - 1, roll.y + 2 * roll.step), fill=INK)
        x += bar + rng.choice((1, 2, 2, 3))
    roll.feed(2)
    roll.centre(f"{rng.randrange(10**6, 10**7)}")
    roll.feed(0.3)
    roll.centre(farewell, fill=GREY)


def _lay_on_table(sheet: Sheet, height: int) -> None:
    """Table top at both sides, and a lower edge as a till tears it."""
    for x in (0, sheet.width - _EDGE):
        sheet.draw.rectangle((x, 0, x + _EDGE - 1, height), fill=_TABLETOP)
    for x in range(_EDGE, sheet.width - _EDGE, 8):
        sheet.draw.polygon(((x, height), (x + 4, height - 6), (x + 8, height)), fill=_TABLETOP)


def receipt(rng: Random, variant: int) -> Document:
    """A receipt 448-900 pixels wide and 2-4 times as high; ``variant`` picks the layout."""
    layout = _LAYOUTS[variant % len(_LAYOUTS)]
    width = rng.randrange(448, 901, 4)
    roll = _Roll(width, rng.choice(layout.papers))
    layout.head(roll, rng.choice(layout.shops), an_address(rng), a_phone(rng))
    day = _slip(roll, rng, layout.place)
    bill = _body(roll, rng, layout, rng.uniform(2.2, 3.6) * width - 15 * roll.step)
    cash = -(-bill.total // 1000) * 1000 + rng.choice((0, 1000, 2000))
    _sums(roll, bill, cash)
    _foot(roll, rng, layout.farewell)
    height = round(roll.y + 2 * roll.step)
    _lay_on_table(roll.sheet, height)
    others = [
        Ask("What is the date of purchase?", (day,), "date"),
        Ask("What is the subtotal?", money_answers(bill.subtotal), "subtotal"),
        Ask("What is the change?", money_answers(cash - bill.total), "change"),
        *item_asks(bill, (cash, cash - bill.total)),
    ]
    first = Ask("What is the total?", money_answers(bill.total), "total")
    return roll.sheet.document("receipt", choose(rng, first, others), height=height)
