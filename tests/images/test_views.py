"""The planner against Transformers' own code, and pictures of its views."""

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageColor
from transformers import Gemma3ImageProcessorPil

from panscan.core import ImageError, PanAndScan, SettingError
from panscan.images.draw import COLOURS, LEAST_SIDE, MARGIN, MOST_TILES, PictureLayout, draw_views, lay_out, view_label
from panscan.images.ink import Box, printable, shorten, text_width, wrap
from panscan.images.views import PUBLISHED_COST, ViewPlan, plan_views

RGB = [ImageColor.getrgb(colour) for colour in COLOURS]
MANY = PanAndScan(min_crop_size=1, max_num_crops=100, min_ratio_to_activate=1.0)
sides = st.one_of(st.integers(1, 40), st.integers(1, 3000))
pan_and_scan = st.builds(
    PanAndScan,
    enabled=st.booleans(),
    min_crop_size=st.sampled_from([1, 8, 64, 256]),
    max_num_crops=st.sampled_from([1, 2, 4, 13, 100]),
    min_ratio_to_activate=st.sampled_from([0.0, 1.0, 1.2, 3.0]),
)
max_sides = st.sampled_from([LEAST_SIDE, 500, 801])


def plan_or_skip(width: int, height: int, settings: PanAndScan) -> ViewPlan:
    try:
        return plan_views(width, height, settings)
    except SettingError:
        assume(False)
        raise


def layout_of(plan: ViewPlan, max_side: int, caption: str | None = None, *, estimated: bool = True) -> PictureLayout:
    return lay_out(plan, caption=bool(caption), estimated=estimated, max_side=max_side)


def inside(box: Box, outer: tuple[int, int], margin: int = 0) -> bool:
    return margin <= box[0] < box[2] <= outer[0] - margin and margin <= box[1] < box[3] <= outer[1] - margin


