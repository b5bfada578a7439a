"""Load published quantised checkpoints as Transformers models with :class:`QuantizedLinear` in their decoder layers.

The model is built on the meta device, and its modules are filled one by one from the safetensors files. The target
device converts each matrix and keeps only the rank's part, so neither a dense copy of the model nor the whole model of
a tensor parallel group is ever in memory. ``from_pretrained`` is not used, because its quantisers need a package per
format, some also a GPU, and they change between Transformers versions. This module depends only on submodule names.

Quantised matrices outside the decoder layers (vision tower, projector) become dense ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from panscan.core import ModelError, UnsupportedError
from panscan.model.build import build_model, decoder_linears, set_computed_buffers, set_part
from panscan.model.formats.bitsandbytes import BitsAndBytesScheme
from panscan.model.formats.compressed import CompressedTensorsScheme
from panscan.model.formats.gptq import AwqScheme, GptqScheme
from panscan.model.formats.schemes import StoredScheme, quantizations_in, unsupported_format
from panscan.model.formats.tensors import MatrixTensors, StoredTensors
from panscan.model.formats.torchao import TorchAoScheme
from panscan.model.hub_errors import naming_errors
from panscan.model.linear.multiply import device_reason
from panscan.model.sharding import shard_config, shard_of
from panscan.model.untrusted.headers import EMBEDDING, HEAD, key_of

log = logging.getLogger("panscan.model")

SCHEMES: tuple[type[StoredScheme], ...] = (
    CompressedTensorsScheme,
    GptqScheme,
    AwqScheme,
    TorchAoScheme,
    BitsAndBytesScheme,
)
"""Every format of quantised checkpoints that can be read."""
_UNUSED = (  # leaves of tensors that the model computes, or that belong to quantised caches
    "inv_freq",
    "original_inv_freq",
    "position_ids",
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
)
_BY_COLUMNS = ("o_proj", "down_proj")


def stored_scheme(config: Mapping[str, Any], name: str) -> StoredScheme | None:
    """Return the quantisation format of a checkpoint.

    None if it is unquantised, or if Transformers loads the format (bitsandbytes where it is installed).

    Args:
        config: contents of ``config.json``.
        name: name of the checkpoint, for messages.

    Raises:
        UnsupportedError: the format is not supported; the message names those that are.
        ModelError: the quantisation configuration is damaged.
    """
    described = next(quantizations_in(config), None)
    if described is None:
        return None
    if not isinstance(described, Mapping):
        raise ModelError(f"--model {name}: quantization_config in config.json is not a mapping")
    method = str(described.get("quant_method") or described.get("method") or "").lower()
    with naming_errors(name):
        scheme = next((known for known in SCHEMES if known.recognises(method, described)), None)
        if scheme is None:
            kind = repr(method)[1:40].rstrip("'")
            if not method:
                kind = "an unknown format (quantization_config in config.json has no quant_method)"
            elif sizes := described.get("weight_block_size"):
                kind = f"block {kind} (blocks of {sizes})"
            raise unsupported_format(kind)
        return None if scheme.by_transformers(described) else scheme(described)


@dataclass(slots=True)
class StoredLoader:
    """Loads a model, or one rank's part of it, from the tensors of a checkpoint.

    Args:
        config: configuration of the whole model.
        scheme: quantisation format of the checkpoint.
        tensors: tensors of the checkpoint.
        dtype: type of unquantised parameters.
        device: device of the model.
        rank: which part, from 0.
        size: number of ranks.
    """

    config: Any
    scheme: StoredScheme
    tensors: StoredTensors
    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    size: int = 1
    _left: dict[str, str] = field(default_factory=dict)  # unused tensors, by key
    _outside: list[str] = field(default_factory=list)  # dequantised matrices outside the decoder layers
    _dequantized: dict[str, None] = field(default_factory=dict)  # formats of those inside

    @torch.no_grad()
    def load(self, name: str) -> Any:
        """Return the model.

        Args:
            name: name of the checkpoint, for messages.

        Raises:
            ModelError: configuration and tensors disagree, or tensors are damaged or missing.
            UnsupportedError: a matrix has an unsupported format, or cannot be split.
        """
        self._left = dict(self.tensors.names)
        with naming_errors(name):
            model = self._filled_model()
        model.dequantized_from = " and ".join(self._dequantized)
        notes = [*self.scheme.notes]
        if self._outside:
            notes.append(
                f"{len(self._outside)} quantised matrices outside the decoder were converted to"
                f" {str(self.dtype).removeprefix('torch.')}, e.g. {self._outside[0]}"
            )
        for note in notes:
            log.info("%s: %s", self.scheme.name, note)
        return model.eval()

    def _filled_model(self) -> Any:
        config = shard_config(self.config, self.size)
        full, model = (build_model(shape, self.dtype, torch.device("meta")) for shape in (self.config, config))
        inside = {name for name, _ in decoder_linears(full)}
        tied = {HEAD} if config.tie_word_embeddings else set()
        for name, linear in full.named_modules():
            if isinstance(linear, nn.Linear) and f"{name}.weight" not in tied:
                self._fill_linear(model, name, linear, inside=name in inside)
        if len(self._left) == len(self.tensors.names):
            raise ValueError(f"config.json: quantization_config names {self.scheme.method}, but no matrix is quantised")
        for name, parameter in full.named_parameters():
            owner, _, leaf = name.rpartition(".")
            empty = model.get_submodule(owner)._parameters.get(leaf)  # quantised matrices have no such parameter
            if name not in tied and empty is not None and empty.is_meta:
                values = self._dense(name, tuple(parameter.shape))
                _set_parameter(model, name, shard_of(name, values, self.rank, self.size))
        for key, name in self._left.items():
            if key not in tied and key.rpartition(".")[2] not in _UNUSED:
                raise ValueError(f"unexpected tensor {name}: the model and config.json do not use it")
        set_computed_buffers(model, config, self.dtype, self.device)
        model.tie_weights()
        return model

    def _fill_linear(self, model: Any, name: str, linear: nn.Linear, *, inside: bool) -> None:
        """Set a matrix whose tensors are quantised; skip others, which are set later as parameters."""
        key = key_of(name)
        stored = MatrixTensors(self.tensors, key, self.device)
        if not any(leaf in stored for leaf in self.scheme.markers):
            return
        quantized = self.scheme.linear_of(stored, linear.out_features, linear.in_features)
        if isinstance(quantized, torch.Tensor):
            if inside:
                self._dequantized[self.scheme.describe(stored)] = None
            part = shard_of(f"{name}.weight", quantized.to(self.dtype), self.rank, self.size)
            _set_parameter(model, f"{name}.weight", part)
        elif inside:
            # At the first matrix, rather than after loading all of them.
            if (reason := device_reason(quantized.weight_format.kind, self.device)) is not None:
                raise UnsupportedError(f"the checkpoint's {reason}")
            if linear.bias is None:
                stored.skip_zero_bias(linear.out_features)
            else:
                bias = self._dense(f"{name}.bias", (linear.out_features,))
                quantized.bias = nn.Parameter(bias, requires_grad=False)
            by: Literal["rows", "columns"] = "columns" if name.rpartition(".")[2] in _BY_COLUMNS else "rows"
            set_part(model, name, quantized.shard(self.rank, self.size, by))
        else:
            self._outside.append(stored.weight_name)
            _set_parameter(model, f"{name}.weight", quantized.dequantized(self.dtype))
        for leaf in stored.taken:
            self._left.pop(f"{key}.{leaf}", None)

    def _dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        key = key_of(name)
        if key == EMBEDDING and key not in self.tensors and self.config.tie_word_embeddings:
            key = HEAD  # some software stores this one of the two names
        if key not in self.tensors:
            raise ValueError(f"the tensor {name} is missing: download the checkpoint again")
        self._left.pop(key, None)
        return self.tensors.read(key, self.device, shape).to(self.dtype)


def _set_parameter(model: Any, name: str, values: torch.Tensor) -> None:
    # A view would keep the whole tensor in memory.
    values = values.clone() if values.untyped_storage().nbytes() > values.numel() * values.element_size() else values
    set_part(model, name, nn.Parameter(values.contiguous(), requires_grad=False))
