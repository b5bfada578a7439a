"""Checkpoints in the format of compressed-tensors, as LLM Compressor and ``panscan quantize`` write them.

``pack-quantized`` stores int32 words of 4-bit or 8-bit values along the inputs; ``int-quantized``, ``float-quantized``
and ``naive-quantized`` store one value per element. All have ``weight_scale`` ``[outputs, groups]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from typing_extensions import override

from panscan.model.formats.layouts import channel_linear, int4_linear, order_of, unpack_words
from panscan.model.formats.schemes import StoredScheme, check_pattern, field_of, unsupported_format
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.linear.quantized import LINEARS, QuantizedLinear, WeightFormat, unpack_int4
from panscan.model.untrusted.reading import JsonObject, typed

_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_CLASS, _PATTERN = "Linear", "re:"  # of targets: all matrices; a regular expression
_ACTIVATION_LEAVES = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "weight_shape")
_INDICES = (torch.int32, torch.int64)
_VERSION = "0.20.0"
"""Version of compressed-tensors whose layout is written."""
_WRITTEN = {"int4": _PACKED, "int8": "int-quantized", "fp8": "float-quantized"}
"""Layout of each of panscan's formats."""
_UNQUANTIZED = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*embed_tokens.*", "re:.*lm_head.*")


class _Values(msgspec.Struct):
    """How the weights, or the inputs, of a group of matrices are quantised."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    actorder: bool | str | None = None

    @property
    def grain(self) -> str:
        """What shares a scale: ``tensor``, ``channel``, ``group`` or ``token``."""
        strategy = self.strategy or ("tensor" if self.group_size is None else "group")
        return "channel" if strategy == "group" and self.group_size in (None, -1, 0) else strategy


class _Group(msgspec.Struct):
    """One entry of ``config_groups``: a format and the matrices that it applies to."""

    weights: _Values
    input_activations: _Values | None = None
    output_activations: Any = None
    targets: list[str] = []
    format: str | None = None

    @property
    def packed(self) -> bool:
        return self.format == _PACKED

    @property
    def floating(self) -> bool:
        return self.weights.type == "float"


class CompressedTensorsScheme(StoredScheme):
    """The compressed-tensors format.

    Args:
        config: ``quantization_config`` of config.json.

    Raises:
        UnsupportedError: a format or strategy that cannot be read.
        ValueError: a field has a wrong type or value.
    """

    method = "compressed-tensors"
    markers = ("weight_packed", "weight_scale")

    def __init__(self, config: JsonObject) -> None:
        status = field_of(config, "quantization_status", str, "compressed")
        if status != "compressed" and config.get("format") in (None, "dense", "fakequant"):
            raise unsupported_format(f"compressed-tensors with status {status!r} (uncompressed values)")
        if field_of(config, "transform_config", dict, {}).get("config_groups"):
            raise unsupported_format("compressed-tensors with transforms (rotated weights)")
        sparsity = field_of(config, "sparsity_config", dict, {}).get("format", "dense")
        if sparsity != "dense":
            raise unsupported_format(f"compressed-tensors with sparse weights ({sparsity})")
        self._ignored = tuple(map(str, field_of(config, "ignore", list, [])))
        groups = field_of(config, "config_groups", dict, {})
        if not groups:
            raise ValueError("config.json: quantization_config.config_groups is missing or empty")
        overall = field_of(config, "format", str, "")
        self._groups = tuple(_group_of(name, group, overall) for name, group in groups.items())
        for target in (*self._ignored, *(target for group in self._groups for target in group.targets)):
            if target.startswith(_PATTERN):
                check_pattern(target.removeprefix(_PATTERN))
        inputs = [group.input_activations for group in self._groups if group.input_activations is not None]
        self.notes = tuple(dict.fromkeys(note for values in inputs for note in _notes(values)))
        if config.get("kv_cache_scheme") is not None:
            self.notes += ("the scales of the checkpoint's quantised KV cache are ignored",)
        self.name = f"compressed-tensors {', '.join(dict.fromkeys(str(group.format) for group in self._groups))}"

    @override
    def describe(self, tensors: MatrixTensors) -> str:
        group = self._find(tensors.names)
        if group is None:
            return "unknown"
        weights = group.weights
        kind = "fp8" if group.floating else f"int{weights.num_bits}"
        grain = f"groups of {weights.group_size}" if weights.grain == "group" else f"per {weights.grain}"
        return f"{kind}, {grain}{'' if weights.symmetric else ', zero points'}"

    @override
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
        group = self._find(tensors.names)
        if group is None:
            raise ValueError(f"{tensors.weight_name} is quantised, but config.json excludes it from quantisation")
        tensors.taken.update(_ACTIVATION_LEAVES)
        if group.packed and "weight_shape" in tensors:  # old versions write it only where the packing is ambiguous
            stored_shape = tensors.take("weight_shape", (2,), types=_INDICES).tolist()
            if stored_shape != [outputs, inputs]:
                raise ValueError(
                    f"weight_shape of {tensors.weight_name} is {stored_shape}; expected {[outputs, inputs]}"
                )
        if group.weights.num_bits == 4:
            return _int4_of(group, tensors, outputs, inputs)
        if group.packed:
            words = tensors.take("weight_packed", (outputs, -(-inputs // 4)), types=(torch.int32,))
            weight = (unpack_words(words, 8)[:, :inputs] ^ 0x80).view(torch.int8)  # from offset-128 to two's complement
        else:
            kind = torch.float8_e4m3fn if group.floating else torch.int8
            weight = tensors.take_values("weight", (outputs, inputs), kind)
        scales = [(1,), (), (1, 1)] if group.weights.grain == "tensor" else [(outputs, 1), (outputs,)]
        scale = tensors.take_scale("weight_scale", *scales)
        if "weight_zero_point" in tensors:
            zero = tensors.take("weight_zero_point", types=(torch.int8, torch.int32, torch.int64, weight.dtype))
            if zero.float().any():
                raise ValueError(f"{tensors.weight_name}: symmetric 8-bit weights must not have zero points")
        return channel_linear(weight, scale, quantizes_inputs=group.input_activations is not None)

    def _find(self, names: Sequence[str]) -> _Group | None:
        """Return the group of a matrix. Exact names take precedence over patterns, and patterns over classes."""
        if any(_matches(target, names) for target in self._ignored):
            return None
        ranked = [
            (2 if target == _CLASS else int(target.startswith(_PATTERN)), number)
            for number, group in enumerate(self._groups)
            for target in group.targets
            if _matches(target, names)
        ]
        return self._groups[min(ranked)[1]] if ranked else None


def _matches(target: str, names: Sequence[str]) -> bool:
    pattern = target.removeprefix(_PATTERN)
    if pattern == target:
        return target == _CLASS or target in names
    return any(re.match(pattern, name) for name in names)


def _group_of(name: str, stored: Any, overall: str) -> _Group:
    if not isinstance(stored, Mapping):
        raise unsupported_format(f"compressed-tensors with the preset {name!r:.40}")
    layout = stored.get("format") or overall
    if layout not in (*_PLAIN, _PACKED):
        raise unsupported_format(f"compressed-tensors {layout or 'without a format'}")
    if stored.get("weights") is None:
        raise unsupported_format(f"compressed-tensors without quantised weights (config_groups.{name})")
    group = typed({**stored, "format": layout}, _Group, f"config.json: quantization_config.config_groups.{name}")
    if group.output_activations is not None:
        raise unsupported_format("compressed-tensors with quantised outputs")
    weights, inputs = group.weights, group.input_activations
    grain = inputs and (inputs.strategy or "tensor")
    if inputs is not None and ((inputs.num_bits, inputs.type) != (8, weights.type) or grain not in ("token", "tensor")):
        raise unsupported_format(
            f"compressed-tensors {layout} with {inputs.num_bits}-bit {inputs.type} inputs per {grain}"
        )
    kind = "float" if group.floating else "int"
    if weights.num_bits == 4:
        fits = group.packed and not group.floating and weights.grain in ("group", "channel", "tensor")
        rest = "" if inputs is None else " and quantised inputs"
    else:
        fits = weights.num_bits == 8 and not (group.floating and group.packed)
        fits = fits and weights.grain in ("channel", "tensor")
        rest = "" if weights.symmetric else " and zero points"
    if rest or not fits:
        raise unsupported_format(
            f"compressed-tensors {layout} with {weights.num_bits}-bit {kind} weights per {weights.grain}{rest}"
        )
    return group


def _notes(inputs: _Values) -> Iterator[str]:
    """Yield how the inputs are computed otherwise than a checkpoint's configuration asks."""
    if not inputs.dynamic:
        yield "inputs are quantised per token; the checkpoint's static scales are ignored"
    elif inputs.strategy in (None, "tensor"):
        yield "inputs are quantised per token; the checkpoint's configuration asks for one scale per tensor"
    if not inputs.symmetric:
        yield "inputs are quantised symmetrically; the checkpoint's configuration asks for zero points"


