"""Checkpoints in the formats of GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ).

Both store ``qweight``, ``qzeros`` and ``scales`` ``[groups, outputs]``. GPTQ packs weights along the inputs and zero
points along the outputs, and may assign input channels to groups in any order (``g_idx``). AWQ packs both along the
outputs, interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from panscan.model.formats.layouts import (
    awq_levels,
    channel_linear,
    gptq_zeros,
    int4_linear,
    order_of,
    unpack_words,
)
from panscan.model.formats.schemes import StoredScheme, field_of, unsupported_format
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.untrusted.reading import JsonObject

_INT32, _INDICES = (torch.int32,), (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class _Packing:
    """Bits and group size (-1: all input channels) of a matrix."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        grain = "per channel" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"int{self.bits}, {grain}"

    def groups(self, inputs: int) -> int:
        size = inputs if self.group_size == -1 else self.group_size
        if size < 1 or inputs % size:
            raise ValueError(f"groups of {size} do not divide {inputs} input channels")
        return inputs // size


class GptqScheme(StoredScheme):
    """The GPTQ formats.

    Args:
        config: ``quantization_config`` of config.json.

    Raises:
        UnsupportedError: a format or number of bits that cannot be read.
        ValueError: a field has a wrong type or value.
    """

    method = "gptq"
    markers = ("qweight", "qzeros", "scales")

    def __init__(self, config: JsonObject) -> None:
        layout = field_of(config, "checkpoint_format", str) or field_of(config, "format", str, "gptq")
        layout = layout.lower()
        if field_of(config, "is_marlin_format", bool, False):
            layout = "marlin"
        if layout not in ("gptq", "gptq_v2"):
            raise unsupported_format(f"GPTQ in the format {layout!r:.30}")
        if field_of(config, "pack_dtype", str, "int32") != "int32":
            raise unsupported_format(f"GPTQ packed in {config['pack_dtype']!r:.20}")
        for name in ("rotation", "adapter"):
            if config.get(name):
                raise unsupported_format(f"GPTQ with {name}")
        self._minus_one = layout == "gptq"
        self._ordered = field_of(config, "desc_act", bool, False)
        self._packing = _packing(config)
        # The tensors say which matrices are quantised, as rules that begin with a minus do.
        if changed := [rule for rule in field_of(config, "dynamic", dict, {}) if not rule.startswith("-:")]:
            raise unsupported_format(f"GPTQ with the dynamic rule {changed[0]!r:.60}")
        self.name = f"GPTQ ({layout}, {self._packing.bits} bits)"

    @override
    def describe(self, tensors: MatrixTensors) -> str:
        return str(self._packing)

    @override
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
        packing = self._packing
        groups, per_word = packing.groups(inputs), 32 // packing.bits
        words = tensors.take("qweight", (-(-inputs // per_word), outputs), types=_INT32)
        levels = unpack_words(words.T, packing.bits)[:, :inputs]
        zeros = tensors.take("qzeros", (groups, -(-outputs // per_word)), types=_INT32)
        zero = gptq_zeros(zeros, packing.bits, minus_one=self._minus_one)[:, :outputs]
        scale = tensors.take_scale("scales", (groups, outputs))
        order = None
        if self._ordered or "g_idx" in tensors:  # old versions omit it without act-order
            order = order_of(tensors.take("g_idx", (inputs,), types=_INDICES), groups)
        if packing.bits == 4:
            return int4_linear(levels, scale, zero, order)
        if groups > 1:
            raise unsupported_format(f"GPTQ with 8 bits in groups of {packing.group_size}")
        if (zero != 128).any():
            raise unsupported_format("GPTQ with 8 bits and zero points")
        return channel_linear((levels ^ 0x80).view(torch.int8), scale, quantizes_inputs=False)


class AwqScheme(StoredScheme):
    """The AWQ format.

    Args:
        config: ``quantization_config`` of config.json.

    Raises:
        UnsupportedError: a version or number of bits that cannot be read.
        ValueError: a field has a wrong type or value.
    """

    method = "awq"
    markers = ("qweight", "qzeros", "scales")
    folds_scales = True

    def __init__(self, config: JsonObject) -> None:
        version = field_of(config, "version", str) or field_of(config, "checkpoint_format", str)
        version = (version or field_of(config, "format", str, "gemm")).lower()
        if config.get("backend") == "llm-awq":
            version = "llm-awq"
        if version != "gemm":
            raise unsupported_format(f"AWQ in the version {version!r:.30}")
        named = {
            "bits": config.get("bits", config.get("w_bit")),
            "group_size": config.get("group_size", config.get("q_group_size")),
        }
        self._packing = _packing(named)
        if self._packing.bits != 4:
            raise unsupported_format(f"AWQ with {self._packing.bits} bits")
        self.name = "AWQ (gemm, 4 bits)"

    @override
    def describe(self, tensors: MatrixTensors) -> str:
        return f"{self._packing}, zero points"

    @override
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
        groups = self._packing.groups(inputs)
        if outputs % 8:
            raise ValueError(f"{tensors.weight_name}: AWQ packs 8 output channels per word; there are {outputs}")
        levels = awq_levels(tensors.take("qweight", (inputs, outputs // 8), types=_INT32))
        zero = awq_levels(tensors.take("qzeros", (groups, outputs // 8), types=_INT32))
        scale = tensors.take_scale("scales", (groups, outputs))
        return int4_linear(levels.T, scale, zero)


def _packing(config: JsonObject) -> _Packing:
    bits, size = field_of(config, "bits", int), field_of(config, "group_size", int, 128)
    if bits not in (4, 8):
        raise unsupported_format(f"GPTQ or AWQ with {bits} bits")
    return _Packing(bits, size)
