"""Checks of the host: cores, memory, container limits, disks, and access to gated checkpoints."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from huggingface_hub import constants

from panscan.core.files import cache_directory
from panscan.inspect.doctor.checks import CheckFinding, Findings, file_text, not_checked, ok, warning
from panscan.model.untrusted.headers import index_files
from panscan.model.untrusted.reading import DamagedFileError

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the check of limits asks for it


_GIB = 2**30
_CGROUP, _SHARED = Path("/sys/fs/cgroup"), Path("/dev/shm")
_FEW_CORES = 2
_LEAST_MEMORY = 4 * _GIB
_LEAST_SHARED = 1 * _GIB
_LEAST_DISK = 60 * _GIB  # Gemma 3 27B in bf16 takes 55 GB
_LEAST_FILES = 4096
_HUB_CACHE = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_OFFLINE, _TOKENS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this container or service.

    Args:
        cores: cores' worth of time; None: no limit.
        memory: bytes; None: no limit.
        used_memory: bytes of the limit that are in use, without cached files that the kernel can drop; 0: unknown.
    """

    cores: float | None
    memory: int | None
    used_memory: int = 0

    @property
    def free_memory(self) -> int | None:
        """Bytes that can still be allocated; None: no limit."""
        return None if self.memory is None else max(0, self.memory - self.used_memory)


def read_limits(root: Path = _CGROUP) -> Limits:
    """Return the limits of the control group mounted at ``root``, version 2 or 1."""
    quota, _, period = file_text(root / "cpu.max").partition(" ")
    if not quota:
        quota, period = file_text(root / "cpu/cpu.cfs_quota_us"), file_text(root / "cpu/cpu.cfs_period_us")
    memory = file_text(root / "memory.max") or file_text(root / "memory/memory.limit_in_bytes")
    limited = quota.isdigit() and period.isdigit()  # "max" and -1 stand for no limit
    bounded = memory.isdigit() and int(memory) < psutil.virtual_memory().total  # version 1 writes 2**63 for no limit
    return Limits(
        int(quota) / int(period) if limited else None,
        int(memory) if bounded else None,
        _used_memory(root) if bounded else 0,
    )


def _used_memory(root: Path) -> int:
    """Return the bytes that a control group uses, without cached files that the kernel can drop; 0: unknown."""
    for used, statistics, name in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        if (total := file_text(root / used)).isdigit():
            pairs = (line.split() for line in file_text(root / statistics).splitlines())
            values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
            return max(0, int(total) - values.get(name, 0))
    return 0


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


def memory() -> Findings:
    """Report the memory that this process may use."""
    facts = psutil.virtual_memory()
    yield memory_finding(facts.total, facts.available, read_limits())


def memory_finding(total: int, available: int, limits: Limits) -> CheckFinding:
    """Judge the memory of this machine, in bytes, and of the container."""
    fact = f"{available / _GIB:.1f} GiB of {total / _GIB:.1f} GiB memory are available"
    free = limits.free_memory
    if limits.memory is not None and free is not None:
        fact += f", the container may use {limits.memory / _GIB:.1f} GiB and has {free / _GIB:.1f} GiB free"
    if min(available, available if free is None else free) < _LEAST_MEMORY:
        return warning(
            f"{fact}: little for checkpoints and decoded images",
            "Stop other processes, or raise the container's limit.",
        )
    return ok(fact)


def shared_memory() -> Findings:
    """Report the size of /dev/shm, which NCCL (tensor parallel) and Ray (replicas) use."""
    if not _SHARED.is_dir():
        yield not_checked("this system has no /dev/shm")
        return
    usage = shutil.disk_usage(_SHARED)
    fact = f"/dev/shm: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _LEAST_SHARED:
        yield warning(
            f"{fact}: NCCL (--tensor-parallel-size) and Ray (--replicas) may need more",
            "Start the container with --shm-size=16g or --ipc=host.",
        )
    else:
        yield ok(fact)


