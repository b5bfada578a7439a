"""From the bytes of a picture or PDF to one upright RGB image. Knows nothing of paths, globs or the network."""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from math import ceil
from typing import Any, BinaryIO

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, _imaging

from panscan.core import ImageError, hold_lock
from panscan.core.request import MAX_PAGES
from panscan.images.headers import PageStream, Size, check_size, check_supported, find_directories, image_error

PDF_DPI = 150
"""Resolution of a PDF page. A4 becomes 1240 x 1754 pixels: more than one 896-pixel view shows, enough for its crops."""

PDF_MAX_SIDE = 8192
"""Longest side of a rendered PDF page, pixels. A0 at 150 dpi fits; a larger page is rendered at fewer dpi."""

# Named, because Pillow's full list holds formats that start other programs (EPS runs Ghostscript).
_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "TIFF", "GIF", "BMP")
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # not all cores for one document; Pillow has no parameter for it

# glibc returns freed memory to the system at once only in blocks of more than 32 MiB. Pillow's default blocks are
# smaller, so each thread that decoded a large page would keep its memory.
_BLOCK_BYTES = 33 * 2**20
Image.core.set_block_size(max(_BLOCK_BYTES, Image.core.get_block_size()))  # type: ignore[attr-defined]  # not in Pillow's stubs

# Where logging is not configured, Python would print the libraries' complaints about a file beside our one line.
for _library in ("PIL", "pypdfium2"):
    logging.getLogger(_library).addHandler(logging.NullHandler())


# Keep libtiff from printing its complaints about a file: what matters comes back as a decoder error. Pillow has no
# switch for it. The handlers are pointers in the libtiff that Pillow loaded, found through Pillow's own module and set
# once, before any thread reads. Redirecting file descriptor 2 while a file is read would swallow what other threads
# print. Where the symbols are hidden (static builds), libtiff keeps printing, and nothing else changes.
with suppress(OSError, AttributeError):
    _pillow = ctypes.CDLL(_imaging.__file__)
    for _handler in (_pillow.TIFFSetErrorHandler, _pillow.TIFFSetWarningHandler):
        _handler.restype, _handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        _handler(None)

# Pdfium keeps global state without a lock.
_PDFIUM = threading.Lock()

_STRIP_PIXELS = 2**22
_AMBIGUOUS = "its headers contradict each other: save a copy of it with another program"

# 16-bit grey to 8 bits, rounded. Pillow's own conversions clip, or drop the low byte, depending on version and mode.
_SIXTEEN_TO_EIGHT = np.rint(np.arange(65536) / 257).astype(np.uint8)


