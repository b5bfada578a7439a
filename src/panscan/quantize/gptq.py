"""GPTQ (Frantar et al., ICLR 2023): 4-bit weights that reproduce a matrix's outputs on calibration inputs.

Input channels are quantised one by one, starting with the largest inputs. After each channel, the remaining dense ones
are adjusted to minimise the change of the outputs. Groups keep their channels, and scales are chosen in advance
("static groups"), so the checkpoint stores no channel order and runs as fast as an uncalibrated one.
"""

from __future__ import annotations

import torch

from panscan.model.linear.quantized import INT4_ZERO, QuantizedLinear, WeightFormat, pack_int4, quantized_linear

_DAMPING = 0.01  # of the mean diagonal
_ATTEMPTS = 5
_SHRINK = tuple(1 - 0.05 * step for step in range(9))  # of scales, which clips the largest weights of a group
_TOGETHER = 128  # channels after which corrections reach all later channels


class Hessian:
    """Running mean of ``x x^T`` over the inputs of one matrix, float32 ``[inputs, inputs]``.

    Args:
        inputs: input channels.
        device: device of the inputs.
    """

    def __init__(self, inputs: int, device: torch.device | None = None) -> None:
        self.values = torch.zeros(inputs, inputs, device=device)
        self.rows = 0

    @torch.no_grad()
    def add(self, inputs: torch.Tensor) -> None:
        """Add inputs ``[..., inputs]``."""
        rows = inputs.flatten(0, -2).float()
        count = self.rows + len(rows)
        self.values *= self.rows / count
        self.values.addmm_(rows.T, rows, alpha=1 / count)
        self.rows = count


@torch.no_grad()
def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    weight_format: WeightFormat,
    *,
    scale_type: torch.dtype = torch.bfloat16,
) -> QuantizedLinear:
    """Quantise a matrix for the inputs that a Hessian describes.

    Args:
        weight: ``[outputs, inputs]``.
        hessian: float32 ``[inputs, inputs]``, on any device, where the work is done. Channels without inputs are
            rounded to nearest.
        weight_format: ``int4``, symmetric, channels in their own order.
        scale_type: data type of the scales.

    Raises:
        ValueError: the Hessian is not finite, or the group size does not divide the inputs.
    """
    if not hessian.isfinite().all():
        raise ValueError("the calibration inputs are not finite")
    device = hessian.device
    linear = quantized_linear(weight.shape[1], weight.shape[0], weight_format, scale_type=scale_type, device=device)
    linear.quantize(weight)
    dense = weight.to(device, torch.float32)
    linear.scale.copy_(_scales(dense, linear.scale, hessian.diagonal(), weight_format))
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order])
    scales = linear.scale.float()[order // weight_format.group_size]
    levels = _quantized_columns(dense[:, order].T.contiguous(), factor, scales)
    restored = torch.empty_like(levels).index_copy_(0, order, levels)
    linear.weight.copy_(pack_int4(restored.T.contiguous()))
    return linear


def _scales(
    dense: torch.Tensor, largest: torch.Tensor, energy: torch.Tensor, weight_format: WeightFormat
) -> torch.Tensor:
    """Return the scales ``[groups, outputs]`` whose rounding errors change outputs least, taken independently.

    Args:
        dense: weights, float32 ``[outputs, inputs]``.
        largest: scales that clip no weight.
        energy: mean square of each input, float32 ``[inputs]``.
        weight_format: the weights' format.
    """
    groups = dense.view(len(dense), -1, weight_format.group_size)
    weights = energy.view(-1, weight_format.group_size)
    best, least = largest.clone(), torch.full(largest.shape, torch.inf, device=dense.device)
    for shrink in _SHRINK:
        scale = (largest.float() * shrink).to(largest.dtype)
        step = scale.T[:, :, None].float()
        error = torch.round(groups / step).clamp_(-8, 7).mul_(step).sub_(groups).square_().mul_(weights).sum(-1).T
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse; more damping where it is singular.

    The Hessian's diagonal is overwritten: at 21,504 channels every copy takes 1.8 GB.
    """
    diagonal = hessian.diagonal().clone()
    mean = float(diagonal.mean()) or 1.0
    diagonal += mean * (diagonal == 0)  # channels without inputs correct nothing
    for attempt in range(_ATTEMPTS):
        hessian.diagonal().copy_(diagonal + mean * _DAMPING * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            factor: torch.Tensor = upper
            return factor
    raise ValueError("the calibration inputs are degenerate: calibrate on more documents")


def _quantized_columns(columns: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantise ``columns`` ``[inputs, outputs]`` in their order, in place; return levels uint8 of that shape.

    Args:
        columns: float32.
        factor: upper triangular ``[inputs, inputs]``.
        scales: float32 ``[inputs, outputs]``.
    """
    levels = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    for start in range(0, len(columns), _TOGETHER):
        stop = min(start + _TOGETHER, len(columns))
        errors = torch.empty(stop - start, columns.shape[1], device=columns.device)
        for column in range(start, stop):
            level = torch.round(columns[column] / scales[column]).clamp_(-8, 7)
            levels[column] = (level + INT4_ZERO).to(torch.uint8)
            errors[column - start] = (columns[column] - level * scales[column]) / factor[column, column]
            columns[column + 1 : stop].addr_(factor[column, column + 1 : stop], errors[column - start], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return levels
