"""bitsandbytes: checkpoints in 4 bits, dequantised as they are loaded, and the quantisations that Transformers makes.

A matrix of a 4-bit checkpoint is stored as ``weight``: pairs of 4-bit indices in the order of its values, the first in
the high bits. ``weight.quant_map`` has the value of each index, ``weight.absmax`` a scale for each block of consecutive
values, and ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) the rest as JSON. Scales may be quantised themselves:
8-bit indices into ``weight.nested_quant_map``, with ``weight.nested_absmax`` for each block of them, plus an offset.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch.nn import functional
from typing_extensions import override

from panscan.model.formats.schemes import StoredScheme, field_of
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.untrusted.reading import JsonObject, json_object, typed

T = TypeVar("T")

_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # types that hold the packed bytes
_MOST_STATE = 65_536  # bytes; usual ones have 200

_UNTOUCHED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
"""Starts of the paths of modules that stay unquantised: the vision tower and its projector, because their inputs have a
wide range and they are a small part of the weights, and the output matrix."""
ON_LOAD: dict[str, dict[str, Any]] = {
    "bnb-8bit": {"load_in_8bit": True},
    "bnb-4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""Arguments of Transformers' configuration by the value of ``--quantization``."""


def transformers_config(name: str | None, dtype: torch.dtype) -> Any:
    """Return the Transformers configuration of a quantisation on load; None for names that are not in ``ON_LOAD``."""
    if name not in ON_LOAD:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**ON_LOAD[name], bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=_UNTOUCHED)


class BitsAndBytesScheme(StoredScheme):
    """The 4-bit formats, where bitsandbytes is not installed. Otherwise, and in 8 bits, Transformers loads them.

    Args:
        config: ``quantization_config`` of config.json.
    """

    method = "bitsandbytes"
    markers = _STATES

    def __init__(self, config: JsonObject) -> None:
        self.name = f"bitsandbytes ({field_of(config, 'bnb_4bit_quant_type', str, 'fp4')}, 4 bits)"
        self.notes = ("the weights are dequantised, because bitsandbytes is not installed",)

    @classmethod
    @override
    def recognises(cls, method: str, config: JsonObject) -> bool:
        return method.startswith(cls.method) or bool(config.get("load_in_4bit") or config.get("load_in_8bit"))

    @classmethod
    @override
    def by_transformers(cls, config: JsonObject) -> bool:
        return not config.get("load_in_4bit") or find_spec("bitsandbytes") is not None

    @override
    def describe(self, tensors: MatrixTensors) -> str:
        state = _quant_state(tensors, _QuantState)
        return f"{state.quant_type}, blocks of {state.blocksize}"

    @override
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> torch.Tensor:
        state, count = _quant_state(tensors, _QuantState), outputs * inputs
        if state.shape != [outputs, inputs]:
            raise ValueError(
                f"quant_state of {tensors.weight_name} has the shape {state.shape}; expected {[outputs, inputs]}"
            )
        packed = tensors.take("weight", types=_STORAGE).contiguous().view(torch.uint8).flatten()
        if len(packed) != -(-count // 2):
            raise ValueError(f"{tensors.weight_name} has {len(packed):,} bytes; expected {-(-count // 2):,}")
        blocks = -(-count // state.blocksize)
        if "weight.nested_absmax" in tensors:
            scales = _nested_scales(tensors, blocks)
        else:
            scales = tensors.take_scale("weight.absmax", (blocks,))
        values = tensors.take_scale("weight.quant_map", (16,)).float()
        dense = values[torch.stack([packed >> 4, packed & 0xF], -1).flatten().int()]
        dense = functional.pad(dense[:count], (0, blocks * state.blocksize - count)).view(blocks, state.blocksize)
        return (dense * scales.float()[:, None]).flatten()[:count].view(outputs, inputs)


class _QuantState(msgspec.Struct):
    """What describes a matrix."""

    shape: list[int]
    blocksize: _BlockSize
    quant_type: str


class _NestedState(msgspec.Struct):
    """What describes the scales of a matrix if they are quantised."""

    nested_blocksize: _BlockSize
    nested_offset: float


def _quant_state(tensors: MatrixTensors, kind: type[T]) -> T:
    """Return the JSON object that describes a matrix."""
    leaf, where = next(leaf for leaf in _STATES if leaf in tensors), f"quant_state of {tensors.weight_name}"
    text = tensors.take(leaf, types=(torch.uint8,))
    if text.numel() > _MOST_STATE:
        raise ValueError(f"{where} has {text.numel():,} bytes")
    return typed(json_object(bytes(text.flatten().tolist()).decode(errors="replace"), where), kind, where)


def _nested_scales(tensors: MatrixTensors, blocks: int) -> torch.Tensor:
    """Return the scales of a matrix whose scales are quantised, float32 ``[blocks]``."""
    state = _quant_state(tensors, _NestedState)
    size = state.nested_blocksize
    indices = tensors.take("weight.absmax", (blocks,), types=(torch.uint8,)).int()
    scales = tensors.take_scale("weight.nested_absmax", (-(-blocks // size),)).float().repeat_interleave(size)
    values = tensors.take_scale("weight.nested_quant_map", (256,)).float()
    return values[indices] * scales[:blocks] + state.nested_offset
