"""Timestamps of a device's work, without synchronising the device, and named steps in a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.profiler import record_function

from panscan.core import now
from panscan.model.machine import record_event, synchronize
from panscan.model.phases import PHASE_PREFIX, phase, profiled

_PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_SETUP, _CHOOSE = "generate: configuration and cache", "generate: next token and stopping criteria"


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
            self._anchor = record_event(self.device)
            synchronize(device)
        self._zero = now()

    def mark(self) -> int:
        """Record a timestamp and return its index in :meth:`read`."""
        if self._events:
            self._marks.append(record_event(self.device))
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
        last = record_event(self.device)
        synchronize(self.device)
        per_millisecond = (now() - self._zero) / self._anchor.elapsed_time(last)
        return [self._zero + self._anchor.elapsed_time(event) * per_millisecond for event in self._marks]


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


class marked_steps:  # noqa: N801 - used as a context manager, like a function
    """Mark the steps of one ``generate()`` call inside the ``with`` block. Does nothing without a profiler.

    ``generate()`` calls one method of the model before each forward pass, to prepare the inputs, and one after it, to
    update them. Both are wrapped on the instance, because ``torch.compile`` would compile a hook on the forward pass.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._step = "prefill"
        self._range: record_function | None = None

    def __enter__(self) -> marked_steps:
        if profiled():
            self._wrap(_PREPARE, lambda: PHASE_PREFIX + self._step)
            self._wrap(_UPDATE, lambda: _CHOOSE)
            self._enter(_SETUP)
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        for name in (_PREPARE, _UPDATE):
            self._model.__dict__.pop(name, None)

    def _wrap(self, name: str, following: Callable[[], str]) -> None:
        original: Callable[..., Any] = getattr(self._model, name)

        @wraps(original)  # generate() picks the arguments by the signature
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            found = original(*args, **kwargs)
            self._enter(following())
            self._step = "decode" if name == _UPDATE else self._step
            return found

        setattr(self._model, name, marked)

    def _enter(self, name: str) -> None:
        self._leave()
        self._range = record_function(name)
        self._range.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def _leave(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
