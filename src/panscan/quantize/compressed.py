"""Quantised matrices in the layout of compressed-tensors, which Transformers and vLLM load.

=======  ===============  ==========================================================================================
kind     format           tensors of each matrix
=======  ===============  ==========================================================================================
int4     pack-quantized   ``weight_packed`` int32 ``[outputs, inputs / 8]``, ``weight_scale`` ``[outputs, groups]``,
                          ``weight_shape`` int64 ``[2]``
int8     int-quantized    ``weight`` int8 ``[outputs, inputs]``, ``weight_scale`` ``[outputs, 1]``
fp8      float-quantized  ``weight`` float8_e4m3fn ``[outputs, inputs]``, ``weight_scale`` ``[outputs, 1]``
=======  ===============  ==========================================================================================

Scales have the type of the dense weights, because loaders convert them to it.
"""

from __future__ import annotations

from typing import Any

import torch

from panscan.linear.quantized import QuantizedLinear, WeightFormat, pack_int4, unpack_int4

__all__ = ["compressed_parts", "linear_of_parts", "quantization_config", "rounded"]

_VERSION = "0.20.0"
"""Version of compressed-tensors whose layout this is."""
_FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
_UNQUANTIZED = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*embed_tokens.*", "re:.*lm_head.*")
_NIBBLES = 8  # 4-bit values of one int32


def quantization_config(weight_format: WeightFormat, *, calibrated: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of ``config.json``.

    Args:
        weight_format: format of the decoder's matrices.
        calibrated: whether columns were quantised in the order of their activations (GPTQ).
    """
    weights: dict[str, Any] = {
        "num_bits": 4 if weight_format.kind == "int4" else 8,
        "type": "float" if weight_format.kind == "fp8" else "int",
        "symmetric": True,
        "group_size": weight_format.group_size if weight_format.kind == "int4" else None,
        "strategy": "group" if weight_format.kind == "int4" else "channel",
        "block_structure": None,
        "dynamic": False,
        "actorder": "weight" if calibrated and weight_format.kind == "int4" else None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}  # of 8-bit kinds, which have no groups
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if weight_format.kind == "int4" else inputs,
        "output_activations": None,
        "format": _FORMATS[weight_format.kind],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[weight_format.kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(_UNQUANTIZED),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": _VERSION,
    }


@torch.no_grad()
def rounded(values: torch.Tensor, weight_format: WeightFormat) -> QuantizedLinear:
    """Quantise a dense matrix ``[outputs, inputs]`` by rounding to nearest, with scales of its type.

    Weights are rounded with the stored scale, because loaders do not see a more precise one.
    """
    linear = QuantizedLinear(
        values.shape[1], values.shape[0], weight_format, scale_type=values.dtype, device=values.device
    )
    linear.quantize(values)
    if weight_format.kind != "int4":
        linear.scale.copy_(linear.scale.to(values.dtype))
        most = (
            torch.finfo(linear.weight.dtype).max
            if weight_format.kind == "fp8"
            else torch.iinfo(linear.weight.dtype).max
        )
        scaled = (values.float() / linear.scale[:, None]).clamp(-most, most)
        linear.weight.copy_(scaled.round() if weight_format.kind == "int8" else scaled)
    return linear


def compressed_parts(linear: QuantizedLinear, scale_type: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint stores for a matrix, by the last part of their names.

    Args:
        linear: symmetric, with its channels in their own order.
        scale_type: type of the stored scales.
    """
    if linear.weight_format.kind != "int4":
        return {"weight": linear.weight.cpu(), "weight_scale": linear.scale[:, None].to("cpu", scale_type)}
    levels = unpack_int4(linear.weight, linear.in_features).to(torch.int64).view(linear.out_features, -1, _NIBBLES)
    words = (levels << _shifts(levels.device)).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {
        "weight_packed": signed.cpu(),
        "weight_scale": linear.scale.T.contiguous().to("cpu", scale_type),
        "weight_shape": torch.tensor([linear.out_features, linear.in_features]),
    }


def linear_of_parts(parts: dict[str, torch.Tensor], weight_format: WeightFormat) -> QuantizedLinear:
    """Return the matrix that :func:`compressed_parts` stored."""
    scale = parts["weight_scale"]
    if weight_format.kind != "int4":
        linear = QuantizedLinear(parts["weight"].shape[1], parts["weight"].shape[0], weight_format)
        linear.weight, linear.scale = parts["weight"], scale[:, 0].float()
        return linear
    outputs, inputs = parts["weight_shape"].tolist()
    linear = QuantizedLinear(inputs, outputs, weight_format, scale_type=scale.dtype)
    levels = (parts["weight_packed"][:, :, None] >> _shifts(scale.device).int()) & 0xF
    linear.weight, linear.scale = pack_int4(levels.flatten(1).to(torch.uint8)), scale.T.contiguous()
    return linear


def _shifts(device: torch.device) -> torch.Tensor:
    return 4 * torch.arange(_NIBBLES, device=device)
