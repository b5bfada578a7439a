"""Decoded images have upright colours; headers read without a decoder agree with Pillow."""

import io
import struct
import warnings
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from benchmarks.robustness.bombs import _chunk, _png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from tests.images.encoding import ORIENTATION, CountingStream, encode, pixels, read

from panscan.core import ImageError
from panscan.images.decode import count_pages, upright_rgb
from panscan.images.headers import MAX_CHUNKS, MAX_SCANS, MAX_SIDE, ImageHeader, read_header

# How an upright picture is stored for each EXIF orientation, from the definition of the tag (where row 0 and column 0
# of the stored picture lie in the upright one), independently of Pillow.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}

# Lossless ways to store each mode.
KEEPS = {
    "1": ("PNG", "TIFF", "BMP"),
    "L": ("PNG", "TIFF", "BMP"),
    "LA": ("PNG", "TIFF"),
    "I;16": ("PNG", "TIFF"),
    "I;16B": ("PNG", "TIFF"),
    "RGB": ("PNG", "TIFF", "BMP", "WEBP"),
    "RGBA": ("PNG", "TIFF", "WEBP"),
    "CMYK": ("TIFF",),
    "YCbCr": ("TIFF",),
}
KINDS = st.sampled_from([(mode, form) for mode, forms in KEEPS.items() for form in forms])
SIDES = st.integers(1, 9)
CHANNELS = {"LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3}


def raw(mode: str, width: int, height: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if mode == "1":
        return random.integers(0, 2, (height, width)).astype(bool)
    if mode.startswith("I;16"):
        return random.integers(0, 65536, (height, width), dtype=np.uint16)
    shape = (height, width, CHANNELS[mode]) if mode in CHANNELS else (height, width)
    return random.integers(0, 256, shape, dtype=np.uint8)


def as_image(mode: str, values: np.ndarray) -> Image.Image:
    values = np.ascontiguousarray(values)
    if mode == "1":
        return Image.fromarray(values)
    size = values.shape[1], values.shape[0]
    return Image.frombytes(mode, size, values.astype(">u2" if mode == "I;16B" else values.dtype).tobytes())


def over_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return colour * (alpha / 255) + 255 * (1 - alpha / 255)


def to_rgb(mode: str, values: np.ndarray) -> np.ndarray:
    """Float RGB by the books: the formulas of the file formats, not Pillow's code."""
    v = values.astype(np.float64)
    if mode == "1":
        v = v * 255
    if mode.startswith("I;16"):
        v = v / 65535 * 255
    if mode == "LA":
        v = over_white(v[..., 0], v[..., 1])
    if v.ndim == 2:
        return np.repeat(v[..., None], 3, axis=2)
    if mode == "RGBA":
        return over_white(v[..., :3], v[..., 3:])
    if mode == "CMYK":
        return (255 - v[..., :3]) * (255 - v[..., 3:]) / 255
    if mode == "YCbCr":
        y, cb, cr = v[..., 0], v[..., 1] - 128, v[..., 2] - 128
        rgb = [y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb]
        return np.clip(np.stack(rgb, axis=2), 0, 255)
    return v


@settings(max_examples=150)
@given(KINDS, st.integers(1, 8), SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_every_mode_format_and_orientation_gives_the_upright_colours(kind, orientation, width, height, seed):
    mode, form = kind
    if form == "BMP":
        orientation = 1  # the format has no EXIF
    values = raw(mode, width, height, seed)
    lossless = {"lossless": True, "exact": True} if form == "WEBP" else {}
    content = encode(as_image(mode, STORED[orientation](values)), form, orientation, **lossless)
    assert count_pages(io.BytesIO(content), "file") == 1
    decoded = pixels(read(content)).astype(float)
    assert decoded.shape == (height, width, 3)
    # One level for rounding; YCbCr rounds twice in fixed point.
    assert np.abs(decoded - to_rgb(mode, values)).max() <= (2 if mode == "YCbCr" else 1)


CORNERS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]], dtype=np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "YCbCr", "AVIF"])
def test_corners_of_lossy_images_lie_where_they_were_seen(mode, orientation):
    form, mode, colours = ("AVIF", "RGB", "4:4:4") if mode == "AVIF" else ("JPEG", mode, 0)
    upright = CORNERS.repeat(16, axis=0).repeat(24, axis=1)
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).convert(mode)
    decoded = pixels(read(encode(stored, form, orientation, quality=95, subsampling=colours))).astype(int)
    assert decoded.shape == upright.shape
    assert np.abs(decoded - upright)[::31, ::47].max() < 12


