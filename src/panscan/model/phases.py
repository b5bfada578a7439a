"""Named ranges of a profiler's trace: the phases of a request, and the host's work between them.

Without a running profiler a range costs one comparison, so the code that computes answers carries its ranges always.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch.autograd import profiler

Phase = Literal["request", "load", "preprocess", "vision", "prefill", "decode"]
"""``request`` contains all others; ``load`` reads and decodes image files, as the stage of that name in reports."""

PHASE_PREFIX = "panscan."
_UNRECORDED: AbstractContextManager[Any] = nullcontext()


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Return a context that marks a phase of a request in the trace: ``panscan.prefill`` and so on."""
    return profiler.record_function(f"{PHASE_PREFIX}{name}") if profiled() else _UNRECORDED


def host_work(name: str) -> AbstractContextManager[Any]:
    """Return a context that marks work of the host between phases in the trace, under its own name."""
    return profiler.record_function(name) if profiled() else _UNRECORDED


def profiled() -> bool:
    """Return whether ``torch.profiler`` is recording in this process."""
    return profiler._is_profiler_enabled
