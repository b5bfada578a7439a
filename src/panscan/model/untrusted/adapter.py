"""Adapter directories as PEFT writes them: which directories are adapters, and the checked ``adapter_config.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import regex

from panscan.core.option import shorten
from panscan.model.untrusted.reading import DamagedFileError, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_MODEL_WEIGHTS = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?")
_MAX_RANK, _MAX_ALPHA = 1 << 16, 1e6
_MAX_PATTERNS, _MAX_PATTERN = 1024, 512
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


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of ``adapter_config.json`` that decide the merged weights, or name the base.

    Args:
        base: name of the base model; None if the file has none.
        revision: revision of the base on the hub.
        rank: rank of matrices that no pattern matches.
        alpha: numerator of their scale.
        rank_stabilized: whether the scale is divided by the root of the rank.
        dora: whether matrices have magnitudes (DoRA).
        rank_pattern: regular expressions of modules' names, with their rank; the first that matches counts.
        alpha_pattern: the same for the numerator.
        token_rows: rows of the embedding that the adapter replaces, by the end of the module's name.
    """

    base: str | None
    revision: str | None
    rank: int
    alpha: float
    rank_stabilized: bool
    dora: bool
    rank_pattern: _Patterns
    alpha_pattern: _Patterns
    token_rows: Mapping[str, tuple[int, ...]]

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's matrices.

        Args:
            module: the module's name in the model that the adapter was trained on.
            rank: rank of the stored matrices.

        Raises:
            DamagedFileError: the configuration has another rank, or a pattern takes too long.
        """
        expected = self.rank_pattern.value(module, self.rank)
        if rank != expected:
            raise DamagedFileError(f"{ADAPTER_CONFIG}: the rank of {module} is {expected}, but its tensors have {rank}")
        alpha = float(self.alpha_pattern.value(module, self.alpha))
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


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
    stored = read_json(directory / ADAPTER_CONFIG)
    if "lora_parameters" in stored and "peft_type" not in stored:
        raise DamagedFileError(f"{ADAPTER_CONFIG}: MLX wrote this adapter: merge it with mlx_lm.fuse")
    if stored.get("peft_type") != "LORA":
        kind = shorten(stored.get("peft_type"))
        raise DamagedFileError(f"{ADAPTER_CONFIG}: peft_type is {kind}, but only LORA is supported: merge it with PEFT")
    field = _Fields(stored)
    rows = stored.get("trainable_token_indices") or {}
    config = AdapterConfig(
        base=field.take("base_model_name_or_path", None, _is_name, "a text") or None,
        revision=field.take("revision", None, _is_name, "a text"),
        rank=field.take("r", 8, _is_rank, f"an integer from 1 to {_MAX_RANK:,}"),
        alpha=float(field.take("lora_alpha", 8, _is_alpha, f"a number of at most {_MAX_ALPHA:,.0f}")),
        rank_stabilized=field.take("use_rslora", False, _is_switch, "true or false") or False,
        dora=field.take("use_dora", False, _is_switch, "true or false") or False,
        rank_pattern=field.patterns("rank_pattern", _is_rank),
        alpha_pattern=field.patterns("alpha_pattern", _is_alpha),
        token_rows={
            name: tuple(indices)
            for name, indices in (rows if isinstance(rows, dict) else {"embed_tokens": rows}).items()
            if _is_rows(indices) or field.refuse("trainable_token_indices", "lists of different token ids")
        },
    )
    field.take("bias", "none", lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only")
    field.take("lora_bias", False, _is_switch, "true or false")
    field.take("modules_to_save", None, lambda value: value is None or isinstance(value, list), "a list")
    if (initial := stored.get("init_lora_weights")) not in _KEEPS_BASE:
        raise DamagedFileError(
            f"{ADAPTER_CONFIG}: init_lora_weights {shorten(initial)} changes the base, which the adapter does not"
            " store: save it with path_initial_model_for_weight_conversion, or merge it with PEFT"
        )
    field.finish()
    return config


class _Patterns:
    """Regular expressions of modules' names, whose time is bounded for all modules together.

    Args:
        values: compiled expressions, each with its value.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]]) -> None:
        self._values, self._seconds_left = values, _SLOW_SECONDS

    def value(self, module: str, default: Any) -> Any:
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


class _Fields:
    """The fields of a configuration, each of which must be read.

    Args:
        stored: the JSON object.
    """

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored
        self._known = {"init_lora_weights", "peft_type", "trainable_token_indices", *_NO_EFFECT}

    def take(self, name: str, default: Any, accepts: Callable[[Any], bool], expected: str) -> Any:
        """Return the value of a field, or the default."""
        self._known.add(name)
        value = self._stored.get(name, default)
        return value if accepts(value) else self.refuse(name, expected)

    def patterns(self, name: str, accepts: Callable[[Any], bool]) -> _Patterns:
        """Return the compiled regular expressions of a mapping, with their values."""
        values = self.take(name, None, _is_mapping_of(accepts), "numbers by pattern") or {}
        try:
            return _Patterns([(regex.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in values.items()])
        except regex.error as error:
            raise DamagedFileError(f"{ADAPTER_CONFIG}: {name}: {shorten(error.pattern)}: {error.msg}") from error

    def refuse(self, name: str, expected: str) -> bool:
        """Raise for the value of a field."""
        raise DamagedFileError(f"{ADAPTER_CONFIG}: {name} is {shorten(self._stored.get(name))}; expected {expected}")

    def finish(self) -> None:
        """Raise for a field that was not read, unless it is off."""
        for name in sorted(self._stored.keys() - self._known):
            if self._stored[name]:
                raise DamagedFileError(
                    f"{ADAPTER_CONFIG}: {shorten(name)} is not supported: merge the adapter with PEFT's"
                    " merge_and_unload() if it can, and load the result"
                )


def _is_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 4096 and "\0" not in value)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_ALPHA


def _is_switch(value: Any) -> bool:
    return value is None or type(value) is bool


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(type(row) is int for row in value) and len({*value}) == len(value)


def _is_mapping_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_mapping(value: Any) -> bool:
        return value is None or (
            isinstance(value, dict)
            and len(value) <= _MAX_PATTERNS
            and all(len(key) <= _MAX_PATTERN and accepts(item) for key, item in value.items())
        )

    return is_mapping
