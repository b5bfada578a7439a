"""Signs on a wall. Layouts: a notice, opening hours, a door plate, directions; and hours under days, held out."""

from __future__ import annotations

from functools import partial
from random import Random

from panscan.images.ink import rounded
from panscan.workload.documents.sheet import Document, Flow, Sheet
from panscan.workload.documents.words import PEOPLE, SHOPS, TOWNS, a_date, a_phone, long_date

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
    edge = round(min(sheet.width, sheet.height) * 0.025)
    for inset, radius, fill in ((edge, edge, sheet.style.accent), (2 * edge, max(1, edge // 2), sheet.style.paper)):
        rounded(sheet.image, (inset, inset, sheet.width - inset, sheet.height - inset), radius, fill)
    return Flow(sheet, 3.2 * edge, sheet.width - 3.2 * edge, 2 * edge, sheet.height - 3 * edge)


def _notice(rng: Random, flow: Flow) -> None:
    """A warning in large letters, with its reason, its end and a number to call."""
    heading, reason = rng.choice(_NOTICES)
    if rng.random() < flow.sheet.invented:
        heading = flow.sheet.name(rng, TOWNS, 1.0).upper()
    flow.feed((flow.room - 6) * 0.15 + 0.6)
    flow.line(heading, 2.0, bold=True, centred=True)
    flow.feed(0.4)
    flow.line(reason, centred=True)
    until, phone = long_date(a_date(rng)), a_phone(rng)
    flow.feed(0.4)
    flow.line(f"Until {until}", centred=True)
    flow.line(f"Call {phone}", centred=True)
    flow.sheet.ask("What does the sign say in large letters?", "sign", heading)
    flow.sheet.ask("Until which date does the sign hold?", "date", until)
    flow.sheet.ask("Which number can one call?", "number", phone)


def _hours(rng: Random, flow: Flow, *, stacked: bool = False) -> None:
    """The opening hours of a shop, beside the days or under them."""
    sheet = flow.sheet
    shop = sheet.new_name(rng, SHOPS, flow.width / 1.3, [], bold=True)
    flow.feed(0.3)
    flow.line(shop, 1.3, bold=True, centred=True)
    flow.rule()
    sheet.ask("What is the name of the shop?", "name", shop)
    days = _DAYS[: max(2, min(7, flow.room // 2 if stacked else flow.room))]
    closed = rng.choice(days)
    for day in days:
        opens = f"{rng.randint(6, 11):02d}:{rng.choice(('00', '15', '30'))}"
        text = f"{opens} - {rng.randint(13, 22)}:{rng.choice(('00', '30', '45'))}"
        if day == closed:
            text = "closed"
        else:
            sheet.ask(f"What are the opening hours on {day}?", "hours", text, text.replace(" ", ""))
        if stacked:
            flow.line(day, fill=sheet.style.grey, centred=True)
            flow.line(text, centred=True)
        else:
            flow.pair(day, text)
    sheet.ask("On which day is it closed?", "closed", closed)


def _door(rng: Random, flow: Flow) -> None:
    """Who sits in which room."""
    rooms = sorted(rng.sample(range(1, 400), max(2, min(8, flow.room - 2))))
    sheet = flow.sheet
    limit = flow.width - sheet.long("000") - sheet.style.size
    people = sheet.new_names(rng, len(rooms), PEOPLE, limit, invented=0.1)
    flow.feed(0.2)
    floor = f"Floor {rng.randint(1, 40)}"
    flow.line(floor, 1.3, bold=True)
    flow.rule()
    sheet.ask("Which floor is it?", "number", floor)
    for room, person in zip(map(str, rooms), people, strict=True):
        flow.feed()
        sheet.text(flow.left, flow.y, room, bold=True)
        sheet.text(flow.left + sheet.long("0000", bold=True), flow.y, person)
        sheet.ask(f"Who is in room {room}?", "name", person)
        sheet.ask(f"In which room is {person}?", "number", room)


def _directions(rng: Random, flow: Flow) -> None:
    """Distances to places."""
    flow.feed(0.4)
    flow.line("Walking routes", 1.2, bold=True, centred=True)
    flow.rule()
    count = max(2, min(8, flow.room))
    for place in flow.sheet.new_names(rng, count, TOWNS, flow.width * 0.6, invented=0.1):
        distance = f"{rng.randint(0, 29)}.{rng.randrange(10)} km"
        flow.pair(place, distance)
        flow.sheet.ask(f"How far is it to {place}?", "number", distance)


_DRAW = (_notice, _hours, _door, _directions, partial(_hours, stacked=True))


def sign(rng: Random, sheet: Sheet, layout: int) -> Document:
    """A sign that fills the sheet; ``layout`` is below :data:`LAYOUTS`."""
    _DRAW[layout](rng, _plate(sheet))
    return sheet.document("sign")
