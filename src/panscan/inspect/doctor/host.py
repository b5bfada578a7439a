"""Checks of this host: versions and imports of packages, cores, and the Gemma 3 sizes that fit in the free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from panscan.core import SettingError
from panscan.core.errors import error_line
from panscan.core.gpu_features import Capability, supports
from panscan.core.installation import install_command
from panscan.core.text import count
from panscan.engine.options import EngineOptions
from panscan.inspect.doctor.checks import CheckFinding, Findings, file_text, not_checked, ok, problem, warning
from panscan.model.shapes import SHAPES, Shape
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu
from panscan.plan.memory import concurrent_requests, memory_plan
from panscan.settings import WEIGHT_KINDS

_CGROUP = Path("/sys/fs/cgroup")
_FEW_CORES = 2
_SIZES = ("270m", "1b", "4b", "12b", "27b")
_GB = 1e9
_USUAL_TOKENS = 1358  # of a request: a page of four views, and a long answer
_OPTIONAL = {"bitsandbytes": "--quantization bnb-8bit and bnb-4bit", "ray": "--replicas"}


def requirements() -> Findings:
    """Check that the installed versions are those that panscan's own package metadata requires."""
    try:
        needs = requires("panscan") or ()
    except PackageNotFoundError:
        yield not_checked(f"panscan runs from its source tree; `{install_command()}` records its requirements")
        return
    wrong, shown = [], []
    for needed in map(Requirement, needs):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        installed = _version(needed.name)
        if installed is None or not needed.specifier.contains(installed, prereleases=True):
            wrong.append(f"{needed.name} {installed or 'is missing'} (needs {needed.specifier})")
        elif needed.name in ("torch", "transformers", "tokenizers", "accelerate"):
            shown.append(f"{needed.name} {installed}")
    if wrong:
        yield problem(f"versions that panscan does not support: {', '.join(wrong)}", install_command())
    else:
        yield ok(", ".join(shown))


def torchvision() -> Findings:
    """Check that torchvision, if installed, imports and belongs to the installed PyTorch."""
    installed, torch = _version("torchvision"), _version("torch")
    if installed is None:
        yield ok("torchvision is not installed; panscan resizes views without it (Pillow, or PyTorch on the GPU)")
        return
    fix = "Install the torchvision of this PyTorch, or uninstall torchvision: panscan does not need it."
    needs = [needed for needed in map(Requirement, requires("torchvision") or ()) if needed.name == "torch"]
    if (error := _import_error("torchvision")) is not None:
        yield problem(f"torchvision {installed} does not work with torch {torch}: {error}", fix)
    elif torch is not None and not all(needed.specifier.contains(torch, prereleases=True) for needed in needs):
        yield warning(f"torchvision {installed} requires torch{needs[0].specifier}, installed is {torch}", fix)
    else:
        yield ok(f"torchvision {installed} works with torch {torch}")


def attention_packages() -> Findings:
    """Report attention kernel packages, and whether they work with the installed PyTorch."""
    from panscan.model.support import FLASH_PACKAGES

    for module, name in FLASH_PACKAGES.values():
        fix = f"pip uninstall {name}, or install a build for this PyTorch and CUDA; panscan does not need it."
        yield _optional_package(name, module, "panscan does not need it", fix)
    if (installed := _version("kernels")) is not None:
        yield warning(
            f"kernels {installed}: Transformers downloads flash-attention kernels from the hub if a flash"
            " implementation is requested",
            "Keep --attention at sdpa or eager; see the attention checks.",
        )


def optional_packages() -> Findings:
    """Report packages that only some settings need."""
    for name, purpose in _OPTIONAL.items():
        yield _optional_package(name, name, f"only {purpose} needs it", f"Reinstall {name}; only {purpose} needs it.")


