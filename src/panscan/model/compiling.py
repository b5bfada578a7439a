"""torch.compile as the engine uses it: one function for all layers, one graph for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["compiled"]

Result = TypeVar("Result")

_LIMIT = 256
"""Compilations of one function, for all models of the process together; PyTorch's 8 is less than a few models need."""


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function without graph breaks, compiled at its first call for all sizes but 1, which PyTorch takes for a
    constant. To be called by the thread that calls this: PyTorch 2.13 keeps the limit per thread."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _LIMIT)
    compiled_function: Callable[..., Result] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled_function
