"""Signs on a wall, square: a notice in large letters, or the opening hours of a shop."""

from __future__ import annotations

from random import Random

from panscan.images.documents.sheet import GREY, Ask, Document, Sheet, choose
from panscan.images.documents.words import TOWNS, a_date, a_phone, long_date
from panscan.images.ink import rounded, text_width, wrap

__all__ = ["sign"]

_NOTICES = (
    ("TRAIL CLOSED", "The path to the lookout is closed because of fallen trees.", "#9a3b1f"),
    ("NO PARKING", "Keep this gate free by day and night. Vehicles are towed away.", "#a11d2b"),
    ("WET PAINT", "The railings on both sides have been painted. Please do not touch.", "#1f5c99"),
    ("NO SWIMMING", "Strong currents below the weir. The pool behind the mill is safe.", "#1f5c99"),
    ("LIFT OUT OF ORDER", "Please use the stairs, or ask at the desk for the goods lift.", "#54423a"),
)
_SHOPS = ("Bakery Okro", "Fern Books", "Velo Garage", "Studio Nine", "Plum Pharmacy")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_LIGHT, _GOLD = "#f4e9cd", "#d8c48d"


def _plate(rng: Random, side: int, rim: str, fill: str) -> Sheet:
    """A plate with a rim and four screws on a wall."""
    sheet = Sheet(side, side, rng.choice(("#d8d5cd", "#cfd6d3", "#dcd3c8")))
    for inset, radius, colour in ((24, 24, rim), (31, 17, fill)):
        rounded(sheet.image, (inset, inset, side - inset, side - inset), radius, colour)
    for x in (50, side - 50):
        for y in (50, side - 50):
            rounded(sheet.image, (x - 7, y - 7, x + 7, y + 7), 7, "#77777a")
            rounded(sheet.image, (x - 5, y - 5, x + 5, y + 5), 5, "#b4b4b0")
    return sheet


def _fitting(text: str, limit: float) -> int:
    """Largest even font size of at most 84 at which ``text`` in bold fits into ``limit`` pixels."""
    return next(size for size in range(84, 0, -2) if text_width(text, size, bold=True) <= limit)


def _notice(rng: Random, side: int) -> Document:
    """A warning, with its reason and a number to call in small print."""
    heading, reason, colour = rng.choice(_NOTICES)
    sheet = _plate(rng, side, colour, "#fdfcf8")
    middle = side / 2
    sheet.text(middle, side * 0.17, f"Town of {rng.choice(TOWNS)}", 16, anchor="ms", fill=GREY)
    sheet.draw.rectangle((31, round(side * 0.25), side - 32, round(side * 0.55)), fill=colour)
    sheet.text(middle, side * 0.4, heading, _fitting(heading, side - 130), anchor="mm", fill="#ffffff", bold=True)
    y = side * 0.66
    for line in wrap(reason, 16, side - 120):
        sheet.text(middle, y, line, 16, anchor="ms")
        y += 26
    sheet.rule(middle - 40, middle + 40, round(side * 0.77), fill=colour, weight=2)
    until, phone = long_date(a_date(rng)), a_phone(rng)
    for row, text in enumerate((f"Until {until}", f"Questions? Call {phone}")):
        sheet.text(middle, side * 0.77 + 32 + 26 * row, text, 14, anchor="ms", fill=GREY)
    asks = [
        Ask("Until which date does the sign hold?", (until,), "date"),
        Ask("Which number can one call?", (phone,), "number"),
    ]
    first = Ask("What does the sign say in large letters?", (heading,), "sign")
    return sheet.document("sign", choose(rng, first, asks))


def _hours(rng: Random, side: int) -> Document:
    """The opening hours of a shop, light on dark."""
    shop = rng.choice(_SHOPS)
    sheet = _plate(rng, side, "#c9a44c", rng.choice(("#23312d", "#2b2a33", "#31271f")))
    sheet.text(side / 2, side * 0.2, shop, 34, anchor="ms", fill=_LIGHT)
    sheet.text(side / 2, side * 0.2 + 36, "Opening hours", 16, anchor="ms", fill=_GOLD)
    hours = {
        day: f"{rng.randint(7, 10):02d}:{rng.choice(('00', '30'))} - {rng.randint(15, 20)}:{rng.choice(('00', '30'))}"
        for day in _DAYS
    }
    inset, pitch = round(side * 0.2), side * 0.078
    for row, (day, text) in enumerate({**hours, "Sunday": "closed"}.items()):
        y, fill = side * 0.4 + pitch * row, _LIGHT if day in hours else _GOLD
        sheet.text(inset, y, day, 16, fill=fill)
        sheet.text(side - inset, y, text, 16, anchor="rs", fill=fill)
        sheet.rule(inset, side - inset, round(y + pitch * 0.33), fill="#5a5750")
    others = [
        Ask(f"What are the opening hours on {day}?", (text, text.replace(" ", "")), "hours")
        for day, text in hours.items()
    ]
    others.append(Ask("On which day is it closed?", ("Sunday",), "closed"))
    return sheet.document("sign", choose(rng, Ask("What is the name of the shop?", (shop,), "name"), others))


_SIGNS = (_notice, _hours)


def sign(rng: Random, variant: int) -> Document:
    """A sign, 448-900 pixels square; ``variant`` picks a notice or opening hours."""
    return _SIGNS[variant % len(_SIGNS)](rng, rng.randrange(448, 901, 4))