def _optional_package(name: str, module: str, need: str, fix: str) -> CheckFinding:
    if (installed := _version(name)) is None:
        return ok(f"{name} is not installed; {need}")
    error = _import_error(module)
    return (
        ok(f"{name} {installed} imports")
        if error is None
        else warning(f"{name} {installed} does not import: {error}", fix)
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    try:
        import_module(module)
    except Exception as error:  # extension modules raise anything: OSError, RuntimeError for operators, AttributeError
        return error_line(error)
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this container or service.

    Args:
        cores: cores' worth of time; None: no limit.
        free_memory: bytes that can still be allocated, cached files that the kernel can drop included; None: no limit.
    """

    cores: float | None
    free_memory: int | None


def read_limits(root: Path = _CGROUP) -> Limits:
    """Return the limits of the control group mounted at ``root``, version 2 or 1."""
    quota, _, period = file_text(root / "cpu.max").partition(" ")
    if not quota:
        quota, period = file_text(root / "cpu/cpu.cfs_quota_us"), file_text(root / "cpu/cpu.cfs_period_us")
    cores = int(quota) / int(period) if quota.isdigit() and period.isdigit() else None  # "max" and -1: no limit
    for limit, used, statistics, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        text, total = file_text(root / limit), file_text(root / used)
        if text.isdigit() and int(text) < psutil.virtual_memory().total:  # version 1 writes 2**63 for no limit
            pairs = (line.split() for line in file_text(root / statistics).splitlines())
            cached = sum(int(value) for key, value in pairs if key == name)
            return Limits(cores, max(0, int(text) - (int(total) - cached if total.isdigit() else 0)))
    return Limits(cores, None)


def cores() -> Findings:
    """Report the cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield cores_finding(os.cpu_count() or 1, usable, read_limits().cores)


def cores_finding(present: int, usable: int, quota: float | None) -> CheckFinding:
    """Judge the cores of this machine.

    Args:
        present: logical cores of the machine.
        usable: cores that the affinity of this process allows.
        quota: cores' worth of time that the container may use; None: no limit.
    """
    fact = f"{usable} of {present} logical cores" + (
        "" if quota is None else f", limited to {quota:.1f} by the container"
    )
    available = usable if quota is None else min(usable, quota)
    if quota is not None and quota < usable:
        return warning(
            f"{fact}: PyTorch starts one thread per visible core, and the kernel then throttles them",
            f"Set OMP_NUM_THREADS={max(1, int(quota))}, or raise the container's limit.",
        )
    if available <= _FEW_CORES:
        return warning(
            f"{fact}: images are decoded and resized on the CPU, which may keep a GPU waiting",
            "Use a machine with more cores, or --preprocess device.",
        )
    return ok(fact)


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
        if plan.fits and (requests := concurrent_requests(plan, variant, _USUAL_TOKENS)):
            default = "bf16" if on_gpu else "fp32"
            options = [f"--dtype {variant.dtype}"] if variant.dtype != default else []
            options += [f"--quantization {variant.weights}"] if variant.weights else []
            fact = f"{size} fits {where} with {' '.join(options) or default}: {weights / _GB:.1f} GB of weights"
            several = "" if variant.weights is None else _unquantized(shape, devices)
            return ok(f"{fact}, {_kv_cache_fact(requests, variant, largest)}{several}")
    fact = f"{size} does not fit {where}: it takes {weights / _GB:.1f} GB in its smallest precision, plus caches"
    if several := _unquantized(shape, devices):
        return ok(f"{fact}{several}")
    advice = f"Use a smaller size; `panscan plan --model {size} --gpu NAME` shows which GPUs hold it."
    return warning(fact, f"Stop other processes if they hold memory. {advice}")


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


def _kv_cache_fact(requests: int, variant: Variant, device: Gpu) -> str:
    """Return how many requests the KV cache holds; in int8 too, where memory limits the requests of a step."""
    fact = f"a KV cache for {count(requests, 'request')} of {_USUAL_TOKENS:,} tokens"
    if requests >= EngineOptions().max_num_seqs:
        return fact
    smaller = replace(variant, kv_cache_dtype="int8")
    requests = concurrent_requests(memory_plan(smaller, device), smaller, _USUAL_TOKENS)
    return f"{fact} ({requests} with --kv-cache-dtype int8, which is not exact)"


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
