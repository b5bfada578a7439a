"""How our Triton kernels are made and launched. Imported only where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from panscan.core.gpu_features import supports

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, on CPU tensors; decided when they are decorated."""


def kernel(*, any_value: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit``, typed. Triton specialises kernels for 1 and multiples of 16, except in ``any_value``."""
    decorate: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=any_value)
    return decorate


def launch(program: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel.

    Args:
        program: the kernel.
        grid: number of programs in each dimension.
        arguments: of the kernel; the first one is a tensor on the GPU that runs it.
        options: constants of the kernel, and launch options.
    """
    with torch.cuda.device(arguments[0].get_device()):  # Triton launches on the current one; no effect for CPU tensors
        program[grid](*arguments, **options)


@cache
def gpu_has(feature: str, device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU with a feature of :mod:`panscan.core.gpu_features`."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's MI200 calls itself 9.0, too
        return False
    return supports(feature, torch.cuda.get_device_capability(device))


@cache
def early_launch(device: torch.device) -> Mapping[str, bool]:
    """Return launch options of a kernel that calls :func:`wait_for_inputs`, including its argument ``early``.

    On Hopper, the kernel's programs start while the previous kernel of the stream finishes (programmatic dependent
    launch).
    """
    early = gpu_has("dependent_launch", device) and not INTERPRETED
    return MappingProxyType({"early": True, "launch_pdl": True} if early else {"early": False})


@kernel()
def wait_for_inputs(early: tl.constexpr) -> None:
    """Wait until the previous kernel has finished and its results are visible; then let the next one start early.

    Before this call, a kernel may read only what was written before the previous kernel started. Every program must
    call it: the next kernel relies on all earlier ones being finished.
    """
    if early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
