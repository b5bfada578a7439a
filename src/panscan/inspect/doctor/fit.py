"""Which Gemma 3 sizes fit into this machine's free memory, by the engine's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil

from panscan.core import SettingError
from panscan.core.gpu_features import Capability, supports
from panscan.inspect.doctor.checks import CheckFinding, Findings, ok, warning
from panscan.inspect.doctor.host import read_limits
from panscan.model.shapes import SHAPES, Shape
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu
from panscan.plan.memory import memory_plan
from panscan.settings import WEIGHT_KINDS

_SIZES = ("270m", "1b", "4b", "12b", "27b")
_GB = 1e9


def fits() -> Findings:
    """Report for each released size which precision fits, on one GPU, on several, or in the host's memory."""
    import torch

    devices = []
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what earlier checks left
        for index in range(torch.cuda.device_count()):
            free, _ = torch.cuda.mem_get_info(index)
            devices.append(_device(f"GPU {index}", free, torch.cuda.get_device_capability(index)))
    else:
        available, limited = psutil.virtual_memory().available, read_limits().free_memory
        devices.append(_device("this host", available if limited is None else min(available, limited), None))
    for size in _SIZES:
        yield fit_finding(size, devices)


def _device(label: str, free: int, capability: Capability | None) -> Gpu:
    """Return a GPU, or the CPU, with the product types that it has. Rates are not used here."""
    kinds = ["fp32", *(kind for kind in ("bf16", "fp8", "int8") if supports(kind, capability))]
    return Gpu(
        name=label,
        label=label,
        memory_bytes=free,
        bytes_per_s=1.0,
        link="",
        link_bytes_per_s=1.0,
        flops_per_s=dict.fromkeys(kinds, 1.0),
        capability=capability,
    )


def fit_finding(size: str, devices: Sequence[Gpu]) -> CheckFinding:
    """Judge one size of Gemma 3.

    Args:
        size: name of a shape, such as ``27b``.
        devices: GPUs with their free memory, or the host alone (``capability`` None).
    """
    shape, largest = SHAPES[size], max(devices, key=lambda device: device.memory_bytes)
    on_gpu, free = largest.capability is not None, f"{largest.memory_bytes / _GB:.1f} GB free"
    if len(devices) > 1:
        free = f"{largest.label}, {free}"
    where = f"on one GPU ({free})" if on_gpu else f"in this host's memory ({free})"
    weights = 0
    for variant in _variants(shape, largest):
        plan, weights = memory_plan(variant, largest), variant.weight_bytes()
        if plan.fits:
            how = _options(variant, default="bf16" if on_gpu else "fp32")
            fact = f"{size} fits {where} with {how}: {weights / _GB:.1f} GB of weights"
            several = "" if variant.weights is None else _unquantized(shape, devices)
            return ok(f"{fact}, KV cache of {plan.global_tokens:,} tokens{several}")
    fact = f"{size} does not fit {where}: it takes {weights / _GB:.1f} GB in its smallest precision, plus caches"
    if several := _unquantized(shape, devices):
        return ok(f"{fact}{several}")
    advice = f"Use a smaller size; `panscan plan --model {size} --gpu NAME` shows which GPUs hold it."
    return warning(fact, f"Stop other processes if they hold memory. {advice}")


def _options(variant: Variant, default: str) -> str:
    """Return the options that choose a variant, or the default precision."""
    options = [] if variant.dtype == default else [f"--dtype {variant.dtype}"]
    options += [] if variant.weights is None else [f"--quantization {variant.weights}"]
    return " ".join(options) or default


def _variants(shape: Shape, device: Gpu) -> Iterator[Variant]:
    """Yield what a device can run, the most precise first."""
    dtypes = ["bf16"] if device.capability is not None and "bf16" in device.flops_per_s else ["fp32"]
    if device.capability is None:
        dtypes.append("bf16")
    for dtype in dtypes:
        yield Variant(shape, dtype=dtype)
    for dtype in dtypes:
        for kind in WEIGHT_KINDS:
            if device.refusal(kind, dtype=dtype) is None:
                yield Variant(shape, weights=kind, dtype=dtype)


def _unquantized(shape: Shape, devices: Sequence[Gpu]) -> str:
    """Return how several GPUs hold a shape without quantisation; empty if they do not."""
    smallest = min(devices, key=lambda device: device.memory_bytes)
    for ranks in (2, 4, 8):
        if ranks > len(devices):
            break
        try:
            variant = Variant(shape, tensor_parallel_size=ranks)
        except SettingError:  # this shape cannot be split so often
            break
        if memory_plan(variant, smallest).fits:
            return f"; unquantised with --tensor-parallel-size {ranks}"
    return ""
