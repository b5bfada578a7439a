"""Checkpoints in the format of compressed-tensors, as LLM Compressor and ``panscan quantize`` write them.

``pack-quantized`` stores int32 words of 4-bit or 8-bit values along the inputs; ``int-quantized``, ``float-quantized``
and ``naive-quantized`` store one value per element. All have ``weight_scale`` ``[outputs, groups]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from panscan.model.formats.layouts import channel_linear, int4_linear, order_of, unpack_words
from panscan.model.formats.schemes import StoredScheme, check_pattern, field_of, unsupported_format
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.linear.quantized import LINEARS, QuantizedLinear, WeightFormat, unpack_int4
from panscan.model.untrusted.reading import JsonObject

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


@dataclass(frozen=True, slots=True)
class _Group:
    """One entry of ``config_groups``: a format and the matrices that it applies to."""

    targets: tuple[str, ...]
    packed: bool
    bits: int
    floating: bool
    strategy: str
    group_size: int | None
    symmetric: bool
    ordered: bool
    quantizes_inputs: bool


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
        self.notes = tuple(dict.fromkeys(note for group in groups.values() for note in _notes(group)))
        if config.get("kv_cache_scheme") is not None:
            self.notes += ("the scales of the checkpoint's quantised KV cache are ignored",)
        formats = dict.fromkeys(group.get("format") or overall for group in groups.values())
        self.name = f"compressed-tensors {', '.join(formats)}"

    def describe(self, names: Sequence[str], tensors: MatrixTensors) -> str:
        """See :class:`StoredScheme`."""
        group = self._find(names)
        if group is None:
            return "unknown"
        kind = "fp8" if group.floating else f"int{group.bits}"
        grain = f"groups of {group.group_size}" if group.strategy == "group" else f"per {group.strategy}"
        return f"{kind}, {grain}{'' if group.symmetric else ', zero points'}"

    def linear_of(self, names: Sequence[str], tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
        """See :class:`StoredScheme`."""
        group = self._find(names)
        if group is None:
            raise ValueError(f"{tensors.weight_name} is quantised, but config.json excludes it from quantisation")
        tensors.taken.update(_ACTIVATION_LEAVES)
        if group.packed and "weight_shape" in tensors:  # old versions write it only where the packing is ambiguous
            stored_shape = tensors.take("weight_shape", (2,), types=_INDICES).tolist()
            if stored_shape != [outputs, inputs]:
                raise ValueError(
                    f"weight_shape of {tensors.weight_name} is {stored_shape}; expected {[outputs, inputs]}"
                )
        if group.bits == 4:
            return _int4_of(group, tensors, outputs, inputs)
        if group.packed:
            words = tensors.take("weight_packed", (outputs, -(-inputs // 4)), types=(torch.int32,))
            weight = (unpack_words(words, 8)[:, :inputs] ^ 0x80).view(torch.int8)  # from offset-128 to two's complement
        else:
            kind = torch.float8_e4m3fn if group.floating else torch.int8
            weight = tensors.take_values("weight", (outputs, inputs), kind)
        scales = [(1,), (), (1, 1)] if group.strategy == "tensor" else [(outputs, 1), (outputs,)]
        scale = tensors.take_scale("weight_scale", *scales)
        if "weight_zero_point" in tensors:
            zero = tensors.take("weight_zero_point", types=(torch.int8, torch.int32, torch.int64, weight.dtype))
            if zero.float().any():
                raise ValueError(f"{tensors.weight_name}: symmetric 8-bit weights must not have zero points")
        return channel_linear(weight, scale, quantizes_inputs=group.quantizes_inputs)

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


def _group_of(name: str, group: Any, overall: str) -> _Group:
    if not isinstance(group, Mapping):
        raise unsupported_format(f"compressed-tensors with the preset {name!r:.40}")
    layout = group.get("format") or overall
    if layout not in (*_PLAIN, _PACKED):
        raise unsupported_format(f"compressed-tensors {layout or 'without a format'}")
    weights = field_of(group, "weights", dict)
    if weights is None:
        raise unsupported_format(f"compressed-tensors without quantised weights (config_groups.{name})")
    if group.get("output_activations") is not None:
        raise unsupported_format("compressed-tensors with quantised outputs")
    bits, kind = field_of(weights, "num_bits", int, 8), field_of(weights, "type", str, "int")
    size = field_of(weights, "group_size", int)
    size = None if size in (None, -1, 0) else size
    strategy = field_of(weights, "strategy", str, "tensor" if weights.get("group_size") is None else "group")
    if strategy == "group" and size is None:
        strategy = "channel"
    found = _Group(
        tuple(map(str, field_of(group, "targets", list, []))),
        layout == _PACKED,
        bits,
        kind == "float",
        strategy,
        size,
        field_of(weights, "symmetric", bool, True),
        weights.get("actorder") in (True, "group", "dynamic"),
        _quantizes_inputs(group, kind, layout),
    )
    _refuse_combinations(found, layout)
    return found


def _refuse_combinations(group: _Group, layout: str) -> None:
    kind = "float" if group.floating else "int"
    if group.bits == 4:
        fits = group.packed and not group.floating and group.strategy in ("group", "channel", "tensor")
        rest = " and quantised inputs" if group.quantizes_inputs else ""
    else:
        fits = group.bits == 8 and not (group.floating and group.packed) and group.strategy in ("channel", "tensor")
        rest = "" if group.symmetric else " and zero points"
    if rest or not fits:
        raise unsupported_format(
            f"compressed-tensors {layout} with {group.bits}-bit {kind} weights per {group.strategy}{rest}"
        )


def _quantizes_inputs(group: JsonObject, kind: str, layout: str) -> bool:
    inputs = field_of(group, "input_activations", dict)
    if inputs is None:
        return False
    bits, type_ = field_of(inputs, "num_bits", int, 8), field_of(inputs, "type", str, "int")
    strategy = field_of(inputs, "strategy", str, "tensor")
    if (bits, type_) != (8, kind) or strategy not in ("token", "tensor"):
        raise unsupported_format(f"compressed-tensors {layout} with {bits}-bit {type_} inputs per {strategy}")
    return True


def _notes(group: Any) -> list[str]:
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    if inputs is None:
        return []
    notes = []
    if not inputs.get("dynamic", False):
        notes.append("inputs are quantised per token; the checkpoint's static scales are ignored")
    elif inputs.get("strategy", "tensor") == "tensor":
        notes.append("inputs are quantised per token; the checkpoint's configuration asks for one scale per tensor")
    if not inputs.get("symmetric", True):
        notes.append("inputs are quantised symmetrically; the checkpoint's configuration asks for zero points")
    return notes


def _int4_of(group: _Group, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear:
    size = group.group_size if group.strategy == "group" and group.group_size else inputs
    if inputs % size:
        raise ValueError(f"{tensors.weight_name}: groups of {size} do not divide {inputs} input channels")
    groups = inputs // size
    levels = unpack_words(tensors.take("weight_packed", (outputs, -(-inputs // 8)), types=(torch.int32,)), 4)
    if group.strategy == "tensor":
        scale = tensors.take_scale("weight_scale", (1,), (), (1, 1)).reshape(1, 1).expand(outputs, 1)
    else:
        scale = tensors.take_scale("weight_scale", (outputs, groups))
    zero = _zero_points(group, tensors, outputs, groups)
    order = None
    if group.ordered or "weight_g_idx" in tensors:
        order = order_of(tensors.take("weight_g_idx", (inputs,), types=_INDICES), groups)
    return int4_linear(levels[:, :inputs], scale.T, zero, order)


def _zero_points(group: _Group, tensors: MatrixTensors, outputs: int, groups: int) -> torch.Tensor | None:
    """Return zero points, packed along the outputs, as uint8 ``[groups, outputs]``; None for symmetric weights."""
    if group.symmetric:
        tensors.taken.add("weight_zero_point")
        return None
    words = tensors.take("weight_zero_point", (-(-outputs // 8), groups), types=(torch.int32,))
    return unpack_words(words.T, 4)[:, :outputs]


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
