"""Measured compute rate and memory bandwidth of a device: the limits from which floors are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from panscan.model.machine import synchronize

_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_BUSY_SECONDS = 0.015
_GROWTH = 4  # of the seconds from one side to the next, where the device is busy; the work grows by 8
_SECONDS = 0.05  # spent on each product and the copy; the first run warms up
_LEAST_RUNS = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits: FLOP/s of a large square product, and bytes/s of a large copy (bytes read plus written)."""

    flops_per_s: float
    bytes_per_s: float


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a device once per process: the best of several runs, in a fraction of a second.

    The copy is larger than caches are: a model that fits in a cache can read its weights faster than that.

    Args:
        device: where; it needs 1.5 GiB for a moment, a CPU 0.3 GiB.
        dtype: of the product; float32 is measured without TF32, whatever is set.
    """
    source = torch.empty((128 if device.type == "cpu" else 512) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ceilings(
        _product_rate(device, dtype), (2 * source.numel() / _best_seconds(lambda: target.copy_(source), device))
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The highest rate of growing squares, up to one that keeps the device busy: CPUs differ a thousandfold.

    On a machine that other processes use, small products mostly wait for their threads. Eight times the work then takes
    about the same time, which does not mean that the device is busy.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    rate, before = 0.0, float("inf")
    try:
        for side in _SIDES:
            square = torch.randn(side, side, device=device).to(dtype)
            seconds = _best_seconds(partial(torch.matmul, square, square), device)
            rate = max(rate, 2 * side**3 / seconds)
            if seconds > max(_BUSY_SECONDS, _GROWTH * before):
                break
            before = seconds
    finally:
        torch.set_float32_matmul_precision(precision)
    return rate


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best, until, runs = float("inf"), time.perf_counter() + _SECONDS, 0
    while runs < _LEAST_RUNS or time.perf_counter() < until:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best
