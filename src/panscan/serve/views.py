"""The views of an image as plain data, with a preview, for the playground."""

from __future__ import annotations

from PIL import Image

from panscan.core import PanAndScan
from panscan.core.deadline import Deadline
from panscan.core.foreign import JsonObject
from panscan.images.encode import data_url, encoded_image
from panscan.images.files import open_image
from panscan.images.views import PromptCost, plan_views
from panscan.serve.media import MediaFile

_PREVIEW = 1600  # pixels of the longer side
_PREVIEWS = 20  # maximum number of pages in one response


def size_views(width: int, height: int, settings: PanAndScan, cost: PromptCost) -> JsonObject:
    """Return the views and token counts of an image of this size in pixels.

    Raises:
        SettingError: see :func:`panscan.images.views.split`.
    """
    plan = plan_views(width, height, settings, cost)
    views = [{"kind": view.kind, "box": view.box} for view in plan.views]
    return {
        "width": width,
        "height": height,
        "views": views,
        "image_tokens": plan.image_tokens,
        "prompt_tokens": plan.prompt_tokens,
    }


def page_views(
    document: MediaFile, settings: PanAndScan, cost: PromptCost, deadline: Deadline, *, preview: bool
) -> list[JsonObject]:
    """Return the views of each page. Pages are decoded one at a time, because decoding determines the orientation.

    Args:
        document: document within the server's limits.
        settings: pan-and-scan settings.
        cost: prompt tokens of an image.
        deadline: when the work ends.
        preview: whether to add a JPEG of each page, at most 1,600 pixels per side, as a data URL.

    Raises:
        ImageError: a page cannot be decoded.
        SettingError: see :func:`panscan.images.views.split`.
        TimeoutError: the deadline has passed.
    """
    pages = []
    for page in document.pages[:_PREVIEWS]:
        image = open_image(page, deadline=deadline)
        pages.append(size_views(image.width, image.height, settings, cost))
        if preview:
            image.thumbnail((_PREVIEW, _PREVIEW), Image.Resampling.LANCZOS)
            pages[-1]["preview"] = data_url("image/jpeg", encoded_image(image, "JPEG", quality=85))
    return pages
