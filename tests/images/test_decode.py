import io
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from tests.images.encoding import ORIENTATION, encode, pixels, read

from panscan.images.decode import count_pages, upright_rgb

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
    found = pixels(read(content)).astype(float)
    assert found.shape == (height, width, 3)
    # One level for rounding; YCbCr rounds twice in fixed point.
    assert np.abs(found - to_rgb(mode, values)).max() <= (2 if mode == "YCbCr" else 1)


CORNERS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]], dtype=np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "YCbCr"])
def test_jpeg_corners_lie_where_they_were_seen(mode, orientation):
    upright = CORNERS.repeat(16, axis=0).repeat(24, axis=1)
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).convert(mode)
    found = pixels(read(encode(stored, "JPEG", orientation, quality=95, subsampling=0))).astype(int)
    assert found.shape == upright.shape
    assert np.abs(found - upright)[::31, ::47].max() < 12


@given(st.integers(0, 255), st.lists(st.integers(0, 255), min_size=4, max_size=4), st.sampled_from(["PNG", "GIF"]))
@settings(max_examples=40)
def test_transparent_palette_entries_are_white(seed, alphas, form):
    palette = np.random.default_rng(seed).integers(0, 256, (4, 3), dtype=np.uint8)
    image = Image.frombytes("P", (2, 2), bytes([0, 1, 2, 3]))
    image.putpalette(palette.tobytes())
    if form == "GIF":
        alphas = [0, 255, 255, 255]
    content = encode(image, form, transparency=0 if form == "GIF" else bytes(alphas))
    found = pixels(read(content)).reshape(4, 3)
    assert np.abs(found - over_white(palette.astype(float), np.array(alphas)[:, None])).max() <= 1


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
    found = pixels(read(encode(lab, "TIFF"))).astype(int)[0]
    assert np.abs(found - np.array([[0], [119], [255]])).max() <= 2


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
    found = pixels(read(encode(Image.frombytes(mode, (1024, 1), gradient.tobytes()), form)))[0, :, 0].astype(int)
    assert (np.diff(found) >= 0).all()
    assert sorted(set(found)) == list(range(256))
    # Halfway is half grey: scaled evenly, not clipped.
    assert abs(found[512] - 128) <= 1


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
