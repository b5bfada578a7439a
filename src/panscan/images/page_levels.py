"""A page's pixels, copied from Pillow's memory, and their digest.

Packing by Pillow and SHA-256 take 9 ms for a page of 2.4 million pixels, a third of a follow-up question's TTFT. BLAKE3
is as resistant to collisions as SHA-256, several times as fast on x86, and uses several cores. A page is copied by
several threads only while no other request is being prepared: each time a thread takes Python's lock back, it delays
the others and the engine's thread, which launches kernels.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from panscan.images.copying import WORTH_THREADS, copy_in_pieces

_BLOCK_BYTES = 15 << 20  # of pixels: Pillow stores images in blocks of 16 MiB, and shares no more than one
_threads = blake3.AUTO
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


def copy_levels(
    image: Image.Image, *, alone: bool = False, out: NDArray[np.uint32] | None = None
) -> tuple[NDArray[np.uint8], bytes]:
    """Return the levels of an RGB image, and their digest.

    Args:
        image: in mode RGB.
        alone: whether no other request is being prepared: several threads then copy the page, which is faster.
        out: ``[height, width]`` to copy the levels to, four bytes per pixel; None: a new array.

    Returns:
        Levels ``[height, width, 4]``: red, green, blue and 0. (Pillow stores four bytes per pixel, the last of which
        may have any value.) The digest is BLAKE3 of the size and the levels.
    """
    image.load()
    width, height = image.size
    words = np.empty((height, width), np.uint32) if out is None else out
    rows = max(1, _BLOCK_BYTES // (4 * width))
    for top in range(0, height, rows):
        strip = words[top : top + rows]
        part = image if rows >= height else image.crop((0, top, width, top + len(strip)))
        pixels, _owner = _shared(part) or (np.frombuffer(part.tobytes("raw", "RGBX"), np.uint32), None)
        _copy(pixels.reshape(strip.shape), strip, alone=alone)
    levels = words.view(np.uint8).reshape(height, width, 4)
    hasher = blake3(struct.pack("<II", width, height), max_threads=_threads)
    return levels, hasher.update(levels.data).digest()


def _copy(pixels: NDArray[np.uint32], levels: NDArray[np.uint32], *, alone: bool) -> None:
    if alone and levels.nbytes >= WORTH_THREADS:
        copy_in_pieces(lambda rows: np.bitwise_and(pixels[rows], _MASK, out=levels[rows]), len(levels))
    else:
        np.bitwise_and(pixels, _MASK, out=levels)


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


def _use_one_thread() -> None:
    global _threads
    _threads = 1


# A child has BLAKE3's pool without its threads, and would wait for them.
os.register_at_fork(after_in_child=_use_one_thread)
