"""The planner against Transformers' own code: same boxes, same refusals."""

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Gemma3ImageProcessorPil

from panscan.core import ImageError, PanAndScan, SettingError
from panscan.images.views import PUBLISHED_COST, plan_views

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
    theirs = transformers_boxes(width, height, chosen)
    empty = any(left >= right or top >= bottom for left, top, right, bottom in theirs)
    if empty:
        with pytest.raises(SettingError, match="min_crop_size"):
            plan_views(width, height, chosen)
        return
    plan = plan_views(width, height, chosen)
    assert [view.box for view in plan.views[1:]] == theirs
    assert plan.views[0].box == (0, 0, width, height)
    assert [view.kind for view in plan.views] == ["whole"] + ["crop"] * len(theirs)


@given(SIDES, SIDES)
def test_disabled_is_one_view(width: int, height: int) -> None:
    plan = plan_views(width, height, PanAndScan(enabled=False))
    assert len(plan.views) == 1
    assert (plan.image_tokens, plan.prompt_tokens) == (256, 256 + PUBLISHED_COST.plain)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_crop_size", [0, -1, 1.5, True, "256"]),
        ("max_num_crops", [0, -4, 2.0, False, None]),
        ("min_ratio_to_activate", [-0.1, math.inf, math.nan, "2"]),
        ("enabled", [1, "true", None]),
    ],
)
def test_settings_that_crash_transformers_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SettingError, match=field if field != "enabled" else "do_pan_and_scan"):
            PanAndScan(**{field: value})


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at least one pixel"):
        plan_views(*size, PanAndScan())
