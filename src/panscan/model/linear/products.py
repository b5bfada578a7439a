"""Matrix multiplications of our layers: projections of the same input are fused.

Weights stay where Transformers' modules find them: a module's parameter becomes a block of rows of the fused weight, so
``generate()``, the float32 reference and the engine share one copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from panscan.model.linear.multiply import apply_scales
from panscan.model.linear.quantized import LINEARS, QuantizedLinear, fused, joined_tensor
from panscan.model.linear.rows import QuantizedRows, UnscaledProduct

Rows = torch.Tensor | QuantizedRows
"""Inputs of a multiplication ``[T, inputs]``: dense, or quantised to the type :attr:`Linear.input_dtype`."""
Product = torch.Tensor | UnscaledProduct
"""A product ``[T, outputs]``: scaled, or with scales that the next kernel applies."""


class Linear(ABC):
    """One matrix multiplication, or several of the same input side by side.

    :class:`QuantizedLinear` is one too, by its methods; this class's own ``product`` takes and returns dense values.

    ``input_dtype``: type of quantised inputs that are accepted in addition to dense ones; None: only dense inputs.
    """

    input_dtype: torch.dtype | None = None

    @abstractmethod
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., outputs]`` for an input ``[..., inputs]``."""

    def product(self, rows: Rows, dtype: torch.dtype) -> Product:
        """Return the product of rows in the model's ``dtype``, or quantised to the type :attr:`input_dtype`."""
        assert isinstance(rows, torch.Tensor)
        return self(rows)


AnyLinear = Linear | QuantizedLinear


class PlainLinear(Linear):
    """Multiplication by a dense weight.

    Args:
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @override
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight, self.bias)


class ModuleLinear(Linear):
    """Modules that are not ours (quantised, offloaded, hooked), called one by one.

    Args:
        modules: each takes the input and returns its outputs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)

    @override
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if len(self._modules) == 1:
            output: torch.Tensor = self._modules[0](input)
            return output
        return torch.cat([module(input) for module in self._modules], -1)


class RowParallelLinear(Linear):
    """Multiplication whose inputs are split over ranks: each computes its part, ``reduce`` sums the parts in place."""

    def __init__(self, part: AnyLinear, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._part, self._reduce = part, reduce
        self.input_dtype = part.input_dtype

    @override
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._reduce(self._part(input))

    @override
    def product(self, rows: Rows, dtype: torch.dtype) -> Product:
        return self._reduce(apply_scales(self._part.product(rows, dtype), dtype))


def linear_of(*modules: Any) -> AnyLinear:
    """Fuse modules that take the same input; the result concatenates their outputs in this order.

    The weights of plain ``nn.Linear`` modules (:func:`is_plain`) of one type on one device move into one fused tensor.
    This temporarily takes extra memory of the size of one group. Names, shapes and values do not change. Later calls
    reuse the fused tensor. In-place changes of a parameter take effect; replacing its ``data`` does not.
    Quantised weights of one format are fused in the same way, but on every call.
    """
    first = modules[0]
    quantized = all(runs_own_forward(module, *LINEARS.values()) for module in modules)
    if not quantized and not all(is_plain(module, nn.Linear) for module in modules):
        return ModuleLinear(modules)
    kinds = {
        (part.in_features, part.bias is None, part.weight.dtype, part.weight.device)
        + ((part.weight_format, part.scale.dtype) if quantized else ())
        for part in modules
    }
    alike = len(kinds) == 1
    if quantized and (len(modules) == 1 or (alike and not first.weight_format.ordered)):
        return fused(modules)  # reordered channels need separate inputs
    if quantized or not alike or not first.weight.dtype.is_floating_point:
        return ModuleLinear(modules)
    weight = _fused([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    return PlainLinear(weight, _fused(biases) if biases else None)


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Return whether a module runs the ``forward`` of exactly this class on dense values that are loaded.

    False with parameters that are quantised, split over processes (DTensor) or on the meta device.
    """
    return runs_own_forward(module, kind) and all(
        type(parameter) is nn.Parameter and not parameter.is_meta for parameter in module.parameters()
    )


def runs_own_forward(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether calling the module runs the ``forward`` of exactly one of these classes, without hooks.

    Its submodules may be of any kind. accelerate's hooks replace ``forward`` on the instance.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) in kinds and "forward" not in vars(module) and not hooks


def _fused(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Concatenate parameters along their first dimension; each becomes a view into the result."""
    fused = joined_tensor([part.data for part in parameters])
    for part, view in zip(parameters, torch.split(fused, [len(part) for part in parameters]), strict=True):
        part.data = view
    return fused
