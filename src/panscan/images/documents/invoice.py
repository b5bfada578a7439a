"""Invoices: an A4 page with numbered lines, sums, and the dates that go with them."""

from __future__ import annotations

from datetime import timedelta
from random import Random

from panscan.images.documents.a4 import ACCENTS, MARGIN, addressee, foot, letterhead, paper
from panscan.images.documents.bill import Bill, Line, item_asks, money, money_answers
from panscan.images.documents.sheet import GREY, INK, Ask, Document, Sheet, choose
from panscan.images.documents.words import PEOPLE, SERVICES, a_date, long_date

__all__ = ["invoice"]

_PITCH = 29  # pixels from one line of the bill to the next


def _bill(rng: Random) -> Bill:
    names = rng.sample(SERVICES, rng.randint(10, 18))
    lines = tuple(Line(name, rng.choice((1, 1, 1, 2, 3, 5, 8)), rng.randint(450, 42000)) for name in names)
    return Bill(lines, rng.choice((700, 1000, 1900, 2000)))


def _facts(sheet: Sheet, rng: Random) -> dict[str, str]:
    """Draw the block of numbers and dates at the right; returns them by label."""
    issued = a_date(rng)
    facts = {
        "Invoice number": f"INV-{issued.year}-{rng.randrange(1000, 9999)}",
        "Invoice date": long_date(issued),
        "Due date": long_date(issued + timedelta(days=rng.choice((14, 21, 30)))),
        "Customer number": f"C-{rng.randrange(10000, 99999)}",
    }
    for index, (label, value) in enumerate(facts.items()):
        y = 190 + 22 * index
        sheet.text(sheet.width - MARGIN - 290, y, label, 14, fill=GREY)
        sheet.text(sheet.width - MARGIN, y, value, 14, anchor="rs")
    return facts


def _lines(sheet: Sheet, bill: Bill, accent: str, top: int) -> int:
    """The lines of the bill under a coloured bar; returns the y at which the sums begin."""
    right = sheet.width - MARGIN
    columns = ((MARGIN + 10, "ls"), (MARGIN + 52, "ls"), (right - 230, "rs"), (right - 120, "rs"), (right - 10, "rs"))
    sheet.draw.rectangle((MARGIN, top, right, top + 28), fill=accent)
    rows = [("No", "Description", "Quantity", "Unit price", "Amount")]
    for index, line in enumerate(bill.lines):
        rows.append((str(index + 1), line.name, str(line.count), money(line.each), money(line.amount)))
    for index, row in enumerate(rows):
        y = top + 19 + _PITCH * index
        for (x, anchor), text in zip(columns, row, strict=True):
            sheet.text(x, y, text, 13, anchor=anchor, fill=INK if index else "#ffffff", bold=not index)
        if index:
            sheet.rule(MARGIN, right, y + 9, fill="#d9d9d6")
    return top + _PITCH * len(rows)


def _sums(sheet: Sheet, bill: Bill, accent: str, top: int) -> int:
    """Subtotal, tax and, on a coloured bar, the total; returns the y below."""
    right, y = sheet.width - MARGIN, top + 28
    for label, cents in (("Subtotal", bill.subtotal), (bill.tax_label, bill.tax)):
        sheet.text(right - 230, y, label, 14, anchor="rs", fill=GREY)
        sheet.text(right - 10, y, money(cents), 14, anchor="rs")
        y += 25
    sheet.draw.rectangle((right - 330, y - 10, right, y + 28), fill=accent)
    sheet.text(right - 230, y + 15, "Total due", 16, anchor="rs", fill="#ffffff", bold=True)
    sheet.text(right - 10, y + 15, money(bill.total), 16, anchor="rs", fill="#ffffff", bold=True)
    return y + 28


def invoice(rng: Random, variant: int) -> Document:
    """An A4 invoice, 900x1273 or 848x1200 pixels; ``variant`` picks the colour."""
    sheet, accent = paper(rng), ACCENTS[variant % len(ACCENTS)]
    company = letterhead(sheet, rng, accent)
    sheet.text(sheet.width - MARGIN, 88, "INVOICE", 30, anchor="rs", fill=accent, bold=True)
    sheet.text(MARGIN, 190, "Bill to", 14, fill=GREY)
    addressee(sheet, rng, rng.choice(PEOPLE), 212)
    facts, bill = _facts(sheet, rng), _bill(rng)
    y = _sums(sheet, bill, accent, _lines(sheet, bill, accent, 300)) + 46
    account = " ".join(f"{rng.randrange(10000):04d}" for _ in range(4))
    for text in (
        f"Please pay by bank transfer to {company}, account {account}.",
        "Quote the number of this invoice with your payment. Late payments bear interest of 1% a month.",
    ):
        sheet.text(MARGIN, y, text, 13, fill=GREY)
        y += 22
    foot(sheet, rng, company)
    others = [
        Ask("What is the total due?", money_answers(bill.total), "total"),
        Ask("What is the due date?", (facts["Due date"],), "date"),
        *item_asks(bill),
    ]
    first = Ask("What is the invoice number?", (facts["Invoice number"],), "number")
    return sheet.document("invoice", choose(rng, first, others))
