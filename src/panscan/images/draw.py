"""A picture for people of the views that pan and scan takes: where they lie, and what the model gets of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from PIL import Image, ImageDraw

from panscan.images.ink import Box, printable, rounded, shorten, text_width, wrap, write
from panscan.images.views import ViewPlan

LEAST_SIDE = 320
"""Smaller images are enlarged to this many pixels, and ``max_side`` is at least this many."""

CAPTION_SIZE, FACTS_SIZE, SMALL_SIZE = 24, 17, 14
MARGIN = 32
RIM = 8  # around the image: outlines and the frame
_GUTTER = 34  # beside the image: badges and bars of the crops
_GAP = 24
_LEAST_WIDTH = 420  # what the lines at the top need
_FACTS_PITCH = 26
_NOTE = "Each view as the model gets it"
_NOTE_HEIGHT = 2 * 20 + 8
_MOST_TILES = 12
_LEAST_TILE, _MOST_TILE = 160, 280
_LABEL_HEIGHT = 56  # two lines below a thumbnail


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Boxes in pixels of the picture.

    Args:
        plan: the views.
        size: of the picture, (width, height).
        facts: lines about the whole image; the first has its baseline at ``facts_y``, the others follow every
            26 pixels.
        image: where the scaled image lies.
        note: lines above the thumbnails, bottom left at ``note_at``.
        tiles: thumbnails of the first views; the last one stands for ``more`` views, if there are any.
    """

    plan: ViewPlan
    size: tuple[int, int]
    facts: tuple[str, ...]
    facts_y: int
    image: Box
    note: tuple[str, ...]
    note_at: tuple[int, int]
    tiles: tuple[Box, ...]

    @property
    def vertical(self) -> bool:
        """Crops lie below each other, not side by side."""
        return self.plan.height > self.plan.width

    def turned(self, box: Box) -> Box:
        """``box`` as if crops lay below each other: x and y are swapped where they lie side by side."""
        left, top, right, bottom = box
        return box if self.vertical else (top, left, bottom, right)

    @property
    def more(self) -> int:
        """Views without a thumbnail of their own."""
        left_out = len(self.plan.views) - len(self.tiles)
        return left_out + 1 if left_out else 0

    def place(self, box: Box) -> Box:
        """Where ``box``, in pixels of the upright image, lies in the picture; at least one pixel each way."""
        left, top, right, bottom = self.image
        across, down = (right - left) / self.plan.width, (bottom - top) / self.plan.height
        x0, y0 = min(left + round(box[0] * across), right - 1), min(top + round(box[1] * down), bottom - 1)
        return x0, y0, max(left + round(box[2] * across), x0 + 1), max(top + round(box[3] * down), y0 + 1)


def view_label(plan: ViewPlan, index: int) -> tuple[str, str]:
    """What is written below the thumbnail of a view: its name, then its size and tokens."""
    width, height = plan.views[index].size
    tokens = plan.image_tokens // len(plan.views)
    return f"crop {index}" if index else "whole", f"{width}x{height} px · {tokens} tokens"


def _grid(count: int, room: int, label: int, *, beside: bool) -> tuple[int, int]:
    """Columns and side of ``count`` thumbnails that fill ``room`` pixels of height (``beside``) or width.

    They are put into as few columns, or rows, as leave them large enough.
    """
    for lines in (1, 2, 3):
        if beside:
            side = (room - _NOTE_HEIGHT) // ceil(count / lines) - _LABEL_HEIGHT - _GAP
            least, columns = _LEAST_TILE, lines
        else:
            columns = ceil(count / lines)
            side = (room + _GAP) // columns - _GAP
            least = max(_LEAST_TILE, label)
        if side >= least:
            return columns, min(side, _MOST_TILE)
    return min(count, 3), _LEAST_TILE


def _tiles(count: int, columns: int, side: int, pitch: int, left: int, top: int) -> tuple[Box, ...]:
    """Boxes of thumbnails, of which neighbours in a row are ``pitch`` pixels apart."""
    boxes = []
    for index in range(count):
        row, column = divmod(index, columns)
        x, y = left + column * pitch, top + row * (side + _LABEL_HEIGHT + _GAP)
        boxes.append((x, y, x + side, y + side))
    return tuple(boxes)


