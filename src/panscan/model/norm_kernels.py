"""A sum and its layer norm in one pass over memory, by a Triton kernel. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from panscan.model.jit import kernel

__all__ = ["add_norm"]

_WARPS = 4


def add_norm(
    hidden: torch.Tensor, part: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``hidden + part``, and its layer norm over the last axis: rounded where PyTorch's own two operators round.

    Args:
        hidden: contiguous ``[..., width]``; returned as it is if there is no part.
        part: of the same shape and type, contiguous; None: nothing to add.
        norm: over the width, with weight and bias.
    """
    width = hidden.shape[-1]
    total = hidden if part is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    with torch.cuda.device(hidden.get_device()):  # Triton launches on the present device; nothing on a CPU
        _add_norm[(hidden.numel() // width,)](
            hidden, hidden if part is None else part, norm.weight, norm.bias, total, normed, norm.eps,
            width=width, padded=triton.next_power_of_2(width), adds=part is not None, num_warps=_WARPS,
        )  # fmt: skip
    return total, normed


@kernel()
def _add_norm(
    hidden, part, weight, bias, total, normed, epsilon,
    width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    """One program: one row. The variance is that of differences from the mean, as large means would swallow it."""
    column = tl.arange(0, padded)
    there = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    values = tl.load(hidden + at, mask=there, other=0.0).to(tl.float32)
    if adds:
        values += tl.load(part + at, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=there)
        values = rounded.to(tl.float32)
    apart = tl.where(there, values - tl.sum(values, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / width + epsilon)
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + at, (apart * scale * factor + shift).to(normed.dtype.element_ty), mask=there)
