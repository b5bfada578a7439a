"""A picture for people of the views that pan and scan takes: where they lie, and what the model gets of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from PIL import Image, ImageDraw

from panscan.images.ink import Box, printable, shorten, text_width, wrap, write
from panscan.images.views import ViewPlan

LEAST_SIDE = 320
"""Smaller images are enlarged to this many pixels, and ``max_side`` is at least this many."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Outlines of crops 1, 2, ... in turn: Okabe and Ito's colours, which most colour-blind people tell apart."""
MARGIN = 32
MOST_TILES = 12
"""Views with a thumbnail."""

_CAPTION_SIZE, _FACTS_SIZE, _SMALL_SIZE = 24, 17, 14
_GAP = 24
_LEAST_WIDTH = 420  # what the lines at the top need
_FACTS_PITCH = 26
_TILE, _LABEL_HEIGHT = 220, 56  # side of a thumbnail; two lines below it
_LEAST_LINES = 3  # columns or rows of thumbnails that fit beside any image
_LEAST_NUMBERED = 24  # pixels of a crop's shorter side that has a number in the image
_PAPER, _INK, _GREY, _LINE = "#fbfbf9", "#22252b", "#5d626a", "#aeb2b9"


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Boxes in pixels of the picture.

    Args:
        plan: the views.
        size: of the picture, (width, height).
        facts: lines about the whole image; the first has its baseline at ``facts_y``, the others follow every
            26 pixels.
        image: where the scaled image lies.
        tiles: thumbnails of the first views.
    """

    plan: ViewPlan
    size: tuple[int, int]
    facts: tuple[str, ...]
    facts_y: int
    image: Box
    tiles: tuple[Box, ...]

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


def lay_out(plan: ViewPlan, *, caption: bool, estimated: bool, max_side: int) -> PictureLayout:
    """Lay out the picture: facts on top, the image, and the thumbnails beside a tall image or below a wide one."""
    # Small images grow by a whole factor, so that their pixels stay square.
    longer = max(plan.width, plan.height)
    scale = max(1, LEAST_SIDE // longer) if longer <= max_side else max_side / longer
    width, height = max(1, round(plan.width * scale)), max(1, round(plan.height * scale))
    count = min(len(plan.views), MOST_TILES)
    label = ceil(max(text_width(view_label(plan, index)[1], _SMALL_SIZE) for index in range(count)))
    pitch, row_height = max(_TILE, label) + _GAP, _TILE + _LABEL_HEIGHT + _GAP
    is_portrait = height >= width
    if is_portrait:
        columns = ceil(count / max((height + _GAP) // row_height, ceil(count / _LEAST_LINES)))
    else:
        columns = min(count, max(_LEAST_LINES, (width + _GAP) // pitch))
    strip = columns * pitch - _GAP
    content = max(width + _GAP + strip if is_portrait else max(width, strip), _LEAST_WIDTH)
    facts = tuple(wrap(_facts_text(plan, count, estimated=estimated), _FACTS_SIZE, content, separator=" · "))
    facts_y = MARGIN + (2 * _CAPTION_SIZE if caption else _FACTS_SIZE)
    top = facts_y + _FACTS_PITCH * (len(facts) - 1) + _GAP
    x, y = (MARGIN + width + _GAP, top) if is_portrait else (MARGIN, top + height + _GAP)
    corners = [(x + index % columns * pitch, y + index // columns * row_height) for index in range(count)]
    tiles = tuple((left, upper, left + _TILE, upper + _TILE) for left, upper in corners)
    size = (content + 2 * MARGIN, max(top + height, tiles[-1][3] + _LABEL_HEIGHT) + MARGIN)
    return PictureLayout(plan, size, facts, facts_y, (MARGIN, top, MARGIN + width, top + height), tiles)


def _facts_text(plan: ViewPlan, shown: int, *, estimated: bool) -> str:
    facts = [
        f"{plan.width}x{plan.height} px",
        f"{plan.crops + 1} views (whole and {plan.crops} crops)" if plan.crops else "1 view (whole)",
        f"{plan.image_tokens:,} image tokens",
        f"{'about ' if estimated else ''}{plan.prompt_tokens:,} prompt tokens",
    ]
    if shown < len(plan.views):
        facts.append(f"the first {shown} views below")
    return " · ".join(facts)


def _colour(index: int) -> str:
    """Return the colour of a view's frame."""
    return COLOURS[(index - 1) % len(COLOURS)] if index else _LINE


def _frame(draw: ImageDraw.ImageDraw, box: Box, index: int) -> None:
    """Draw the frame of a view: a line inside the edges of a half-open box."""
    left, top, right, bottom = box
    weight = 3 if min(right - left, bottom - top) >= 16 else 1
    draw.rectangle((left, top, right - 1, bottom - 1), outline=_colour(index), width=weight)


def _outline(draw: ImageDraw.ImageDraw, box: Box, index: int) -> None:
    """Draw a crop's outline and, if there is room, its number on its colour."""
    _frame(draw, box, index)
    left, top, right, bottom = box
    width = ceil(text_width(str(index), _SMALL_SIZE, bold=True)) + 12
    if bottom - top >= _LEAST_NUMBERED and right - left >= max(width, _LEAST_NUMBERED):
        draw.rectangle((left, top, left + width - 1, top + 21), fill=_colour(index))
        write(draw, (left + width / 2, top + 16), str(index), _SMALL_SIZE, fill=_INK, anchor="ms", bold=True)


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
        plan: its views; the first :data:`MOST_TILES` get a thumbnail.
        caption: a line on top, shortened to what fits.
        max_side: the image is scaled to at most this many pixels along its longer side, 320 or more. With all that is
            around it the picture stays within ``max_side + 1400`` pixels each way.
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
        title = shorten(printable(caption), _CAPTION_SIZE, layout.size[0] - 2 * MARGIN, bold=True)
        write(draw, (MARGIN, MARGIN + _CAPTION_SIZE - 6), title, _CAPTION_SIZE, fill=_INK, bold=True)
    for row, line in enumerate(layout.facts):
        write(draw, (MARGIN, layout.facts_y + _FACTS_PITCH * row), line, _FACTS_SIZE, fill=_GREY)
    left, top, right, bottom = layout.image
    method = Image.Resampling.NEAREST if right - left > upright.width else Image.Resampling.LANCZOS
    picture.paste(upright.resize((right - left, bottom - top), method, reducing_gap=3.0), (left, top))
    for index in range(1, len(plan.views)):
        _outline(draw, layout.place(plan.views[index].box), index)
    for index, box in enumerate(layout.tiles):
        view, (x, _, _, y) = plan.views[index], box
        thumbnail = upright.resize((_TILE, _TILE), Image.Resampling.BICUBIC, box=view.box, reducing_gap=3.0)
        picture.paste(thumbnail, box)
        _frame(draw, box, index)
        title, detail = view_label(plan, index)
        write(draw, (x, y + 24), title, _SMALL_SIZE, fill=_INK, bold=True)
        write(draw, (x, y + 47), detail, _SMALL_SIZE, fill=_GREY)
    return picture
