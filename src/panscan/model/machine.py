"""This machine: its devices, their memory and precision, and facts about them for records."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import torch

from panscan.core import UnsupportedError

__all__ = [
    "cuda_version",
    "gpu_count",
    "gpu_facts",
    "is_out_of_memory",
    "peak_memory",
    "release_memory",
    "reset_peak_memory",
    "resolve_device",
    "resolve_dtype",
    "set_thread_count",
    "synchronize",
    "thread_count",
]

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


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
            raise UnsupportedError(f"--device {name}: {count or 'no'} NVIDIA GPU(s) visible")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UnsupportedError("--device mps: this machine has no Apple GPU")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator and float32 on a CPU; fp16 is allowed, though Gemma 3 overflows in it."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]


def release_memory() -> None:
    """Collect unreferenced objects, and return cached blocks to the device."""
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


def reset_peak_memory() -> None:
    """Start new peaks: on every GPU in use, and of this process where the system lets it (Linux)."""
    for index in _initialised_gpus():
        torch.cuda.reset_peak_memory_stats(index)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident size


def peak_memory() -> dict[str, int | None]:
    """Peak bytes since :func:`reset_peak_memory`: allocated and reserved, summed over GPUs (None without one in use),
    and the process's resident size (None where its peak cannot be reset, so that it would be an earlier cell's)."""
    devices = _initialised_gpus()
    return {
        "peak_allocated_bytes": sum(map(torch.cuda.max_memory_allocated, devices)) if devices else None,
        "peak_reserved_bytes": sum(map(torch.cuda.max_memory_reserved, devices)) if devices else None,
        "peak_rss_bytes": _peak_rss(),
    }


def gpu_facts() -> list[dict[str, Any]]:
    """Name, memory in bytes, compute capability, multiprocessors and driver of each visible NVIDIA GPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": facts.name,
                "memory_bytes": facts.total_memory,
                "capability": f"{facts.major}.{facts.minor}",
                "multiprocessors": facts.multi_processor_count,
            }
        )
    return [gpu | {"driver": _driver()} for gpu in found]


def thread_count() -> int:
    """Threads that PyTorch computes with on the CPU."""
    return torch.get_num_threads()


def set_thread_count(threads: int) -> None:
    """Set how many threads PyTorch computes with on the CPU."""
    torch.set_num_threads(threads)


def gpu_count() -> int:
    """Visible NVIDIA GPUs. No CUDA context is made."""
    return torch.cuda.device_count()


def cuda_version() -> str | None:
    """The CUDA version that PyTorch was built for; None for a CPU build."""
    return torch.version.cuda


def _initialised_gpus() -> range:
    """Return all visible GPUs if CUDA is initialised in this process, else none: a query must not initialise it."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    return range(torch.cuda.device_count() if started else 0)


def _peak_rss() -> int | None:
    try:
        lines = _STATUS.read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
