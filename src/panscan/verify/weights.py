"""Weights as quantised checkpoints hold them, in float32: rounded to the grid of a format and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["ROUNDED"]

_GROUP = 32
_FP8 = torch.float8_e4m3fn


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 with one scale per output channel, as torchao's weight-only quantisation rounds."""
    scale = (weight.abs().amax(-1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight * scale.reciprocal()).round_().clamp_(-128, 127).mul_(scale)


def _int4(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 weights with one float16 scale, as GGUF's Q4_0 rounds: the largest weight becomes -8."""
    rows, columns = weight.shape
    groups = functional.pad(weight, (0, -columns % _GROUP)).view(rows, -1, _GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, scale, scale.reciprocal())
    levels = (groups * inverse + 8.5).floor_().clamp_(0, 15)
    return levels.sub_(8).mul_(scale.half().float()).view(rows, -1)[:, :columns].contiguous()


def _fp8(weight: torch.Tensor) -> torch.Tensor:
    """Quantise to E4M3 with one scale per matrix, as vLLM does on load."""
    scale = (weight.abs().amax() / torch.finfo(_FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale).to(_FP8).float().mul_(scale)


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8-weights": _int8,
    "int4-weights": _int4,
    "fp8-weights": _fp8,
}
"""By the name of the change: float32 weights ``[outputs, inputs]`` to those that a quantised server computes with."""
