"""The files of a checkpoint, read once for every command: configuration, weights, output matrix and quantisation.

Where the configuration contradicts the stored tensors, the tensors decide, whichever command and runner reads them.
"""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from panscan.core import ModelError, PanscanWarning, UnsupportedError
from panscan.model.bundled import bundled_directory
from panscan.model.families import refused_model
from panscan.model.formats.schemes import QUANTIZATION_FIELDS, quantizations_in, unsupported_format
from panscan.model.formats.tensors import StoredTensors
from panscan.model.hub import checkpoint_directory, model_source
from panscan.model.hub_errors import PICKLED, friendly_errors
from panscan.model.untrusted.adapter import ADAPTER_CONFIG
from panscan.model.untrusted.check import CheckedFiles, check_directory
from panscan.model.untrusted.headers import EMBEDDING, HEAD, key_of, missing_files
from panscan.model.untrusted.reading import DamagedFileError, JsonObject

COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
_MATRIX = re.compile(r"layers\.\d+\.(?:self_attn|mlp)\.\w+_proj\.(.+)")
_UNMERGED = re.compile(r"\.(lora_\w+|base_layer|modules_to_save)\.")
_ROWS = 16_384  # of two matrices that are compared at once


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointFiles(CheckedFiles):
    """Files of a Gemma 3 checkpoint on this machine.

    Args:
        directory: their directory.
        config: contents of ``config.json``, with ``tie_word_embeddings`` and the quantisation as the tensors have them.
        tensors: type, shape and file of each stored tensor; empty if the weights are not downloaded.
    """

    @property
    def names(self) -> dict[str, str]:
        """The name of each stored tensor, by its key."""
        return {key_of(name): name for name in self.tensors}

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The configuration, and that of the decoder inside it, if there is one."""
        return [part for part in (self.config, self.config.get("text_config")) if isinstance(part, dict)]

    @property
    def reads_images(self) -> bool:
        """Whether the checkpoint has a vision tower."""
        return "vision_config" in self.config

    @property
    def companions(self) -> dict[str, Path]:
        """Files of the tokenizer, the processor and generation, by name."""
        return {name: path for name in COMPANIONS if (path := self.directory / name).is_file()}

    @property
    def plain(self) -> bool:
        """Whether Transformers, given the directory, reads these tensors and nothing else."""
        single = "model.safetensors"
        files = {stored.file for stored in self.tensors.values()}
        return not (self.directory / ADAPTER_CONFIG).exists() and (single not in files or files == {single})

    @property
    def quantization(self) -> JsonObject | None:
        """How ``config.json`` describes the quantisation of the tensors; None if they are dense."""
        return next(quantizations_in(self.config), None)

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding, as in all published models."""
        return bool(self.config.get("tie_word_embeddings", True))

    def stored_name(self, key: str) -> str:
        """Return the name of the tensor with a key; with tied embeddings, both matrices are one tensor.

        Raises:
            DamagedFileError: there is none.
        """
        names = self.names
        other = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(key) if self.tied else None
        if (name := names.get(key) or names.get(str(other))) is None:
            raise DamagedFileError(f"the tensor {key} is missing: download the checkpoint again")
        return name

    def open_by_key(self) -> StoredTensors:
        """Open the weights, to be read by key."""
        return StoredTensors(self.directory, self.tensors)


def checked_files(name: str, revision: str | None = None, *, weights: bool = True) -> CheckedFiles:
    """Return the files of a checkpoint of any family, downloaded if necessary, after checking them.

    Args:
        name: ``mini``, ``tiny``, a directory or a hub id, of a checkpoint or an adapter.
        revision: revision of a hub checkpoint.
        weights: False if the configuration, the tokenizer and the processor are enough.

    Raises:
        ModelError: there is no such checkpoint, it cannot be downloaded, or a file is damaged.
    """
    origin = model_source(name, revision)
    directory = bundled_directory(origin.base)
    if directory is None:
        directory = checkpoint_directory(origin.base, origin.revision, weights=weights)
    with friendly_errors(name):
        return check_directory(directory)


def checkpoint_files(name: str, revision: str | None = None, *, weights: bool = True) -> CheckpointFiles:
    """Return the files of a Gemma 3 checkpoint (arguments: :func:`checked_files`).

    Raises:
        ModelError: as :func:`checked_files`; or it is not a Gemma 3 that generates text, or its weights are missing
            or not in safetensors files.
        UnsupportedError: its tensors are quantised in an unknown format.
    """
    checked = checked_files(name, revision, weights=False)
    with friendly_errors(name):
        if (reason := refused_model(checked.config)) is not None:
            raise ModelError(f"--model {name}: {reason}")
        if weights:
            checked = checked_files(name, revision, weights=True)
            if not checked.tensors:
                raise ModelError(f"--model {name}: {_why_no_weights(checked.directory)}")
        return _files_of(checked, name)


