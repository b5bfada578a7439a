"""Whether a runner and this machine can do what settings say, found out without loading a model."""

from __future__ import annotations

from typing import Any

from panscan.engine.limits import unsupported_reason as engine_reason
from panscan.model.loading import machine_reason
from panscan.settings import ENGINE_AXES, Settings, axes

__all__ = ["unsupported_reason"]

# What a runner does not offer: setting -> the only value it takes.
_RUNNER_LIMITS: dict[str, dict[str, Any]] = {
    "pipeline": {"batch_size": 1, "pad_to_multiple_of": None, "preprocess": "cpu"},
    "generate_batch": {
        "cache": "dynamic",
        "compile": None,
        "prefill_chunk_size": None,
        "pad_to_multiple_of": None,
        "preprocess": "cpu",
    },
}


def unsupported_reason(settings: Settings) -> str | None:
    """Why these settings cannot run here; None if nothing speaks against."""
    if settings.runner == "engine":
        return engine_reason(settings)
    for name in ENGINE_AXES:
        if getattr(settings, name) != axes()[name].default:
            return f"runner {settings.runner}: --{name.replace('_', '-')} is for --runner engine"
    for name, only in _RUNNER_LIMITS.get(settings.runner, {}).items():
        if getattr(settings, name) != only:
            return f"runner {settings.runner}: --{name.replace('_', '-')} must stay at {only}"
    return machine_reason(settings)
