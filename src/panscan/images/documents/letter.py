"""Letters: an A4 page of prose with dates, sums and names in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from math import cos, sin, tau
from random import Random

from PIL.ImageDraw import ImageDraw

from panscan.images.documents.a4 import ACCENTS, MARGIN, addressee, foot, letterhead, paper
from panscan.images.documents.bill import money, money_answers
from panscan.images.documents.sheet import GREY, Ask, Document, Sheet, choose
from panscan.images.documents.words import PEOPLE, a_date, an_address, long_date
from panscan.images.ink import stamp, wrap

__all__ = ["letter"]


@dataclass(frozen=True, slots=True)
class _Matter:
    """What a letter is about."""

    subject: str
    paragraphs: tuple[str, ...]
    asks: tuple[Ask, ...]


def _unbroken(text: str) -> str:
    """The same text, kept on one line by :func:`wrap`, so that an answer is drawn in one piece."""
    return text.replace(" ", "\u00a0")


def _inspection(rng: Random, day: date, colleague: str) -> _Matter:
    """The announcement of a visit by ``colleague`` some weeks after ``day``."""
    visit = long_date(day + timedelta(days=rng.randint(9, 40)))
    hour = f"{rng.randint(8, 16):02d}:{rng.choice((15, 30, 45))}"
    fee = rng.randint(2000, 9900)
    return _Matter(
        "Inspection of your heating system",
        (
            "The heating system in your building was last inspected two years ago. The regulations ask for a new "
            "inspection before the beginning of the next heating season, and we would like to do this together "
            "with the yearly reading of the meters.",
            f"Our engineer {_unbroken(colleague)} will visit you on {_unbroken(visit)} at {hour}. Please make sure "
            "that the boiler room and all radiators can be reached. The work takes about forty minutes and the "
            "heating stays off for half of that time.",
            f"The inspection costs {money(fee)}, which we add to your next yearly statement. There is nothing to "
            "pay on the day. Tenants who cannot be at home may leave a key with a neighbour, or ask us for another "
            "day by telephone no later than one week before the visit.",
        ),
        (
            Ask("On which date does the engineer visit?", (visit,), "date"),
            Ask("At what time does the engineer come?", (hour,), "time"),
            Ask("What is the name of the engineer?", (colleague,), "name"),
            Ask("How much does the inspection cost?", money_answers(fee), "price"),
        ),
    )


def _lease(rng: Random, day: date, colleague: str) -> _Matter:
    """The offer of a studio from some weeks after ``day``, with the keys from ``colleague``."""
    start = long_date(day + timedelta(days=rng.randint(30, 90)))
    area = f"{rng.randint(18, 140)} square metres"
    rent, deposit = rng.randrange(42000, 189000, 500), rng.randrange(200000, 380000, 1000)
    return _Matter(
        "Our offer for your new studio",
        (
            "Thank you for your visit last week. We are glad to offer you the studio at "
            f"{_unbroken(an_address(rng)[0])}. It has {_unbroken(area)} on the second floor, two large windows to "
            "the north, and a store room of its own in the yard, which you may use from the first day.",
            f"The rent is {money(rent)} a month, due on the first working day. Before you move in we ask for a "
            f"deposit of {money(deposit)}, which is kept on a separate account and returned with interest at the "
            "end of the lease.",
            f"The lease starts on {_unbroken(start)} and runs for three years. Either side may end it with three "
            "months' notice. If you agree, please sign the enclosed copy and send it back to us within fourteen "
            f"days. {_unbroken(colleague)} will then hand over the keys to you.",
        ),
        (
            Ask("On which date does the lease start?", (start,), "date"),
            Ask("How much is the rent per month?", money_answers(rent), "price"),
            Ask("How much is the deposit?", money_answers(deposit), "price"),
            Ask("How large is the studio?", (area, area.split()[0]), "area"),
            Ask("Who will hand over the keys?", (colleague,), "name"),
        ),
    )


_MATTERS = (_inspection, _lease)


def _signature(sheet: Sheet, rng: Random, x: int, y: int) -> None:
    """A flourish of the pen, 170x60 pixels, its top left at (x, y)."""
    loops, lean, phase = rng.uniform(4, 7), rng.uniform(8, 16), rng.uniform(0, tau)
    points = []
    for step in range(121):
        angle = phase + tau * loops * step / 120
        swing = 22 - step / 8
        points.append((20 + step + lean * cos(angle), 30 - step / 12 + swing * sin(angle * 1.03)))

    def flourish(draw: ImageDraw, fine: int) -> None:
        draw.line([(x * fine, y * fine) for x, y in points], fill=255, width=2 * fine, joint="curve")

    stamp(sheet.image, (x, y, x + 170, y + 60), "#2b3f7a", flourish)


def letter(rng: Random, variant: int) -> Document:
    """An A4 letter, 900x1273 or 848x1200 pixels; ``variant`` picks the matter."""
    sheet = paper(rng)
    company = letterhead(sheet, rng, rng.choice(ACCENTS))
    receiver, signer, colleague = rng.sample(PEOPLE, 3)
    addressee(sheet, rng, receiver, 210)
    day, number = a_date(rng), f"{rng.choice('ABKMR')}{rng.randrange(100, 999)}/{rng.randrange(1000, 9999)}"
    for y, text in ((210, long_date(day)), (230, f"Our reference: {number}")):
        sheet.text(sheet.width - MARGIN, y, text, 14, anchor="rs")
    matter = _MATTERS[variant % len(_MATTERS)](rng, day, colleague)
    sheet.text(MARGIN, 345, matter.subject, 16, bold=True)
    y = 395
    for paragraph in (f"Dear {receiver},", *matter.paragraphs, "Yours sincerely,"):
        for line in wrap(paragraph, 15, sheet.width - 2 * MARGIN):
            sheet.text(MARGIN, y, line, 15)
            y += 25
        y += 14
    _signature(sheet, rng, MARGIN - 4, y - 22)
    sheet.text(MARGIN, y + 64, signer, 15)
    sheet.text(MARGIN, y + 86, f"{company}, customer service", 13, fill=GREY)
    foot(sheet, rng, company)
    others = [*matter.asks, Ask("Who signed the letter?", (signer,), "name")]
    first = Ask("What is the reference number?", (number,), "number")
    return sheet.document("letter", choose(rng, first, others))
