"""Checks of this host: versions and imports of packages, cores, and the Gemma 3 sizes that fit in the free memory."""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import product
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from panscan.core.errors import error_line
from panscan.core.gpu_features import Capability, supports
from panscan.core.installation import install_command
from panscan.core.process import usable_cores
from panscan.core.text import count
from panscan.inspect.doctor.checks import CheckFinding, Findings, file_text, not_checked, ok, problem, warning
from panscan.model.shapes import SHAPES
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu
from panscan.plan.memory import concurrent_requests, memory_plan
from panscan.settings import WEIGHT_KINDS

_CGROUP = Path("/sys/fs/cgroup")
_FEW_CORES = 2
_SIZES = ("270m", "1b", "4b", "12b", "27b")
_GB = 1e9
_USUAL_TOKENS = 1358  # of a request: a page of four views, and a long answer


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
        if (installed := _version(name)) is None:
            yield ok(f"{name} is not installed; panscan does not need it")
        elif error := _import_error(module):
            yield warning(f"{name} {installed} does not import: {error}", fix)
        else:
            yield ok(f"{name} {installed} imports")
    if (installed := _version("kernels")) is not None:
        yield warning(
            f"kernels {installed}: Transformers downloads flash-attention kernels from the hub if a flash"
            " implementation is requested",
            "Keep --attention at sdpa or eager; see the attention checks.",
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


def read_limits(root: Path = _CGROUP) -> tuple[float | None, int | None]:
    """Return the limits of this container or service, from the control group (version 2) mounted at ``root``.

    Returns:
        Cores' worth of time, and bytes that can still be allocated, cached files that the kernel can drop included;
        None: no limit.
    """
    quota, _, period = file_text(root / "cpu.max").partition(" ")
    cores = int(quota) / int(period) if quota.isdigit() else None  # "max": no limit
    limit, used = file_text(root / "memory.max"), file_text(root / "memory.current")
    if not limit.isdigit():
        return cores, None
    cached = re.search(r"^inactive_file (\d+)$", file_text(root / "memory.stat"), re.MULTILINE)
    return cores, max(0, int(limit) - int(used or 0) + (int(cached[1]) if cached else 0))


def cores() -> Findings:
    """Report the cores that this process may use."""
    yield cores_finding(os.cpu_count() or 1, usable_cores(), read_limits()[0])


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
    """Report for each released size which precision fits on the GPU with the most free memory, or on this host."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what earlier checks left
        free, index = max((torch.cuda.mem_get_info(i)[0], i) for i in range(torch.cuda.device_count()))
        device = _device(f"GPU {index}", free, torch.cuda.get_device_capability(index))
    else:
        available, (_, limit) = psutil.virtual_memory().available, read_limits()
        device = _device("this host", available if limit is None else min(available, limit), None)
    for size in _SIZES:
        yield fit_finding(size, device)


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


def fit_finding(size: str, device: Gpu) -> CheckFinding:
    """Judge one size of Gemma 3 in the memory of a device: the most precise weights that leave room for a request.

    Args:
        size: name of a shape, such as ``27b``.
        device: a GPU with its free memory, or the host (``capability`` None).
    """
    dtypes = ["bf16"] if device.capability is not None and "bf16" in device.flops_per_s else ["fp32"]
    dtypes += ["bf16"] * (device.capability is None)
    where, weights = f"{device.label}, {device.memory_bytes / _GB:.1f} GB free", 0
    for kind, dtype in product((None, *WEIGHT_KINDS), dtypes):
        if device.refusal(kind, dtype=dtype) is not None:
            continue
        variant = Variant(SHAPES[size], weights=kind, dtype=dtype)
        weights = variant.weight_bytes()
        if requests := concurrent_requests(memory_plan(variant, device), variant, _USUAL_TOKENS):
            options = f"--dtype {dtype}" + (f" --quantization {kind}" if kind else "")
            cache = f"a KV cache for {count(requests, 'request')} of {_USUAL_TOKENS:,} tokens"
            return ok(f"{size} fits ({where}) with {options}: {weights / _GB:.1f} GB of weights, {cache}")
    return warning(
        f"{size} does not fit ({where}): it takes {weights / _GB:.1f} GB in its smallest precision, plus caches",
        "Stop other processes if they hold memory, or use a smaller size or several GPUs:"
        f" `panscan plan --model {size} --gpu NAME` shows which hold it.",
    )
