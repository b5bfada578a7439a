"""Ranges of ``generate()`` in a profiler's trace: prefill, each decode step, and the host's work between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.autograd.profiler import record_function

from panscan.model.phases import PHASE_PREFIX, profiled

__all__ = ["marked_steps"]

_PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_SETUP, _CHOOSE = "generate: configuration and cache", "generate: next token and stopping criteria"


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
            self._wrap(_PREPARE, lambda: self._enter(PHASE_PREFIX + self._step))
            self._wrap(_UPDATE, self._stepped)
            self._enter(_SETUP)
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        for name in (_PREPARE, _UPDATE):
            self._model.__dict__.pop(name, None)

    def _stepped(self) -> None:
        self._step = "decode"
        self._enter(_CHOOSE)

    def _wrap(self, name: str, afterwards: Callable[[], None]) -> None:
        original: Callable[..., Any] = getattr(self._model, name)

        @wraps(original)  # generate() picks the arguments by the signature
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            found = original(*args, **kwargs)
            afterwards()
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
