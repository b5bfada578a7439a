"""Invoices, and bills in general: lines that sum to a total, in whole cents, and questions about them.

Layouts of an invoice: facts under the heading, a coloured heading, facts beside labels; and one that is held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from random import Random

from panscan.workload.documents.sheet import Document, Flow, Question, Sheet
from panscan.workload.documents.words import COMPANIES, GOODS, PEOPLE, a_code, a_date, a_name, long_date

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


def item_questions(bill: Bill, other_sums: Iterable[int] = ()) -> list[Question]:
    """Every unambiguous question about a line.

    A price is asked for, or named, only where it is that of one piece; it is named only if no other sum in the
    picture, ``other_sums`` included, is the same.
    """
    sums = Counter([bill.subtotal, bill.tax, bill.total, *other_sums])
    for line in bill.lines:
        sums.update({line.amount, line.each})
    questions = []
    for line in bill.lines:
        if line.count > 1:
            questions.append(Question(f"What is the quantity of {line.name}?", (str(line.count),), "quantity"))
            continue
        questions.append(Question(f"What is the price of {line.name}?", money_answers(line.each, bill.sign), "price"))
        if sums[line.each] == 1:
            questions.append(Question(f"Which item costs {money(line.each, bill.sign)}?", (line.name,), "item"))
    return questions


def _heading(rng: Random, flow: Flow, layout: int, company: str) -> None:
    sheet = flow.sheet
    word = rng.choice(("INVOICE", "Invoice"))
    if layout == 1:
        height = round(1.9 * sheet.step)
        sheet.draw.rectangle((0, 0, sheet.width, height), fill=sheet.style.accent)
        scale = sheet.fitting(word, flow.width * 0.6, 1.5, bold=True)
        sheet.text(flow.left, height * 0.68, word, scale, bold=True, fill="#ffffff")
        flow.y = height
        flow.line(company, 1.0, bold=True)
    elif layout == 3:
        flow.line(company, 1.15, bold=True)
        flow.feed(0.2)
        flow.line(word, 1.0)
    else:
        flow.centre(company, 1.2, bold=True) if layout == 0 else flow.line(company, 1.1)
        flow.feed(0.1)
        flow.line(word, 1.4, bold=True, fill=sheet.style.accent)
    flow.rule()


def _invoice_facts(rng: Random, flow: Flow, layout: int, invented: float) -> list[Question]:
    """Number, dates and receiver, with their questions."""
    day = a_date(rng)
    due, style = day + timedelta(days=rng.choice((10, 14, 30))), rng.random()
    shown = [
        long_date(d) if style < 0.4 else d.isoformat() if style < 0.8 else d.strftime("%d.%m.%Y") for d in (day, due)
    ]
    facts = {
        "Invoice number": a_code(rng),
        "Invoice date": shown[0],
        "Due date": shown[1],
        "Customer": a_name(rng, PEOPLE, invented),
    }
    questions = []
    below = 6  # lines: a rule, one article, a rule and the sums
    for label, value in list(facts.items())[: max(1, min(4, flow.room - below))]:
        if layout == 2:
            flow.line(f"{label}: {value}")
        elif layout == 3 and flow.room > below + 8:
            flow.line(label, 0.85, fill=flow.sheet.style.grey)
            flow.line(value)
        else:
            flow.pair(label, value)
        kind = {"Invoice number": "number", "Customer": "name"}.get(label, "date")
        questions.append(Question(f"What is the {label.lower()}?", (value,), kind))
    return questions


def _invoice_row(flow: Flow, layout: int, line: Line, sign: str) -> None:
    sheet = flow.sheet
    flow.feed()
    count_x = flow.left if layout != 3 else flow.right - 5.2 * sheet.style.size
    name_x = flow.left + (1.6 * sheet.style.size if layout != 3 else 0)
    sheet.text(name_x, flow.y, line.name)
    sheet.text(count_x, flow.y, str(line.count))
    sheet.text(flow.right, flow.y, money(line.amount, sign), anchor="rs")


def _invoice_lines(rng: Random, flow: Flow, layout: int, until: float, invented: float, sign: str) -> list[Line]:
    sheet = flow.sheet
    limit = flow.width - sheet.long(money(99999 * 4, sign)) - 3.6 * sheet.style.size
    lines, names = list[Line](), set[str]()
    while not lines or (flow.bottom - flow.y - sheet.step > until and len(lines) < 40):
        name = sheet.pick(rng, lambda r: a_name(r, GOODS, invented), limit, known=names)
        line = Line(name, rng.choice((1, 1, 2, 3, 4)), rng.randint(900, 99999))
        _invoice_row(flow, layout, line, sign)
        names.add(name)
        lines.append(line)
    return lines


def invoice(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """An invoice that fills the sheet; ``layout`` is below :data:`LAYOUTS`."""
    flow = sheet.flow(0.2)
    sign = rng.choice(("$", "$", "$", ""))
    [company] = sheet.names(rng, 1, COMPANIES, invented, flow.width / 1.25, bold=True)
    _heading(rng, flow, layout, company)
    questions = _invoice_facts(rng, flow, layout, invented)
    questions.append(Question("Which company sent the invoice?", (company,), "name"))
    flow.rule(weight=max(1, sheet.style.size // 12))
    lines = _invoice_lines(rng, flow, layout, 4.3 * sheet.step, invented, sign)
    bill = Bill(tuple(lines), rng.choice((500, 700, 1900, 2000)), sign)
    flow.rule()
    for label, cents in (("Subtotal", bill.subtotal), (bill.tax_label, bill.tax)):
        flow.pair(label, money(cents, sign))
    flow.feed(0.15)
    flow.pair("Total due", money(bill.total, sign), 1.15, bold=True)
    questions += [
        Question("What is the total due?", money_answers(bill.total, sign), "total"),
        Question("What is the subtotal?", money_answers(bill.subtotal, sign), "subtotal"),
        Question("What is the tax?", money_answers(bill.tax, sign), "tax"),
    ]
    return sheet.document("invoice", [*questions, *item_questions(bill)])
