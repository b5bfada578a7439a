"""Build Transformers models before their weights are loaded, dense or with quantised decoder matrices.

A quantised model never allocates dense decoder matrices, so one whose dense weights exceed the device's memory can be
filled matrix by matrix (:func:`panscan.model.sharding.fill_shard`).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from panscan.model.linear.quantized import WeightFormat, quantized_linear


def empty_model(config: Any, weight_format: WeightFormat | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the model of a configuration, in evaluation mode, to be filled.

    Computed buffers are set. With a weight format, there is :class:`QuantizedLinear` in the decoder layers, and
    parameters and quantised weights are uninitialised.

    Args:
        config: configuration of a Gemma 3, or of one rank's shard.
        weight_format: format of the decoder's matrices; None: dense.
        dtype: type of all other parameters.
        device: device of the model.

    Raises:
        ValueError: the group size does not divide a matrix.
    """
    if weight_format is None:
        return build_model(config, dtype, device).eval()
    model = build_model(config, dtype, torch.device("meta"))
    for name, linear in decoder_linears(model):
        bias, inputs, outputs = linear.bias, linear.in_features, linear.out_features
        quantized = quantized_linear(inputs, outputs, weight_format, bias=bias, device=device, scale_type=dtype)
        set_part(model, name, quantized)
    # Shared parameters stay shared.
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in allocated:
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                allocated[parameter] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, allocated[parameter])
    set_computed_buffers(model, config, dtype, device)
    model.tie_weights()
    return model.eval()


def decoder_linears(model: Any) -> list[tuple[str, nn.Linear]]:
    """Return name and module of every matrix in the decoder layers of a Gemma 3."""
    inside = {module for module in model.get_decoder().layers.modules() if isinstance(module, nn.Linear)}
    return [(name, module) for name, module in model.named_modules() if module in inside]


def set_part(model: nn.Module, name: str, part: nn.Module | nn.Parameter) -> None:
    """Replace the submodule or parameter with this dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, part)


def build_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the model of a configuration, without changing random states."""
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return kind.from_config(config, dtype=dtype, trust_remote_code=False)  # None would ask on the terminal


def set_computed_buffers(model: nn.Module, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Set the buffers that constructors compute and checkpoints do not store, on a model on the meta device."""
    for name, value in build_model(one_layer_config(config), dtype, device).named_buffers():
        if "layers." not in name:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_buffer(leaf, value, persistent=False)


def one_layer_config(config: Any) -> Any:
    """Return a configuration of the same kind with one layer of each kind and a vocabulary of 8.

    Its model has the same buffers, such as rotary frequencies.
    """
    small = deepcopy(config)
    text = small.get_text_config()
    text.layer_types = sorted(set(text.layer_types))
    text.num_hidden_layers = len(text.layer_types)
    text.vocab_size, text.pad_token_id = 8, None
    if hasattr(small, "vision_config"):
        small.vision_config.num_hidden_layers = 1
    return small
