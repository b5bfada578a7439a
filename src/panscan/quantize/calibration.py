"""Layer-by-layer calibration: statistics of the inputs of each decoder matrix over calibration prompts.

Prompts are prepared as for inference, with pan-and-scan views and image tokens. The model's own forward pass computes
masks and positions once; stand-ins for the decoder layers record the arguments that all layers share. Each layer then
runs over all prompts, after the layers before it have been quantised. The device holds one layer at a time, and the
host holds the hidden states and attention masks of all prompts; masks take one bit per pair of positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils._pytree import tree_map

from panscan.core import Request, SettingError
from panscan.core.activity import track
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import collate, prepare, read_images
from panscan.quantize.gptq import Hessian

_MASKS, _BITS = 2, 8  # of each prompt: full and sliding attention; of a byte
_USUAL_WIDTH = 2560  # of a text model whose config.json leaves the default out


def check_prompt_memory(tokens: Sequence[int], config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Check that the host can hold the calibration prompts.

    Args:
        tokens: length of each prompt.
        config: ``config.json`` of the dense checkpoint.
        dtype: data type of the hidden states.

    Raises:
        SettingError: they need more than the available memory.
    """
    width = int(config.get("text_config", config).get("hidden_size", _USUAL_WIDTH))
    needed = sum(count * width * dtype.itemsize + _MASKS * count**2 // _BITS for count in tokens)
    if needed > (available := psutil.virtual_memory().available):
        raise SettingError(
            f"--calibration: {len(tokens)} prompts need {needed / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB"
            " are available: lower --num-prompts or --max-pages"
        )


class Calibration:
    """Hidden states of prompts on their way through a decoder.

    Args:
        loaded: a dense model on the host, whose decoder layers are consumed.
        device: device to compute on.
    """

    def __init__(self, loaded: Loaded, device: torch.device) -> None:
        self._loaded, self._device = loaded, device
        self._decoder = loaded.model.get_decoder()
        self._states: list[torch.Tensor] = []
        self._arguments: list[dict[str, dict[str, Any]]] = []
        self._present = 0

    @torch.no_grad()
    def read(self, requests: Sequence[Request]) -> None:
        """Embed prompts and their images."""
        loaded, layers = self._loaded, self._decoder.layers
        recorders = [_Recorder(kind) for kind in loaded.model.config.get_text_config().layer_types]
        self._decoder.layers = nn.ModuleList(recorders)
        loaded.model.to(self._device)
        loaded.model.hf_device_map = {"": str(self._device)}
        try:
            for request in track("reading documents", requests):
                item = prepare(read_images(request), loaded.reader, self._device, loaded.dtype, on_device=False)
                loaded.model.model(**collate([item], loaded), use_cache=False)
                self._states.append(recorders[0].hidden.cpu())
                self._arguments.append({recorder.kind: tree_map(_stored, recorder.arguments) for recorder in recorders})
        finally:
            self._decoder.layers = layers

    def layers(self) -> Iterator[nn.Module]:
        """Yield each layer on the device, and drop its weights when the next one is due."""
        for number, layer in enumerate(self._decoder.layers):
            self._present = number
            yield layer.to(self._device)
            layer.to("meta")

    @torch.no_grad()
    def hessians(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return the Hessian of each matrix of the present layer, by the matrix's name."""
        watched = {name: Hessian(layer.get_submodule(name).in_features, self._device) for name in _WATCHED}
        hooks = [
            layer.get_submodule(name).register_forward_pre_hook(lambda _, inputs, hessian=hessian: hessian.add(*inputs))
            for name, hessian in watched.items()
        ]
        try:
            for number in range(len(self._states)):
                self._run(layer, number)
        finally:
            for hook in hooks:
                hook.remove()
        return {matrix: hessian.values for name, hessian in watched.items() for matrix in _WATCHED[name]}

    @torch.no_grad()
    def advance(self, layer: nn.Module) -> None:
        """Replace the hidden states by the present layer's outputs."""
        for number in range(len(self._states)):
            self._states[number] = self._run(layer, number).cpu()

    def _run(self, layer: nn.Module, number: int) -> torch.Tensor:
        kind = self._loaded.model.config.get_text_config().layer_types[self._present]
        states = self._states[number].to(self._device)
        restored = partial(_restored, tokens=states.shape[1], device=self._device)
        output: torch.Tensor = layer(states, **tree_map(restored, self._arguments[number][kind]))
        return output


_WATCHED = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Matrices whose inputs are watched, each with those that have the same inputs."""


class _Recorder(nn.Module):
    """Stands in for a decoder layer: keeps what it is called with, and returns its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.hidden = torch.empty(0)
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.hidden, self.arguments = hidden_states, arguments
        return hidden_states


def _stored(value: Any) -> Any:
    """Return a tensor on the host, a mask packed along its keys, and any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return np.packbits(value.numpy(force=True), axis=-1) if value.dtype == torch.bool else value.cpu()
    return value


def _restored(value: Any, tokens: int, device: torch.device) -> Any:
    """Return a stored tensor or mask on a device, and any other value unchanged."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.unpackbits(value, axis=-1, count=tokens)).bool()
    return value.to(device) if isinstance(value, torch.Tensor) else value
