"""A page's pixels, copied from Pillow's memory, and their digest: both by several threads, strip by strip.

Packing by Pillow and SHA-256, in one thread, take 9 ms for a page of 2.4 million pixels, a third of a follow-up
question's TTFT. BLAKE3 is as resistant to collisions as SHA-256, and several times as fast on x86.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from panscan.images.strips import map_strips

__all__ = ["copy_levels"]

_BLOCK_BYTES = 15 << 20  # of pixels: Pillow stores images in blocks of 16 MiB, and shares no more than one
_CUT_BYTES = 1 << 20  # of pixels: per strip that is cut out of a larger image
_MASK = np.frombuffer(b"\xff\xff\xff\x00", np.uint32)


class _Array(ctypes.Structure):
    """``ArrowArray`` of Arrow's C data interface, https://arrow.apache.org/docs/format/CDataInterface.html."""


_Array._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")),
]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def copy_levels(image: Image.Image) -> tuple[NDArray[np.uint8], bytes]:
    """Return the levels of an RGB image, and their digest.

    Returns:
        Levels ``[height, width, 4]``: red, green, blue and 0. (Pillow stores four bytes per pixel, the last of which
        may have any value.) The digest is BLAKE3 of the size and of the BLAKE3 digest of each strip.
    """
    image.load()
    width, height = image.size
    words = np.empty((height, width), np.uint32)
    large = words.nbytes > _BLOCK_BYTES
    whole = None if large else _shared(image)

    def copy(top: int, bottom: int) -> bytes:
        if whole is not None:
            pixels = whole[0][top * width : bottom * width]
        else:
            part = image.crop((0, top, width, bottom))
            pixels, _owner = _shared(part) or (np.frombuffer(part.tobytes("raw", "RGBX"), np.uint32), None)
        strip = words[top:bottom]
        np.bitwise_and(pixels.reshape(strip.shape), _MASK, out=strip)
        return blake3(strip.view(np.uint8).data).digest()

    strips = map_strips(copy, height, 4 * width, _CUT_BYTES if large else _BLOCK_BYTES)
    digest = blake3(repr((width, height)).encode() + b"".join(strips)).digest()
    return words.view(np.uint8).reshape(height, width, 4), digest


def _shared(image: Image.Image) -> tuple[NDArray[np.uint32], Any] | None:
    """Return the pixels in Pillow's memory, and what keeps them there; None before Pillow 11.2, and if the pixels are
    not in one piece of memory."""
    try:
        _schema, owner = image.__arrow_c_array__()
    except (AttributeError, ValueError):
        return None
    array = ctypes.cast(_pointer_of(owner, b"arrow_array"), ctypes.POINTER(_Array)).contents
    values = array.children[0].contents  # of a list of four bytes per pixel
    count = image.width * image.height
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(values.buffers[1])), owner
