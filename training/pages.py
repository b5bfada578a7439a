"""One training document: of which kind and size, how it is printed, and what happens to it before it is seen."""

from __future__ import annotations

import string
from dataclasses import dataclass
from io import BytesIO
from math import exp, log
from random import Random

from PIL import Image

from panscan.images.ink import Face
from panscan.workload.documents import KINDS, Document, Print, Sheet
from panscan.workload.documents.sheet import Flow
from panscan.workload.documents.words import (
    GOODS,
    LABELS,
    PEOPLE,
    STREETS,
    a_code,
    a_date,
    a_name,
    a_phone,
    a_word,
    long_date,
)

_SQUARE = ("receipt", "chart", "chart", "notes", "notes", "table", "form", "sign", "sign", "board")
_TALL = ("receipt", "receipt", "receipt", "invoice", "notes", "form")
_WIDE = ("board", "board", "table")
_PAPERS = ("#ffffff", "#ffffff", "#fdfdfb", "#f8f8f4", "#f6f8fa", "#fdf6e3", "#fbf3ec", "#e8efe6", "#f3e6ea", "#dfe7f2")
_INKS = ("#000000", "#22252b", "#22252b", "#1a2a44", "#3a2020", "#333333", "#444444")
_GREYS = ("#44484f", "#565b63", "#6a6f78")
_ACCENTS = (
    "#1f4e79",
    "#3d5a45",
    "#6b3f54",
    "#20508c",
    "#8a3b2a",
    "#2f6b4f",
    "#5b3a7a",
    "#222222",
    "#a11d2b",
    "#c9a44c",
)
_LIGHTS = ("#eef3f8", "#f0f4ee", "#f7f0f3", "#eeeeee")


@dataclass(frozen=True, slots=True)
class Page:
    """A document, and its picture as a camera or scanner saw it."""

    document: Document
    image: Image.Image


def _style(rng: Random, faces: tuple[Face, ...], short: int, columns: float) -> Print:
    face = rng.choice(faces)
    return Print(
        face=face,
        size=Print.size_for(face, short, columns),
        pitch=rng.uniform(1.45, 2.05),
        paper=rng.choice(_PAPERS),
        ink=rng.choice(_INKS),
        grey=rng.choice(_GREYS),
        accent=rng.choice(_ACCENTS),
        light=rng.choice(_LIGHTS),
        colon=rng.random() < 0.25,
        bold_values=rng.random() < 0.15,
        column=rng.random() < 0.2,
    )


def _worn(rng: Random, image: Image.Image, paper: str) -> Image.Image:
    """Turned by up to two degrees, or compressed by JPEG, or neither."""
    if rng.random() < 0.12:
        turn = rng.uniform(-2, 2) if image.width < 2 * image.height < 4 * image.width else rng.uniform(-1, 1)
        image = image.rotate(turn, Image.Resampling.BILINEAR, fillcolor=paper)
    if rng.random() < 0.15:
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(30, 90))
        image = Image.open(buffer).convert("RGB")
    return image


def a_page(
    rng: Random,
    ratio: float,
    faces: tuple[Face, ...],
    *,
    columns: float,
    held_out_layouts: bool = False,
    shorts: tuple[int, int] = (200, 420),
    kinds: tuple[str, ...] | None = None,
) -> Page:
    """A page whose long side is ``ratio`` times its short one; some are turned a little or compressed.

    Args:
        rng: everything follows from it.
        ratio: 1 is about square.
        faces: typefaces to choose from.
        columns: characters of ordinary text that the short side would hold.
        held_out_layouts: of each kind the layout that training never sees, instead of the others.
        shorts: the short side, pixels, from and to; small ones are likelier.
        kinds: to choose from; by default those that come in this shape.
    """
    short = round(exp(rng.uniform(log(shorts[0]), log(shorts[1]))))
    tall = _TALL if ratio > 1.2 else _SQUARE
    kind = rng.choice(kinds or (tall if ratio <= 1.2 or rng.random() < 0.6 else _WIDE))
    wide = kind in _WIDE and ratio > 1.2
    long = round(short * ratio)
    style = _style(rng, faces, short, columns)
    sheet = Sheet(*((long, short) if wide else (short, long)), style, invented=0.35)
    draw, layouts = KINDS[kind]
    layout = layouts - 1 if held_out_layouts else rng.randrange(layouts - 1)
    document = draw(rng, sheet, layout)
    if not document.questions:  # print so large that nothing fits
        return a_page(
            rng,
            ratio,
            faces,
            columns=columns * 1.3,
            held_out_layouts=held_out_layouts,
            shorts=shorts,
            kinds=kinds,
        )
    image = _worn(rng, document.image, style.paper)
    return Page(document, image)


_SIGNS = string.ascii_lowercase * 2 + string.ascii_uppercase + string.digits * 3 + "$.,:-/ "