@lru_cache(maxsize=16)
def _files_of(checked: CheckedFiles, name: str) -> CheckpointFiles:
    """Return the files of a checked directory; a contradiction is resolved, and reported, once per process."""
    files = CheckpointFiles(checked.directory, deepcopy(dict(checked.config)), checked.tensors)
    if not files.tensors:
        return files
    leaves = {tensor: match[1] for tensor in files.tensors if (match := _MATRIX.fullmatch(key_of(tensor)))}
    if (unmerged := next(filter(_UNMERGED.search, files.tensors), None)) is not None:
        raise DamagedFileError(
            f"{files.tensors[unmerged].file}: {unmerged} belongs to an adapter that is not merged: save the model after"
            " merge_and_unload()"
        )
    quantized = [
        tensor
        for tensor, leaf in leaves.items()
        if leaf not in ("weight", "bias") or files.tensors[tensor].dtype not in ("BF16", "F16", "F32", "F64")
    ]
    described = any(quantizations_in(files.config))
    notes = []
    if leaves and described and not quantized:
        notes.append("ignoring quantization_config of config.json: the tensors are not quantised")
        for part in files.parts:
            for field in QUANTIZATION_FIELDS:
                part.pop(field, None)
    if any(files.tensors[tensor].dtype == "U32" for tensor, leaf in leaves.items() if leaf == "weight"):
        raise UnsupportedError(f"--model {name}: {unsupported_format('MLX')}")
    if quantized and not described:
        raise DamagedFileError(
            f"config.json: it has no quantization_config, but {quantized[0]} is quantised: download it again"
        )
    if (files.directory / ADAPTER_CONFIG).is_file():
        notes.append(f"ignoring {ADAPTER_CONFIG}: the directory has the weights of a whole model")
    if (note := _resolve_head(files)) is not None:
        notes.append(note)
    for note in notes:
        warnings.warn(f"--model {name}: {note}", PanscanWarning, stacklevel=2)
    return files


def _resolve_head(files: CheckpointFiles) -> str | None:
    """Correct ``tie_word_embeddings`` in the configuration; return the warning about it, if any."""
    stored = {key_of(tensor).partition(".")[0] for tensor in files.tensors}
    absent = {"embed_tokens", "lm_head"} - stored
    if absent and (not files.tied or len(absent) > 1):
        raise DamagedFileError(
            f"config.json: tie_word_embeddings is {str(files.tied).lower()}, but the weights have no"
            f" {min(absent)}.weight: download it again"
        )
    if not files.tied or "lm_head" in absent or _same_matrices(files):
        return None
    for part in files.parts:
        part["tie_word_embeddings"] = False
    return f"tie_word_embeddings of config.json is true, but {HEAD} differs from the embedding: using both"


def _same_matrices(files: CheckpointFiles) -> bool:
    """Return whether the stored output matrix is the embedding, or stands for it."""
    tensors = files.open_by_key()
    if HEAD not in tensors:  # quantised
        return False
    if EMBEDDING not in tensors:
        return True
    head, embedding = tensors.slice(HEAD), tensors.slice(EMBEDDING)
    parts = (slice(row, row + _ROWS) for row in range(0, tensors.shape(HEAD)[0], _ROWS))
    return all(torch.equal(head[part].float(), embedding[part].float()) for part in parts)


def _why_no_weights(directory: Path) -> str:
    """Return why a directory has no weights that can be read."""
    names = {path.name for path in directory.iterdir()}
    if absent := missing_files(directory, names):
        return absent
    if ADAPTER_CONFIG in names:
        return f"{ADAPTER_CONFIG}: this is an adapter, without the weights of a model: merge it into its base model"
    tensors = sorted(name for name in names if name.endswith(".safetensors"))
    if any("-of-" in name for name in tensors):
        return f"{tensors[0]} is one of several files, but their model.safetensors.index.json is missing: download it"
    if tensors:
        return f"no model.safetensors: rename {tensors[0]} if it holds the weights"
    if gguf := next((name for name in sorted(names) if name.endswith(".gguf")), None):
        return f"{gguf}: GGUF files are not supported: use the checkpoint in safetensors files"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return PICKLED
    return "no model.safetensors: download the weights again"
