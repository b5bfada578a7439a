"""What A4 pages share: the paper, a letterhead, the receiver's address and a foot."""

from __future__ import annotations

from random import Random

from panscan.images.documents.sheet import GREY, Sheet
from panscan.images.documents.words import COMPANIES, a_phone, an_address
from panscan.images.ink import rounded

__all__ = ["ACCENTS", "MARGIN", "addressee", "foot", "letterhead", "paper"]

MARGIN = 72
ACCENTS = ("#20508c", "#8a3b2a", "#2f6b4f", "#5b3a7a")


def paper(rng: Random) -> Sheet:
    """A page of 900x1273 or 848x1200 pixels, margins of :data:`MARGIN` to be kept by the caller."""
    width, height = rng.choice(((900, 1273), (848, 1200)))
    return Sheet(width, height, rng.choice(("#ffffff", "#fdfdf9", "#fbfaf6")))


def letterhead(sheet: Sheet, rng: Random, accent: str) -> str:
    """Logo, name and address in the top 140 pixels; returns the company's name."""
    company = rng.choice(COMPANIES)
    rounded(sheet.image, (MARGIN, 60, MARGIN + 56, 116), rng.choice((4, 12, 28)), accent)
    sheet.text(MARGIN + 28, 89, company[0], 34, anchor="mm", fill="#ffffff")
    sheet.text(MARGIN + 72, 84, company, 22, bold=True)
    sheet.text(MARGIN + 72, 107, " · ".join((*an_address(rng), a_phone(rng))), 13, fill=GREY)
    sheet.rule(MARGIN, sheet.width - MARGIN, 138, fill=accent, weight=2)
    return company


def addressee(sheet: Sheet, rng: Random, person: str, y: int) -> None:
    """Name and address of the receiver, from baseline ``y`` down."""
    for index, text in enumerate((person, *an_address(rng))):
        sheet.text(MARGIN, y + 20 * index, text, 14)


def foot(sheet: Sheet, rng: Random, company: str) -> None:
    """The company's particulars in the lowest 70 pixels."""
    height = sheet.image.height
    sheet.rule(MARGIN, sheet.width - MARGIN, height - 70, fill="#c8c8c4")
    text = f"{company} · registered office {an_address(rng)[1]} · page 1 of 1"
    sheet.text(sheet.width / 2, height - 46, text, 12, anchor="ms", fill=GREY)
