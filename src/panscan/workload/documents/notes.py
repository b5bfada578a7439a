"""Numbered lines: lists, statements, minutes.

Layouts: "7.", "7)", "7", "(7)", "7:", "#7", a word such as "Item 7"; and "No 7", held out.
"""

from __future__ import annotations

from random import Random

from panscan.workload.documents.sheet import Document, Question, Sheet
from panscan.workload.documents.words import GOODS, PEOPLE, TASKS, TOWNS, a_code, a_name

LAYOUTS = 8
"""The last one is held out."""

_TITLES = ("To do", "Minutes", "House rules", "Shopping list", "Log", "Agenda", "Statement")
_WAYS = ("{}.", "{})", "{}", "({})", "{}:", "#{}", "", "No {}")  # the empty one: one of the words below
_WORDS = ("Line", "Item", "Row", "Step", "Art.", "Pos", "Point", "Rule", "Day", "Part", "§", "P.", "Nr", "L")


def notes(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """Numbered lines that fill the sheet; ``layout`` is below :data:`LAYOUTS`."""
    flow = sheet.flow(0.3)
    title = a_name(rng, _TITLES, invented)
    flow.line(title, 1.35, bold=True)
    flow.rule()
    way = _WAYS[layout] or f"{rng.choice(_WORDS)} {{}}"
    start = flow.left + sheet.long(way.format(88)) + sheet.style.size * 0.5
    pool = rng.choice((TASKS, GOODS, PEOPLE, TOWNS, TASKS))
    questions, said = [Question("What is the title?", (title,), "title")], set[str]()
    first, aligned = rng.choice((1, 1, 1, rng.randint(2, 40))), rng.random() < 0.3
    while flow.room >= 1 and len(said) < 50:
        draw = a_code if rng.random() < 0.1 else lambda r: a_name(r, pool, invented)
        text = sheet.pick(rng, draw, flow.right - start, known=said)
        number = first + len(said)
        flow.feed()
        left, anchor = (start - sheet.style.size * 0.5, "rs") if aligned else (flow.left, "ls")
        grey = sheet.style.grey if layout == 2 else None
        sheet.text(left, flow.y, way.format(number), anchor=anchor, fill=grey, bold=sheet.style.bold_values)
        sheet.text(start, flow.y, text)
        said.add(text)
        questions.append(Question(f"What does line {number} say?", (text,), "line"))
        questions.append(Question(f'Which line says "{text}"?', (str(number),), "which line"))
    return sheet.document("notes", questions)
