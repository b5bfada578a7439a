"""What the NVIDIA driver reports, through NVML. Nothing here changes a setting or starts a CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pynvml

from panscan.inspect.doctor.checks import file_text

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


def gpu_reader(index: int) -> Callable[..., Any | None]:
    """Return a function that asks the driver about a GPU.

    It takes a name as in ``nvmlDeviceGet<name>``, and arguments. It returns None for what the GPU, the driver or the
    installed bindings do not report: everything without a driver, or of a part of a GPU (MIG).

    Args:
        index: PyTorch's number of the GPU.
    """
    import torch

    def read(name: str, *arguments: Any) -> Any | None:
        try:
            return getattr(pynvml, f"nvmlDeviceGet{name}")(*arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    uuid = torch.cuda.get_device_properties(index).uuid
    handle = None if driver() is None else read("HandleByUUID", f"GPU-{uuid}")
    return lambda name, *arguments: None if handle is None else read(name, handle, *arguments)


def pci_gpus(devices: Path = _PCI) -> int | None:
    """Return how many NVIDIA GPUs are on the PCI bus, with or without a driver; None if it cannot be read."""
    try:
        entries = list(devices.iterdir())
    except OSError:
        return None
    return sum(
        file_text(entry / "vendor") == _NVIDIA and file_text(entry / "class")[:4] == _DISPLAY for entry in entries
    )
