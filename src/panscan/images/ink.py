"""Text in typefaces that come with Python packages, whatever fonts the machine has, and shapes with smooth edges."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from math import ceil, floor
from typing import cast

from PIL import Image, ImageDraw, ImageFont

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels, half open."""

_FINE = 4  # shapes are drawn this much larger and scaled down, because Pillow does not smooth their edges
_LOOKALIKES = str.maketrans(
    {"×": "x", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "€": "EUR"}
    | {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
)


_MEASURE = "the quick brown fox jumps over a lazy dog THE TOTAL 0123456789"


@dataclass(frozen=True, slots=True)
class Face:
    """A typeface: its name and its font files. Without a file it is the one that Pillow carries, Aileron.

    ``bold`` may be missing: then a second stroke beside the first stands in for it.
    """

    name: str
    regular: str | None = None
    bold: str | None = None


AILERON = Face("Aileron")


@cache
def font(size: int, file: str | None = None) -> ImageFont.FreeTypeFont:
    """The font of ``file``, or Pillow's own, ``size`` pixels from the top of a capital to the foot of a "g"."""
    # Raqm spaces letters differently and is not in every build of Pillow.
    if file is not None:
        return ImageFont.truetype(file, size, layout_engine=ImageFont.Layout.BASIC)
    face = cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))
    return face.font_variant(layout_engine=ImageFont.Layout.BASIC)


@cache
def mean_advance(face: Face) -> float:
    """Mean width of a character of ordinary text, in units of the font's size."""
    return font(100, face.regular).getlength(_MEASURE) / (100 * len(_MEASURE))


def _thickening(size: int) -> int:
    """Shift, in pixels, of the second stroke that stands in for a bold face where there is none."""
    return max(1, round(size * 0.03))


def text_width(text: str, size: int, *, bold: bool = False, face: Face = AILERON) -> float:
    """Width of one line in pixels."""
    if bold and face.bold is None:
        return sum(font(size, face.regular).getlength(letter) + _thickening(size) for letter in text)
    return font(size, face.bold if bold else face.regular).getlength(text)


def write(
    draw: ImageDraw.ImageDraw,
    xy: tuple[float, float],
    text: str,
    size: int,
    *,
    fill: str,
    anchor: str = "ls",
    bold: bool = False,
    face: Face = AILERON,
) -> Box:
    """Draw one line with its anchor (Pillow's two letters: l, m or r, then its height) at ``xy``.

    Returns the box that it covers.
    """
    drawn = font(size, face.bold if bold else face.regular)
    width = 0.0 if anchor[0] == "l" else text_width(text, size, bold=bold, face=face)
    # Whole pixels: hinted letters look alike wherever they stand.
    x, y = round(xy[0] - {"l": 0.0, "m": width / 2, "r": width}[anchor[0]]), round(xy[1])
    anchor = f"l{anchor[1]}"
    left, top, right, bottom = draw.textbbox((x, y), text, font=drawn, anchor=anchor)
    if not bold or face.bold is not None:
        draw.text((x, y), text, fill=fill, font=drawn, anchor=anchor)
    else:
        right = x + text_width(text, size, bold=True, face=face)
        for letter in text:
            for shift in range(_thickening(size) + 1):
                draw.text((x + shift, y), letter, fill=fill, font=drawn, anchor=anchor)
            x += round(drawn.getlength(letter)) + _thickening(size)
    return floor(left), floor(top), ceil(right), ceil(bottom)


def wrap(text: str, size: int, limit: float, *, separator: str = " ") -> list[str]:
    """Break ``text`` at ``separator`` into lines of at most ``limit`` pixels (a longer word stands alone).

    A no-break space keeps its neighbours on one line and comes back as a plain space.
    """
    lines: list[str] = []
    for part in text.split(separator):
        word = part.replace("\u00a0", " ")
        longer = f"{lines[-1]}{separator}{word}" if lines else word
        if lines and text_width(longer, size) <= limit:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def shorten(text: str, size: int, limit: float, *, bold: bool = False) -> str:
    """``text``, or as much of its beginning as fits into ``limit`` pixels followed by "..."."""
    if text_width(text, size, bold=bold) <= limit:
        return text
    kept = 0
    while kept < len(text) and text_width(f"{text[: kept + 1]}...", size, bold=bold) <= limit:
        kept += 1
    return f"{text[:kept].rstrip()}..."


def printable(text: str) -> str:
    """``text`` on one line in the letters that the typeface has: accents go, unknown letters become "?"."""
    plain = unicodedata.normalize("NFKD", text.translate(_LOOKALIKES))
    letters = "".join(c for c in plain if not unicodedata.combining(c))
    line = " ".join(letters.split())
    return "".join(c if c.isprintable() else "?" for c in line.encode("ascii", "replace").decode("ascii"))


def rounded(image: Image.Image, box: Box, radius: int, fill: str) -> None:
    """A filled box with round corners, edges smoothed; a disc if the radius is half its side."""
    width, height = box[2] - box[0], box[3] - box[1]
    mask = Image.new("L", (width * _FINE, height * _FINE))
    corner = (width * _FINE - 1, height * _FINE - 1)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, *corner), radius * _FINE, fill=255)
    image.paste(fill, box, mask.resize((width, height), Image.Resampling.BOX))
