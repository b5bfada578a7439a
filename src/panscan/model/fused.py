"""Projections of the same input as one product: query, key and value; gate and up. No module is replaced or renamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

__all__ = ["fuse_projections", "is_plain"]

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names within one module, in the order in which Gemma 3's and SigLIP's ``forward`` call them."""


def fuse_projections(model: nn.Module) -> Callable[[], None]:
    """Let the projections of each decoder and vision layer that read the same input compute as one product.

    Weights move group by group into one tensor, of which each parameter becomes a block of rows: names, shapes and
    values stay, memory grows by one group while it is copied. The modules stay too; only their class changes, so
    whatever calls them (``generate()``, :func:`panscan.model.reference.float32_model`) goes on doing so. A parameter
    whose ``data`` is replaced computes with what it then has, apart from the others. Changes in place are seen.

    A group stays as it is unless it is of plain ``nn.Linear`` (:func:`is_plain`) of one type on one device. For
    inference: gradients do not reach the parameters. A compiled layer sees a replacement of ``data`` only where it
    changes type or device. Two threads must not run the same model at once.

    Args:
        model: a loaded Gemma 3, or any part of one.

    Returns:
        What gives the modules their class back. Their weights stay where they are.
    """
    fused: list[nn.Linear] = []
    for owner in model.modules():
        for names in _TOGETHER:
            parts = [getattr(owner, name, None) for name in names]
            if _fit_together(parts):
                fused.extend(_fuse(parts))

    def undo() -> None:
        while fused:
            part = fused.pop()
            part.__class__ = nn.Linear
            for name in _Part.__annotations__:
                delattr(part, name)

    return undo


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly a ``kind`` that computes what its class says on values that are there.

    Not so with a subclass, hooks, a ``forward`` of its own (accelerate's hooks are that), or parameters that are
    quantised, split over processes (DTensor) or elsewhere (meta).
    """
    return (
        type(module) is kind
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in module.parameters())
    )


class _Product:
    """Of a group: the weight ``[sum of outputs, inputs]``, the bias, and what its first part has computed.

    ``held``: an input and its product, from the first part's call to the last's.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: torch.Tensor | None = None
        if parts[0].bias is not None:
            self.bias = torch.cat([part.bias.detach() for part in parts])
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None


class _Part(nn.Linear):
    """One projection of a group: its first computes the product, the others hand out their columns ``[start, end)``.

    A later part that is asked about another input than the first was, or alone, computes its own: what a ``forward``
    that failed in between has left behind is never taken for an answer.
    """

    product: _Product
    start: int
    end: int
    addresses: list[int]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = self.product
        if self.start == 0:
            product.held = None  # before the next product: after a failure there is no room for both
            if self._in_place():
                product.held = (input, functional.linear(input, product.weight, product.bias))
        held = product.held
        if held is None or held[0] is not input or not self._in_place():
            return super().forward(input)
        if self.end == product.weight.shape[0]:
            product.held = None
        return held[1][..., self.start : self.end]

    def _in_place(self) -> bool:
        """Whether the parameters' values are still rows of the product's."""
        if torch.compiler.is_compiling():  # a graph is guarded by types and devices, and knows no addresses
            weight = self.product.weight
            return self.weight.dtype == weight.dtype and self.weight.device == weight.device
        return _addresses(self) == self.addresses


def _addresses(linear: nn.Linear) -> list[int]:
    return [parameter.data_ptr() for parameter in (linear.weight, linear.bias) if parameter is not None]


def _fit_together(parts: Sequence[Any]) -> TypeGuard[Sequence[nn.Linear]]:
    """Whether one product can stand for these projections."""
    if not all(is_plain(part, nn.Linear) for part in parts):
        return False
    kinds = {(part.in_features, part.bias is None, part.weight.dtype, part.weight.device) for part in parts}
    return len(kinds) == 1


def _fuse(linears: Sequence[nn.Linear]) -> list[_Part]:
    product, parts, start = _Product(linears), [], 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = product.weight[start:end]
        if product.bias is not None:
            linear.bias.data = product.bias[start:end]
        part = _as_part(linear)
        part.product, part.start, part.end, part.addresses = product, start, end, _addresses(linear)
        parts.append(part)
        start = end
    return parts


def _as_part(linear: Any) -> _Part:
    linear.__class__ = _Part
    part: _Part = linear
    return part
