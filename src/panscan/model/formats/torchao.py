"""Checkpoints that torchao quantised, saved by Transformers in safetensors files.

The metadata of each file names the class of every weight, which is stored as several tensors, such as
``_weight_qdata`` and ``_weight_scale``. Reading them does not require torchao.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from typing_extensions import override

from panscan.model.formats.layouts import channel_linear, int4_linear, unpack_words
from panscan.model.formats.schemes import StoredScheme, field_of, unsupported_format
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.linear.quantized import INT4_ZERO, QuantizedLinear
from panscan.model.untrusted.reading import JsonObject

_CLASSES = {
    "Int8WeightOnlyConfig": "Int8Tensor",
    "Int8DynamicActivationInt8WeightConfig": "Int8Tensor",
    "Int8StaticActivationInt8WeightConfig": "Int8Tensor",
    "Float8WeightOnlyConfig": "Float8Tensor",
    "Float8DynamicActivationFloat8WeightConfig": "Float8Tensor",
    "Float8StaticActivationFloat8WeightConfig": "Float8Tensor",
    "Int4WeightOnlyConfig": "Int4Tensor",
}
_STATIC = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class TorchAoScheme(StoredScheme):
    """The torchao formats.

    Args:
        config: ``quantization_config`` of config.json.

    Raises:
        UnsupportedError: a configuration that cannot be read.
        ValueError: a field has a wrong type or value.
    """

    method = "torchao"
    markers = ("_weight_qdata", "_weight_scale")

    def __init__(self, config: JsonObject) -> None:
        kind = field_of(config, "quant_type", dict, {}).get("default")
        name = kind.get("_type") if isinstance(kind, Mapping) else None
        self._by_name = name in ("FqnToConfig", "ModuleFqnToConfig")
        if not self._by_name and name not in _CLASSES:
            raise unsupported_format(f"torchao {name or config.get('quant_type')!r:.60}")
        self._class = None if self._by_name else _CLASSES[str(name)]
        self.name = f"torchao {name}"
        static = "StaticActivation" in str(name)
        if static:
            self.notes = ("inputs are quantised per token; the checkpoint's static scales are ignored",)

    @override
    def describe(self, tensors: MatrixTensors) -> str:
        return "unknown" if tensors.description is None else _description(tensors)[0]

    @override
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
        kind, fields = _description(tensors)
        if kind not in _CLASSES.values():
            raise unsupported_format(f"torchao {kind}")
        if self._class is not None and kind != self._class:
            raise ValueError(f"{tensors.weight_name} has the class {kind}; config.json implies {self._class}")
        if "_weight_act_pre_scale" in tensors:
            raise unsupported_format(f"torchao {kind} with scaled inputs (AWQ or SmoothQuant)")
        tensors.taken.update(_STATIC)
        if kind in ("Int8Tensor", "Float8Tensor"):
            dtype = torch.int8 if kind == "Int8Tensor" else torch.float8_e4m3fn
            weight = tensors.take_values("_weight_qdata", (outputs, inputs), dtype)
            if tensors.shape("_weight_scale") not in ((outputs, 1), (outputs,), (1, 1), (1,), ()):
                raise unsupported_format(
                    f"torchao {kind} with scales of the shape {list(tensors.shape('_weight_scale'))}"
                )
            scale = tensors.take_scale("_weight_scale")
            if "_weight_zero_point" in tensors:
                zero = tensors.take("_weight_zero_point", types=(torch.int8, torch.int32, torch.int64, *_FLOATS))
                if zero.any():
                    raise unsupported_format(f"torchao {kind} with zero points")
            return channel_linear(weight, scale, quantizes_inputs=fields.get("act_quant_kwargs") is not None)
        return _int4(tensors, outputs, inputs)


def _description(tensors: MatrixTensors) -> tuple[str, JsonObject]:
    """Return class and attributes of a weight."""
    text = tensors.description
    if text is None:
        raise ValueError(f"the file's metadata does not describe {tensors.weight_name}")
    try:
        described = json.loads(text)
        return str(described["_type"]), dict(described["_data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the file's metadata of {tensors.weight_name} cannot be read: {error!r:.60}") from error


def _int4(tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
    """Return a matrix whose weights are ``level * scale + zero_point``, with signed levels."""
    pairs = tensors.take("_weight_qdata", (outputs, inputs // 2), types=(torch.int8, torch.uint8))
    levels = unpack_words(pairs, 4) ^ INT4_ZERO  # from two's complement to an offset of 8
    shape = tensors.shape("_weight_scale")
    groups = shape[0] if len(shape) == 2 else 0
    if groups < 1 or inputs % groups:
        raise ValueError(f"{tensors.weight_name} has scales of the shape {list(shape)} for {inputs} input channels")
    scale = tensors.take_scale("_weight_scale", (groups, outputs))
    offset = tensors.take_scale("_weight_zero_point", (groups, outputs))
    if not offset.any():
        return int4_linear(levels, scale)
    if (scale == 0).any():
        raise ValueError(f"{tensors.weight_name} has scales of 0: the file is damaged")
    return int4_linear(levels, scale, INT4_ZERO - offset.float() / scale.float())
