"""Signs on a wall. Layouts: a notice, opening hours, a door plate, directions; and hours under days, held out."""

from __future__ import annotations

from functools import partial
from random import Random

from panscan.images.ink import rounded
from panscan.workload.documents.sheet import Document, Flow, Question, Sheet
from panscan.workload.documents.words import PEOPLE, SHOPS, TOWNS, a_date, a_name, a_phone, long_date

LAYOUTS = 5
"""The last one is held out."""

_NOTICES = (
    ("TRAIL CLOSED", "Fallen trees ahead"),
    ("NO PARKING", "Keep this gate free"),
    ("WET PAINT", "Please do not touch"),
    ("NO SWIMMING", "Strong currents"),
    ("OUT OF ORDER", "Please use the stairs"),
    ("ROAD WORKS", "Expect long delays"),
    ("PRIVATE", "No way through"),
    ("FRESH EGGS", "Ring the bell"),
    ("FOR SALE", "By the owner"),
    ("DANGER", "High voltage"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _plate(sheet: Sheet) -> Flow:
    """A plate with a rim on a wall, and where to write on it."""
    side = min(sheet.width, sheet.height)
    edge = round(side * 0.025)
    box = (edge, edge, sheet.width - edge, sheet.height - edge)
    rounded(sheet.image, box, edge, sheet.style.accent)
    inner = (box[0] + edge, box[1] + edge, box[2] - edge, box[3] - edge)
    rounded(sheet.image, inner, max(1, edge // 2), sheet.style.paper)
    return Flow(sheet, 3.2 * edge, sheet.width - 3.2 * edge, 2 * edge, sheet.height - 3 * edge)


def _notice(rng: Random, flow: Flow, invented: float) -> list[Question]:
    """A warning in large letters, with its reason, its end and a number to call."""
    heading, reason = rng.choice(_NOTICES)
    if rng.random() < invented:
        heading = a_name(rng, TOWNS, 1.0).upper()
    flow.feed((flow.room - 6) * 0.15 + 0.6)
    flow.centre(heading, 2.0, bold=True)
    flow.feed(0.4)
    flow.centre(reason)
    until, phone = long_date(a_date(rng)), a_phone(rng)
    flow.feed(0.4)
    flow.centre(f"Until {until}")
    flow.centre(f"Call {phone}")
    return [
        Question("What does the sign say in large letters?", (heading,), "sign"),
        Question("Until which date does the sign hold?", (until,), "date"),
        Question("Which number can one call?", (phone,), "number"),
    ]


def _hours(rng: Random, flow: Flow, invented: float, *, stacked: bool = False) -> list[Question]:
    """The opening hours of a shop, beside the days or under them."""
    [shop] = flow.sheet.names(rng, 1, SHOPS, invented, flow.width / 1.3, bold=True)
    flow.feed(0.3)
    flow.centre(shop, 1.3, bold=True)
    flow.rule()
    days = _DAYS[: max(2, min(7, flow.room // 2 if stacked else flow.room))]
    closed = rng.choice(days)
    questions = [Question("What is the name of the shop?", (shop,), "name")]
    for day in days:
        opens = f"{rng.randint(6, 11):02d}:{rng.choice(('00', '15', '30'))}"
        text = f"{opens} - {rng.randint(13, 22)}:{rng.choice(('00', '30', '45'))}"
        text = "closed" if day == closed else text
        if stacked:
            flow.centre(day, fill=flow.sheet.style.grey)
            flow.centre(text)
        else:
            flow.pair(day, text)
        if day != closed:
            questions.append(Question(f"What are the opening hours on {day}?", (text, text.replace(" ", "")), "hours"))
    questions.append(Question("On which day is it closed?", (closed,), "closed"))
    return questions


def _door(rng: Random, flow: Flow, invented: float) -> list[Question]:
    """Who sits in which room."""
    rooms = sorted(rng.sample(range(1, 400), max(2, min(8, flow.room - 2))))
    sheet = flow.sheet
    limit = flow.width - sheet.long("000") - sheet.style.size
    people = sheet.names(rng, len(rooms), PEOPLE, max(invented, 0.1), limit)
    flow.feed(0.2)
    floor = f"Floor {rng.randint(1, 40)}"
    flow.line(floor, 1.3, bold=True)
    flow.rule()
    questions = [Question("Which floor is it?", (floor,), "number")]
    for room, person in zip(rooms, people, strict=True):
        flow.feed()
        sheet.text(flow.left, flow.y, str(room), bold=True)
        sheet.text(flow.left + sheet.long("0000", bold=True), flow.y, person)
        questions.append(Question(f"Who is in room {room}?", (person,), "name"))
        questions.append(Question(f"In which room is {person}?", (str(room),), "number"))
    return questions


def _directions(rng: Random, flow: Flow, invented: float) -> list[Question]:
    """Distances to places."""
    flow.feed(0.4)
    flow.centre("Walking routes", 1.2, bold=True)
    flow.rule()
    questions = list[Question]()
    count = max(2, min(8, flow.room))
    for place in flow.sheet.names(rng, count, TOWNS, max(invented, 0.1), flow.width * 0.6):
        distance = f"{rng.randint(0, 29)}.{rng.randrange(10)} km"
        flow.pair(place, distance)
        questions.append(Question(f"How far is it to {place}?", (distance,), "number"))
    return questions


_DRAW = (_notice, _hours, _door, _directions, partial(_hours, stacked=True))


def sign(rng: Random, sheet: Sheet, layout: int, invented: float = 0.0) -> Document:
    """A sign that fills the sheet; ``layout`` is below :data:`LAYOUTS`."""
    return sheet.document("sign", _DRAW[layout](rng, _plate(sheet), invented))
