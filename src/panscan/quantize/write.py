"""Writes a quantised checkpoint: tensor by tensor, or layer by layer on calibration prompts.

Quantised matrices have the layout of compressed-tensors, which Transformers and vLLM load:

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

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from panscan.core import ModelError, Request
from panscan.model.checkpoint import Placement, load_model
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, pack_int4, unpack_int4
from panscan.model.machine import resolve_dtype
from panscan.quantize.calibration import Calibration
from panscan.quantize.gptq import gptq
from panscan.quantize.partial import INDEX_FILE, PartialCheckpoint
from panscan.quantize.source import DenseCheckpoint
from panscan.workload.calibration import Steps

_VERSION = "0.20.0"
"""Version of compressed-tensors whose layout this is."""
_DENSE_PARTS = ("weight", "weight_scale")
_LAYOUTS = {
    "int4": ("pack-quantized", ("weight_packed", "weight_scale", "weight_shape")),
    "int8": ("int-quantized", _DENSE_PARTS),
    "fp8": ("float-quantized", _DENSE_PARTS),
}
"""Format of each kind, and the last part of the names of a matrix's tensors."""
_UNQUANTIZED = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*embed_tokens.*", "re:.*lm_head.*")
_NIBBLES = 8  # 4-bit values of one int32


@dataclass(slots=True)
class CheckpointWriter:
    """Writes the files of a quantised checkpoint, those that are not finished yet.

    Args:
        source: the dense checkpoint.
        weight_format: format of its decoder matrices.
        target: directory of the files.
        on_step: called after each step.
    """

    source: DenseCheckpoint
    weight_format: WeightFormat
    target: PartialCheckpoint
    on_step: Steps

    @property
    def bytes(self) -> int:
        """Estimated bytes of the checkpoint's weights."""
        stored = self.source.stored
        quantized = sum(prod(stored[tensor].shape) for tensor in self.source.matrices)
        dense = sum(stored[tensor].bytes for tensor in stored.keys() - self.source.matrices)
        bits = 4 + 16 / self.weight_format.group_size if self.weight_format.kind == "int4" else 8
        return dense + int(quantized * bits / 8)

    def write_dense(self) -> None:
        """Write the tensors that stay dense."""
        shards = self.source.other_shards
        for number, names in enumerate(shards):
            if not self.target.has(file := self._file(number)):
                self.target.write_tensors(file, {name: self.source.read(name) for name in names})
            self.on_step("copying unquantised tensors", number + 1, len(shards))

    def round_layers(self, device: torch.device) -> None:
        """Write decoder layers rounded to nearest on a device, one matrix at a time."""
        for number, layer in enumerate(self.source.layers):
            if not self.target.has(self._layer_file(number)):
                dense = ((name, self.source.read(tensor).to(device)) for name, tensor in layer.items())
                self._write_layer(number, {name: rounded(values, self.weight_format) for name, values in dense})
            self.on_step("quantising layers", number + 1, len(self.source.layers))

    def calibrate_layers(self, requests: Sequence[Request], device: torch.device, revision: str | None = None) -> None:
        """Write decoder layers quantised by GPTQ.

        Args:
            requests: calibration prompts.
            device: device to compute on, one layer at a time.
            revision: revision of a hub checkpoint.

        Raises:
            ModelError: the model overflows, or its inputs are degenerate.
        """
        count = len(self.source.layers)
        if all(self.target.has(self._layer_file(number)) for number in range(count)):
            return
        placement = Placement(torch.device("cpu"), resolve_dtype("auto", device))
        loaded = load_model(self.source.name, placement, revision=revision)
        calibration = Calibration(loaded, device)
        calibration.read(requests, lambda done: self.on_step("reading documents", done, len(requests)))
        for number, layer in enumerate(calibration.layers()):
            if (matrices := self._finished_layer(number)) is None:
                matrices = self._calibrated(number, layer, calibration.hessians(layer))
                self._write_layer(number, matrices)
            for name, matrix in matrices.items():
                weight = layer.get_submodule(name).get_parameter("weight")
                weight.data = matrix.to(device).dequantized(weight.dtype)
            if number + 1 < count:
                calibration.advance(layer)
            self.on_step("quantising layers", number + 1, count)

    def finish(self, *, calibrated: bool) -> None:
        """Write the other files that loading needs, ``config.json`` last."""
        for name, path in self.source.files.companions.items():
            self.target.write_bytes(name, path.read_bytes())
        files: dict[str, str] = {}
        for number, names in enumerate(self.source.other_shards):
            files |= dict.fromkeys(names, self._file(number))
        for number, layer in enumerate(self.source.layers):
            for tensor in layer.values():
                files |= dict.fromkeys(self._part_names(tensor), self._layer_file(number))
        total = sum((self.target.path / name).stat().st_size for name in {*files.values()})
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        self.target.write_json(INDEX_FILE, index)
        quantization = _quantization_config(self.weight_format, calibrated=calibrated)
        self.target.write_json("config.json", {**self.source.files.config, "quantization_config": quantization})

    def _calibrated(self, number: int, layer: Any, hessians: dict[str, torch.Tensor]) -> dict[str, QuantizedLinear]:
        matrices = {}
        for name, tensor in self.source.layers[number].items():
            weight = layer.get_submodule(name).weight
            try:
                matrices[name] = gptq(weight, hessians[name], self.weight_format, scale_type=self.source.dtype(tensor))
            except ValueError as error:
                raise ModelError(f"{self.source.name}: layer {number}, {name}: {error}") from error
        return matrices

    def _write_layer(self, number: int, matrices: dict[str, QuantizedLinear]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.source.layers[number].items():
            parts = compressed_parts(matrices[name], self.source.dtype(tensor))
            tensors.update(zip(self._part_names(tensor), parts, strict=True))
        self.target.write_tensors(self._layer_file(number), tensors)

    def _finished_layer(self, number: int) -> dict[str, QuantizedLinear] | None:
        if not self.target.has(file := self._layer_file(number)):
            return None
        tensors = self.target.read_tensors(file)
        return {
            name: linear_of_parts([tensors[part] for part in self._part_names(tensor)], self.weight_format)
            for name, tensor in self.source.layers[number].items()
        }

    def _part_names(self, tensor: str) -> list[str]:
        """Return the names of the stored tensors of a decoder matrix."""
        return [tensor.removesuffix("weight") + part for part in _LAYOUTS[self.weight_format.kind][1]]

    def _layer_file(self, number: int) -> str:
        return self._file(len(self.source.other_shards) + number)

    def _file(self, number: int) -> str:
        total = len(self.source.other_shards) + len(self.source.layers)
        return f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _quantization_config(weight_format: WeightFormat, *, calibrated: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of ``config.json``.

    Args:
        weight_format: format of the decoder's matrices.
        calibrated: whether columns were quantised in the order of their activations (GPTQ).
    """
    int4, layout = weight_format.kind == "int4", _LAYOUTS[weight_format.kind][0]
    weights: dict[str, Any] = {
        "num_bits": 4 if int4 else 8,
        "type": "float" if weight_format.kind == "fp8" else "int",
        "symmetric": True,
        "group_size": weight_format.group_size if int4 else None,
        "strategy": "group" if int4 else "channel",
        "block_structure": None,
        "dynamic": False,
        "actorder": "weight" if calibrated and int4 else None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}  # of 8-bit kinds, which have no groups
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if int4 else inputs,
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


@torch.no_grad()
def rounded(values: torch.Tensor, weight_format: WeightFormat) -> QuantizedLinear:
    """Quantise a dense matrix ``[outputs, inputs]`` by rounding to nearest, with scales of its type.

    Weights are rounded with the stored scale, because loaders do not see a more precise one.
    """
    outputs, inputs = values.shape
    linear = QuantizedLinear(inputs, outputs, weight_format, scale_type=values.dtype, device=values.device)
    linear.quantize(values)
    if weight_format.kind != "int4":
        linear.scale.copy_(linear.scale.to(values.dtype))
        limits = torch.finfo if weight_format.kind == "fp8" else torch.iinfo
        most = limits(linear.weight.dtype).max
        scaled = (values.float() / linear.scale[:, None]).clamp(-most, most)
        linear.weight.copy_(scaled.round() if weight_format.kind == "int8" else scaled)
    return linear


def compressed_parts(linear: QuantizedLinear, scale_type: torch.dtype) -> list[torch.Tensor]:
    """Return the tensors that a checkpoint stores for a matrix, in the order of the table above.

    Args:
        linear: symmetric, with its channels in their own order.
        scale_type: type of the stored scales.
    """
    if linear.weight_format.kind != "int4":
        return [linear.weight.cpu(), linear.scale[:, None].to("cpu", scale_type)]
    levels = unpack_int4(linear.weight, linear.in_features).to(torch.int64).view(linear.out_features, -1, _NIBBLES)
    words = (levels << _nibble_shifts(levels.device)).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scales = linear.scale.T.contiguous().to("cpu", scale_type)
    return [signed.cpu(), scales, torch.tensor([linear.out_features, linear.in_features])]


def linear_of_parts(parts: Sequence[torch.Tensor], weight_format: WeightFormat) -> QuantizedLinear:
    """Return the matrix that :func:`compressed_parts` stored."""
    values, scale, *_ = parts
    if weight_format.kind != "int4":
        linear = QuantizedLinear(values.shape[1], values.shape[0], weight_format)
        linear.weight, linear.scale = values, scale[:, 0].float()
        return linear
    outputs, inputs = parts[2].tolist()
    linear = QuantizedLinear(inputs, outputs, weight_format, scale_type=scale.dtype)
    levels = (values[:, :, None] >> _nibble_shifts(scale.device).int()) & 0xF
    linear.weight, linear.scale = pack_int4(levels.flatten(1).to(torch.uint8)), scale.T.contiguous()
    return linear


def _nibble_shifts(device: torch.device) -> torch.Tensor:
    return 4 * torch.arange(_NIBBLES, device=device)
