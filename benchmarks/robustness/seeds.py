"""Whole files of every kind that panscan reads, small enough to mutate thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageCms

_SIZE = 48, 64


def _picture(mode: str = "RGB", turn: int = 0) -> Image.Image:
    """Return a picture with edges and noise, the same in every run."""
    noise = np.random.default_rng(turn).integers(0, 64, (*_SIZE, 3), dtype=np.uint8)
    noise[8:24, 8:40] += 128
    return Image.fromarray(noise).convert(mode)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _pages(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    rest = [_picture(mode, turn) for turn in (1, 2)]
    return _saved(_picture(mode), kind, save_all=True, append_images=rest, **options)


def _deep(kind: str) -> bytes:
    levels = np.random.default_rng(3).integers(0, 2**16, _SIZE, dtype=np.uint16)
    return _saved(Image.fromarray(levels), kind)


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return _saved(_picture(), "JPEG", exif=exif.tobytes(), icc_profile=profile)


def _text_pdf() -> bytes:
    """Return a PDF of plain text objects: dictionaries, a content stream and a cross-reference table to damage."""
    stream = b"BT /F1 18 Tf 20 100 Td (Total: 42.00) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R 4 0 R] /Count 2 >>",
        *(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 5 0 R"
            b" /Resources << /Font << /F1 6 0 R >> >> /Rotate %d >>" % turn
            for turn in (0, 90)
        ),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    return data + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (count, table, count, len(data))
    )


SEEDS: dict[str, Callable[[], bytes]] = {
    "png": lambda: _saved(_picture(), "PNG"),
    "png, palette and transparency": lambda: _saved(_picture().quantize(16), "PNG", transparency=3),
    "png, 16 bits": lambda: _deep("PNG"),
    "png, grey and alpha": lambda: _saved(_picture("LA"), "PNG"),
    "jpeg": lambda: _saved(_picture(), "JPEG"),
    "jpeg, progressive": lambda: _saved(_picture(), "JPEG", progressive=True),
    "jpeg, CMYK": lambda: _saved(_picture("CMYK"), "JPEG"),
    "jpeg, rotated, with a profile": _turned,
    "webp": lambda: _saved(_picture(), "WEBP"),
    "webp, lossless": lambda: _saved(_picture("RGBA"), "WEBP", lossless=True),
    "webp, animated": lambda: _pages("WEBP"),
    "avif": lambda: _saved(_picture(), "AVIF"),
    "tiff": lambda: _saved(_picture(), "TIFF"),
    "tiff, pages, deflate": lambda: _pages("TIFF", compression="tiff_adobe_deflate"),
    "tiff, pages, LZW": lambda: _pages("TIFF", compression="tiff_lzw"),
    "tiff, fax": lambda: _saved(_picture("1"), "TIFF", compression="group4"),
    "tiff, JPEG": lambda: _saved(_picture(), "TIFF", compression="jpeg"),
    "tiff, 16 bits": lambda: _deep("TIFF"),
    "gif": lambda: _saved(_picture(), "GIF"),
    "gif, animated": lambda: _pages("GIF", mode="P"),
    "bmp": lambda: _saved(_picture(), "BMP"),
    "bmp, palette": lambda: _saved(_picture("P"), "BMP"),
    "pdf, text": _text_pdf,
    "pdf, images": lambda: _pages("PDF"),
}
"""What every kind is called, and how its bytes are made."""
