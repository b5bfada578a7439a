"""Adapter directories as PEFT writes them: which directories are adapters, and the checked ``adapter_config.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import msgspec
import regex

from panscan.core.option import shorten
from panscan.model.untrusted.reading import DamagedFileError, read_json, typed

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_MODEL_WEIGHTS = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?")
_MAX_PATTERNS = 1024
_Name = Annotated[str, msgspec.Meta(max_length=4096, pattern="^[^\0]*$")]
_Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Alpha = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
_Pattern = Annotated[str, msgspec.Meta(max_length=512)]
_MATCH_SECONDS, _SLOW_SECONDS = 50e-6, 0.5  # of one match, and of what all matches of a mapping take beyond that
_NO_EFFECT = (
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
    "target_modules",
    "task_type",
    "unsloth_fixed",
)
"""Fields that change nothing once the tensors are there. PEFT, too, sets ``fan_in_fan_out`` to false for Gemma 3."""
_KEEPS_BASE = (None, True, False, "eva", "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base unchanged."""


class AdapterConfig(msgspec.Struct, dict=True):
    """The fields of ``adapter_config.json`` that decide the merged weights, or name the base, as PEFT writes them."""

    base_model_name_or_path: _Name | None = None
    revision: _Name | None = None
    r: _Rank = 8
    lora_alpha: _Alpha = 8.0
    use_rslora: bool | None = False
    use_dora: bool | None = False
    rank_pattern: Annotated[dict[_Pattern, _Rank], msgspec.Meta(max_length=_MAX_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[_Pattern, _Alpha], msgspec.Meta(max_length=_MAX_PATTERNS)] | None = None
    trainable_token_indices: dict[str, list[int]] | list[int] | None = None
    bias: Annotated[str, msgspec.Meta(pattern="^(none|all|lora_only)$")] = "none"  # the error names all values
    lora_bias: bool | None = False
    modules_to_save: list[Any] | None = None
    init_lora_weights: Any = True
    peft_type: Any = None

    @property
    def token_rows(self) -> dict[str, list[int]]:
        """Rows of the embedding that the adapter replaces, by the end of the module's name."""
        rows = self.trainable_token_indices or {}
        return rows if isinstance(rows, dict) else {"embed_tokens": rows}

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's matrices.

        Args:
            module: the module's name in the model that the adapter was trained on.
            rank: rank of the stored matrices.

        Raises:
            DamagedFileError: the configuration has another rank, or a pattern is damaged or takes too long.
        """
        expected = self._ranks.value(module, self.r)
        if rank != expected:
            raise DamagedFileError(f"{ADAPTER_CONFIG}: the rank of {module} is {expected}, but its tensors have {rank}")
        alpha = self._alphas.value(module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @cached_property
    def _ranks(self) -> _Patterns:
        return _Patterns("rank_pattern", self.rank_pattern or {})

    @cached_property
    def _alphas(self) -> _Patterns:
        return _Patterns("alpha_pattern", self.alpha_pattern or {})


def is_adapter_directory(directory: Path) -> bool:
    """Return whether a directory holds an adapter (:func:`is_adapter_listing`)."""
    return (directory / ADAPTER_CONFIG).is_file() and is_adapter_listing(path.name for path in directory.iterdir())


def is_adapter_listing(names: Iterable[str]) -> bool:
    """Return whether files with these names are an adapter; with the weights of a model, they are its checkpoint."""
    listed = frozenset(names)
    if ADAPTER_CONFIG not in listed or any(map(_MODEL_WEIGHTS.fullmatch, listed)):
        return False
    return "config.json" not in listed or not listed.isdisjoint((ADAPTER_WEIGHTS, _PICKLED))


def adapter_weights(directory: Path) -> Path:
    """Return the file of an adapter's tensors.

    Raises:
        DamagedFileError: it is missing, or pickled.
    """
    if (path := directory / ADAPTER_WEIGHTS).is_file():
        return path
    if (directory / _PICKLED).is_file():
        raise DamagedFileError(
            f"{_PICKLED}: pickled weights can run code and are not loaded: save the adapter as {ADAPTER_WEIGHTS}"
        )
    raise DamagedFileError(f"{ADAPTER_WEIGHTS} is missing: download or copy the whole directory")


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read and check ``adapter_config.json``.

    Raises:
        DamagedFileError: a field is damaged or unknown, or the method cannot be merged; the message names the field.
    """
    fields = read_json(directory / ADAPTER_CONFIG)
    if "lora_parameters" in fields and "peft_type" not in fields:
        raise DamagedFileError(f"{ADAPTER_CONFIG}: MLX wrote this adapter: merge it with mlx_lm.fuse")
    if fields.get("peft_type") != "LORA":
        kind = shorten(fields.get("peft_type"))
        raise DamagedFileError(f"{ADAPTER_CONFIG}: peft_type is {kind}, but only LORA is supported: merge it with PEFT")
    config = typed(fields, AdapterConfig, ADAPTER_CONFIG)
    if config.init_lora_weights not in _KEEPS_BASE:
        raise DamagedFileError(
            f"{ADAPTER_CONFIG}: init_lora_weights {shorten(config.init_lora_weights)} changes the base, which the"
            " adapter does not store: save it with path_initial_model_for_weight_conversion, or merge it with PEFT"
        )
    for name in sorted(fields.keys() - {*AdapterConfig.__struct_fields__, *_NO_EFFECT}):
        if fields[name]:
            raise DamagedFileError(
                f"{ADAPTER_CONFIG}: {shorten(name)} is not supported: merge the adapter with PEFT's"
                " merge_and_unload() if it can, and load the result"
            )
    return config


class _Patterns:
    """Regular expressions of modules' names, whose time is bounded for all modules together.

    Args:
        field: name of the field in messages.
        values: the value of each expression.

    Raises:
        DamagedFileError: one is not a regular expression.
    """

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        try:
            self._values = [(regex.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in values.items()]
        except regex.error as error:
            raise DamagedFileError(f"{ADAPTER_CONFIG}: {field}: {shorten(error.pattern)}: {error.msg}") from error
        self._seconds_left = _SLOW_SECONDS

    def value(self, module: str, default: float) -> float:
        """Return the value of the first expression that matches the end of a module's name, as PEFT does.

        Raises:
            DamagedFileError: matching takes too long.
        """
        for pattern, value in self._values:
            start = process_time()
            try:
                matches = pattern.match(module, timeout=self._seconds_left)
                self._seconds_left -= max(0.0, process_time() - start - _MATCH_SECONDS)
            except TimeoutError:
                self._seconds_left = 0.0
            if self._seconds_left <= 0:
                raise DamagedFileError(f"{ADAPTER_CONFIG}: matching {shorten(pattern.pattern)} takes too long")
            if matches:
                return value
        return default
