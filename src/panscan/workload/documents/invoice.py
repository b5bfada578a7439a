"""Invoices, and bills in general: lines that sum to a total, in whole cents, and questions about them.

Layouts of an invoice: facts under the heading, a coloured heading, facts beside labels; and one that is held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from random import Random

from panscan.workload.documents.sheet import Document, Flow, Sheet
from panscan.workload.documents.words import COMPANIES, GOODS, PEOPLE, a_code, a_date, long_date

LAYOUTS = 4
"""The last one is held out."""


@dataclass(frozen=True, slots=True)
class Line:
    """``count`` pieces at ``each`` cents."""

    name: str
    count: int
    each: int

    @property
    def amount(self) -> int:
        """Cents."""
        return self.count * self.each


@dataclass(frozen=True, slots=True)
class Bill:
    """Lines, a tax rate in hundredths of a percent, and the sign before sums. All sums are cents."""

    lines: tuple[Line, ...]
    tax_rate: int
    sign: str = "$"

    @property
    def subtotal(self) -> int:
        return sum(line.amount for line in self.lines)

    @property
    def tax(self) -> int:
        """Rounded half up to whole cents."""
        return (self.subtotal * self.tax_rate + 5000) // 10000

    @property
    def total(self) -> int:
        return self.subtotal + self.tax

    @property
    def tax_label(self) -> str:
        return f"Tax {self.tax_rate / 100:g}%"


def money(cents: int, sign: str = "$") -> str:
    """As in "$1,248.20"."""
    return f"{sign}{cents // 100:,}.{cents % 100:02d}"


def money_answers(cents: int, sign: str = "$") -> tuple[str, ...]:
    """The sum as drawn, and the same without its sign and without the thousands comma."""
    shown, bare = money(cents, sign), money(cents, "")
    return tuple(dict.fromkeys((shown, bare, shown.replace(",", ""), bare.replace(",", ""))))


def draw_lines(
    rng: Random,
    flow: Flow,
    sign: str,
    draw: Callable[[Line], None],
    *,
    until: float,
    most: int,
    cents: tuple[int, int],
    counts: tuple[int, ...],
    beside: float,
) -> tuple[Line, ...]:
    """Draw lines of goods until the sheet's room is down to ``until`` pixels.

    Args:
        rng: everything follows from it.
        flow: where they go.
        sign: stands before sums.
        draw: draws a line.
        until: pixels.
        most: lines.
        cents: price of a piece, from and to.
        counts: numbers of pieces to choose from.
        beside: what a line has beside its name and sum, in sizes.
    """
    sheet = flow.sheet
    limit = flow.width - sheet.long(money(cents[1] * 4, sign)) - beside * sheet.style.size
    lines: list[Line] = []
    names: list[str] = []
    while not lines or (flow.bottom - flow.y > until and len(lines) < most):
        name = sheet.new_name(rng, GOODS, limit, names)
        lines.append(Line(name, rng.choice(counts), rng.randint(*cents)))
        draw(lines[-1])
    return tuple(lines)


def ask_lines(sheet: Sheet, bill: Bill, *other_sums: int) -> None:
    """Ask every unambiguous question about a line.

    A price is asked for, or named, only where it is that of one piece; it is named only if no other sum in the
    picture, ``other_sums`` included, is the same.
    """
    sums = Counter([bill.subtotal, bill.tax, bill.total, *other_sums])
    for line in bill.lines:
        sums.update({line.amount, line.each})
    for line in bill.lines:
        if line.count > 1:
            sheet.ask(f"What is the quantity of {line.name}?", "quantity", str(line.count))
            continue
        sheet.ask(f"What is the price of {line.name}?", "price", *money_answers(line.each, bill.sign))
        if sums[line.each] == 1:
            sheet.ask(f"Which item costs {money(line.each, bill.sign)}?", "item", line.name)


def _heading(rng: Random, flow: Flow, layout: int, company: str) -> None:
    sheet = flow.sheet
    word = rng.choice(("INVOICE", "Invoice"))
    if layout == 1:
        height = round(1.9 * sheet.step)
        sheet.draw.rectangle((0, 0, sheet.width, height), fill=sheet.style.accent)
        scale = sheet.fitting(word, flow.width * 0.6, 1.5, bold=True)
        sheet.text(flow.left, height * 0.68, word, scale, bold=True, fill="#ffffff")
        flow.y = height
        flow.line(company, bold=True)
    elif layout == 3:
        flow.line(company, 1.15, bold=True)
        flow.feed(0.2)
        flow.line(word)
    else:
        flow.line(company, 1.2 if layout == 0 else 1.1, bold=layout == 0, centred=layout == 0)
        flow.feed(0.1)
        flow.line(word, 1.4, bold=True, fill=sheet.style.accent)
    flow.rule()


def _draw_facts(rng: Random, flow: Flow, layout: int) -> None:
    """Number, dates and receiver."""
    sheet, day = flow.sheet, a_date(rng)
    due, style = day + timedelta(days=rng.choice((10, 14, 30))), rng.random()
    dates = [
        long_date(d) if style < 0.4 else d.isoformat() if style < 0.8 else d.strftime("%d.%m.%Y") for d in (day, due)
    ]
    facts = (
        ("Invoice number", "number", a_code(rng)),
        ("Invoice date", "date", dates[0]),
        ("Due date", "date", dates[1]),
        ("Customer", "name", sheet.name(rng, PEOPLE)),
    )
    below = 6  # lines: a rule, one article, a rule and the sums
    for label, kind, value in facts[: max(1, min(4, flow.room - below))]:
        if layout == 2:
            flow.line(f"{label}: {value}")
        elif layout == 3 and flow.room > below + 8:
            flow.line(label, 0.85, fill=sheet.style.grey)
            flow.line(value)
        else:
            flow.pair(label, value)
        sheet.ask(f"What is the {label.lower()}?", kind, value)


def _draw_line(flow: Flow, layout: int, sign: str, line: Line) -> None:
    sheet, size = flow.sheet, flow.sheet.style.size
    flow.feed()
    name_x, count_x = flow.left + 1.6 * size, flow.left
    if layout == 3:
        name_x, count_x = flow.left, flow.right - 5.2 * size
    sheet.text(name_x, flow.y, line.name)
    sheet.text(count_x, flow.y, str(line.count))
    sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


def invoice(rng: Random, sheet: Sheet, layout: int) -> Document:
    """An invoice that fills the sheet; ``layout`` is below :data:`LAYOUTS`."""
    flow = sheet.flow(0.2)
    sign = rng.choice(("$", "$", "$", ""))
    company = sheet.new_name(rng, COMPANIES, flow.width / 1.25, [], bold=True)
    _heading(rng, flow, layout, company)
    _draw_facts(rng, flow, layout)
    sheet.ask("Which company sent the invoice?", "name", company)
    flow.rule(weight=max(1, sheet.style.size // 12))
    lines = draw_lines(
        rng,
        flow,
        sign,
        partial(_draw_line, flow, layout, sign),
        until=5.3 * sheet.step,
        most=40,
        cents=(900, 99999),
        counts=(1, 1, 2, 3, 4),
        beside=3.6,
    )
    bill = Bill(lines, rng.choice((500, 700, 1900, 2000)), sign)
    flow.rule()
    flow.pair("Subtotal", money(bill.subtotal, sign))
    flow.pair(bill.tax_label, money(bill.tax, sign))
    flow.feed(0.15)
    flow.pair("Total due", money(bill.total, sign), 1.15, bold=True)
    sheet.ask("What is the total due?", "total", *money_answers(bill.total, sign))
    sheet.ask("What is the subtotal?", "subtotal", *money_answers(bill.subtotal, sign))
    sheet.ask("What is the tax?", "tax", *money_answers(bill.tax, sign))
    ask_lines(sheet, bill)
    return sheet.document("invoice")
