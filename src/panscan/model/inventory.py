"""Inventory of a checkpoint's files: tensors, their quantisation and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from panscan.model.checkpoint import stored_scheme_of
from panscan.model.files import checkpoint_files
from panscan.model.formats.schemes import StoredScheme
from panscan.model.formats.tensors import MatrixTensors, StoredTensors
from panscan.model.hub_errors import naming_errors

Part = Literal["decoder", "vision", "projector", "embedding", "head", "other"]
_PARTS: tuple[tuple[str, Part], ...] = (
    ("layers.", "decoder"),
    ("vision_tower.", "vision"),
    ("multi_modal_projector.", "projector"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "head"),
)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A quantised matrix with its scales and zero points, or an unquantised tensor.

    Args:
        name: parameter name in the checkpoint's layout, such as ``language_model.model.layers.0.mlp.up_proj.weight``.
        part: part of the model.
        quantized: whether the values are quantised.
        stored_as: type, such as ``bfloat16`` or, if quantised, ``int4, groups of 128``.
        bytes: size of all stored tensors.
    """

    name: str
    part: Part
    quantized: bool
    stored_as: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of a checkpoint.

    Args:
        format: quantisation format, such as ``compressed-tensors pack-quantized``; None if unquantised, or if
            Transformers loads the format.
        notes: differences between the computation that the checkpoint describes and ours.
        folds_scales: whether tools that write the format fold scales into norms.
        tensors: tensors sorted by name.
    """

    format: str | None
    notes: tuple[str, ...]
    folds_scales: bool
    tensors: tuple[TensorFacts, ...]

    def of_part(self, part: Part) -> tuple[TensorFacts, ...]:
        """Return the tensors of a part of the model."""
        return tuple(facts for facts in self.tensors if facts.part == part)

    def quantized(self, part: Part) -> tuple[TensorFacts, ...]:
        """Return the quantised matrices of a part of the model."""
        return tuple(facts for facts in self.of_part(part) if facts.quantized)

    def bytes_of(self, part: Part) -> int:
        """Return the bytes of a part of the model."""
        return sum(facts.bytes for facts in self.of_part(part))


def inventory(name: str, revision: str | None = None) -> Inventory:
    """Return the inventory of a checkpoint, read from the headers of its files.

    Args:
        name: a directory, a hub id, or a bundled model.
        revision: revision of a hub checkpoint.

    Raises:
        ModelError: the checkpoint is not available, is damaged, or is not in safetensors files.
        UnsupportedError: the quantisation format is not supported.
    """
    scheme, files = stored_scheme_of(name, revision), checkpoint_files(name, revision)
    with naming_errors(name):
        tensors = files.open_by_key()
        facts = [fact for key in tensors.modules for fact in _facts_of(key, scheme, tensors)]
    entries = tuple(sorted(facts, key=lambda fact: fact.name))
    if scheme is None:
        return Inventory(None, (), False, entries)
    return Inventory(scheme.name, scheme.notes, scheme.folds_scales, entries)


def _facts_of(key: str, scheme: StoredScheme | None, tensors: StoredTensors) -> list[TensorFacts]:
    """Return one entry for a quantised matrix and its companions, and one for each other tensor of a module."""
    leaves = dict(tensors.modules[key])
    part: Part = next((part for start, part in _PARTS if f"{key}.".startswith(start)), "other")
    facts = []
    if scheme is not None and any(marker in leaves for marker in scheme.markers):
        matrix = MatrixTensors(tensors, key, torch.device("cpu"))
        kind = scheme.describe(matrix)
        size = sum(tensors.bytes(f"{key}.{leaf}") for leaf in leaves if leaf != "bias")
        facts.append(TensorFacts(matrix.weight_name, part, True, kind, size))
        leaves = {leaf: name for leaf, name in leaves.items() if leaf == "bias"}
    for leaf, name in leaves.items():
        tensor = f"{key}.{leaf}" if key else leaf
        dtype = str(tensors.dtype(tensor)).removeprefix("torch.")
        facts.append(TensorFacts(name, part, False, dtype, tensors.bytes(tensor)))
    return facts
