"""Timestamps of a device's work, without synchronising the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from panscan.core import now
from panscan.model.machine import synchronize
from panscan.model.phases import phase

__all__ = ["DeviceClock", "TokenClock", "timed_vision"]


class DeviceClock:
    """Records timestamps of a device's work; :meth:`read` converts them to seconds of :func:`panscan.core.now`.

    On one NVIDIA GPU, timestamps are CUDA events, which let the host run ahead of the device. With layers on several
    devices, and on MPS, each mark synchronises instead: events of different devices cannot be compared.

    Args:
        device: the device.
        one_device: whether all layers are on this device.
    """

    def __init__(self, device: torch.device, *, one_device: bool = True) -> None:
        self.device = device
        self._events = one_device and device.type == "cuda"
        self._marks: list[Any] = []
        synchronize(device)
        if self._events:
            self._anchor = self._event()
            synchronize(device)
        self._zero = now()

    def mark(self) -> int:
        """Record a timestamp and return its index in :meth:`read`."""
        if self._events:
            self._marks.append(self._event())
        else:
            synchronize(self.device)
            self._marks.append(now())
        return len(self._marks) - 1

    def read(self) -> list[float]:
        """Wait for the device and return all timestamps.

        The clocks of device and host drift apart by a few parts per million, which matters after seconds. Timestamps
        are therefore interpolated between two points that both clocks have measured.
        """
        synchronize(self.device)
        if not self._events:
            return list(self._marks)
        last = self._event()
        synchronize(self.device)
        per_millisecond = (now() - self._zero) / self._anchor.elapsed_time(last)
        return [self._zero + self._anchor.elapsed_time(event) * per_millisecond for event in self._marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record(torch.cuda.current_stream(self.device))
        return event


class TokenClock:
    """A stopping criterion that only records timestamps: ``generate()`` calls it after each step."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.marks: list[int] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.marks.append(self.clock.mark())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class timed_vision:  # noqa: N801 - used as a context manager, like a function
    """Record start and end of image encoding inside the ``with`` block.

    The model's ``get_image_features`` is wrapped on the instance, because ``torch.compile`` would compile a hook on the
    tower.
    """

    def __init__(self, model: Any, clock: DeviceClock) -> None:
        self.core, self.clock = model.model, clock
        self.start: int | None = None
        self.end: int | None = None

    def __enter__(self) -> timed_vision:
        original: Callable[..., Any] | None = getattr(self.core, "get_image_features", None)
        if original is None:  # a text-only model
            return self

        @wraps(original)  # generate() picks the arguments by the signature
        def marked(*args: Any, **kwargs: Any) -> Any:
            self.start = self.clock.mark()
            with phase("vision"):
                features = original(*args, **kwargs)
            self.end = self.clock.mark()
            return features

        self.core.get_image_features = marked
        return self

    def __exit__(self, *exc: object) -> None:
        self.core.__dict__.pop("get_image_features", None)
