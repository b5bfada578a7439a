"""What the NVIDIA driver reports, through NVML. Nothing here changes a setting or starts a CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pynvml

__all__ = ["Driver", "driver", "handle_of", "pci_gpus", "read"]

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, the highest CUDA version that it supports, and the number of GPUs that it manages."""

    version: str
    cuda: tuple[int, int]
    gpus: int


@cache
def driver() -> Driver | None:
    """Return the NVIDIA driver of this machine; None if there is none or it does not answer."""
    try:
        pynvml.nvmlInit()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), int(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return None


def handle_of(uuid: str) -> Any | None:
    """Return NVML's handle of a GPU; None without a driver, or for a part of a GPU (MIG).

    Args:
        uuid: as PyTorch reports it, without the prefix ``GPU-``.
    """
    return None if driver() is None else read(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")


def read(function: Callable[..., Any], *arguments: Any) -> Any | None:
    """Return what an NVML function reports; None if this GPU or driver does not report it."""
    try:
        return function(*arguments)
    except (pynvml.NVMLError, AttributeError):  # AttributeError: the installed bindings are older than the function
        return None


def pci_gpus(devices: Path = _PCI) -> int | None:
    """Return how many NVIDIA GPUs are on the PCI bus, with or without a driver; None if it cannot be read."""
    try:
        entries = list(devices.iterdir())
    except OSError:
        return None
    return sum(_content(entry / "vendor") == _NVIDIA and _content(entry / "class")[:4] == _DISPLAY for entry in entries)


def _content(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return ""