def apart(one: Box, other: Box) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@given(sides, sides, pan_and_scan, max_sides, st.none() | st.text(max_size=300))
@example(1, 1, PanAndScan(), LEAST_SIDE, "\ud800 one\npixel")
@example(20000, 300, MANY, 1600, None)
@example(300, 20000, PanAndScan(), 1600, "thin")
@example(20000, 1, MANY, 1600, "W" * 5000)
@example(5, 4, PanAndScan(min_crop_size=1, max_num_crops=2, min_ratio_to_activate=0.0), LEAST_SIDE, None)
@settings(max_examples=60)
def test_margins_are_clean_and_outlines_lie_on_the_edges_of_the_crops(
    width: int, height: int, pas: PanAndScan, max_side: int, caption: str | None
) -> None:
    plan = plan_or_skip(width, height, pas)
    image = Image.new("RGB", (width, height), "#808080")
    before = image.copy()
    picture = draw_views(image, plan, caption=caption, max_side=max_side)
    assert ImageChops.difference(image, before).getbbox() is None
    assert picture.mode == "RGB"
    assert max(picture.size) <= max_side + 1400  # three rows of the largest thumbnails, lines above, margins
    # Whatever is cut off at an edge would reach into the margin.
    content = ImageChops.difference(picture, Image.new("RGB", picture.size, picture.getpixel((0, 0)))).getbbox()
    assert inside(content, picture.size, MARGIN // 3)
    layout = layout_of(plan, max_side, caption)
    for index, view in enumerate(plan.views[1:]):
        left, top, right, bottom = layout.place(view.box)
        x, y = (left + right) // 2, (top + bottom) // 2
        if min(right - left, bottom - top) >= 3:
            edges = [(x, bottom - 1), (left, bottom - 1), (right - 1, y), (right - 1, bottom - 1)]
            assert [picture.getpixel(edge) for edge in edges] == [RGB[index % len(RGB)]] * 4
        if min(right - left, bottom - top) >= 60:
            assert picture.getpixel((x, y)) == (128, 128, 128)


@given(sides, sides, pan_and_scan, max_sides)
@example(20000, 300, MANY, 1600)
@settings(max_examples=200)
def test_nothing_in_the_layout_overlaps(width: int, height: int, pas: PanAndScan, max_side: int) -> None:
    plan = plan_or_skip(width, height, pas)
    layout = layout_of(plan, max_side)
    left, top, right, bottom = layout.image
    assert LEAST_SIDE // 2 < max(right - left, bottom - top) <= max_side
    if min(right - left, bottom - top) > 1:
        assert abs((right - left) * height - (bottom - top) * width) <= max(width, height)
    assert len(layout.tiles) == min(len(plan.views), MOST_TILES)
    labels = [max(map(text_width, view_label(plan, i), (14, 14))) for i in range(len(layout.tiles))]
    tiles = zip(layout.tiles, labels, strict=True)
    with_labels = [(x0, y0, max(x1, x0 + round(label)), y1 + 50) for (x0, y0, x1, y1), label in tiles]
    for box in (layout.image, *with_labels):
        assert inside(box, layout.size, MARGIN)
    for one, other in combinations((layout.image, *with_labels), 2):
        assert apart(one, other)
    assert layout.facts_y + 26 * (len(layout.facts) - 1) < top
    for line in layout.facts:
        assert text_width(line, 17) <= layout.size[0] - 2 * MARGIN
    across, down = (right - left) / width, (bottom - top) / height
    for view in plan.views:
        placed = layout.place(view.box)
        assert left <= placed[0] < placed[2] <= right
        assert top <= placed[1] < placed[3] <= bottom
        for got, wanted, origin, scale in zip(placed, view.box, (left, top) * 2, (across, down) * 2, strict=True):
            assert abs(got - origin - wanted * scale) <= 1


def test_without_crops_the_image_is_left_as_it_is() -> None:
    image = Image.effect_noise((400, 400), 80).convert("RGB")
    plan = plan_views(400, 400, PanAndScan())
    picture = draw_views(image, plan, max_side=400)
    assert picture.crop(layout_of(plan, 400).image).tobytes() == image.tobytes()
    assert not {colour for _, colour in picture.getcolors(1 << 20)} & set(RGB)


@pytest.mark.parametrize("size", [(1200, 300), (300, 1200)])
def test_each_thumbnail_shows_its_view(size: tuple[int, int]) -> None:
    plan = plan_views(*size, PanAndScan())
    image = Image.new("RGB", size)
    colours = [(40 * index, 90, 200 - 40 * index) for index in range(len(plan.views))]
    for view, colour in list(zip(plan.views, colours, strict=True))[1:]:
        image.paste(colour, view.box)
    picture = draw_views(image, plan)
    for (left, top, right, bottom), colour in list(zip(layout_of(plan, 1600).tiles, colours, strict=True))[1:]:
        assert right - left == bottom - top
        inner = picture.crop((left + 3, top + 3, right - 3, bottom - 3))
        assert inner.getcolors() == [((right - left - 6) ** 2, colour)]
        assert picture.getpixel((left, top)) == RGB[colours.index(colour) - 1]


@pytest.mark.parametrize(("crops", "note"), [(11, ""), (100, " · the first 12 views below")])
def test_thumbnails_are_capped(crops: int, note: str) -> None:
    plan = plan_views(crops * 20, 20, MANY)
    assert plan.crops == crops
    layout = layout_of(plan, 1600)
    assert len(layout.tiles) == 12
    assert " · ".join(layout.facts).partition(" prompt tokens")[2] == note


def test_the_header_says_what_the_plan_says() -> None:
    plan = plan_views(600, 2400, PanAndScan())
    about = " · ".join(layout_of(plan, 1600).facts)
    assert about == "600x2400 px · 5 views (whole and 4 crops) · 1,280 image tokens · about 1,321 prompt tokens"
    assert " · ".join(layout_of(plan, 1600, estimated=False).facts) == about.replace("about ", "")
    image = Image.new("RGB", (600, 2400))
    pictures = [draw_views(image, plan, estimated=estimated) for estimated in (True, False)]
    header = (0, 0, pictures[0].width, layout_of(plan, 1600).image[1])
    assert ImageChops.difference(*(picture.crop(header) for picture in pictures)).getbbox() is not None
    assert view_label(plan, 0) == ("whole", "600x2400 px · 256 tokens")
    assert view_label(plan, 1) == ("crop 1", "600x600 px · 256 tokens")
    assert layout_of(plan_views(50, 50, PanAndScan()), 1600).facts[0].startswith("50x50 px · 1 view (whole)")


def test_same_arguments_same_picture_and_the_caption_is_in_it() -> None:
    image = Image.effect_noise((900, 300), 80).convert("RGB")
    plan = plan_views(900, 300, PanAndScan())
    pictures = [draw_views(image, plan, caption=caption) for caption in ("page.png", "page.png", "page.jpg", None)]
    assert pictures[0].tobytes() == pictures[1].tobytes() != pictures[2].tobytes()
    assert pictures[3].height < pictures[0].height
    for caption, shown in (("Größe 2×3", "Grosse 2x3"), ("two\nlines", "two lines")):
        assert draw_views(image, plan, caption=caption).tobytes() == draw_views(image, plan, caption=shown).tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_other_modes_are_drawn_too(mode: str) -> None:
    noise = Image.effect_noise((700, 200), 80).convert("F" if mode == "I;16" else "RGB")
    image = noise.convert("I").convert(mode) if mode == "I;16" else noise.convert(mode)
    plan = plan_views(700, 200, PanAndScan())
    assert draw_views(image, plan).tobytes() == draw_views(image.convert("RGB"), plan).tobytes()
    assert image.mode == mode


# --- text ---


@given(st.text())
def test_printable_text_is_one_line_of_known_letters(text: str) -> None:
    shown = printable(text)
    assert shown.isascii()
    assert not shown or shown.isprintable()
    assert printable(shown) == shown


def test_printable_text_keeps_what_it_can() -> None:
    assert printable("Übergröße  ×\n2 漢") == "Ubergrosse x 2 ?"


words = st.text("abcW i.", min_size=1, max_size=80)


@given(words, st.integers(30, 400), st.booleans())
def test_shortened_text_fits(text: str, limit: int, bold: bool) -> None:
    shown = shorten(text, 14, limit, bold=bold)
    assert text_width(shown, 14, bold=bold) <= limit
    if shown != text:
        assert shown.endswith("...")
        assert text.startswith(shown.removesuffix("..."))
        assert text_width(text, 14, bold=bold) > limit


@given(words, st.integers(1, 400))
def test_wrapping_loses_nothing_and_fits_where_words_do(text: str, limit: int) -> None:
    lines = wrap(text, 14, limit)
    assert " ".join(lines) == text
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        assert " " not in line or text_width(line, 14) <= limit
        if following is not None:
            assert text_width(f"{line} {following.split(' ')[0]}", 14) > limit


def test_a_no_break_space_holds_words_together() -> None:
    assert wrap("aaa bb\u00a0cc d", 14, text_width("aaa bb", 14)) == ["aaa", "bb cc", "d"]


# The planner against Transformers' own code: same boxes, same refusals.


TRANSFORMERS = Gemma3ImageProcessorPil()
SIDES = st.integers(1, 9000) | st.integers(1, 40)
SETTINGS = st.builds(
    PanAndScan,
    min_crop_size=st.integers(1, 2000) | st.integers(1, 8) | st.just(256),
    max_num_crops=st.integers(1, 200) | st.just(4),
    min_ratio_to_activate=st.floats(0, 12) | st.just(1.2),
)


class Sliced:
    """Has a shape and tells what was cut out of it: boxes without gigabytes of pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.shape = (3, height, width)

    def __getitem__(self, key: tuple[slice, slice, slice]) -> tuple[int, int, int, int]:
        top, bottom, _ = key[1].indices(self.shape[1])
        left, right, _ = key[2].indices(self.shape[2])
        return left, top, right, bottom


def transformers_boxes(width: int, height: int, chosen: PanAndScan) -> list[tuple[int, int, int, int]]:
    image: Any = Sliced(width, height)
    return TRANSFORMERS.pan_and_scan(image, chosen.min_crop_size, chosen.max_num_crops, chosen.min_ratio_to_activate)


@settings(max_examples=2000)
@given(SIDES, SIDES, SETTINGS)
@example(600, 2401, PanAndScan())
@example(2401, 600, PanAndScan())
@example(101, 20, PanAndScan(min_crop_size=4, max_num_crops=25))
@example(896, 2688, PanAndScan(max_num_crops=1))
def test_boxes_equal_transformers_or_are_refused_where_it_crashes(width: int, height: int, chosen: PanAndScan) -> None:
    boxes = transformers_boxes(width, height, chosen)
    empty = any(left >= right or top >= bottom for left, top, right, bottom in boxes)
    if empty:
        with pytest.raises(SettingError, match="min_crop_size"):
            plan_views(width, height, chosen)
        return
    plan = plan_views(width, height, chosen)
    assert [view.box for view in plan.views[1:]] == boxes
    assert plan.views[0].box == (0, 0, width, height)
    assert [view.kind for view in plan.views] == ["whole"] + ["crop"] * len(boxes)


@given(SIDES, SIDES)
def test_disabled_is_one_view(width: int, height: int) -> None:
    plan = plan_views(width, height, PanAndScan(enabled=False))
    assert len(plan.views) == 1
    assert (plan.image_tokens, plan.prompt_tokens) == (256, 256 + PUBLISHED_COST.plain)


CRASHING = [
    ("min_crop_size", [0, -1, 1.5, True, "256"]),
    ("max_num_crops", [0, -4, 2.0, False, None]),
    ("min_ratio_to_activate", [-0.1, math.inf, math.nan, "2"]),
    ("enabled", [1, "true", None]),
]


@pytest.mark.parametrize(("field", "values"), CRASHING)
def test_settings_that_crash_transformers_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SettingError, match=field if field != "enabled" else "do_pan_and_scan"):
            PanAndScan(**{field: value})


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at least one pixel"):
        plan_views(*size, PanAndScan())
