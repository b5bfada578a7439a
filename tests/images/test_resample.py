"""Pillow's weights and order of axes as integers, against Pillow itself."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from panscan.images.resample import WEIGHT_BITS, columns_first, filter_weights, has_weights

SIZES = st.integers(1, 300) | st.sampled_from([1, 2, 896])
SIDES = st.integers(1, 40) | st.integers(1, 3000) | st.sampled_from([1, 2, 895, 896, 897, 1344, 2688, 40_000])
SMALL = st.integers(1, 150) | st.integers(1, 20)
TURNS = [(1, 400), (400, 1), (2, 401), (60, 72), (60, 73), (97, 146), (97, 147)]  # where Pillow's order of axes turns


def resized(levels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return what Pillow makes of an image, in one call."""
    return np.asarray(Image.fromarray(levels).resize((width, height), Image.Resampling.BILINEAR))


def filtered(levels: NDArray[np.uint8], size: int, axis: int) -> NDArray[np.uint8]:
    """Return ``levels [height, width]`` with one axis resized, by integers alone."""
    weights = filter_weights(levels.shape[axis], size)
    source = levels.T if axis == 0 else levels
    taps = source[:, weights[:, :1] + np.arange(weights.shape[1] - 1)].astype(np.int32)
    total = np.einsum("rst,st->rs", taps, weights[:, 1:], dtype=np.int32) + (1 << (WEIGHT_BITS - 1))
    found = (total >> WEIGHT_BITS).clip(0, 255).astype(np.uint8)
    return found.T if axis == 0 else found


@settings(max_examples=120)
@given(st.lists(st.tuples(SIDES, SIZES), min_size=25, max_size=25), st.integers(0, 2**32 - 1))
def test_one_axis_equals_pillow_bit_for_bit(cases: list[tuple[int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for length, size in cases:
        if not has_weights(length, size):
            continue
        levels = draw.integers(0, 256, (2, length), np.uint8)
        levels[1] = np.where(levels[1] < 128, 0, 255)  # black and white, where sums are largest
        assert np.array_equal(filtered(levels, size, 1), resized(levels, size, 2)), (length, size)


@settings(max_examples=60)
@given(st.lists(st.tuples(SMALL, SMALL, st.integers(1, 60)), min_size=10, max_size=10), st.integers(0, 2**32 - 1))
@example([(width, height, 48) for width, height in TURNS], 0)
def test_both_axes_equal_pillow_bit_for_bit(cases: list[tuple[int, int, int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for width, height, size in cases:
        levels = draw.integers(0, 256, (height, width), np.uint8)
        first = 0 if columns_first(width, height, size) else 1
        found = filtered(filtered(levels, size, first), size, 1 - first)
        assert np.array_equal(found, resized(levels, size, size)), (width, height, size)
