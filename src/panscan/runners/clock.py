"""Time stamps on the device's own time line, without making the device wait."""

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
    """Marks moments; :meth:`read` gives them in seconds of :func:`panscan.core.now`.

    On one NVIDIA GPU a mark is an event, so that the host runs ahead as it does unmeasured. With layers on several
    devices, and on MPS, each mark waits for the device instead: events of different devices cannot be compared.
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
        """Record a time mark; return its index in :meth:`read`."""
        if self._events:
            self._marks.append(self._event())
        else:
            synchronize(self.device)
            self._marks.append(now())
        return len(self._marks) - 1

    def read(self) -> list[float]:
        """Every mark's time, once the device has reached the last.

        The device's clock and the host's drift apart by some millionths, which shows after seconds: marks are placed
        between two moments that both clocks have seen.
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
    """A stopping criterion that stops nothing: ``generate()`` calls it when each step's tokens are chosen."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.marks: list[int] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.marks.append(self.clock.mark())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class timed_vision:  # noqa: N801 - used as a context manager, like a function
    """Marks when the vision tower is entered and when the image embeddings are ready, while in the ``with`` block.

    The model's ``get_image_features`` is wrapped on the instance: a hook on the tower would become part of what
    ``torch.compile`` compiles.
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
