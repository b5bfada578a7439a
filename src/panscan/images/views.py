"""Which views pan and scan takes of an image, and what they cost in tokens. Pure geometry: no pixels are touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor

from panscan.core import ImageError, PanAndScan, SettingError, View
from panscan.core.model_names import IMAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Prompt tokens of an image: one block per view, and the words that the processor writes around crops.

    Args:
        image_tokens: soft tokens of one view.
        plain: tokens around a view that stands alone (its start and end marks and line breaks).
        with_crops: tokens around the whole image of a cropped one ("Here is the original image ... and here are
            some crops to help you see better"), without any crop.
        per_crop: tokens around each crop.
        estimated: the words were not counted with the checkpoint's own tokenizer.
    """

    image_tokens: int
    plain: int
    with_crops: int
    per_crop: int
    estimated: bool = False

    def of(self, crops: int) -> int:
        """Prompt tokens of an image with this many crops, image tokens included."""
        around = self.with_crops + crops * self.per_crop if crops else self.plain
        return (crops + 1) * self.image_tokens + around


PUBLISHED_COST = PromptCost(image_tokens=IMAGE_TOKENS, plain=4, with_crops=21, per_crop=5, estimated=True)
"""Gemma 3 without its tokenizer at hand: image tokens are exact, the words are counted one token a word and mark."""


@dataclass(frozen=True, slots=True)
class ViewPlan:
    """The views of one image, the whole first, then its crops in reading order.

    ``width`` and ``height`` are pixels of the upright image; ``image_tokens`` counts soft tokens only,
    ``prompt_tokens`` also what the processor writes around them.
    """

    width: int
    height: int
    views: tuple[View, ...]
    image_tokens: int
    prompt_tokens: int

    @property
    def crops(self) -> int:
        return len(self.views) - 1


def split(width: int, height: int, settings: PanAndScan) -> tuple[int, int, int]:
    """Return (number of crops, crop width, crop height) of an image; (0, width, height) if it is not cropped.

    As in Transformers' ``Gemma3ImageProcessor.pan_and_scan``, the longer side is divided. The number of crops is the
    aspect ratio, rounded half up, and at most the longer side // ``min_crop_size``; it is then raised to at least 2 and
    limited to ``max_num_crops``. There are no crops if pan and scan is off, if the aspect ratio is below
    ``min_ratio_to_activate``, or if a side of a crop would be shorter than ``min_crop_size``.

    Raises:
        SettingError: for an image so small that rounding up leaves a crop without pixels (Transformers crashes there).
    """
    long, short = (width, height) if width >= height else (height, width)
    least = settings.min_crop_size
    if not settings.enabled or long / short < settings.min_ratio_to_activate:
        return 0, width, height
    count = min(settings.max_num_crops, max(2, min(long // least, floor(long / short + 0.5))))
    side = ceil(long / count)
    if min(side, short) < least:
        return 0, width, height
    if side * (count - 1) >= long:
        raise SettingError(
            f"pan_and_scan_min_crop_size={least} with pan_and_scan_max_num_crops={settings.max_num_crops}:"
            f" {count} crops of an image of {width}x{height} pixels leave the last one empty"
        )
    return (count, side, height) if width >= height else (count, width, side)


def view_settings(image: object, settings: PanAndScan) -> PanAndScan:
    """Return the settings of one image of a request: it may be one view (:class:`panscan.images.files.PageBytes`)."""
    return replace(settings, enabled=False) if getattr(image, "one_view", False) else settings


def plan_views(width: int, height: int, settings: PanAndScan, cost: PromptCost = PUBLISHED_COST) -> ViewPlan:
    """Plan the views of an image of ``width`` x ``height`` pixels. The last crop may be smaller than the others.

    Raises:
        ImageError: if a side is not positive.
        SettingError: see :func:`split`.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image needs at least one pixel, got {width}x{height}")
    count, crop_width, crop_height = split(width, height, settings)
    views = [View("whole", (0, 0, width, height))]
    for index in range(count):
        left, top = (index * crop_width, 0) if width >= height else (0, index * crop_height)
        views.append(View("crop", (left, top, min(left + crop_width, width), min(top + crop_height, height))))
    return ViewPlan(width, height, tuple(views), len(views) * cost.image_tokens, cost.of(count))
