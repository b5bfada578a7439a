"""Filled-in forms. Layouts: values at the right, after a colon, in boxes; and under their labels, which is held out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from panscan.workload.documents.sheet import Document, Flow, Sheet
from panscan.workload.documents.words import (
    COMPANIES,
    PEOPLE,
    STREETS,
    TOWNS,
    a_code,
    a_date,
    a_phone,
    a_word,
    long_date,
)

LAYOUTS = 4
"""The last one is held out."""

_TITLES = ("Registration", "Membership", "Delivery note", "Visitor pass", "Claim form", "Library card", "Boarding pass")


def _a_day(rng: Random) -> str:
    day = a_date(rng)
    return rng.choice((day.isoformat(), long_date(day), day.strftime("%d.%m.%Y")))


def _fields(rng: Random, sheet: Sheet) -> dict[str, tuple[Callable[[Random], str], str]]:
    """Labels, how their values are drawn, and the kind of a question about them."""
    amount = rng.choice((10_000, 1_000_000))
    return {
        "Name": (lambda r: sheet.name(r, PEOPLE), "name"),
        "Street": (lambda r: f"{r.randint(2, 198)} {sheet.name(r, STREETS)}", "name"),
        "City": (lambda r: sheet.name(r, TOWNS), "name"),
        "Postcode": (lambda r: str(r.randint(10000, 99999)), "number"),
        "Phone": (a_phone, "number"),
        "Date": (_a_day, "date"),
        "Expiry date": (_a_day, "date"),
        "Reference": (a_code, "number"),
        "Member number": (lambda r: str(r.randint(1000, 999999)), "number"),
        "Company": (lambda r: sheet.name(r, COMPANIES), "name"),
        "Amount": (lambda r: f"${r.randrange(amount) / 100:,.2f}", "total"),
        "Time": (lambda r: f"{r.randrange(24):02d}:{r.randrange(60):02d}", "time"),
        "Seat": (lambda r: f"{r.randint(1, 40)}{r.choice('ABCDEF')}", "number"),
        "Weight": (lambda r: f"{r.randint(1, 90)}.{r.randrange(10)} kg", "number"),
        "Contact": (lambda r: f"{a_word(r)} {a_word(r)}", "name"),
        "Room": (lambda r: str(r.randint(1, 999)), "number"),
    }


def _draw_field(flow: Flow, layout: int, label: str, value: str) -> None:
    sheet = flow.sheet
    grey, size = sheet.style.grey, sheet.style.size
    if layout == 0:
        flow.pair(label, value)
    elif layout == 1:
        flow.feed(1.2)
        end = sheet.text(flow.left, flow.y, f"{label}:", fill=grey)[2]
        sheet.text(end + size * 0.5, flow.y, value)
    elif layout == 2:
        flow.feed(1.6)
        start = min(flow.left + sheet.long("Member number") + size * 0.5, flow.middle)
        sheet.text(flow.left, flow.y, label, fill=grey)
        top, bottom = flow.y - 0.72 * sheet.step, flow.y + 0.32 * sheet.step
        sheet.draw.rectangle((start, top, flow.right, bottom), outline=grey, width=max(1, size // 16))
        sheet.text(start + size * 0.4, flow.y, value)
    else:
        flow.line(label, 0.85, fill=grey)
        flow.feed()
        sheet.text(flow.left, flow.y, value)
    if layout in (0, 3):
        flow.feed(0.3)
        sheet.rule(flow.left, flow.right, round(flow.y))


_HEIGHT = (1.3, 1.2, 1.6, 2.3)  # lines that a field takes, by layout


def form(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A form that fills the sheet; ``layout`` is below :data:`LAYOUTS`."""
    flow = sheet.flow(0.3, 0.6)
    title = sheet.name(rng, _TITLES)
    flow.line(title, 1.3 if layout == 1 else 1.35, bold=True, centred=layout != 1)
    flow.rule(weight=max(1, sheet.style.size // 14))
    sheet.ask("What is the title?", "title", title)
    fields = _fields(rng, sheet)
    limit = flow.width - sheet.long("Member number") - 1.7 * sheet.style.size
    for label in rng.sample(list(fields), len(fields)):
        if flow.bottom - flow.y < _HEIGHT[layout] * sheet.step:
            break
        draw, kind = fields[label]
        value = sheet.pick(rng, draw, limit if layout < 3 else flow.width)
        _draw_field(flow, layout, label, value)
        sheet.ask(f"What is the {label.lower()}?", kind, value)
    return sheet.document("form")
