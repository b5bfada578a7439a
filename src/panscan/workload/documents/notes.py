"""Numbered lines: lists, statements, minutes.

Layouts: "7.", "7)", "7", "(7)", "7:", "#7", a word such as "Item 7"; and "No 7", held out.
"""

from __future__ import annotations

from random import Random

from panscan.workload.documents.sheet import Document, Sheet
from panscan.workload.documents.words import GOODS, PEOPLE, TASKS, TOWNS, a_code

LAYOUTS = 8
"""The last one is held out."""

_TITLES = ("To do", "Minutes", "House rules", "Shopping list", "Log", "Agenda", "Statement")
_WAYS = ("{}.", "{})", "{}", "({})", "{}:", "#{}", "", "No {}")  # the empty one: one of the words below
_WORDS = ("Line", "Item", "Row", "Step", "Art.", "Pos", "Point", "Rule", "Day", "Part", "§", "P.", "Nr", "L")


def notes(rng: Random, sheet: Sheet, layout: int) -> Document:
    """Numbered lines that fill the sheet; ``layout`` is below :data:`LAYOUTS`."""
    flow = sheet.flow(0.3)
    title = sheet.name(rng, _TITLES)
    flow.line(title, 1.35, bold=True)
    flow.rule()
    sheet.ask("What is the title?", "title", title)
    way = _WAYS[layout] or f"{rng.choice(_WORDS)} {{}}"
    space = 0.5 * sheet.style.size
    start = flow.left + sheet.long(way.format(88)) + space
    pool = rng.choice((TASKS, GOODS, PEOPLE, TOWNS, TASKS))
    first, aligned = rng.choice((1, 1, 1, rng.randint(2, 40))), rng.random() < 0.3
    left, anchor = (start - space, "rs") if aligned else (flow.left, "ls")
    grey = sheet.style.grey if layout == 2 else None
    known: list[str] = []
    while flow.room >= 1 and len(known) < 50:
        draw = a_code if rng.random() < 0.1 else lambda r: sheet.name(r, pool)
        text = sheet.pick(rng, draw, flow.right - start, known=known)
        number = str(first + len(known))
        known.append(text)
        flow.feed()
        sheet.text(left, flow.y, way.format(number), anchor=anchor, fill=grey, bold=sheet.style.bold_values)
        sheet.text(start, flow.y, text)
        sheet.ask(f"What does line {number} say?", "line", text)
        sheet.ask(f'Which line says "{text}"?', "which line", number)
    return sheet.document("notes")
