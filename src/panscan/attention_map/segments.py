"""The segments of a prompt: runs of text and the image tokens of each view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Segment", "image_positions", "segments_of"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``[start, end)`` of a prompt.

    Args:
        start: first position.
        end: position behind the last one.
        image: number of the image, starting at 1; None for text.
        crop: number of the crop, starting at 1; 0 for the whole image; None for text.
    """

    start: int
    end: int
    image: int | None = None
    crop: int | None = None

    @property
    def tokens(self) -> int:
        """Number of positions."""
        return self.end - self.start

    def label(self, *, images: int) -> str:
        """Return its name in a prompt of ``images`` images, e.g. ``text``, ``crop 2`` or ``image 3, crop 2``."""
        if self.image is None:
            return "text"
        view = f"crop {self.crop}" if self.crop else "whole"
        return view if images == 1 else f"image {self.image}, {view}"


def image_positions(ids: Sequence[int], soft_id: int | None) -> NDArray[np.bool_]:
    """Return which positions of a prompt are image tokens: bool ``[tokens]``.

    Args:
        ids: token ids of the prompt.
        soft_id: id of image tokens; None for a text-only checkpoint.
    """
    return np.array([token == soft_id for token in ids], np.bool_)


def segments_of(image: NDArray[np.bool_], crops: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments of a prompt, in order, covering each position once.

    Args:
        image: bool ``[tokens]``: which positions are image tokens. Text stands between the views.
        crops: number of crops of each image.

    Raises:
        ValueError: the prompt has another number of views.
    """
    views = [(number, crop) for number, count in enumerate(crops, 1) for crop in range(count + 1)]
    edges = [0, *(np.flatnonzero(np.diff(image)) + 1).tolist(), len(image)]
    found: list[Segment] = []
    shown = 0
    for start, end in pairwise(edges):
        if image[start]:
            if shown == len(views):
                raise ValueError(f"more than {len(views)} views in the prompt")
            found.append(Segment(start, end, *views[shown]))
            shown += 1
        else:
            found.append(Segment(start, end))
    if shown != len(views):
        raise ValueError(f"{shown} views in the prompt, {len(views)} expected")
    return tuple(found)
