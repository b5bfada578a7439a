"""The dense checkpoint to quantise: its decoder matrices, and the files that its other tensors go to."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from panscan.core import ModelError, SettingError
from panscan.linear.quantized import WeightFormat
from panscan.model.checkpoint import CheckpointFiles, checkpoint_files
from panscan.settings import GROUP_SIZES

__all__ = ["DenseCheckpoint", "choose_format", "decoder_matrix"]

"""Group sizes that kernels have, best first."""
_MATRIX = re.compile(
    r"(?:language_model\.model|model\.language_model|language_model|model)\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+_proj)\.weight"
)
_SHARD_BYTES = 2_000_000_000  # of unquantised tensors in one file
_SAMPLED = 64  # values of each tensor in the fingerprint
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def decoder_matrix(tensor: str) -> tuple[int, str] | None:
    """Return layer and name (``self_attn.q_proj``) of a decoder matrix's tensor; None for any other tensor."""
    found = _MATRIX.fullmatch(tensor)
    return None if found is None else (int(found[1]), found[2])


@dataclass(slots=True)
class _Stored:
    """Facts of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    path: Path

    @property
    def bytes(self) -> int:
        sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}
        return prod(self.shape) * sizes.get(self.dtype, 1)


class DenseCheckpoint:
    """A Gemma 3 checkpoint with dense weights, read tensor by tensor.

    Args:
        name: ``mini``, ``tiny``, a directory or a hub id.
        revision: revision of a hub checkpoint.

    Raises:
        ModelError: the checkpoint is not available, is already quantised, or has no complete decoder.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name = name
        self.files: CheckpointFiles = checkpoint_files(name, revision)
        if (stored := self.files.config.get("quantization_config")) is not None:
            method = stored.get("quant_method") if isinstance(stored, dict) else None
            method = method or "an unknown method"
            raise ModelError(f"{name} is quantised already ({method}): quantise the checkpoint that it was made from")
        self._stored = self._read_headers()
        layers: dict[int, dict[str, str]] = defaultdict(dict)
        for tensor, facts in self._stored.items():
            if (found := decoder_matrix(tensor)) is not None:
                layers[found[0]][found[1]] = tensor
                if facts.dtype not in _DTYPES or len(facts.shape) != 2:
                    raise ModelError(f"{name}: {tensor} is not a dense matrix: {facts.dtype} {list(facts.shape)}")
        text = self.files.config.get("text_config", self.files.config)
        if sorted(layers) != list(range(int(text.get("num_hidden_layers", -1)))):
            raise ModelError(f"{name}: config.json has {text.get('num_hidden_layers')} layers, its files {len(layers)}")
        self.layers = [dict(sorted(layers[number].items())) for number in range(len(layers))]
        """The tensor of each decoder matrix, by layer and name."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored[tensor].shape

    def dtype(self, tensor: str) -> torch.dtype:
        """Return the type of a decoder matrix."""
        return _DTYPES[self._stored[tensor].dtype]

    def bytes_of(self, tensors: Iterable[str]) -> int:
        """Return the bytes of some tensors."""
        return sum(self._stored[tensor].bytes for tensor in tensors)

    @property
    def reads_images(self) -> bool:
        """Whether the checkpoint has a vision tower."""
        return "vision_config" in self.files.config

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(facts.bytes for facts in self._stored.values())

    @cached_property
    def widths(self) -> set[int]:
        """Input channels of the decoder matrices."""
        return {self._stored[tensor].shape[1] for layer in self.layers for tensor in layer.values()}

    @cached_property
    def other_shards(self) -> list[list[str]]:
        """Names of the tensors that stay dense, cut into files of a few gigabytes."""
        quantized = {tensor for layer in self.layers for tensor in layer.values()}
        shards: list[list[str]] = [[]]
        size = 0
        for tensor in sorted(self._stored.keys() - quantized):
            if shards[-1] and size + self._stored[tensor].bytes > _SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += self._stored[tensor].bytes
        return shards

    def read(self, tensor: str) -> torch.Tensor:
        """Return a tensor on the host.

        Raises:
            ModelError: the file cannot be read.
        """
        path = self._stored[tensor].path
        with self._readable(path), safe_open(path, "pt") as file:
            values: torch.Tensor = file.get_tensor(tensor)
        return values

    def fingerprint(self) -> str:
        """Return a digest of the configuration and of each tensor's name, type, shape and some of its values."""
        digest = hashlib.sha256(repr(sorted(self.files.config.items(), key=str)).encode())
        for tensor, facts in sorted(self._stored.items()):
            digest.update(f"{tensor} {facts.dtype} {facts.shape}".encode())
            flat = self.read(tensor).reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED]
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _read_headers(self) -> dict[str, _Stored]:
        found = {}
        for path in sorted({*self.files.weights.values()}):
            with self._readable(path), safe_open(path, "pt") as file:
                for tensor in file.keys():  # noqa: SIM118 - it is no dict
                    part = file.get_slice(tensor)
                    found[tensor] = _Stored(tuple(part.get_shape()), part.get_dtype(), path)
        return {tensor: found[tensor] for tensor in self.files.weights}

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.name}: {path.name} cannot be read: {error}: download it again") from error


def choose_format(checkpoint: DenseCheckpoint, kind: str, group_size: int | None) -> WeightFormat:
    """Return the format of a checkpoint's decoder matrices.

    Args:
        checkpoint: checkpoint to quantise.
        kind: one of :data:`panscan.settings.WEIGHT_KINDS`.
        group_size: group size of ``int4``; None: the largest usual one that divides every matrix.

    Raises:
        SettingError: the group size does not divide a matrix, or the kind has no groups.
    """
    flag = "--quantization-group-size"
    if kind != "int4":
        if group_size is not None:
            raise SettingError(f"{flag} is for int4: {kind} has one scale per output channel")
        return WeightFormat(kind)
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in checkpoint.widths)]
    if not fitting:
        raise SettingError(
            f"--quantization int4: no group size divides the {min(checkpoint.widths)} input channels"
            " of every matrix: use int8 or fp8"
        )
    if group_size is not None and group_size not in fitting:
        raise SettingError(
            f"{flag} {group_size} does not divide every matrix of {checkpoint.name}: use"
            f" {' or '.join(map(str, fitting))}"
        )
    return WeightFormat("int4", group_size or fitting[0])
