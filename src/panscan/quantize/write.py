"""Writes a quantised checkpoint: tensor by tensor, or layer by layer on calibration prompts.

Quantised matrices have the layout of compressed-tensors, which Transformers and vLLM load. Scales have the type of the
dense weights, because loaders convert them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from panscan.core import ModelError, Request
from panscan.core.activity import activity, track
from panscan.model.checkpoint import Placement, load_model
from panscan.model.formats.compressed import CompressedTensorsScheme, stored_config, stored_parts
from panscan.model.formats.tensors import MatrixTensors, StoredTensors
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.model.machine import resolve_dtype
from panscan.model.untrusted.headers import key_of, read_header
from panscan.quantize.calibration import Calibration
from panscan.quantize.gptq import gptq
from panscan.quantize.partial import INDEX_FILE, PartialCheckpoint
from panscan.quantize.source import DenseCheckpoint


@dataclass(slots=True)
class CheckpointWriter:
    """Writes the files of a quantised checkpoint, those that are not finished yet.

    Args:
        source: the dense checkpoint.
        weight_format: format of its decoder matrices.
        target: directory of the files.
    """

    source: DenseCheckpoint
    weight_format: WeightFormat
    target: PartialCheckpoint

    @property
    def bytes(self) -> int:
        """Estimated bytes of the checkpoint's weights."""
        stored, group = self.source.stored, self.weight_format.group_size
        dense = sum(stored[tensor].bytes for tensor in stored.keys() - self.source.matrices)
        for tensor in self.source.matrices:
            outputs, inputs = stored[tensor].shape
            dense += self.weight_format.facts.matrix_bytes(inputs, outputs, self.source.dtype(tensor).itemsize, group)
        return dense

    def write_dense(self) -> None:
        """Write the tensors that stay dense."""
        for number, names in enumerate(track("copying unquantised tensors", self.source.other_shards)):
            if not self.target.has(file := self._file(number)):
                self.target.write_tensors(file, {name: self.source.read(name) for name in names})

    def round_layers(self, device: torch.device) -> None:
        """Write decoder layers rounded to nearest on a device, one matrix at a time."""
        for number, layer in enumerate(track("quantising layers", self.source.layers)):
            if not self.target.has(self._layer_file(number)):
                matrices = {}
                for name, tensor in layer.items():
                    values = self.source.read(tensor).to(device)
                    outputs, inputs = values.shape
                    matrices[name] = quantized_linear(
                        inputs, outputs, self.weight_format, scale_type=values.dtype, device=device
                    )
                    matrices[name].quantize(values, stored_scale=values.dtype)
                self._write_layer(number, matrices)

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
        calibration.read(requests)
        with activity("quantising layers", total=count) as step:
            for number, layer in enumerate(calibration.layers()):
                if (matrices := self._finished_layer(number)) is None:
                    matrices = self._calibrated(number, layer, calibration.hessians(layer))
                    self._write_layer(number, matrices)
                for name, matrix in matrices.items():
                    weight = layer.get_submodule(name).get_parameter("weight")
                    weight.data = matrix.to(device).dequantized(weight.dtype)
                if number + 1 < count:
                    calibration.advance(layer)
                step.advance()

    def finish(self, *, calibrated: bool) -> None:
        """Write the other files that loading needs, ``config.json`` last."""
        for name, path in self.source.files.companions.items():
            self.target.write_bytes(name, path.read_bytes())
        files: dict[str, str] = {}
        total = 0
        for number in range(len(self.source.other_shards) + len(self.source.layers)):
            path = self.target.path / self._file(number)
            files |= dict.fromkeys(read_header(path), path.name)
            total += path.stat().st_size
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        self.target.write_json(INDEX_FILE, index)
        quantization = stored_config(self.weight_format, calibrated=calibrated)
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
        tensors = {}
        for name, tensor in self.source.layers[number].items():
            for leaf, values in stored_parts(matrices[name], self.source.dtype(tensor)).items():
                tensors[tensor.removesuffix("weight") + leaf] = values
        self.target.write_tensors(self._layer_file(number), tensors)

    def _finished_layer(self, number: int) -> dict[str, QuantizedLinear] | None:
        if not self.target.has(file := self._layer_file(number)):
            return None
        scheme = CompressedTensorsScheme(stored_config(self.weight_format, calibrated=True))
        matrices = {}
        stored = StoredTensors(self.target.path, read_header(self.target.path / file))
        for name, tensor in self.source.layers[number].items():
            path = tensor.removesuffix(".weight")
            tensors = MatrixTensors(stored, key_of(path), torch.device("cpu"))
            matrices[name] = scheme.linear_of(tensors, *self.source.stored[tensor].shape)
        return matrices

    def _layer_file(self, number: int) -> str:
        return self._file(len(self.source.other_shards) + number)

    def _file(self, number: int) -> str:
        total = len(self.source.other_shards) + len(self.source.layers)
        return f"model-{number + 1:05d}-of-{total:05d}.safetensors"
