"""Pillow's bilinear filter in integers, so that a GPU can resize with the same bits.

Pillow resizes 8-bit images along one axis after the other, rounds to whole levels in between, and weights levels by
integers. Sums of integers do not depend on their order, so the weights and the order of the axes define every bit.
Neither is documented, and the order has changed: weights are taken from the Pillow that is installed, the order from
its version. The engine compares the result with Pillow's at startup (:mod:`panscan.images.resize`).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

WEIGHT_BITS = 22
"""Fractional bits of a weight. A sum of weighted levels starts at one half and is shifted right by as many."""

_MOST_IMPULSES = 1 << 22  # pixels of 4 bytes: sides of up to some 42,000 pixels for views of 896


def has_weights(length: int, size: int) -> bool:
    """Return whether the weights from ``length`` to ``size`` pixels are few enough to be read from Pillow."""
    return _taps(length, size) * length <= _MOST_IMPULSES


@lru_cache(maxsize=64)
def filter_weights(length: int, size: int) -> NDArray[np.int32]:
    """Return how each of ``size`` pixels is made of ``length`` pixels: int32 ``[size, 1 + taps]``, read-only.

    A row holds the index of the first source pixel, then the weights of that one and the next ones. All of them are
    inside the source.

    The weights are read from Pillow: it resizes 32-bit pixels with the same weights, not rounded, and impulses of
    ``1 << 22`` that lie farther apart than the filter is wide become the weights, rounded as those of 8-bit images.
    Weights computed here could differ in their last bit, since compilers may fuse multiplications and additions.
    """
    taps, scale = _taps(length, size), length / size
    impulses, source = np.zeros((taps, length), np.int32), np.arange(length)
    impulses[source % taps, source] = 1 << WEIGHT_BITS
    response = np.asarray(_resized(Image.fromarray(impulses), size, taps))
    firsts = np.floor((np.arange(size) + 0.5) * scale - max(scale, 1.0) + 0.5).astype(np.int32)
    firsts = firsts.clip(0, length - taps)[:, None]
    weights = np.take_along_axis(response.T, (firsts + np.arange(taps)) % taps, axis=1)
    rows: NDArray[np.int32] = np.concatenate([firsts, weights], axis=1)
    rows.flags.writeable = False
    return rows


_PILLOW = tuple(map(int, PIL.__version__.split(".")[:2]))


def columns_first(width: int, height: int, size: int) -> bool:
    """Return whether the installed Pillow resizes columns before rows, from ``width`` by ``height`` to ``size``."""
    if _PILLOW < (12, 3):
        return False
    if _PILLOW < (13, 0):
        return height > 100 * width and height > size
    return height - size > max(0, 2 * (width - size))


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _taps(length: int, size: int) -> int:
    """Source pixels that one pixel is made of, at most."""
    return min(2 * ceil(max(length / size, 1.0)) + 1, length)