@given(st.integers(0, 255), st.lists(st.integers(0, 255), min_size=4, max_size=4), st.sampled_from(["PNG", "GIF"]))
@settings(max_examples=40)
def test_transparent_palette_entries_are_white(seed, alphas, form):
    palette = np.random.default_rng(seed).integers(0, 256, (4, 3), dtype=np.uint8)
    image = Image.frombytes("P", (2, 2), bytes([0, 1, 2, 3]))
    image.putpalette(palette.tobytes())
    if form == "GIF":
        alphas = [0, 255, 255, 255]
    content = encode(image, form, transparency=0 if form == "GIF" else bytes(alphas))
    decoded = pixels(read(content)).reshape(4, 3)
    assert np.abs(decoded - over_white(palette.astype(float), np.array(alphas)[:, None])).max() <= 1


def test_rarer_modes_composite_too():
    rgba = Image.frombytes("RGBA", (2, 1), bytes([0, 0, 0, 0, 200, 100, 0, 255]))
    assert pixels(upright_rgb(rgba.convert("RGBa"), "x")).tolist() == [[[255, 255, 255], [200, 100, 0]]]
    grey = Image.frombytes("LA", (2, 1), bytes([9, 0, 77, 255]))
    assert pixels(upright_rgb(grey.convert("La"), "x")).tolist() == [[[255] * 3, [77] * 3]]
    palette = Image.frombytes("PA", (2, 1), bytes([0, 0, 1, 255]))
    palette.putpalette([1, 2, 3, 4, 5, 6])
    assert pixels(read(encode(palette, "TIFF"))).tolist() == [[[255] * 3, [4, 5, 6]]]
    keyed = Image.frombytes("I;16", (2, 1), struct.pack("<2H", 300, 301))
    assert pixels(read(encode(keyed, "PNG", transparency=300))).tolist() == [[[255] * 3, [1] * 3]]


@pytest.mark.parametrize("alphas", [(0, 0), (0, 9)])
def test_an_alpha_channel_that_is_zero_everywhere_is_unused_in_a_bitmap(alphas):
    image = Image.frombytes("RGBA", (2, 1), bytes([10, 20, 30, alphas[0], 40, 50, 60, alphas[1]]))
    content = bytearray(encode(image, "BMP"))  # Pillow writes the alpha bytes, under a header that does not name them
    header = struct.pack("<IiiHHIIiiII", 108, 2, 1, 1, 32, 3, 8, 0, 0, 0, 0)
    header += struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + b"BGRs" + bytes(48)
    content = b"BM" + struct.pack("<IHHI", 130, 0, 0, 122) + header + bytes(content[-8:])
    composited = over_white(np.array([[10, 20, 30], [40, 50, 60]]), np.array(alphas)[:, None])
    expected = composited if any(alphas) else [[10, 20, 30], [40, 50, 60]]
    assert np.abs(pixels(read(content))[0] - expected).max() <= 1


def test_lab_greys_are_neutral():
    # L* of 0, 50 and 100 is sRGB 0, 119 and 255; a* and b* are signed.
    lab = Image.frombytes("LAB", (3, 1), bytes([0, 0, 0, 128, 0, 0, 255, 0, 0]))
    decoded = pixels(read(encode(lab, "TIFF"))).astype(int)[0]
    assert np.abs(decoded - np.array([[0], [119], [255]])).max() <= 2


DEEP_GREYS = [
    ("I;16", "<u2", "PNG", 65535),
    ("I;16", "<u2", "TIFF", 65535),
    ("I;16B", ">u2", "TIFF", 65535),
    ("I", "<i4", "TIFF", 65535),
    ("I", "<i4", "TIFF", 2**31 - 1),
    ("F", "<f4", "TIFF", 1.0),
    ("F", "<f4", "TIFF", 65535),
    ("F", "<f4", "TIFF", 3e38),
]


