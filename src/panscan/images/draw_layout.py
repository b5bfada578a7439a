"""Where everything lies in the picture of an image's views. Pure geometry: no pixels are touched."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from panscan.core import SettingError
from panscan.images.ink import Box, text_width, wrap
from panscan.images.views import ViewPlan

__all__ = [
    "CAPTION_SIZE",
    "FACTS_SIZE",
    "LEAST_SIDE",
    "MARGIN",
    "RIM",
    "SMALL_SIZE",
    "PictureLayout",
    "lay_out",
    "view_label",
]

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
            ``facts_pitch`` pixels.
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
    facts_pitch: int = _FACTS_PITCH

    @property
    def vertical(self) -> bool:
        """Crops lie below each other, not side by side."""
        return self.plan.height > self.plan.width

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


def _facts(plan: ViewPlan, *, estimated: bool) -> str:
    views = f"{plan.crops + 1} views (whole and {plan.crops} crops)" if plan.crops else "1 view (whole)"
    about = "about " if estimated else ""
    tokens = f"{plan.image_tokens:,} image tokens", f"{about}{plan.prompt_tokens:,} prompt tokens"
    return " · ".join((f"{plan.width}x{plan.height} px", views, *tokens))


def _display(plan: ViewPlan, max_side: int) -> tuple[int, int]:
    """Width and height of the scaled image. Small ones grow by a whole factor, so that their pixels stay square."""
    longer = max(plan.width, plan.height)
    scale = max(1, LEAST_SIDE // longer) if longer <= max_side else max_side / longer
    return max(1, round(plan.width * scale)), max(1, round(plan.height * scale))


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


@dataclass(frozen=True, slots=True)
class _Strip:
    """The thumbnails, before it is known where they go. ``pitch`` is (across, down) from one to the next."""

    count: int
    columns: int
    side: int
    pitch: tuple[int, int]

    @property
    def width(self) -> int:
        return self.columns * self.pitch[0] - _GAP

    def tiles(self, left: int, top: int) -> tuple[Box, ...]:
        boxes = []
        for index in range(self.count):
            row, column = divmod(index, self.columns)
            x, y = left + column * self.pitch[0], top + row * self.pitch[1]
            boxes.append((x, y, x + self.side, y + self.side))
        return tuple(boxes)


def _strip(plan: ViewPlan, room: int, *, beside: bool) -> _Strip:
    """Thumbnails for ``room`` pixels of height (``beside``) or width, no label of them wider than its place."""
    count = min(len(plan.views), _MOST_TILES)
    label = ceil(max(text_width(view_label(plan, index)[1], SMALL_SIZE) for index in range(count)))
    columns, side = _grid(count, room, label, beside=beside)
    return _Strip(count, columns, side, (max(side, label) + _GAP, side + _LABEL_HEIGHT + _GAP))


def lay_out(plan: ViewPlan, *, caption: bool, estimated: bool, max_side: int) -> PictureLayout:
    """Lay out the picture: facts on top, the image, and the thumbnails beside a tall image or below a wide one.

    Raises:
        SettingError: if ``max_side`` is below :data:`LEAST_SIDE`.
    """
    if max_side < LEAST_SIDE:
        raise SettingError(f"max_side must be at least {LEAST_SIDE}, got {max_side}")
    width, height = _display(plan, max_side)
    beside = height >= width
    strip = _strip(plan, height if beside else width, beside=beside)

    # The gutter is for the badges of the crops, which lie left of a tall image and above any other.
    gutter = RIM + (_GUTTER if plan.crops else 0)
    inset = (gutter, RIM) if plan.height > plan.width else (RIM, gutter)
    block = (inset[0] + width + RIM, inset[1] + height + RIM)
    content = max(block[0] + _GAP + strip.width if beside else max(block[0], strip.width), _LEAST_WIDTH)

    facts = tuple(wrap(_facts(plan, estimated=estimated), FACTS_SIZE, content, separator=" · "))
    facts_y = MARGIN + (2 * CAPTION_SIZE if caption else FACTS_SIZE)
    top = facts_y + _FACTS_PITCH * (len(facts) - 1) + _GAP
    left = MARGIN + inset[0]
    image = (left, top + inset[1], left + width, top + inset[1] + height)

    note = tuple(wrap(_NOTE, SMALL_SIZE, strip.width))
    x, y = (MARGIN + block[0] + _GAP, top) if beside else (MARGIN, top + block[1] + _GAP // 2)
    y += 20 * len(note)
    tiles = strip.tiles(x, y + 8)
    size = (content + 2 * MARGIN, max(top + block[1], tiles[-1][3] + _LABEL_HEIGHT) + MARGIN)
    return PictureLayout(plan, size, facts, facts_y, image, note, (x, y - 4), tiles)