def a_page_of_signs(rng: Random, ratio: float, faces: tuple[Face, ...], *, columns: float) -> Page:
    """A page of random characters: whoever reads it has to look, since no knowledge of words helps."""
    short = round(exp(rng.uniform(log(200), log(320))))
    style = _style(rng, faces, short, columns)
    sheet = Sheet(short, round(short * ratio), style)
    flow = Flow(sheet, 0.04 * short, 0.96 * short, 0.2 * sheet.step, sheet.height - 0.5 * sheet.step)
    flow.feed(rng.uniform(0, max(0, flow.room - 1)) * rng.random())
    least = rng.randint(1, 8)
    while flow.room >= 1 and len(sheet.texts) < least:
        text = sheet.pick(
            rng, lambda r: "".join(r.choice(_SIGNS) for _ in range(r.randint(1, 16))).strip() or "0", flow.width
        )
        flow.feed()
        x = flow.left + rng.random() * max(0.0, flow.width - sheet.long(text))
        sheet.text(x, flow.y, text)
    lines = [text.text for text in sheet.texts]
    for place, text in zip(("first", "last"), lines[:: max(1, len(lines) - 1)], strict=False):
        sheet.ask(f"What does the {place} line say?", "signs", text)
    return Page(sheet.document("signs"), sheet.image)


def _a_value(rng: Random) -> str:
    day, number = a_date(rng), rng.randrange(10 ** rng.randint(2, 6))
    return rng.choice(
        (
            f"${number / 100:,.2f}",
            f"{number:,}",
            f"{number / 10:.1f}",
            day.isoformat(),
            long_date(day),
            f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
            a_code(rng),
            a_name(rng, PEOPLE, 0.5),
            a_word(rng),
            f"{rng.randint(1, 99)} {a_name(rng, STREETS, 0.5)}",
            a_phone(rng),
            a_name(rng, GOODS, 0.5),
        )
    )


def _labelled(rng: Random, flow: Flow, way: int, label: str, value: str) -> None:
    """One label and its value: beside it, after a colon, above it, below it, or in a box."""
    sheet, size = flow.sheet, flow.sheet.style.size
    if way == 0:
        flow.pair(label, value)
        return
    if way == 1:
        flow.feed()
        end = sheet.text(flow.left, flow.y, f"{label}{rng.choice((':', ' =', ' -'))}")[2]
        sheet.text(end + 0.4 * size, flow.y, value, sheet.fitting(value, flow.right - end - 0.4 * size, 1.0))
        return
    first, second = (label, value) if way in (2, 4) else (value, label)
    middle = rng.random() < 0.3
    top = flow.y
    for text, small in ((first, first == label), (second, second == label)):
        scale = sheet.fitting(text, flow.width, 0.85 if small else 1.0)
        flow.feed(0.95)
        x, anchor = (flow.middle, "ms") if middle else (flow.left, "ls")
        fill, strong = (sheet.style.grey, False) if small else (None, way == 4)
        sheet.text(x, flow.y, text, scale, anchor=anchor, fill=fill, bold=strong)
    flow.feed(0.45)
    if way == 4:
        box = (flow.left - 0.3 * size, top + 0.1 * size, flow.right + 0.3 * size, flow.y)
        sheet.draw.rectangle(box, outline=sheet.style.grey, width=max(1, size // 14))
        flow.feed(0.15)


def a_page_of_labels(rng: Random, ratio: float, faces: tuple[Face, ...], *, columns: float) -> Page:
    """A page of labels that no form has, in one to three columns: so that a label is what is asked for, not a habit."""
    short = round(exp(rng.uniform(log(200), log(400))))
    long, wide = round(short * ratio), ratio > 1.2 and rng.random() < 0.5
    width, height = (long, short) if wide else (short, long)
    sheet = Sheet(width, height, _style(rng, faces, short, columns))
    sheet_columns = max(1, round(width / height)) if wide else rng.choice((1, 1, 2)) if columns > 20 else 1
    values: dict[str, str] = {}
    way, column_width = rng.randrange(5), width / sheet_columns
    for column in range(sheet_columns):
        left = column_width * column + 0.05 * short
        flow = Flow(sheet, left, left + column_width - 0.1 * short, 0.2 * sheet.step, height - 0.5 * sheet.step)
        while flow.room >= (1 if way < 2 else 3) and len(values) < 40:
            label = sheet.pick(rng, lambda r: a_name(r, LABELS, 0.6), flow.width * (0.5 if way < 2 else 1.0))
            value = sheet.pick(rng, _a_value, flow.width - (sheet.long(label) + sheet.style.size if way < 2 else 0))
            if label not in values and value not in values.values():
                values[label] = value
                _labelled(rng, flow, way, label, value)
            elif rng.random() < 0.2:
                break
    if not values:  # print so large that nothing fits
        return a_page_of_labels(rng, ratio, faces, columns=columns * 1.3)
    for label, value in values.items():
        sheet.ask(f"What is the {label.lower()}?", "label", value)
    for label, value in values.items():
        sheet.ask(f"What is the value of {label}?", "label", value)
    for label, value in values.items():
        sheet.ask(f'Where does it say "{value}"?', "place", label)
    return Page(sheet.document("labels"), sheet.image)


def rows_of(document: Document) -> list[str]:
    """The text, line by line: strings beside each other are of one line."""
    lines: list[list[tuple[int, int, int, str]]] = []
    for text in sorted(document.texts, key=lambda t: t.box[1] + t.box[3]):
        left, top, _, bottom = text.box
        if lines and (top + bottom) / 2 < lines[-1][-1][2] - (bottom - top) * 0.15:
            lines[-1].append((left, top, bottom, text.text))
        else:
            lines.append([(left, top, bottom, text.text)])
    return [" ".join(t[3] for t in sorted(line)) for line in lines]
