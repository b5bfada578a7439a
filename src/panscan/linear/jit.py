"""How our Triton kernels are made. Imported only where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

__all__ = ["INTERPRETED", "kernel"]

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, on CPU tensors; decided when they are decorated."""


def kernel(*, any_value: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit``, typed. Triton specialises kernels for 1 and multiples of 16, except in ``any_value``."""
    decorate: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=any_value)
    return decorate
