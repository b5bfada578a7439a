"""Inputs and outputs of matrix multiplications with quantised inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest quantised value of each type."""
LEAST_SCALE = 1e-12
"""Lower bound of scales, for rows and groups of zeros."""


class QuantizedRows(NamedTuple):
    """Inputs quantised per row: ``values`` int8 or float8_e4m3fn ``[..., inputs]``, ``scale`` float32 ``[..., 1]``."""

    values: torch.Tensor
    scale: torch.Tensor


class UnscaledProduct(NamedTuple):
    """Matrix product with pending scales, which the next kernel applies as it reads the sums.

    ``values``: contiguous ``[T, outputs]``. ``row_scale``: float32 ``[T, 1]``. ``column_scale``: float32 ``[outputs]``.
    """

    values: torch.Tensor
    row_scale: torch.Tensor
    column_scale: torch.Tensor
