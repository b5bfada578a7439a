"""A sheet of paper that remembers which text was drawn where, a cursor that fills it, and the document it becomes."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from panscan.images.ink import AILERON, Box, Face, mean_advance, text_width, write
from panscan.workload.documents.words import a_name, a_word


@dataclass(frozen=True, slots=True)
class Text:
    """One drawn string and the box, in pixels, that it covers."""

    text: str
    box: Box


@dataclass(frozen=True, slots=True)
class Question:
    """A question with all right answers; the first one appears verbatim in the picture."""

    question: str
    answers: tuple[str, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Document:
    """A drawn document: its picture (RGB), the strings in it, and questions about it."""

    kind: str
    image: Image.Image
    texts: tuple[Text, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Print:
    """How a document is printed: typeface, its size in pixels, the distance of lines in sizes, and colours.

    Of a label and its value: whether a colon stands between them, the value is bold, and values begin one below the
    other instead of ending at the right edge.
    """

    face: Face = AILERON
    size: int = 24
    pitch: float = 1.7
    paper: str = "#ffffff"
    ink: str = "#22252b"
    grey: str = "#565b63"
    accent: str = "#1f4e79"
    light: str = "#eef3f8"
    colon: bool = False
    bold_values: bool = False
    column: bool = False

    @staticmethod
    def size_for(face: Face, short_side: int, columns: float) -> int:
        """The size, pixels, at which ``columns`` characters of ordinary text fill ``short_side`` pixels."""
        return max(7, round(short_side / columns / mean_advance(face)))


class Sheet:
    """Paper to draw on. Text goes through :meth:`text`; rules and shapes go straight to :attr:`draw`.

    ``invented`` is the share of names that are made up instead of taken from a list.
    """

    def __init__(self, width: int, height: int, style: Print, invented: float = 0.0) -> None:
        self.image = Image.new("RGB", (width, height), style.paper)
        self.draw = ImageDraw.Draw(self.image)
        self.width, self.height = width, height
        self.style, self.invented = style, invented
        self.texts: list[Text] = []
        self.questions: list[Question] = []

    @property
    def step(self) -> float:
        """Pixels from one line to the next."""
        return self.style.size * self.style.pitch

    def text(
        self,
        x: float,
        y: float,
        text: str,
        scale: float = 1.0,
        *,
        anchor: str = "ls",
        fill: str | None = None,
        bold: bool = False,
    ) -> Box:
        """Draw one line (by default with the left end of its baseline at x, y) and return the box it covers."""
        style = self.style
        size, ink = self._scaled(scale), fill or style.ink
        box = write(self.draw, (x, y), text, size, fill=ink, anchor=anchor, bold=bold, face=style.face)
        self.texts.append(Text(text, box))
        return box

    def _scaled(self, scale: float) -> int:
        return max(7, round(self.style.size * scale))

    def long(self, text: str, scale: float = 1.0, *, bold: bool = False) -> float:
        """Pixels that a line takes."""
        return text_width(text, self._scaled(scale), bold=bold, face=self.style.face)

    def fitting(self, text: str, limit: float, most: float, *, bold: bool = False) -> float:
        """The largest scale up to ``most`` at which ``text`` takes at most ``limit`` pixels."""
        width = self.long(text, most, bold=bold)
        return most if width <= limit else most * limit / width * 0.97

    def pick(
        self,
        rng: Random,
        draw: Callable[[Random], str],
        limit: float,
        *,
        bold: bool = False,
        known: Container[str] = (),
    ) -> str:
        """What ``draw`` makes, drawn again until it takes at most ``limit`` pixels and is not ``known`` yet.

        After twenty tries it is the shortest new one, or else an invented word, so the search always ends.
        """
        tries = []
        for _ in range(20):
            text = draw(rng)
            if text not in known:
                if self.long(text, bold=bold) <= limit:
                    return text
                tries.append(text)
        while not tries:
            tries = [word for word in (a_word(rng), a_word(rng) + a_word(rng).lower()) if word not in known]
        return min(tries, key=len)

    def name(self, rng: Random, names: tuple[str, ...], invented: float = 0.0) -> str:
        """One of the names, or an invented one with at least the probability ``invented``; see :func:`a_name`."""
        return a_name(rng, names, max(invented, self.invented))

    def new_name(
        self,
        rng: Random,
        names: tuple[str, ...],
        limit: float,
        known: list[str],
        *,
        invented: float = 0.0,
        bold: bool = False,
    ) -> str:
        """A :meth:`name` that takes at most ``limit`` pixels and is not ``known``; it is appended to these."""
        known.append(self.pick(rng, lambda r: self.name(r, names, invented), limit, bold=bold, known=known))
        return known[-1]

    def new_names(
        self,
        rng: Random,
        count: int,
        names: tuple[str, ...],
        limit: float,
        *,
        invented: float = 0.0,
        bold: bool = False,
    ) -> list[str]:
        """``count`` different names; see :meth:`new_name`."""
        chosen: list[str] = []
        for _ in range(count):
            self.new_name(rng, names, limit, chosen, invented=invented, bold=bold)
        return chosen

    def ask(self, question: str, kind: str, *answers: str) -> None:
        """Add a question of a kind. The first answer appears verbatim in the picture."""
        self.questions.append(Question(question, answers, kind))

    def flow(self, top: float, bottom: float = 0.5, margin: float = 0.05) -> Flow:
        """A cursor within margins: lines at the top and bottom, and a share of the short side at the left and right."""
        edge = margin * min(self.width, self.height)
        return Flow(self, edge, self.width - edge, top * self.step, self.height - bottom * self.step)

    def rule(self, left: float, right: float, y: float, *, weight: int = 1, dash: float = 0) -> None:
        """A horizontal line; ``dash`` is the length of its dashes, 0 for an unbroken one."""
        starts = range(round(left), round(right), max(2, round(dash * 2))) if dash else (round(left),)
        for start in starts:
            end = min(start + dash, right) if dash else right
            self.draw.line((start, y, end, y), fill=self.style.grey, width=weight)

    def document(self, kind: str) -> Document:
        """The finished document, without questions whose answers ended up outside of it, as in very large print."""
        inside = []
        for text in self.texts:
            left, top, right, bottom = text.box
            if min(left, top) >= 0 and right <= self.width and bottom <= self.height:
                inside.append(text.text)
        seen = tuple(ask for ask in self.questions if any(ask.answers[0] in text for text in inside))
        return Document(kind, self.image, tuple(self.texts), seen)


class Flow:
    """A cursor that goes down a column of a sheet; ``y`` is the baseline, or the rule, that was drawn last."""

    def __init__(self, sheet: Sheet, left: float, right: float, top: float, bottom: float) -> None:
        self.sheet = sheet
        self.left, self.right = left, right
        self.y, self.bottom = top, bottom

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def room(self) -> int:
        """Lines that still fit."""
        return max(0, int((self.bottom - self.y) / self.sheet.step + 1e-6))

    def feed(self, lines: float = 1) -> None:
        self.y += self.sheet.step * lines

    def line(
        self, text: str, scale: float = 1.0, *, bold: bool = False, fill: str | None = None, centred: bool = False
    ) -> None:
        """On the next line, text at the left or in the middle, smaller if it would not fit."""
        self.feed(max(1.0, scale * 0.9))
        scale = self.sheet.fitting(text, self.width, scale, bold=bold)
        x, anchor = (self.middle, "ms") if centred else (self.left, "ls")
        self.sheet.text(x, self.y, text, scale, anchor=anchor, bold=bold, fill=fill)

    def pair(self, label: str, value: str, scale: float = 1.0, *, bold: bool = False, dots: bool = False) -> None:
        """On the next line, a label at the left and its value at the right, perhaps with dots between them.

        A value that would run into its label is printed smaller.
        """
        self.feed(max(1.0, scale * 0.9))
        sheet, style = self.sheet, self.sheet.style
        size, strong = style.size, bold or style.bold_values
        start = sheet.text(self.left, self.y, f"{label}:" if style.colon else label, scale, bold=bold)[2]
        start += round(0.4 * size)
        fits = sheet.fitting(value, self.right - start, scale, bold=strong)
        x, anchor = max(start, self.left + 0.55 * self.width), "ls"
        if not style.column or dots or x + sheet.long(value, fits, bold=strong) > self.right:
            x, anchor = self.right, "rs"
        end = sheet.text(x, self.y, value, fits, anchor=anchor, bold=strong)[0]
        if dots:
            for dot in range(start + size // 2, end - size // 2, max(4, size // 3)):
                sheet.rule(dot, dot + max(1, size // 14), round(self.y) - 1)

    def rule(self, *, dash: float = 0, weight: int = 1) -> None:
        self.feed(0.5)
        self.sheet.rule(self.left, self.right, round(self.y), dash=dash, weight=weight)
