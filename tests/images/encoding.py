"""Images as files, as tests of the decoders write and read them."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from panscan.images.decode import read_page

ORIENTATION = ExifTags.Base.Orientation


def encode(
    image: Image.Image, form: str, orientation: int = 1, *, more: Sequence[Image.Image] = (), **options: object
) -> bytes:
    """Return a file of an image, or of several with ``more``."""
    stream = io.BytesIO()
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    if more:
        options |= {"save_all": True, "append_images": more}
    image.save(stream, form, **options)
    return stream.getvalue()


def read(content: bytes, page: int | None = None) -> Image.Image:
    return read_page(io.BytesIO(content), page, "file")


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


class CountingStream(io.BytesIO):
    """A stream that counts the bytes and the calls that a parser makes."""

    work = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.work += 1 + len(content)
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.work += 1
        return super().seek(offset, whence)


def page(width: int, height: int, seed: int | None = None) -> NDArray[np.uint8]:
    """Return random levels with large flat areas, as documents have."""
    draw = np.random.default_rng(width * height if seed is None else seed)
    levels = draw.integers(0, 256, (height, width, 3), np.uint8)
    levels[draw.random((height, width)) < 0.5] = 255
    return levels
