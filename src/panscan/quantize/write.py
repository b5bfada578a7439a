"""A quantised checkpoint from a dense one: tensor by tensor, or layer by layer on calibration prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from panscan.core import ModelError, Request
from panscan.linear.quantized import QuantizedLinear, WeightFormat
from panscan.model.checkpoint import Placement, load_model
from panscan.model.machine import resolve_dtype
from panscan.quantize.calibration import Calibration
from panscan.quantize.compressed import compressed_parts, linear_of_parts, quantization_config, rounded
from panscan.quantize.gptq import gptq
from panscan.quantize.measure import Steps
from panscan.quantize.partial import INDEX_FILE, PartialCheckpoint
from panscan.quantize.source import DenseCheckpoint

__all__ = ["CheckpointWriter"]


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
        quantized = sum(prod(self.source.shape(tensor)) for layer in self.source.layers for tensor in layer.values())
        dense = self.source.bytes_of(tensor for names in self.source.other_shards for tensor in names)
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
                self._write_layer(
                    number,
                    {
                        name: rounded(self.source.read(tensor).to(device), self.weight_format)
                        for name, tensor in layer.items()
                    },
                )
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
        layers = self.source.layers
        if all(self.target.has(self._layer_file(number)) for number in range(len(layers))):
            return
        placement = Placement(torch.device("cpu"), resolve_dtype("auto", device))
        loaded = load_model(self.source.name, placement, revision=revision)
        calibration = Calibration(loaded, device)
        calibration.read(requests, lambda done: self.on_step("reading documents", done, len(requests)))
        for number in range(len(layers)):
            with calibration.layer(number) as layer:
                found = self._finished_layer(number)
                if found is None:
                    found = self._calibrated(number, layer, calibration.hessians(layer))
                    self._write_layer(number, found)
                for name, matrix in found.items():
                    weight = layer.get_submodule(name).get_parameter("weight")
                    weight.data = matrix.to(device).dequantized(weight.dtype)
                if number + 1 < len(layers):
                    calibration.advance(layer)
            self.on_step("quantising layers", number + 1, len(layers))

    def finish(self, *, calibrated: bool) -> None:
        """Write the other files that loading needs, ``config.json`` last."""
        for name, path in self.source.files.companions.items():
            self.target.write_bytes(name, path.read_bytes())
        total = sum((self.target.path / name).stat().st_size for name in {*self._weight_map().values()})
        self.target.write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": self._weight_map()})
        config = json.loads(json.dumps(self.source.files.config))
        config["quantization_config"] = quantization_config(self.weight_format, calibrated=calibrated)
        self.target.write_json("config.json", config)

    def _calibrated(self, number: int, layer: Any, hessians: dict[str, torch.Tensor]) -> dict[str, QuantizedLinear]:
        found = {}
        for name, tensor in self.source.layers[number].items():
            weight = layer.get_submodule(name).weight
            try:
                found[name] = gptq(weight, hessians[name], self.weight_format, scale_type=self.source.dtype(tensor))
            except ValueError as error:
                raise ModelError(f"{self.source.name}: layer {number}, {name}: {error}") from error
        return found

    def _write_layer(self, number: int, matrices: dict[str, QuantizedLinear]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.source.layers[number].items():
            stem = tensor.removesuffix("weight")
            tensors |= {
                f"{stem}{part}": values
                for part, values in compressed_parts(matrices[name], self.source.dtype(tensor)).items()
            }
        self.target.write_tensors(self._layer_file(number), tensors)

    def _finished_layer(self, number: int) -> dict[str, QuantizedLinear] | None:
        file = self._layer_file(number)
        if not self.target.has(file):
            return None
        tensors = self.target.read_tensors(file)
        found = {}
        for name, tensor in self.source.layers[number].items():
            stem = tensor.removesuffix("weight")
            parts = {key.removeprefix(stem): values for key, values in tensors.items() if key.startswith(stem)}
            found[name] = linear_of_parts(parts, self.weight_format)
        return found

    def _weight_map(self) -> dict[str, str]:
        files = {name: self._file(number) for number, names in enumerate(self.source.other_shards) for name in names}
        parts = {"int4": ("weight_packed", "weight_scale", "weight_shape")}.get(
            self.weight_format.kind, ("weight", "weight_scale")
        )
        for number, layer in enumerate(self.source.layers):
            for tensor in layer.values():
                stem = tensor.removesuffix("weight")
                files |= {f"{stem}{part}": self._layer_file(number) for part in parts}
        return dict(sorted(files.items()))

    def _layer_file(self, number: int) -> str:
        return self._file(len(self.source.other_shards) + number)

    def _file(self, number: int) -> str:
        total = len(self.source.other_shards) + len(self.source.layers)
        return f"model-{number + 1:05d}-of-{total:05d}.safetensors"