@pytest.mark.parametrize(("mode", "dtype", "form", "top"), DEEP_GREYS)
def test_a_deep_grey_gradient_keeps_its_order_and_spans_all_levels(mode, dtype, form, top):
    gradient = np.linspace(0, top, 1024).astype(dtype)
    decoded = pixels(read(encode(Image.frombytes(mode, (1024, 1), gradient.tobytes()), form)))[0, :, 0].astype(int)
    assert (np.diff(decoded) >= 0).all()
    assert sorted(set(decoded)) == list(range(256))
    # Halfway is half grey: scaled evenly, not clipped.
    assert abs(decoded[512] - 128) <= 1


FLOAT_GREYS = [
    ([0, 128, 255, 7], [0, 128, 255, 7]),
    ([-100, 0, 100, 100], [0, 128, 255, 255]),
    ([np.nan, 0.5, 1, -np.inf], [0, 128, 255, 0]),
    ([np.nan, np.inf, 0, 255], [0, 255, 0, 255]),
    ([np.nan] * 4, [0] * 4),
    ([1e9] * 4, [0] * 4),
]


@pytest.mark.parametrize(("values", "expected"), FLOAT_GREYS)
def test_float_grey_has_a_sensible_range(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert pixels(upright_rgb(image, "x"))[0, :, 0].tolist() == expected


def test_a_pil_image_is_not_changed_and_its_result_is_stable():
    upright = CORNERS.repeat(3, axis=0)
    stored = Image.open(io.BytesIO(encode(Image.fromarray(STORED[6](upright).copy()), "PNG", 6)))
    first = upright_rgb(stored, "x")
    assert np.array_equal(pixels(first), upright)
    assert (stored.size, stored.getexif()[ORIENTATION]) == ((6, 2), 6)
    assert np.array_equal(pixels(upright_rgb(first, "x")), upright)
    plain = Image.fromarray(upright)
    upright_rgb(plain, "x").putpixel((0, 0), (1, 2, 3))
    assert plain.getpixel((0, 0)) == (255, 0, 0)
    assert upright_rgb(plain, "x", copy=False) is plain, "as it should be already"
    for other in (plain.convert("L"), plain.convert("RGBA"), stored):
        assert upright_rgb(other, "x", copy=False) is not other
    assert np.array_equal(pixels(upright_rgb(stored, "x", copy=False)), upright)
    clear = Image.new("RGB", (2, 1), (1, 2, 3))
    clear.info["transparency"] = (1, 2, 3)
    assert np.array_equal(pixels(upright_rgb(clear, "x", copy=False)), pixels(upright_rgb(clear, "x")))


@settings(max_examples=100)
@given(st.integers(6, 13) | st.integers(14, 60), st.integers(1, 255))
def test_odd_exif_costs_neither_the_picture_nor_its_orientation(position, flip):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    exif[ExifTags.Base.Make] = "maker"
    exif[ExifTags.Base.XResolution] = 72.0
    damaged = bytearray(exif.tobytes())
    damaged[position] ^= flip  # the header lies at 6 to 13, the tags behind it
    image = Image.fromarray(CORNERS.repeat(3, axis=0))
    content = encode(image, "PNG", exif=bytes(damaged))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            orientation = Image.open(io.BytesIO(content)).getexif().get(ORIENTATION, 1)
        except Exception:
            orientation = 1
    shown = pixels(read(content))
    if orientation in STORED:
        assert np.array_equal(STORED[orientation](shown), np.asarray(image))


# Headers read without a decoder agree with Pillow, refuse what costs too much, and take linear work.


def saved(mode: str, kind: str, size: tuple[int, int] = (33, 57), **options: Any) -> bytes:
    return encode(Image.new(mode, size), kind, **options)


def header_of(content: bytes) -> ImageHeader | None:
    stream = BytesIO(content)
    header = read_header(stream, "page")
    assert stream.tell() == 0
    return header


ORDINARY = [
    *(saved(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    *(saved(mode, "JPEG") for mode in ("L", "RGB", "CMYK")),
    saved("RGB", "JPEG", progressive=True),
    saved("RGB", "WEBP"),
    saved("RGB", "WEBP", lossless=True),
    saved("RGBA", "WEBP"),
    saved("RGBA", "WEBP", lossless=True),
]


@pytest.mark.parametrize("content", ORDINARY)
def test_the_size_is_that_of_pillow(content: bytes) -> None:
    header = header_of(content)
    assert header is not None and header.ordinary
    with Image.open(BytesIO(content)) as image:
        assert (header.width, header.height) == image.size
        assert header.format == image.format


def test_other_formats_and_animations_have_no_header_here() -> None:
    assert [header_of(saved("RGB", kind)) for kind in ("PDF", "TIFF", "GIF", "BMP")] == [None] * 4
    frames = {"more": [Image.new("RGB", (33, 57), "red")]}
    assert header_of(saved("RGB", "WEBP", **frames)) is None
    animated = header_of(saved("RGB", "PNG", **frames))
    assert animated is not None and not animated.ordinary


def test_a_large_image_is_not_ordinary_and_one_beyond_a_limit_is_refused() -> None:
    assert header_of(_png(6_000, 6_000, data=b"")) == ImageHeader("PNG", 6_000, 6_000, True)
    assert header_of(_png(7_000, 7_000, data=b"")) == ImageHeader("PNG", 7_000, 7_000, False)
    with pytest.raises(ImageError, match=r"^page: too large: 1x178000000 pixels, the limit is 262144 on a side$"):
        header_of(_png(1, 178_000_000, data=b""))
    assert header_of(_png(1, MAX_SIDE, data=b"")) is not None
    with pytest.raises(ImageError, match=r"^page: too large: 20000x20000 pixels"):
        header_of(_png(20_000, 20_000, data=b""))


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    content = saved("RGB", "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    scans = content.count(b"\xff\xda")
    return content[:last] + content[last:-2] * (1 + count - scans) + content[-2:]


def with_segments(count: int) -> bytes:
    content = saved("RGB", "JPEG")
    return content[:2] + b"\xff\xfe\x00\x02" * count + content[2:]


def with_chunks(count: int) -> bytes:
    return _png(32, 32, _chunk(b"tEXt", b"") * count)


LIMITS = [(with_scans, MAX_SCANS), (with_segments, MAX_CHUNKS - 20), (with_chunks, MAX_CHUNKS - 1)]


@pytest.mark.parametrize(("file", "limit"), LIMITS)
def test_scans_segments_and_chunks_are_bounded(file: Any, limit: int) -> None:
    header = header_of(file(limit))
    assert header is not None and not header.ordinary
    with pytest.raises(ImageError, match=r"^page: more than "):
        header_of(file(limit + 30))


def test_a_header_that_could_mislead_is_none() -> None:
    """Pillow takes the last size of a PNG, PDFium whatever follows its mark, and both skip markers without a length."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 100_000_000, 8, 2, 0, 0, 0))
    assert header_of(_png(10, 10, head)) is None
    assert header_of(_png(10, 10, _chunk(b"tEXt", b"k\0" + saved("RGB", "PDF")))) is None
    jpeg = saved("RGB", "JPEG")
    for marker in (b"\xff\xd0", b"\xff\xd8", b"\xff\xdc", b"\xff\xc8", b"\xff\xf0"):
        assert header_of(jpeg[:2] + marker + b"\x00\x04\x00\x00" + jpeg[2:]) is None


def test_what_follows_a_picture_is_not_scanned() -> None:
    content = saved("RGB", "JPEG", progressive=True)
    assert header_of(content + b"\xff\xda" * 1_000) == header_of(content)
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xda"  # an end that is none
    last = content.rindex(b"\xff\xda")
    assert header_of(content[:last] + comment + content[last:]) == header_of(content)
    unclear = content[:last] + b"\xff\x01" + content[last:]
    assert (header := header_of(unclear)) is not None and not header.ordinary


@pytest.mark.parametrize("file", [with_segments, with_chunks, lambda count: with_segments(3) + bytes(100 * count)])
def test_work_is_linear(file: Any) -> None:
    def work(count: int) -> int:
        stream = CountingStream(file(count))
        read_header(stream, "page")
        return stream.work

    assert work(9_000) <= 15 * work(900)
