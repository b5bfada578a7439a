"""Timestamps of a device's work, without synchronising the device, and named steps in a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd.profiler import record_function

from panscan.core import now
from panscan.model.checkpoint import Loaded
from panscan.model.machine import record_event, synchronize
from panscan.model.phases import PHASE_PREFIX, phase, profiled

_PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_SETUP, _CHOOSE = "generate: configuration and cache", "generate: next token and stopping criteria"


class DeviceClock:
    """Records timestamps of a device's work; :meth:`read` converts them to seconds of :func:`panscan.core.now`.

    On one NVIDIA GPU, timestamps are CUDA events, which let the host run ahead of the device. With layers on several
    devices, and on MPS, each mark synchronises instead: events of different devices cannot be compared.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.device = device = loaded.device
        placed = getattr(loaded.model, "hf_device_map", None) or {"": device}
        self._events = device.type == "cuda" and len(set(placed.values())) == 1
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


@contextmanager
def timed_vision(model: Any, clock: DeviceClock) -> Iterator[list[int]]:
    """Yield the marks of start and end of image encoding inside the ``with`` block; empty without any.

    The model's ``get_image_features`` is wrapped on the instance, because ``torch.compile`` would compile a hook on the
    tower.
    """
    marks: list[int] = []
    core = model.model
    original: Callable[..., Any] | None = getattr(core, "get_image_features", None)
    if original is None:  # a text-only model
        yield marks
        return

    @wraps(original)  # generate() picks the arguments by the signature
    def marked(*args: Any, **kwargs: Any) -> Any:
        start = clock.mark()
        with phase("vision"):
            features = original(*args, **kwargs)
        marks[:] = start, clock.mark()
        return features

    core.get_image_features = marked
    try:
        yield marks
    finally:
        del core.get_image_features


@contextmanager
def marked_steps(model: Any) -> Iterator[None]:
    """Mark the steps of one ``generate()`` call inside the ``with`` block. Does nothing without a profiler.

    ``generate()`` calls one method of the model before each forward pass, to prepare the inputs, and one after it, to
    update them. Both are wrapped on the instance, because ``torch.compile`` would compile a hook on the forward pass.
    """
    if not profiled():
        yield
        return
    step = "prefill"
    with ExitStack() as current:
        current.enter_context(record_function(_SETUP))

        def enter(name: str) -> None:
            current.close()
            current.enter_context(record_function(name))

        def wrap(name: str) -> None:
            original: Callable[..., Any] = getattr(model, name)

            @wraps(original)  # generate() picks the arguments by the signature
            def marked(*args: Any, **kwargs: Any) -> Any:
                nonlocal step
                enter(name)
                result = original(*args, **kwargs)
                enter(PHASE_PREFIX + step if name == _PREPARE else _CHOOSE)
                step = "decode" if name == _UPDATE else step
                return result

            setattr(model, name, marked)

        for name in (_PREPARE, _UPDATE):
            wrap(name)
        try:
            yield
        finally:
            for name in (_PREPARE, _UPDATE):
                delattr(model, name)
