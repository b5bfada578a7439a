"""The dense checkpoint to quantise: its decoder matrices, and the files that its other tensors go to."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from functools import cached_property

import torch
from safetensors import SafetensorError

from panscan.core import ModelError
from panscan.model.adapters import adapted_tensors
from panscan.model.linear.quantized import WeightFormat
from panscan.model.untrusted.headers import key_of

_MATRIX = re.compile(r"layers\.(\d+)\.((?:self_attn|mlp)\.\w+_proj)\.weight")
_SHARD_BYTES = 2_000_000_000  # of unquantised tensors in one file
_SAMPLED = 64  # values of each tensor in the fingerprint
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class DenseCheckpoint:
    """A Gemma 3 checkpoint with dense weights, read tensor by tensor.

    Args:
        name: ``mini``, ``tiny``, a directory or a hub id.
        revision: revision of a hub checkpoint.

    Attributes:
        files: its files.
        stored: type and shape of each tensor, by name.
        layers: the tensor of each decoder matrix, by layer and name (``self_attn.q_proj``).

    Raises:
        ModelError: the checkpoint is not available, is already quantised, or has no complete decoder.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        self._tensors = adapted_tensors(name, revision)
        self.files = self._tensors.files
        if (quantization := self.files.quantization) is not None:
            method = quantization.get("quant_method") or "an unknown method"
            raise ModelError(f"{name} is quantised already ({method}): quantise the checkpoint that it was made from")
        self.stored = self.files.tensors
        layers: dict[int, dict[str, str]] = defaultdict(dict)
        for tensor, stored in self.stored.items():
            if (matrix := _MATRIX.fullmatch(key_of(tensor))) is not None:
                layers[int(matrix[1])][matrix[2]] = tensor
                if stored.dtype not in _DTYPES or len(stored.shape) != 2:
                    raise ModelError(f"{name}: {tensor} is not a dense matrix: {stored.dtype} {list(stored.shape)}")
        count = self.files.config.get("text_config", self.files.config).get("num_hidden_layers")
        if sorted(layers) != list(range(int(-1 if count is None else count))):
            raise ModelError(f"{name}: config.json has {count} layers, its files {len(layers)}")
        self.layers = [dict(sorted(layers[number].items())) for number in range(len(layers))]

    def dtype(self, tensor: str) -> torch.dtype:
        """Return the type of a decoder matrix."""
        return _DTYPES[self.stored[tensor].dtype]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.bytes for stored in self.stored.values())

    @cached_property
    def matrices(self) -> set[str]:
        """The tensors of all decoder matrices."""
        return {tensor for layer in self.layers for tensor in layer.values()}

    @cached_property
    def other_shards(self) -> list[list[str]]:
        """Names of the tensors that stay dense, cut into files of a few gigabytes."""
        shards: list[list[str]] = [[]]
        size = 0
        for tensor in sorted(self.stored.keys() - self.matrices):
            if shards[-1] and size + self.stored[tensor].bytes > _SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += self.stored[tensor].bytes
        return shards

    def read(self, tensor: str) -> torch.Tensor:
        """Return a tensor on the host.

        Raises:
            ModelError: the file cannot be read.
        """
        try:
            return self._tensors.stored(tensor)
        except (OSError, SafetensorError) as error:
            file = self.stored[tensor].file
            raise ModelError(f"{self.name}: {file} cannot be read: {error}: download it again") from error

    def fingerprint(self) -> str:
        """Return a digest of the configuration and of each tensor's name, type, shape and some of its values."""
        digest = hashlib.sha256(repr(sorted(self.files.config.items(), key=str)).encode())
        for tensor, stored in sorted(self.stored.items()):
            digest.update(f"{tensor} {stored.dtype} {stored.shape}".encode())
            flat = self.read(tensor).reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED]
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def format_of(self, kind: str, group_size: int | None) -> WeightFormat:
        """Return the format of the decoder's matrices after quantisation.

        Args:
            kind: one of :data:`panscan.core.weight_formats.WEIGHT_KINDS`.
            group_size: input channels per scale; None: the largest supported size that divides every matrix.

        Raises:
            SettingError: the group size does not divide a matrix, or the format has no groups.
        """
        return WeightFormat.fitting(kind, group_size, {self.stored[tensor].shape[1] for tensor in self.matrices})
