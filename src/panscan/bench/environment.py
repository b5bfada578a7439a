"""Where a run took place: what a reader needs to believe or repeat its figures. Nothing that names the user."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import panscan

__all__ = ["environment", "peak_memory", "reset_peak_memory"]

_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "triton", "flash-attn", "kernels", "bitsandbytes",
             "torchao", "torchvision", "numpy", "pillow", "vllm")  # fmt: skip
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def environment() -> dict[str, Any]:
    """Hardware, driver, library versions and panscan's own version and commit."""
    import torch

    memory = psutil.virtual_memory().total
    return {
        "panscan": panscan.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
    }


def reset_peak_memory() -> None:
    """Start new peaks: on every GPU in use, and of this process where the system lets it (Linux)."""
    import torch

    for index in _gpus_in_use():
        torch.cuda.reset_peak_memory_stats(index)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident size


def peak_memory() -> dict[str, int | None]:
    """Peak bytes since :func:`reset_peak_memory`: allocated and reserved, summed over GPUs (None without one in use),
    and the process's resident size (None where its peak cannot be reset, so that it would be an earlier cell's)."""
    import torch

    devices = _gpus_in_use()
    return {
        "peak_allocated_bytes": sum(map(torch.cuda.max_memory_allocated, devices)) if devices else None,
        "peak_reserved_bytes": sum(map(torch.cuda.max_memory_reserved, devices)) if devices else None,
        "peak_rss_bytes": _peak_rss(),
    }


def _gpus_in_use() -> range:
    """GPUs, once anything has touched one: asking for their memory must not be what does."""
    import torch

    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    return range(torch.cuda.device_count() if started else 0)


def _peak_rss() -> int | None:
    try:
        lines = _STATUS.read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, with ``+`` if it has changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    import torch

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


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