def limits() -> Findings:
    """Report the limits of open files and locked memory."""
    if resource is None:
        yield not_checked("this system has no resource limits (ulimit)")
        return
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _LEAST_FILES:  # -1: unlimited
        yield warning(
            f"open files: {files} (hard limit {_limit_text(most)}); each connection to `panscan serve` takes one",
            f"Run `ulimit -n {_LEAST_FILES}` before panscan serve and panscan load.",
        )
    else:
        yield ok(f"open files: {_limit_text(files)}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if locked < 0 else f"{locked / 2**20:.0f} MiB"
    yield ok(f"locked memory: {size}; one machine's GPUs need none, RDMA between machines does")


def caches() -> Findings:
    """Report free space and access rights of the hub cache and of panscan's cache."""
    # HF_HOME has no effect on the hub cache if another variable is set.
    hub_variable = next((name for name in _HUB_CACHE if os.environ.get(name)), "HF_HOME")
    for name, path, variable, needed in (
        ("hub cache", Path(constants.HF_HUB_CACHE), hub_variable, _LEAST_DISK),
        ("panscan's cache", cache_directory(), "PANSCAN_CACHE", 0),
    ):
        existing = next(directory for directory in (path, *path.parents) if directory.exists())
        free = shutil.disk_usage(existing).free
        fact = f"{name} {path}: {free / _GIB:.0f} GiB free"
        if not os.access(existing, os.W_OK):
            yield warning(f"{fact}, not writable", f"Set {variable} to a directory that you can write.")
        elif free < needed:
            yield warning(
                f"{fact}; Gemma 3 27B in bf16 takes 55 GB, 12B 24 GB, 4B 9 GB",
                f"Free space, or set {variable} to a directory on a larger disk.",
            )
        else:
            yield ok(fact)


def hub_access() -> Findings:
    """Report whether a hub token is present, and whether downloads are allowed. The token is neither read nor shown."""
    if constants.HF_HUB_OFFLINE:
        name = next((name for name in _OFFLINE if os.environ.get(name)), _OFFLINE[0])
        yield ok(f"{name} is set: only checkpoints on this disk can be loaded")
    file = Path(constants.HF_TOKEN_PATH)
    variable = next((name for name in _TOKENS if os.environ.get(name)), None)
    if variable is not None or file.is_file():
        yield ok(f"a hub token is present ({variable or file}); its access to Gemma 3 was not tested")
    elif not constants.HF_HUB_OFFLINE:
        yield warning(
            "no hub token: google/gemma-3-* are gated and cannot be downloaded",
            "Accept the licence on the model's page, then run `hf auth login` or set HF_TOKEN."
            " Local checkpoints and the bundled models need no token.",
        )


def checkpoints() -> Findings:
    """Report Gemma 3 checkpoints in the hub cache, and whether they are complete."""
    cache = Path(constants.HF_HUB_CACHE)
    configs = sorted(cache.glob("models--*gemma-3-*/snapshots/*/config.json"))
    if not configs:
        yield ok(f"no Gemma 3 checkpoint in the hub cache {cache}; panscan's mini and tiny need none")
    for config in configs:
        name = config.parents[2].name.removeprefix("models--").replace("--", "/")
        yield _checkpoint(name, config.parent)


def _checkpoint(name: str, snapshot: Path) -> CheckFinding:
    index, single = snapshot / "model.safetensors.index.json", snapshot / "model.safetensors"
    needed = [single.name]
    if index.is_file():
        try:
            needed = sorted(set(index_files(index).values()))
        except DamagedFileError:
            return warning(f"{name}: {index.name} is damaged", f"Delete {snapshot} and download the checkpoint again.")
    if not index.is_file() and next(snapshot.glob("*.safetensors"), None) is None:
        return ok(f"{name}: only its configuration is in the cache")
    missing = [name for name in needed if not (snapshot / name).exists()]
    if missing:
        return warning(
            f"{name} in the hub cache lacks {len(missing)} of {len(needed)} weight files", f"Run `hf download {name}`."
        )
    return ok(f"{name} is in the hub cache, complete")


def _limit_text(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
