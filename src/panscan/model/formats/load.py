"""Load published quantised checkpoints as Transformers models with :class:`QuantizedLinear` in their decoder layers.

The model is built on the meta device, and its modules are filled one by one from the safetensors files. The target
device converts each matrix and keeps only the rank's part, so neither a dense copy of the model nor the whole model of
a tensor parallel group is ever in memory. ``from_pretrained`` is not used, because its quantisers need a package per
format, some also a GPU, and they change between Transformers versions. This module depends only on submodule names.

Quantised matrices outside the decoder layers (vision tower, projector) become dense ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from panscan.core import ModelError, UnsupportedError
from panscan.model.build import build_model, decoder_linears, set_computed_buffers, set_module
from panscan.model.formats.bitsandbytes import BitsAndBytesScheme
from panscan.model.formats.compressed import CompressedTensorsScheme
from panscan.model.formats.gptq import AwqScheme, GptqScheme
from panscan.model.formats.schemes import StoredScheme, unsupported_format
from panscan.model.formats.tensors import MatrixTensors, StoredTensors, key_of, names_of
from panscan.model.formats.torchao import TorchAoScheme
from panscan.model.linear.multiply import device_reason
from panscan.model.sharding import shard_config, shard_of

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


def stored_scheme(config: Mapping[str, Any] | Any, name: str) -> StoredScheme | None:
    """Return the quantisation format of a checkpoint.

    None if it is unquantised, or if Transformers loads the format (bitsandbytes where it is installed).

    Args:
        config: configuration of the checkpoint, as a mapping or a Transformers object.
        name: name of the checkpoint, for messages.

    Raises:
        UnsupportedError: the format is not supported; the message names those that are.
        ModelError: the quantisation configuration is damaged.
    """
    described = _quantization_of(config if isinstance(config, Mapping) else config.to_dict())
    if described is None:
        return None
    if not isinstance(described, Mapping):
        raise ModelError(f"--model {name}: quantization_config in config.json is not a mapping")
    method = str(described.get("quant_method") or described.get("method") or "").lower()
    try:
        scheme = next((known for known in SCHEMES if known.recognises(method, described)), None)
        if scheme is None:
            raise unsupported_format(_described(method, described))
        return None if scheme.by_transformers(described) else scheme(described)
    except UnsupportedError as error:
        raise UnsupportedError(f"--model {name}: {error}") from error
    except ValueError as error:
        raise ModelError(f"--model {name}: {error}") from error


@torch.no_grad()
def load_stored(
    name: str,
    config: Any,
    scheme: StoredScheme,
    tensors: StoredTensors,
    dtype: torch.dtype,
    device: torch.device,
    rank: int = 0,
    size: int = 1,
) -> Any:
    """Load a model, or one rank's part of it, from the tensors of a checkpoint.

    Args:
        name: name of the checkpoint, for messages.
        config: configuration of the whole model.
        scheme: quantisation format of the checkpoint.
        tensors: tensors of the checkpoint.
        dtype: type of unquantised parameters.
        device: device of the model.
        rank: which part, from 0.
        size: number of ranks.

    Raises:
        ModelError: configuration and tensors disagree, or tensors are damaged or missing.
        UnsupportedError: a matrix has an unsupported format, or cannot be split.
    """
    loading = _Loading(config, scheme, tensors, dtype, device, rank, size)
    try:
        model = loading.model()
        model.dequantized_from = " and ".join(loading.dequantized_formats)
    except ValueError as error:
        raise ModelError(f"--model {name}: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"--model {name}: {error}") from error
    for note in (*scheme.notes, *loading.notes()):
        log.info("%s: %s", scheme.name, note)
    return model


class _Loading:
    """State of one call of :func:`load_stored`: which tensors are still unused, and what was dequantised."""

    def __init__(
        self,
        config: Any,
        scheme: StoredScheme,
        tensors: StoredTensors,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        size: int,
    ) -> None:
        self._config, self._scheme, self._tensors = config, scheme, tensors
        self._dtype, self._device, self._rank, self._size = dtype, device, rank, size
        self._whole = build_model(config, dtype, torch.device("meta"))
        self._left = {key_of(name): name for name in tensors.names}
        self._dequantized: list[str] = []
        self.dequantized_formats: dict[str, None] = {}

    def model(self) -> Any:
        """Return the filled model.

        Raises:
            ValueError: configuration and tensors disagree, or tensors are damaged or missing.
            UnsupportedError: see :func:`load_stored`.
        """
        config = shard_config(self._config, self._size) if self._size > 1 else self._config
        model = build_model(config, self._dtype, torch.device("meta"))
        inside = {name for name, _ in decoder_linears(self._whole)}
        tied = self._tied_names()
        for name, linear in self._whole.named_modules():
            if isinstance(linear, nn.Linear) and f"{name}.weight" not in tied:
                self._fill_linear(model, name, linear, inside=name in inside)
        for name, parameter in self._whole.named_parameters():
            if name in tied or not self._is_meta(model, name):
                continue
            values = self._dense(name, tuple(parameter.shape))
            _set_parameter(model, name, shard_of(name, values, self._rank, self._size))
        allowed = {key_of(name) for name in tied}
        for key, name in self._left.items():
            if key in allowed or key.rpartition(".")[2] in _UNUSED:
                continue
            raise ValueError(f"unexpected tensor {name}: the model and config.json do not use it")
        set_computed_buffers(model, config, self._dtype, self._device)
        model.tie_weights()
        return model.eval()

    def notes(self) -> list[str]:
        """Return what was done to matrices outside the decoder layers."""
        if not self._dequantized:
            return []
        count, dtype = len(self._dequantized), str(self._dtype).removeprefix("torch.")
        return [
            f"{count} quantised matrices outside the decoder were converted to {dtype}, e.g. {self._dequantized[0]}"
        ]

    def _tied_names(self) -> set[str]:
        """Return the names of tied parameters."""
        if not getattr(self._config, "tie_word_embeddings", True):
            return set()
        head = self._whole.get_output_embeddings()
        return {f"{name}.weight" for name, module in self._whole.named_modules() if module is head}

    def _is_meta(self, model: Any, name: str) -> bool:
        """Return whether a parameter is not set yet; False for quantised matrices, which have no such parameter."""
        owner, _, leaf = name.rpartition(".")
        parameter = model.get_submodule(owner)._parameters.get(leaf)
        return parameter is not None and parameter.is_meta

    def _fill_linear(self, model: Any, name: str, linear: nn.Linear, *, inside: bool) -> None:
        """Set a matrix that the checkpoint quantises; skip others, which are set later as parameters."""
        key = key_of(name)
        stored = self._tensors.of_module(key, self._device)
        names = names_of(key, stored)
        if not self._is_quantized(stored, names, inside=inside):
            return
        quantized = self._scheme.linear_of(names, stored, linear.out_features, linear.in_features)
        if isinstance(quantized, torch.Tensor):
            if inside:
                self.dequantized_formats[self._scheme.describe(names, stored)] = None
            part = shard_of(f"{name}.weight", quantized.to(self._dtype), self._rank, self._size)
            _set_parameter(model, f"{name}.weight", part)
        elif inside:
            # At the first matrix, rather than after loading all of them.
            if (reason := device_reason(quantized.weight_format.kind, self._device)) is not None:
                raise UnsupportedError(f"the checkpoint's {reason}")
            if linear.bias is None:
                stored.skip_zero_bias(linear.out_features)
            else:
                bias = self._dense(f"{name}.bias", (linear.out_features,))
                quantized.bias = nn.Parameter(bias, requires_grad=False)
            by: Literal["rows", "columns"] = "columns" if name.rpartition(".")[2] in _BY_COLUMNS else "rows"
            set_module(model, name, quantized.shard(self._rank, self._size, by))
        else:
            self._dequantized.append(stored.weight_name)
            _set_parameter(model, f"{name}.weight", quantized.dequantized(self._dtype))
        for leaf in stored.taken:
            self._left.pop(f"{key}.{leaf}", None)

    def _is_quantized(self, stored: MatrixTensors, names: Sequence[str], *, inside: bool) -> bool:
        """Return whether a matrix is quantised; raise if configuration and tensors disagree."""
        marked = any(leaf in stored for leaf in self._scheme.markers)
        configured = marked
        if not self._scheme.dequantizes and (marked or inside or self._scheme.covers_all):
            configured = self._scheme.quantizes(names)
        if configured and not marked:
            missing = f"{stored.weight_name.removesuffix('weight')}{self._scheme.markers[-1]}"
            raise ValueError(f"config.json: {stored.weight_name} is quantised, but the tensor {missing} is missing")
        if marked and not configured:
            raise ValueError(f"{stored.weight_name} is quantised, but config.json excludes it from quantisation")
        return marked

    def _dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        key = key_of(name)
        if key not in self._tensors:
            raise ValueError(f"the tensor {name} is missing: download the checkpoint again")
        self._left.pop(key, None)
        return self._tensors.read_dense(key, shape, self._device).to(self._dtype)


def _set_parameter(model: Any, name: str, values: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    # A view would keep the whole tensor in memory.
    values = values.clone() if values.untyped_storage().nbytes() > values.numel() * values.element_size() else values
    setattr(model.get_submodule(owner), leaf, nn.Parameter(values.contiguous(), requires_grad=False))


def _quantization_of(config: Mapping[str, Any]) -> Any:
    """Return the quantisation configuration, which old versions of compressed-tensors store under another name."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for field in ("quantization_config", "compression_config"):
            if place.get(field) is not None:
                return place[field]
    return None


def _described(method: str, config: Mapping[str, Any]) -> str:
    """Return the name of an unknown format, for messages."""
    if not method:
        return "an unknown format (quantization_config in config.json has no quant_method)"
    if method == "fp8" and config.get("weight_block_size"):
        return f"block fp8 (blocks of {config['weight_block_size']})"
    return repr(method)[1:40].rstrip("'")
