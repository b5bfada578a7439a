"""Checks of the links of GPUs: to each other and to the host, measured with short copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

from panscan.inspect.doctor.checks import NO_GPU, CheckFinding, Findings, not_checked, ok, on_gpus, problem, warning
from panscan.inspect.doctor.nvml import gpu_reader

_BYTES = 256 << 20
_RUNS = 5
_MOST_LINKS = 18  # of NVLink on one GPU; the driver refuses higher numbers
_FEWER_LANES = "The link runs with fewer lanes than the GPU and the slot have: reseat the GPU, or check the riser."
_SLOW = 5e9  # bytes/s; PCIe 3.0 x8 is faster


def idle_gpus() -> Findings:
    """Say how to use several GPUs, and that ``device_map="auto"`` uses one at a time."""
    import torch

    yield layout_finding(torch.cuda.device_count())


def layout_finding(count: int) -> CheckFinding:
    """Return how ``panscan serve`` uses ``count`` GPUs."""
    if count == 0:
        return not_checked(NO_GPU)
    if count == 1:
        return ok("one GPU: --device-map has no effect")
    layouts = [f"--replicas {count}"]
    if size := next((size for size in (8, 4, 2) if count % size == 0), None):
        replicas = "" if size == count else f"--replicas {count // size} "
        layouts.append(f"{replicas}--tensor-parallel-size {size}")
    commands = " or ".join(f"`panscan serve {layout}`" for layout in layouts)
    return ok(
        f"{count} GPUs: Transformers' device_map=\"auto\" spreads a model's layers over them, so only one computes"
        f" at a time; {commands} uses all of them"
    )


def peers() -> Findings:
    """Measure copies from each GPU to the next one, and check the copied values."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        yield not_checked("peer-to-peer copies need two GPUs")
        return
    pairs = [(index, (index + 1) % count) for index in range(count if count > 2 else 1)]
    for source, target in pairs:
        yield _peer(torch, source, target)


def _peer(torch: Any, source: int, target: int) -> CheckFinding:
    values = torch.arange(_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    copy = torch.empty_like(values, device=f"cuda:{target}")
    seconds = _best_seconds(torch, partial(copy.copy_, values), (source, target))
    label = f"GPU {source} to GPU {target}"
    rate = f"{_BYTES / seconds / 1e9:.0f} GB/s"
    if not torch.equal(copy.cpu(), values.cpu()):
        return problem(
            f"{label}: a peer-to-peer copy changes values",
            "Disable the IOMMU or PCIe ACS on the host, or run with NCCL_P2P_DISABLE=1 and --replicas.",
        )
    if not torch.cuda.can_device_access_peer(source, target):
        return warning(
            f"{label}: no peer-to-peer access, copies go through host memory at {rate}",
            "Prefer --replicas to --tensor-parallel-size on this machine.",
        )
    links = _nvlinks(source)
    by = f" ({links} active NVLink links on GPU {source})" if links else " (no active NVLink)"
    return ok(f"{label}: peer-to-peer copies at {rate}{by}")


def _nvlinks(index: int) -> int:
    read = gpu_reader(index)
    return [read("NvLinkState", link) for link in range(_MOST_LINKS)].count(pynvml.NVML_FEATURE_ENABLED)


@on_gpus
def host_links() -> Findings:
    """Measure pinned copies between host and each GPU, and compare the PCIe link with what the GPU supports."""
    import torch

    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    for index in range(torch.cuda.device_count()):
        device = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
        up = _BYTES / _best_seconds(torch, partial(device.copy_, host, non_blocking=True), (index,))
        down = _BYTES / _best_seconds(torch, partial(host.copy_, device, non_blocking=True), (index,))
        yield _host_link(index, up, down)
        del device


def _host_link(index: int, up: float, down: float) -> CheckFinding:
    read = gpu_reader(index)
    width, most = read("CurrPcieLinkWidth"), read("MaxPcieLinkWidth")
    fact = f"GPU {index}: {up / 1e9:.0f} GB/s from the host, {down / 1e9:.0f} GB/s to the host"
    if width and most:
        fact += f", PCIe x{width} of x{most}"
    if width and most and width < most:
        return warning(fact, _FEWER_LANES)
    if min(up, down) < _SLOW:
        return warning(fact, "The link is slow: check the slot, or whether other processes copy at the same time.")
    return ok(fact)


def _best_seconds(torch: Any, work: Callable[[], object], indices: tuple[int, ...]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        for index in indices:
            torch.cuda.synchronize(index)
        start = time.perf_counter()
        work()
        for index in indices:
            torch.cuda.synchronize(index)
        best = min(best, time.perf_counter() - start)
    return best
