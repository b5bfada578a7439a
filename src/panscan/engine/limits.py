"""Whether an engine can run what settings say, found out without loading a model."""

from __future__ import annotations

from panscan.model.load import machine_reason
from panscan.settings import ENGINE_LIMITS, VLLM_AXES, Settings, axes

__all__ = ["unsupported_reason"]


def unsupported_reason(settings: Settings) -> str | None:
    """Why an engine cannot run these settings on this machine; None if nothing speaks against."""
    for name, only in {**ENGINE_LIMITS, **{name: axes()[name].default for name in VLLM_AXES}}.items():
        if getattr(settings, name) != only:
            return f"runner engine: --{name.replace('_', '-')} must stay at {only}"
    return machine_reason(settings)
