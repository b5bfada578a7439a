"""What this machine can do: devices, attention kernels, quantisation packages. Answers are reasons, or None for yes."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import torch

from panscan.core import UnsupportedError

__all__ = [
    "attention_reason",
    "is_out_of_memory",
    "quantization_reason",
    "release_memory",
    "resolve_device",
    "resolve_dtype",
    "synchronize",
]

_FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", (8, 0)),
    "flash_attention_3": ("flash_attn_interface", (9, 0)),
    "flash_attention_4": ("flash_attn.cute", (9, 0)),
}


def resolve_device(name: str) -> torch.device:
    """The device a name stands for; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        UnsupportedError: a device that is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UnsupportedError(f"--device {name}: this machine shows {count} NVIDIA GPU(s)")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UnsupportedError("--device mps: this machine has no Apple GPU")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator and float32 on a CPU; fp16 is allowed, though Gemma 3 overflows in it."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]


def attention_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an attention implementation cannot run here. Names with a slash come from the kernels hub."""
    if name in ("eager", "sdpa", "flex_attention"):
        return None
    if "/" in name:
        if find_spec("kernels") is None:
            return f"{name} comes from the kernels hub: pip install kernels"
        return None if device.type == "cuda" else f"{name} needs an NVIDIA GPU"
    if device.type != "cuda":
        return f"{name} needs an NVIDIA GPU"
    package, capability = _FLASH_PACKAGES[name]
    if torch.cuda.get_device_capability(device) < capability:
        return f"{name} needs compute capability {capability[0]}.{capability[1]} or later"
    root = package.split(".")[0]
    if find_spec(root) is None or find_spec(package) is None:  # a submodule cannot be looked up without its package
        return f"{name} needs the package {root.replace('_', '-')}" + (" 4 or later" if root != package else "")
    return f"{name} computes in bf16 or fp16 only" if dtype == torch.float32 else None


def quantization_reason(name: str | None, device: torch.device) -> str | None:
    """Why a quantisation cannot run here."""
    if name is None:
        return None
    package = {"bnb": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel"}[name.split("-")[0]]
    if find_spec(package) is None:
        return f"{name} needs the package {package}"
    if name == "torchao-float8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            return "torchao-float8 needs an NVIDIA GPU of compute capability 8.9 or later"
    elif name in ("gptq", "torchao-int4") and device.type != "cuda":
        return f"{name} needs an NVIDIA GPU"
    return None


def release_memory() -> None:
    """Collect what nobody holds any more, and give cached blocks back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