def lay_out(plan: ViewPlan, *, caption: bool, estimated: bool, max_side: int) -> PictureLayout:
    """Lay out the picture: facts on top, the image, and the thumbnails beside a tall image or below a wide one."""
    # Small images grow by a whole factor, so that their pixels stay square.
    longer = max(plan.width, plan.height)
    scale = max(1, LEAST_SIDE // longer) if longer <= max_side else max_side / longer
    width, height = max(1, round(plan.width * scale)), max(1, round(plan.height * scale))
    beside = height >= width
    room = height if beside else width
    count = min(len(plan.views), _MOST_TILES)
    label = ceil(max(text_width(view_label(plan, index)[1], SMALL_SIZE) for index in range(count)))
    columns, side = _grid(count, room, label, beside=beside)
    pitch = max(side, label) + _GAP
    strip = columns * pitch - _GAP

    # The gutter is for the badges of the crops, which lie left of a tall image and above any other.
    gutter = RIM + (_GUTTER if plan.crops else 0)
    inset = (gutter, RIM) if plan.height > plan.width else (RIM, gutter)
    block = (inset[0] + width + RIM, inset[1] + height + RIM)
    content = max(block[0] + _GAP + strip if beside else max(block[0], strip), _LEAST_WIDTH)

    views = f"{plan.crops + 1} views (whole and {plan.crops} crops)" if plan.crops else "1 view (whole)"
    about = "about " if estimated else ""
    tokens = f"{plan.image_tokens:,} image tokens", f"{about}{plan.prompt_tokens:,} prompt tokens"
    facts = tuple(
        wrap(" · ".join((f"{plan.width}x{plan.height} px", views, *tokens)), FACTS_SIZE, content, separator=" · ")
    )
    facts_y = MARGIN + (2 * CAPTION_SIZE if caption else FACTS_SIZE)
    top = facts_y + _FACTS_PITCH * (len(facts) - 1) + _GAP
    left = MARGIN + inset[0]
    image = (left, top + inset[1], left + width, top + inset[1] + height)

    note = tuple(wrap(_NOTE, SMALL_SIZE, strip))
    x, y = (MARGIN + block[0] + _GAP, top) if beside else (MARGIN, top + block[1] + _GAP // 2)
    y += 20 * len(note)
    tiles = _tiles(count, columns, side, pitch, x, y + 8)
    size = (content + 2 * MARGIN, max(top + block[1], tiles[-1][3] + _LABEL_HEIGHT) + MARGIN)
    return PictureLayout(plan, size, facts, facts_y, image, note, (x, y - 4), tiles)


COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Outlines of crops 1, 2, ... in turn: Okabe and Ito's colours, which most colour-blind people tell apart."""

_PAPER, _INK, _GREY, _LINE = "#fbfbf9", "#22252b", "#5d626a", "#aeb2b9"
_ON_DARK = {"#0072b2", "#009e73", "#d55e00"}  # colours on which white is easier to read than black
_TINT = 0.14
_BADGE = 22  # height of a badge


def _colour(index: int) -> str:
    return COLOURS[(index - 1) % len(COLOURS)]


def _frame(draw: ImageDraw.ImageDraw, box: Box, colour: str, weight: int) -> None:
    """A line inside the edges of a half-open box."""
    draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=colour, width=weight)


def _badge_width(index: int) -> int:
    return max(_BADGE, ceil(text_width(str(index), SMALL_SIZE, bold=True)) + 12)


def _badge(picture: Image.Image, index: int, middle: tuple[int, int]) -> None:
    """The number of a crop on its colour."""
    x, y = middle
    half = _badge_width(index) // 2
    box = (x - half, y - _BADGE // 2, x + half, y + _BADGE // 2)
    rounded(picture, box, _BADGE // 2, _colour(index))
    fill = "#ffffff" if _colour(index) in _ON_DARK else _INK
    # The typeface's middle is that of its tallest and lowest letters; digits stand a little above it.
    write(ImageDraw.Draw(picture), (x, y + 5), str(index), SMALL_SIZE, fill=fill, anchor="ms", bold=True)


def _outline(picture: Image.Image, layout: PictureLayout, index: int) -> None:
    """Tint, outline and gutter bar of a crop.

    Along the long edges of the image the outline lies outside, so that an image of few pixels stays visible.
    """
    box = layout.place(layout.plan.views[index].box)
    if index % 2 == 0:
        piece = picture.crop(box)
        picture.paste(Image.blend(piece, Image.new("RGB", piece.size, _colour(index)), _TINT), box)
    draw = ImageDraw.Draw(picture)
    left, top, right, bottom = layout.turned(box)
    weight = 3 if bottom - top >= 16 else 1
    _frame(draw, layout.turned((left - weight, top, right + weight, bottom)), _colour(index), weight)
    bar = layout.turned((left - RIM - 7, top, left - RIM - 3, bottom))
    draw.rectangle((bar[0], bar[1], bar[2] - 1, bar[3] - 1), fill=_colour(index))


def _badges(picture: Image.Image, layout: PictureLayout) -> None:
    """Numbers in the gutter, every second or n-th one where there is no room for all."""
    crops, width = layout.plan.crops, _badge_width(layout.plan.crops)
    left, top, _, bottom = layout.turned(layout.image)
    across, along = (width, _BADGE) if layout.vertical else (_BADGE, width)
    x = left - RIM - 9 - _BADGE // 2 - (across - _BADGE) // 2
    for index in range(1, crops + 1, ceil((along + 4) * crops / (bottom - top))):
        _, start, _, end = layout.turned(layout.place(layout.plan.views[index].box))
        y = (start + end) // 2
        _badge(picture, index, (x, y) if layout.vertical else (y, x))


def _strip(picture: Image.Image, image: Image.Image, layout: PictureLayout) -> None:
    """The thumbnails with their labels."""
    draw, plan = ImageDraw.Draw(picture), layout.plan
    x, y = layout.note_at
    for index, line in enumerate(reversed(layout.note)):
        write(draw, (x, y - 20 * index), line, SMALL_SIZE, fill=_GREY)
    for index, box in enumerate(layout.tiles):
        left, top, right, bottom = box
        if layout.more and index == len(layout.tiles) - 1:
            rounded(picture, box, 8, "#e9eaec")
            middle = ((left + right) / 2, (top + bottom) / 2)
            write(draw, middle, f"+{layout.more} more", FACTS_SIZE, fill=_INK, anchor="mm", bold=True)
            continue
        side = right - left
        picture.paste(
            image.resize((side, side), Image.Resampling.BICUBIC, box=plan.views[index].box, reducing_gap=3.0), box
        )
        title, detail = view_label(plan, index)
        indent = 0
        if index:
            _frame(draw, box, _colour(index), 3)
            _badge(picture, index, (left + _badge_width(index) // 2, bottom + 19))
            indent = _badge_width(index) + 8
        else:
            _frame(draw, box, _LINE, 1)
        write(draw, (left + indent, bottom + 24), title, SMALL_SIZE, fill=_INK, bold=True)
        write(draw, (left, bottom + 47), detail, SMALL_SIZE, fill=_GREY)


def draw_views(
    image: Image.Image,
    plan: ViewPlan,
    *,
    caption: str | None = None,
    max_side: int = 1600,
    estimated: bool = True,
) -> Image.Image:
    """Draw the views of an image: crops outlined and numbered in it, and each view squashed as the model gets it.

    Args:
        image: upright, of the size that ``plan`` was made for; any mode that Pillow turns into RGB. Not changed.
        plan: its views; the first twelve get a thumbnail.
        caption: a line on top, shortened to what fits.
        max_side: the image is scaled to at most this many pixels along its longer side, 320 or more. With all that is
            around it the picture stays within ``max_side + 1200`` pixels each way.
        estimated: the plan's prompt tokens are not from the checkpoint's own tokenizer
            (:attr:`~panscan.images.views.PromptCost.estimated`).

    Returns:
        a new RGB image.
    """
    layout = lay_out(plan, caption=bool(caption), estimated=estimated, max_side=max_side)
    upright = image.convert("RGB")
    picture = Image.new("RGB", layout.size, _PAPER)
    draw = ImageDraw.Draw(picture)
    if caption:
        title = shorten(printable(caption), CAPTION_SIZE, layout.size[0] - 2 * MARGIN, bold=True)
        write(draw, (MARGIN, MARGIN + CAPTION_SIZE - 6), title, CAPTION_SIZE, fill=_INK, bold=True)
    for row, line in enumerate(layout.facts):
        write(draw, (MARGIN, layout.facts_y + _FACTS_PITCH * row), line, FACTS_SIZE, fill=_GREY)
    left, top, right, bottom = layout.image
    method = Image.Resampling.NEAREST if right - left > upright.width else Image.Resampling.LANCZOS
    picture.paste(upright.resize((right - left, bottom - top), method, reducing_gap=3.0), (left, top))
    _frame(ImageDraw.Draw(picture), (left - RIM, top - RIM, right + RIM, bottom + RIM), _LINE, 1)
    for index in range(1, len(plan.views)):
        _outline(picture, layout, index)
    if plan.crops:
        _badges(picture, layout)
    _strip(picture, upright, layout)
    return picture
