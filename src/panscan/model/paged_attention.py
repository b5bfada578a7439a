"""The seam of paged attention: a name under which Transformers calls whatever its caller handed to the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

__all__ = ["NAME", "Attend"]

NAME = "panscan_paged"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""``attend(query [1, heads, T, D], key and value [1, kv heads, T, D], scaling) -> output [1, T, heads, D]``."""


def _forward(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None,
    *, attend: Attend, scaling: float, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    return attend(query, key, value, scaling), None


AttentionInterface.register(NAME, _forward)
