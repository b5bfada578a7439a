"""What a GPU does while work runs: power and clocks by NVML, kernels by PyTorch's profiler. A CPU is not measured."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workloads.figures import Interval, decode_window, idle_share
from panscan.core import Result, now

_EVERY = 0.1  # seconds between samples of power
_LONGEST = 0.5  # seconds that are profiled: some thousand kernels a step


class Power:
    """A thread that samples power and clocks of GPUs during a ``with`` block; on a CPU, it samples nothing.

    Args:
        device: of the model; the first of its GPUs.
        gpus: number of GPUs that compute, this one and those after it.
    """

    def __init__(self, device: torch.device, gpus: int = 1) -> None:
        self._device, self._gpus = device, gpus
        self._samples: list[tuple[float, int, int]] = []
        self._handles: list[Any] = []
        self._counters: list[list[float]] = []  # joules of each GPU, before and after
        self._start = self._seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._handles = [_nvml_handle((self._device.index or 0) + offset) for offset in range(self._gpus)]
            self._thread.start()
            self._counters.append(_energy_counters(self._handles))
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        if self._handles:
            self._counters.append(_energy_counters(self._handles))
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def summary(self) -> dict[str, Any] | None:
        """Return watts and multiprocessor MHz of a GPU, degrees Celsius, and joules of all GPUs; None without samples.

        ``energy`` names the source of the joules: the driver's counters, or the samples where a GPU has no counter.
        """
        if not self._samples:
            return None
        watts, clocks, degrees = zip(*self._samples, strict=True)
        sampled = fmean(watts) * self._seconds * self._gpus
        joules = counted_joules(*self._counters)
        return {
            "samples": len(watts),
            "mean_w": fmean(watts),
            "max_w": max(watts),
            "median_sm_mhz": median(clocks),
            "least_sm_mhz": min(clocks),
            "max_celsius": max(degrees),
            "joules": sampled if joules is None else joules,
            "energy": "samples" if joules is None else "counter",
        }

    def _sample(self) -> None:
        import pynvml

        while not self._over.wait(_EVERY):
            for handle in self._handles:
                watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                self._samples.append((watts, clock, celsius))


def counted_joules(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the energy between two readings of the counters of some GPUs; None if a GPU has no counter (NaN)."""
    joules = sum(after) - sum(before)
    return None if math.isnan(joules) else joules


def _nvml_handle(index: int) -> Any:
    """Return NVML's handle of a GPU of PyTorch: NVML ignores CUDA_VISIBLE_DEVICES."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the visible GPUs: records with a UUID in common are of the same card."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _energy_counters(handles: Sequence[Any]) -> list[float]:
    """Return the joules that each GPU has used since the driver was loaded; NaN where it does not count them."""
    import pynvml

    joules = []
    for handle in handles:
        try:
            joules.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        except pynvml.NVMLError_NotSupported:
            joules.append(math.nan)
    return joules


def start_profiler(device: torch.device) -> None:
    """Load the profiler, which takes a second. Call it before capturing the CUDA graphs to profile."""
    if device.type == "cuda":
        _profiled(0.0)


def decode_idle(run: Callable[[], Sequence[Result]], window: Interval) -> dict[str, Any]:
    """Return the share of time in which the GPU is idle between decode steps, from the profiler's kernel intervals.

    Profiling slows the host a little, so this is at least the true share.

    Args:
        run: answers requests, all at once.
        window: seconds after its start in which they all decoded when it ran before. Its middle is profiled.

    Returns:
        ``share``, ``kernels`` and ``seconds``. ``share`` is None if this time they did not all decode meanwhile.
    """
    length = min(_LONGEST, (window[1] - window[0]) / 4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        time.sleep((window[0] + window[1] - length) / 2)
        begun, ended, kernels = _profiled(length)
        results = running.result()
    decoding = decode_window([result.stamps for result in results])
    inside = decoding is not None and decoding[0] <= begun and ended <= decoding[1]
    return {"share": idle_share(kernels) if inside else None, "kernels": len(kernels), "seconds": ended - begun}


def _profiled(seconds: float) -> tuple[float, float, list[Interval]]:
    """Profile for some seconds; return start and end, and the kernels of all threads as intervals in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begun = now()
        time.sleep(seconds)
        ended = now()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return (
        begun,
        ended,
        [(event.time_range.start, event.time_range.end) for event in events if not event.is_user_annotation],
    )