class _Quiet:
    """Silences the warnings of Pillow and pypdfium2 while any thread reads: what matters is raised as ImageError.

    ``warnings.catch_warnings`` changes the whole process, and two that overlap would restore each other's filters;
    so the first reader in installs the filter and the last one out removes it, and decoding stays parallel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._readers == 0:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"(PIL|pypdfium2)\.")
            self._readers += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._caught.__exit__(None, None, None)


_QUIET = _Quiet()


def count_pages(stream: BinaryIO, name: str, max_pages: int = MAX_PAGES) -> int:
    """Pages of a PDF or TIFF, 1 for every other image. Reads headers only; ``name`` is what messages call the file.

    A TIFF's pages are counted up to ``max_pages + 1``, which stands for any number above ``max_pages``.

    Raises:
        ImageError: the bytes are no image or PDF that panscan reads, are damaged, encrypted or without pages, or
            the header claims more than :data:`panscan.images.headers.MAX_PIXELS`.
    """
    with reading(name), _pdf(stream, name) as document:
        if document is not None:
            return len(document)
        with Image.open(stream, formats=_FORMATS) as image:
            _check_size(image, name)
        return len(_directories(stream, max_pages + 1))


def page_size(stream: BinaryIO, page: int | None, name: str) -> Size:
    """(width, height) of a page as its header tells, before it is turned upright; no pixel is decoded.

    Args and raises: as :func:`read_page`.
    """
    with reading(name), _pdf(stream, name) as document:
        if document is not None:
            return _pdf_size(document, page_index(len(document), page, name))
        return _header_size(_page_image(stream, page, name), name)


def page_sizes(stream: BinaryIO, name: str, max_pages: int = MAX_PAGES) -> list[Size]:
    """:func:`page_size` of each page, in one pass over the file; see :func:`count_pages` for ``max_pages``.

    Raises:
        ImageError: as :func:`count_pages`; also for a file of more than ``max_pages`` pages.
    """
    count = count_pages(stream, name, max_pages)
    if count > max_pages:
        raise image_error(name, f"has more than {max_pages} pages, the limit")
    with reading(name), _pdf(stream, name) as document:
        if document is not None:
            return [_pdf_size(document, index) for index in range(count)]
        return [_header_size(_image_at(stream, directory), name) for directory in _directories(stream, count)]


def read_page(
    stream: BinaryIO, page: int | None, name: str, *, copy: bool = True, expected: Size | None = None
) -> Image.Image:
    """Decode one page to an upright RGB image (see :func:`upright_rgb`).

    Args:
        stream: a seekable stream of the file's bytes, at its start. It is not closed.
        page: counted from 1; None for the only page of a file. Of an animation the first frame is read.
        name: what messages call the file.
        copy: make a new image without metadata in any case (see :func:`upright_rgb`).
        expected: (width, height) before rotation, by which the cost of decoding was judged.

    Raises:
        ImageError: as :func:`count_pages`; also for truncated pixels, a page that the file does not have, None for a
            file of several pages, and another size than the expected one.
    """
    with reading(name), _pdf(stream, name) as document:
        if document is not None:
            if expected is not None:
                raise image_error(name, _AMBIGUOUS)
            # Before the page is loaded: otherwise what was typed into its form fields is not drawn.
            document.init_forms()
            part = document[page_index(len(document), page, name)]
            with closing(part.render(scale=_scale(part))) as bitmap:
                rendered: Image.Image = bitmap.to_pil().convert("RGB")  # a copy: it may share the bitmap's memory
                return rendered
        with _page_image(stream, page, name) as image:
            if expected not in (None, image.size):
                raise image_error(name, _AMBIGUOUS)
            return upright_rgb(image, name, copy=copy)


def array_image(levels: np.ndarray[Any, Any], name: str) -> Image.Image:
    """An RGB image of an array's levels, which are copied.

    Args:
        levels: uint8 ``[height, width, 3]``, or ``[height, width]`` for grey.
        name: what messages call it.

    Raises:
        ImageError: another dtype or shape; channels in front are not guessed, since an image may be 3 pixels high.
    """
    if levels.dtype != np.uint8:
        raise image_error(name, f"an array must be uint8, levels from 0 to 255, got {levels.dtype}")
    if levels.ndim not in (2, 3) or (levels.ndim == 3 and levels.shape[2] != 3):
        shape = f"an array must be [height, width, 3] or [height, width], got {list(levels.shape)}"
        raise image_error(name, shape + (": move its channels last" if levels.shape[:1] == (3,) else ""))
    height, width = levels.shape[:2]
    check_size(width, height, name)  # before it is copied: a broadcast array takes no memory itself
    with reading(name):
        return upright_rgb(Image.fromarray(levels), name, copy=False)  # already a copy if it is RGB


def page_index(count: int, page: int | None, name: str) -> int:
    """Where ``page`` (counted from 1, None for the only one) lies in a file of ``count`` pages, counted from 0.

    Raises:
        ImageError: there is no such page, or None does not say which of several.
    """
    if page is None and count > 1:
        number = count if count <= MAX_PAGES else f"more than {MAX_PAGES}"
        raise image_error(name, f"has {number} pages; add #page=1 to #page={min(count, MAX_PAGES)} to choose one")
    if page is not None and not 1 <= page <= count:
        raise image_error(name, f"no page {page}; the file has {count}, counted from 1")
    return (page or 1) - 1


def upright_rgb(image: Image.Image, name: str, *, copy: bool = True) -> Image.Image:
    """Return an upright RGB image: a new one, rotated by its EXIF orientation, without metadata.

    ``image`` is not changed. Without ``copy``, ``image`` itself is returned, with its metadata, if it is already RGB,
    opaque and upright.

    Transparency is composited over white, as a page would show it. (The ``do_convert_rgb`` of Transformers' processor
    drops the alpha channel instead and shows whatever colour lies beneath, often black on black; handing it RGB avoids
    that.) Only in a BMP is an alpha channel that is 0 everywhere unused, as viewers take it: Windows writes screenshots
    so. 16-bit grey is scaled by its full range. 32-bit integer and float grey has no fixed range: the smallest
    of 0..1, 0..255 and 0..65535 that holds all values is used, else their own least and greatest; NaN becomes black.

    Raises:
        ImageError: the pixels cannot be decoded, there are none, or more than
            :data:`panscan.images.headers.MAX_PIXELS`.
    """
    with reading(name):
        _check_size(image, name)
        image.load()
        if not copy and image.mode == "RGB" and not image.has_transparency_data and _orientation(image) == 1:
            return image
        rgb = _to_rgb(image)
        # Only the orientation is kept: exif_transpose rewrites all EXIF data and fails on odd values in it.
        rgb.info = {}
        rgb.getexif()[ExifTags.Base.Orientation] = _orientation(image)
        ImageOps.exif_transpose(rgb, in_place=True)
        return rgb


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise whatever a decoder raises as an ImageError of one line."""
    with _QUIET:
        try:
            yield
        except ImageError:
            raise
        except UnidentifiedImageError as error:
            # Pillow's text holds the address of the stream.
            problem = "not a PNG, JPEG, WebP, AVIF, TIFF, GIF, BMP or PDF file, or its header is damaged"
            raise image_error(name, problem) from error
        except Image.DecompressionBombError as error:
            raise image_error(name, f"too large ({error})") from error
        except MemoryError as error:
            raise image_error(name, "not enough memory to decode it") from error
        except Exception as error:  # damaged bytes make the parsers raise almost anything, struct.error to KeyError
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise image_error(name, f"truncated or corrupt ({reason})") from error


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    check_size(width, height, name)
    if width * height == 0:
        raise image_error(name, f"no pixels: its size is {width}x{height}")


