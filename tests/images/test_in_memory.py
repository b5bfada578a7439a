"""Images of a request that are no paths: bytes of files, arrays, tensors. The same picture, whatever it comes in."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from tests.images.encoding import encode

from panscan.core import ImageError
from panscan.images.files import expand_images, open_image

Levels = np.ndarray[Any, np.dtype[np.uint8]]
sides = st.integers(1, 9)
colours = st.tuples(sides, sides, st.just(3))
levels = (colours | st.tuples(sides, sides)).flatmap(lambda shape: arrays.arrays(np.uint8, shape))


def opened(images: list[Any]) -> list[Levels]:
    """As a request's images are read."""
    found = [open_image(image) for image in expand_images(images)]
    assert all(image.mode == "RGB" for image in found)
    return [np.asarray(image) for image in found]


@given(levels, st.booleans())
def test_a_picture_is_the_same_in_every_form(values: Levels, turned: bool) -> None:
    """Views that lie otherwise in memory, too."""
    values = values[::-1, ::2] if turned else values
    picture = Image.fromarray(values)
    expected = np.asarray(picture.convert("RGB"))
    forms = [picture, encode(picture, "PNG"), values, torch.from_numpy(values.copy())]
    for found in opened(forms):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.asarray(open_image(values)), expected)


def test_an_image_of_an_array_is_a_copy() -> None:
    values = np.full((4, 5, 3), 7, np.uint8)
    [image] = expand_images([values])
    values[:] = 9
    assert set(np.asarray(image).ravel().tolist()) == {7}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"rubbish", "not a PNG, "),
        (b"", "empty file"),
        (lambda: encode(Image.new("L", (90, 90)), "PNG")[:-30], "truncated or corrupt"),
        (np.zeros((4, 5, 3)), "an array must be uint8, levels from 0 to 255, got float64$"),
        (np.zeros((4, 5), bool), "an array must be uint8, .*, got bool$"),
        (torch.zeros(4, 5, 3), "an array must be uint8, .*, got float32$"),
        (torch.zeros(3, 4, 5, dtype=torch.uint8), r"\[height, width\], got \[3, 4, 5\]: move its channels last$"),
        (np.zeros((4, 5, 4), np.uint8), r"an array must be \[height, width, 3\] or .*, got \[4, 5, 4\]$"),
        (np.zeros((1, 4, 5, 3), np.uint8), r"got \[1, 4, 5, 3\]$"),
        (np.zeros((5,), np.uint8), r"got \[5\]$"),
        (np.zeros((0, 5, 3), np.uint8), "no pixels: its size is 5x0$"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8, device="meta"), "no array can be made of it .*Tensor.cpu"),
        ([[[1, 2, 3]]], "not a path, .* but list$"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_place(bad: Any, problem: str) -> None:
    bad = bad() if callable(bad) else bad
    with pytest.raises(ImageError, match=rf"\A(?=image 2 of 3: .*{problem}).*\Z"):  # one line
        for image in expand_images([np.zeros((3, 3, 3), np.uint8), bad, np.zeros((4, 4), np.uint8)]):
            open_image(image)


def test_arrays_are_read_without_torch() -> None:
    code = (
        "import sys, numpy; from panscan.images.files import expand_images;"
        "expand_images([numpy.zeros((4, 5, 3), numpy.uint8)]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
