"""Measure on this GPU up to how many rows our kernels multiply quantised weights faster than a library.

The rows at which the fastest method changes depend on the GPU's bandwidth, its compute rate and its libraries. The
defaults (:func:`panscan.model.linear.multiply.kernel_rows`) are those of an H200. A measurement replaces a default only
if the other method is more than 5% faster, so that noise does not decide.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch

from panscan.core.groups import grouped
from panscan.model.linear.multiply import (
    ANY_ROWS,
    describe,
    has_kernels,
    kernel_rows,
    multiply_int4,
    multiply_int8,
    quantize_rows,
    use_kernels_up_to,
)
from panscan.model.linear.quantized import QuantizedLinear

log = logging.getLogger("panscan.engine")

_RUNGS = {"int8": (64, 128, 512, ANY_ROWS), "int4": (16, 32, 64, 128)}  # values of kernel_rows; the first is the least
_PREFILL_ROWS = 1024  # represents any larger number of rows
_GAIN = 1.05  # the method that is not the default must be this much faster
_ROUNDS = 5  # timed rounds, after one that is not
_MATRICES = 6  # per round: gate, up and down of two layers, more than the L2 cache holds
_AHEAD_CYCLES = 2_000_000  # about 1 ms, in which the host launches the kernels of a round

_found: dict[tuple[str, torch.device], KernelRows] = {}  # measured once per process


@dataclass(slots=True)
class KernelRows:
    """The number of rows up to which our kernels are faster, for one kind of weights on one GPU.

    Args:
        rows: the result.
        ratios: seconds of the library by seconds of our kernel, by number of rows, as far as measured.
    """

    rows: int
    ratios: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the measurements, for the log."""
        return ", ".join(f"{rows:,} rows {ratio:.2f}x" for rows, ratio in sorted(self.ratios.items()))


def choose_methods(
    modules: Iterable[QuantizedLinear], dtype: torch.dtype, least: Callable[[Iterable[int]], list[int]]
) -> list[str]:
    """Choose kernels or libraries for a model's matrix multiplications; return the choice per kind of weights.

    All ranks of a model must call it at the same time: each measures its GPU, and all use the fewest rows that any of
    them found for our kernels. Different choices would be valid too, because ranks exchange sums only, but then the
    choice that one rank logs would not hold for the others.

    On a GPU it takes a few tens of milliseconds, once per kind and process, and compiles kernels that the engine needs
    in any case. Other devices, and kinds with a single method, are not measured.

    Args:
        modules: all quantised matrices of a model. Those of the size that holds most of the weights are measured.
        dtype: type of the model.
        least: :meth:`panscan.model.sharding.Ranks.all_reduce_min`.
    """
    formats = grouped(((module.weight_format.kind, module.input_dtype is not None), module) for module in modules)
    return [_choose_method(matrices, dtype, least) for matrices in formats.values()]


def _choose_method(
    matrices: Sequence[QuantizedLinear], dtype: torch.dtype, least: Callable[[Iterable[int]], list[int]]
) -> str:
    """Choose for the matrices of one format; return the choice."""
    first = matrices[0]
    kind, device = first.weight_format.kind, first.weight.device
    if first.value_type is not None and first.input_dtype is None:
        return f"{kind} weights dequantised for each product"
    if kind not in _RUNGS or not has_kernels(device):
        return describe(kind, device)
    if (kind, device) not in _found:
        counts = Counter(matrix.weight.numel() for matrix in matrices)
        size = max(counts, key=lambda size: size * counts[size])  # of the MLP's matrices in every Gemma 3
        sample = [matrix for matrix in matrices if matrix.weight.numel() == size][:_MATRICES]
        with torch.cuda.device(device), torch.no_grad():
            _found[kind, device] = choose_rows(
                _RUNGS[kind], kernel_rows(kind, device), partial(_ratio, kind, sample, dtype)
            )
    measured = _found[kind, device]  # the first choice that this process measured on the device
    [rows] = least([measured.rows])
    use_kernels_up_to(rows, kind, device)
    return f"{describe(kind, device)}; speed of Triton relative to cuBLAS: {measured}"


def choose_rows(rungs: Sequence[int], default: int, ratio: Callable[[int], float]) -> KernelRows:
    """Choose among numbers of rows, and measure only as many as the choice needs.

    Args:
        rungs: the choices, ascending.
        default: one of them.
        ratio: returns seconds of the library by seconds of our kernel for a number of rows.
    """
    choice = KernelRows(default)

    def measured(rung: int) -> float:
        rows = min(rung, _PREFILL_ROWS)
        choice.ratios[rows] = ratio(rows)
        return choice.ratios[rows]

    at = start = rungs.index(default)
    while at + 1 < len(rungs) and measured(rungs[at + 1]) > _GAIN:
        at += 1
    if at == start:
        while at > 0 and measured(rungs[at]) * _GAIN < 1:
            at -= 1
    choice.rows = rungs[at]
    return choice


def median_ratio(kernel: Callable[[], float], library: Callable[[], float]) -> float:
    """Return the median of seconds of the library by seconds of our kernel, over interleaved rounds.

    Args:
        kernel: runs our kernel once and returns the seconds that it took. The first call of either
            function does not count.
        library: likewise, with the library.
    """
    ratios = []
    for _ in range(1 + _ROUNDS):
        seconds = kernel()
        ratios.append(library() / seconds)
    return median(ratios[1:])


def _ratio(kind: str, modules: Sequence[QuantizedLinear], dtype: torch.dtype, rows: int) -> float:
    """Return seconds of the library by seconds of our kernel; 0 if our kernel fails, infinity if the library does."""
    device, narrow = modules[0].weight.device, modules[0].input_dtype
    inputs: dict[int, Any] = {}
    for width in {module.in_features for module in modules}:
        generator = torch.Generator(device).manual_seed(0)
        values = torch.randn(rows, width, device=device, dtype=dtype, generator=generator)
        inputs[width] = values if narrow is None else quantize_rows(values, narrow)

    def product(module: QuantizedLinear, most: int) -> torch.Tensor:
        given = inputs[module.in_features]
        if narrow is not None:
            return multiply_int8(given, module.weight, module.scale, dtype, most)
        return multiply_int4(given, module.weight, module.scale, module.zero, module.weight_format.group_size, most)

    def timed(most: int) -> Callable[[], float]:
        return lambda: gpu_seconds([partial(product, module, most) for module in modules])

    kernel, library = timed(rows), timed(0)
    what = f"a product of {rows} rows with {kind} weights"
    if not runs(kernel, what):
        return 0.0
    return median_ratio(kernel, library) if runs(library, what) else inf


def runs(method: Callable[[], object], what: str) -> bool:
    """Return whether a kernel runs here; log why not.

    Args:
        method: runs it.
        what: what it computes, for the log.
    """
    try:
        method()
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernel
    except Exception as error:  # a library or Triton's compiler may raise anything; another kernel is chosen
        log.debug("%s: %s: %s", what, type(error).__name__, error)
        return False
    return True


def gpu_seconds(calls: Sequence[Callable[[], torch.Tensor]], ahead_cycles: int = _AHEAD_CYCLES) -> float:
    """Return the seconds that the current GPU takes for the calls, without their launches on the host.

    Args:
        calls: launch kernels.
        ahead_cycles: clock cycles for which the GPU waits, so that the host has launched all kernels by then.
    """
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ahead_cycles)  # type: ignore[no-untyped-call]  # torch has no types for it
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
