"""A sheet of paper that remembers which text was drawn where, and the document that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from panscan.images.ink import Box, write

__all__ = ["GREY", "INK", "Ask", "Document", "Sheet", "Text", "choose"]

INK = "#22252b"
GREY = "#6a6f78"


@dataclass(frozen=True, slots=True)
class Text:
    """One drawn string and the box, in pixels, that it covers."""

    text: str
    box: Box


@dataclass(frozen=True, slots=True)
class Ask:
    """A question with every right answer, first the one that stands in the picture word for word."""

    question: str
    answers: tuple[str, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Document:
    """A drawn document: its picture (RGB), the strings in it, and two to four questions about it."""

    kind: str
    image: Image.Image
    texts: tuple[Text, ...]
    asks: tuple[Ask, ...]


class Sheet:
    """Paper to draw on. Text goes through :meth:`text`; rules and shapes go straight to :attr:`draw`."""

    def __init__(self, width: int, height: int, paper: str) -> None:
        self.image = Image.new("RGB", (width, height), paper)
        self.draw = ImageDraw.Draw(self.image)
        self.width = width
        self.paper = paper
        self.texts: list[Text] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        *,
        anchor: str = "ls",
        fill: str = INK,
        bold: bool = False,
    ) -> Box:
        """Draw one line (by default with the left end of its baseline at x, y) and return the box it covers."""
        box = write(self.draw, (x, y), text, size, fill=fill, anchor=anchor, bold=bold)
        self.texts.append(Text(text, box))
        return box

    def rule(self, left: float, right: float, y: float, *, fill: str = INK, weight: int = 1, dash: int = 0) -> None:
        """A horizontal line; ``dash`` is the length of its dashes, 0 for an unbroken one."""
        starts = range(round(left), round(right), dash * 2) if dash else (round(left),)
        for start in starts:
            end = min(start + dash, right) if dash else right
            self.draw.line((start, y, end, y), fill=fill, width=weight)

    def document(self, kind: str, asks: Sequence[Ask], *, height: int | None = None) -> Document:
        """The finished document, cut off below ``height`` pixels."""
        image = self.image if height is None else self.image.crop((0, 0, self.width, height))
        return Document(kind, image, tuple(self.texts), tuple(asks))


def choose(rng: Random, first: Ask, others: Sequence[Ask]) -> list[Ask]:
    """``first`` and one to three of the others."""
    return [first, *rng.sample(others, min(len(others), rng.randint(1, 3)))]
