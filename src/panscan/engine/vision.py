"""Encoded views: kept by what they show, encoded in batches that many requests share."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import SettingError
from panscan.images.pixels import PixelSpec

__all__ = ["VisionCache", "VisionEncoder", "image_digest", "view_key"]

_PIECE = 1 << 19  # bytes
_HASHERS = 8  # threads: a page of 2.4 million pixels takes one of them 6 ms, which nobody should wait for

Pixels = Callable[[], torch.Tensor] | torch.Tensor
"""Of one view, ``[3, size, size]``, or what makes them."""


def image_digest(levels: NDArray[np.uint8]) -> bytes:
    """SHA-256 of an image's shape and of the SHA-256 of every half MiB of its levels, which several threads compute."""
    flat = levels.reshape(-1).data
    parts = _hashers().map(lambda at: hashlib.sha256(flat[at : at + _PIECE]).digest(), range(0, len(flat), _PIECE))
    return hashlib.sha256(repr(levels.shape).encode() + b"".join(parts)).digest()


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HASHERS, thread_name_prefix="panscan-hash")


if hasattr(os, "register_at_fork"):  # a child has the pool without its threads, and would wait for them
    os.register_at_fork(after_in_child=_hashers.cache_clear)


def view_key(image: bytes, box: tuple[int, int, int, int], preprocess: str, spec: PixelSpec) -> bytes:
    """SHA-256 of all that a view's pixels depend on: its image's digest, its box, and how it is resized and scaled."""
    return hashlib.sha256(image + repr((box, preprocess, spec)).encode()).digest()


class VisionCache:
    """Encoded views by key, the least recently used dropped first; never more than ``max_bytes`` of them.

    Args:
        max_bytes: of all views together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._views: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._pinned: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        """Whether a view is there. Any thread may ask."""
        return key in self._views

    def features(self, key: bytes) -> torch.Tensor:
        """A view that is held, ``[image tokens, hidden]``.

        Raises:
            KeyError: it is not.
        """
        return self._views[key]

    def pin(self, key: bytes) -> bool:
        """Keep a view until :meth:`release`, and count it as used; False if it is not there."""
        if key not in self._views:
            return False
        self._views.move_to_end(key)
        self._pinned.add(key)
        return True

    def release(self) -> None:
        """Pinned views may be dropped again."""
        self._pinned.clear()

    def put(self, key: bytes, features: torch.Tensor) -> None:
        """Hold a view that is not there yet, pinned; others make room.

        Raises:
            SettingError: the pinned ones leave no room for it.
        """
        unpinned = (held for held in list(self._views) if held not in self._pinned)
        while self.bytes + features.nbytes > self.max_bytes:
            dropped = next(unpinned, None)
            if dropped is None:
                raise SettingError(
                    f"--vision-cache-gb {self.max_bytes / 1e9:g} holds {len(self._pinned)} encoded views;"
                    " a pass needs more"
                )
            self._drop(dropped)
        self._views[key] = features
        self._pinned.add(key)
        self.bytes += features.nbytes

    def clear(self) -> None:
        """Drop all views but pinned ones."""
        for key in self._views.keys() - self._pinned:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self.bytes -= self._views.pop(key).nbytes


class VisionEncoder:
    """Brings views into the cache.

    ``encoded``: views that went through the vision tower so far. ``reused``: that were wanted and did not have to.

    Args:
        encode: pixels ``[views, 3, size, size]`` to features ``[views, image tokens, hidden]``.
        cache: where encoded views go.
        batch_size: views at most that go through the tower at once.
    """

    def __init__(
        self, encode: Callable[[torch.Tensor], torch.Tensor], cache: VisionCache, batch_size: int
    ) -> None:  # fmt: skip
        self._compute, self._cache, self._batch_size = encode, cache, batch_size
        self.encoded = self.reused = 0

    def encode(self, wanted: Iterable[tuple[bytes, Pixels]]) -> int:
        """Have all wanted views in the cache, pinned until :meth:`release`; returns how many had to be encoded.

        Args:
            wanted: keys and pixels, those of many requests at once; equal keys are encoded once.

        Raises:
            SettingError: the cache does not hold them all at once.
        """
        wanted = list(wanted)
        missing = [(key, pixels) for key, pixels in dict(wanted).items() if not self._cache.pin(key)]
        for start in range(0, len(missing), self._batch_size):
            self._encode(missing[start : start + self._batch_size])
        self.encoded += len(missing)
        self.reused += len(wanted) - len(missing)
        return len(missing)

    def release(self) -> None:
        """The pass is over: views may be dropped again."""
        self._cache.release()

    def _encode(self, batch: Sequence[tuple[bytes, Pixels]]) -> None:
        pixels = torch.stack([part() if callable(part) else part for _, part in batch])
        for (key, _), features in zip(batch, self._compute(pixels), strict=True):
            self._cache.put(key, features.clone())  # on its own: a slice would keep the whole batch
