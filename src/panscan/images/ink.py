"""Text in the one typeface that Pillow carries, whatever fonts the machine has, and shapes with smooth edges."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from math import ceil, floor
from typing import cast

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Box", "font", "printable", "rounded", "shorten", "stamp", "text_width", "wrap", "write"]

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels, half open."""

_FINE = 4  # shapes are drawn this much larger and scaled down, because Pillow does not smooth their edges
_LOOKALIKES = str.maketrans(
    {"×": "x", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "€": "EUR"}
    | {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
)


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's bundled typeface, ``size`` pixels from the top of a capital to the foot of a "g"."""
    face = cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))
    # Raqm spaces letters differently and is not in every build of Pillow.
    return face.font_variant(layout_engine=ImageFont.Layout.BASIC)


def _thickening(size: int) -> int:
    """Shift, in pixels, of the second stroke that stands in for a bold face, which Pillow does not carry."""
    return max(1, round(size * 0.03))


def text_width(text: str, size: int, *, bold: bool = False) -> float:
    """Width of one line in pixels."""
    if not bold:
        return font(size).getlength(text)
    return sum(font(size).getlength(letter) + _thickening(size) for letter in text)


def write(
    draw: ImageDraw.ImageDraw,
    xy: tuple[float, float],
    text: str,
    size: int,
    *,
    fill: str,
    anchor: str = "ls",
    bold: bool = False,
) -> Box:
    """Draw one line with its anchor (Pillow's two letters: l, m or r, then its height) at ``xy``.

    Returns the box that it covers.
    """
    face, width = font(size), text_width(text, size, bold=bold)
    # Whole pixels: hinted letters look alike wherever they stand.
    x, y = round(xy[0] - {"l": 0.0, "m": width / 2, "r": width}[anchor[0]]), round(xy[1])
    left, top, right, bottom = draw.textbbox((x, y), text, font=face, anchor=f"l{anchor[1]}")
    if bold:
        right = x + width
        for letter in text:
            for shift in range(_thickening(size) + 1):
                draw.text((x + shift, y), letter, fill=fill, font=face, anchor=f"l{anchor[1]}")
            x += round(face.getlength(letter)) + _thickening(size)
    else:
        draw.text((x, y), text, fill=fill, font=face, anchor=f"l{anchor[1]}")
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


def stamp(image: Image.Image, box: Box, fill: str, shape: Callable[[ImageDraw.ImageDraw, int], object]) -> None:
    """Fill a shape inside ``box``, edges smoothed.

    ``shape`` gets a canvas of mode L and how many of its pixels make one of ``image``, and draws in 255.
    """
    size = (box[2] - box[0], box[3] - box[1])
    mask = Image.new("L", (size[0] * _FINE, size[1] * _FINE))
    shape(ImageDraw.Draw(mask), _FINE)
    image.paste(fill, box, mask.resize(size, Image.Resampling.BOX))


def rounded(image: Image.Image, box: Box, radius: int, fill: str) -> None:
    """A filled box with round corners; a disc if the radius is half its side."""
    width, height = box[2] - box[0], box[3] - box[1]
    stamp(
        image,
        box,
        fill,
        lambda draw, fine: draw.rounded_rectangle((0, 0, width * fine - 1, height * fine - 1), radius * fine, fill=255),
    )
