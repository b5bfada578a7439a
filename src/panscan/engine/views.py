"""Views on a device: pixels waiting for the vision tower, and the features in the vision cache's slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import View
from panscan.engine.scheduling.batch import ImageRows, ViewToEncode
from panscan.images.pixels import PixelSpec
from panscan.images.resize import Resize, by_pillow
from panscan.model.machine import record_event, side_stream
from panscan.model.sharding import Ranks


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Pixels ``[3, size, size]``, and the CUDA event after which they are ready; None if they are ready now."""

    pixels: torch.Tensor
    ready: Any
    on_device: bool


class PixelStore:
    """Normalised pixels waiting for their pass. Several threads may put pixels; one takes them.

    Args:
        device: device of the pixels.
        dtype: dtype of the pixels, after normalisation in float32.
        spec: the checkpoint's pixel settings.
        limit: maximum bytes on the device; further images are kept in host memory. None: no limit.
        resize: function that crops and resizes views (see :func:`panscan.images.resize.choose_resize`).

    ``patience``: seconds that :meth:`take` waits for pixels; ranks receive them independently of passes.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        spec: PixelSpec,
        limit: int | None = None,
        resize: Resize = by_pillow,
    ) -> None:
        self._device, self._dtype, self._spec, self._limit = device, dtype, spec, limit
        self._resize = resize
        self._bytes = 0  # on the device
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._waiting: dict[int, _Waiting] = {}
        self.patience = 0.0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, levels: NDArray[np.uint8], views: Mapping[int, View]) -> None:
        """Compute the pixels of views and keep them.

        Args:
            levels: an image, uint8 ``[height, width, 3]``, or 4 with padding.
            views: boxes in the image, by the handle of their pixels.
        """
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):  # concurrent with passes
            pixels = self._resize(levels, [*views.values()], self._spec, self._device).to(self._dtype)
            with self._changed:
                on_device = self._limit is None or self._bytes + pixels.nbytes <= self._limit
                self._bytes += pixels.nbytes if on_device else 0
            held = pixels if on_device else pixels.cpu()
            parts = [part.clone() for part in held] if len(held) > 1 else held  # a slice would keep them all
            ready = None if self._stream is None else record_event(self._device)
        with self._changed:
            for handle, part in zip(views, parts, strict=True):
                self._waiting[handle] = _Waiting(part, ready, on_device)
            self._changed.notify_all()

    def take(self, handle: int) -> torch.Tensor:
        """Remove and return a view's pixels, ready for the current stream.

        Raises:
            KeyError: there are no pixels under this handle.
            TimeoutError: they did not arrive.
        """
        with self._changed:
            if self.patience and not self._changed.wait_for(lambda: handle in self._waiting, self.patience):
                raise TimeoutError(f"the pixels of a view did not arrive in {self.patience:.0f} s")
            waiting = self._waiting.pop(handle)
        if not waiting.on_device:
            return waiting.pixels.to(self._device)
        self._release(waiting)
        if waiting.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(waiting.ready)
            waiting.pixels.record_stream(stream)
        return waiting.pixels

    def forget(self, handles: Iterable[int]) -> None:
        """Drop pixels that are no longer needed; unknown handles are ignored."""
        for handle in handles:
            if (waiting := self._waiting.pop(handle, None)) is not None and waiting.on_device:
                self._release(waiting)

    def _release(self, waiting: _Waiting) -> None:
        with self._changed:
            self._bytes -= waiting.pixels.nbytes


class ViewFeatures:
    """Encoded views ``[image tokens, hidden]`` by vision cache slot, the same on every rank.

    Each rank encodes its own views and sends their features to the others.

    Args:
        encode: function from pixels ``[views, 3, size, size]`` to features ``[views, image tokens, hidden]``.
        pixels: store of the pixels.
        batch_size: maximum views that the tower encodes at once.
        ranks: the processes that share the model.
    """

    def __init__(
        self, encode: Callable[[torch.Tensor], torch.Tensor], pixels: PixelStore, batch_size: int, ranks: Ranks
    ) -> None:
        self._encode, self._pixels, self._batch_size, self._ranks = encode, pixels, batch_size, ranks
        self._slots: dict[int, torch.Tensor] = {}

    def encode(self, views: Sequence[ViewToEncode], like: torch.Tensor) -> None:
        """Encode views into their slots.

        Args:
            views: all that the pass needs, in the same order on every rank.
            like: an empty tensor ``[0, image tokens, hidden]`` of the features' type and device.
        """
        size = self._ranks.size
        by_rank = [[view for view in views if view.pixels % size == rank] for rank in range(size)]
        rank_views = by_rank[self._ranks.rank]
        parts = [
            self._encode(
                torch.stack([self._pixels.take(view.pixels) for view in rank_views[at : at + self._batch_size]])
            )
            for at in range(0, len(rank_views), self._batch_size)
        ]
        features = torch.cat([like, *(part.to(like) for part in parts)])
        shares: Sequence[torch.Tensor] = [features]
        if size > 1:
            padded = like.new_zeros(max(map(len, by_rank)), *like.shape[1:])
            padded[: len(features)] = features
            shares = self._ranks.all_gather(padded)
        for held, share in zip(by_rank, shares, strict=True):
            for view, encoded in zip(held, share[: len(held)], strict=True):
                if view.slot in self._slots:
                    self._slots[view.slot].copy_(encoded)
                else:
                    self._slots[view.slot] = encoded.clone()  # a slice would keep the whole batch

    def fill(self, hidden: torch.Tensor, images: Iterable[ImageRows]) -> None:
        """Write features over the embeddings of their rows in ``hidden [T, hidden]``."""
        for image in images:
            hidden[image.row : image.row + image.tokens] = self._slots[image.slot]