def _page_image(stream: BinaryIO, page: int | None, name: str) -> Image.Image:
    """Open a page of anything but a PDF with Pillow."""
    directories = _directories(stream, MAX_PAGES + 1 if page is None else page)
    return _image_at(stream, directories[page_index(len(directories), page, name)])


def _image_at(stream: BinaryIO, directory: int) -> Image.Image:
    stream.seek(0)
    return Image.open(PageStream(stream, directory) if directory else stream, formats=_FORMATS)


def _header_size(image: Image.Image, name: str) -> Size:
    with image:
        _check_size(image, name)
        return image.size


def _directories(stream: BinaryIO, most: int) -> list[int]:
    """Where the first pages lie; one place for every file but a TIFF."""
    # The frames of other formats are one moving picture, and those of an MPO (a JPEG) are takes of one photo.
    stream.seek(0)
    return find_directories(stream, most) if stream.read(4) in TiffImagePlugin.PREFIXES else [0]


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken EXIF raises almost anything, and says nothing of the pixels: they are shown as stored
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        grey = _SIXTEEN_TO_EIGHT[np.asarray(image)]
        if isinstance(transparent := image.info.get("transparency"), int):
            grey[np.asarray(image) == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.asarray(image, dtype=np.float64)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        nominal = [top for top in (1.0, 255.0, 65535.0) if low >= 0 and high <= top]
        if nominal:
            low, high = 0.0, nominal[0]
        scaled = (values - low) / ((high - low) or 1.0) * 255
        scaled = np.nan_to_num(scaled, nan=0.0, posinf=255.0, neginf=0.0)
        return Image.fromarray(np.rint(scaled).astype(np.uint8)).convert("RGB")
    if image.format == "BMP" and image.mode == "RGBA" and not image.getchannel("A").getbbox():
        return image.convert("RGB")
    if image.has_transparency_data:
        # Over white, strip by strip: a copy of all pixels takes four bytes of memory each.
        white = Image.new("RGB", image.size, "white")
        rows = max(1, _STRIP_PIXELS // image.width)
        for top in range(0, image.height, rows):
            part = image.crop((0, top, image.width, min(top + rows, image.height)))
            # Pillow converts La, grey with premultiplied alpha, to nothing but LA.
            rgba = (part.convert("LA") if part.mode == "La" else part).convert("RGBA")
            white.paste(rgba, (0, top), mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


@contextmanager
def _pdf(stream: BinaryIO, name: str) -> Iterator[Any]:
    """Yield the document in a file; None for another type of file."""
    stream.seek(0)
    head = stream.read(1024)
    stream.seek(0)
    if not head:
        raise image_error(name, "empty file")
    if b"%PDF-" not in head:  # Acrobat's rule, and pdfium's: the mark may follow some bytes of junk
        check_supported(head, name)
        yield None
        return
    try:
        import pypdfium2
    except ImportError as error:
        raise image_error(name, "PDF files need the package pypdfium2 (pip install pypdfium2)") from error
    with hold_lock(_PDFIUM):
        # For a document without pages pypdfium2 quotes pdfium's last error, however old; so here is one to quote.
        pypdfium2.raw.FPDF_LoadDocument(b"", None)
        try:
            document = pypdfium2.PdfDocument(stream)
        except pypdfium2.PdfiumError as error:
            raise image_error(name, _pdf_problem(str(error))) from error
        with closing(document):
            yield document


def _pdf_problem(text: str) -> str:
    # The message is all that every version of pypdfium2 gives.
    if "password" in text or "security" in text:
        return "encrypted PDF; save a copy of it without a password"
    if "File access" in text:
        return "PDF without pages"
    return f"truncated or corrupt PDF ({text})"


def _scale(page: Any) -> float:
    """Pixels per point of a PDF's page."""
    # A page's size is whatever its MediaBox claims, kilometres included. It is rounded to float32, and pixels are
    # rounded up: a hair less, or a scan of 40 pixels would become 41.
    return float(min(PDF_DPI / 72, PDF_MAX_SIDE / max(page.get_size())) * (1 - 1e-6))


def _pdf_size(document: Any, index: int) -> Size:
    with closing(document[index]) as page:
        scale = _scale(page)
        width, height = (ceil(side * scale) for side in page.get_size())
        return width, height
