"""Images as the bytes of files, and files as ``data:`` URLs."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any, Literal

from PIL import Image


def encoded_image(image: Image.Image, format: Literal["PNG", "JPEG"] = "PNG", **options: Any) -> bytes:
    """Return an image as the bytes of a file; ``options`` are those of Pillow's writer of the format."""
    stream = BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def data_url(media_type: str, content: bytes) -> str:
    """Return a file as a ``data:`` URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