def _int4_of(group: _Group, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
    weights = group.weights
    size = weights.group_size if weights.grain == "group" and weights.group_size else inputs
    if inputs % size:
        raise ValueError(f"{tensors.weight_name}: groups of {size} do not divide {inputs} input channels")
    groups = inputs // size
    levels = unpack_words(tensors.take("weight_packed", (outputs, -(-inputs // 8)), types=(torch.int32,)), 4)
    if weights.grain == "tensor":
        scale = tensors.take_scale("weight_scale", (1,), (), (1, 1)).reshape(1, 1).expand(outputs, 1)
    else:
        scale = tensors.take_scale("weight_scale", (outputs, groups))
    zero = None
    if weights.symmetric:
        tensors.taken.add("weight_zero_point")
    else:  # packed along the outputs
        words = tensors.take("weight_zero_point", (-(-outputs // 8), groups), types=(torch.int32,))
        zero = unpack_words(words.T, 4)[:, :outputs]
    order = None
    if weights.actorder in (True, "group", "dynamic") or "weight_g_idx" in tensors:
        order = order_of(tensors.take("weight_g_idx", (inputs,), types=_INDICES), groups)
    return int4_linear(levels[:, :inputs], scale.T, zero, order)


def stored_config(weight_format: WeightFormat, *, calibrated: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint whose decoder matrices have a format of panscan's.

    Args:
        weight_format: symmetric, with its channels in their own order.
        calibrated: whether columns were quantised in the order of their activations (GPTQ).
    """
    layout, known, value_type = (
        _WRITTEN[weight_format.kind],
        weight_format.facts,
        LINEARS[weight_format.kind].value_type,
    )
    weights: dict[str, Any] = {
        "num_bits": known.bits,
        "type": "float" if value_type is not None and value_type.is_floating_point else "int",
        "symmetric": True,
        "group_size": weight_format.group_size if known.grouped else None,
        "strategy": "group" if known.grouped else "channel",
        "block_structure": None,
        "dynamic": False,
        "actorder": "weight" if calibrated and known.grouped else None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if known.grouped else inputs,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(_UNQUANTIZED),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": _VERSION,
    }


def stored_parts(linear: QuantizedLinear, scale_type: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint stores for a matrix, by the last part of their names.

    ``weight`` int8 or float8_e4m3fn ``[outputs, inputs]`` and ``weight_scale`` ``[outputs, 1]``; or ``weight_packed``
    int32 ``[outputs, inputs / 8]``, ``weight_scale`` ``[outputs, groups]`` and ``weight_shape`` int64 ``[2]``.

    Args:
        linear: symmetric, with its channels in their own order.
        scale_type: type of the stored scales.
    """
    scale = linear.scale.to("cpu", scale_type)
    if linear.value_type is not None:
        return {"weight": linear.weight.cpu(), "weight_scale": scale[:, None]}
    levels = unpack_int4(linear.weight, linear.in_features).cpu()
    octets = levels[:, ::2] | levels[:, 1::2] << 4
    shape = torch.tensor([linear.out_features, linear.in_features])
    return {"weight_packed": octets.view(torch.int32), "weight_scale": scale.T.contiguous(), "weight_shape": shape}
