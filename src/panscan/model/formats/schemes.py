"""Interface and helpers that the formats of quantised checkpoints share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from panscan.core import UnsupportedError
from panscan.core.text import listed
from panscan.core.weight_formats import FORMATS, STORED_FORMATS, WEIGHT_KINDS
from panscan.model.formats.tensors import MatrixTensors
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.untrusted.reading import JsonObject

_STORED = listed((FORMATS[name].title for name in STORED_FORMATS), "and")
_READABLE = f"{_STORED} checkpoints, and --quantization {listed(WEIGHT_KINDS)} on the unquantised model"
"""Supported alternatives, for error messages."""
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""Fields of ``config.json``; old versions of compressed-tensors wrote the second."""


class StoredScheme(ABC):
    """Quantisation format of a checkpoint, as described by its configuration.

    ``method``: name of the format in :data:`panscan.core.weight_formats.FORMATS`.
    ``name``: format with its variant, for messages and reports.
    ``notes``: differences between the checkpoint's computation and ours, one line each.
    ``markers``: leaf names that identify quantised modules: each module has at least one of these tensors. They decide
    which modules are quantised; the configuration only says how.
    ``folds_scales``: whether tools that write the format fold scales into norms.
    """

    method: ClassVar[str]
    name: str
    notes: tuple[str, ...] = ()
    markers: tuple[str, ...]
    folds_scales = False

    @abstractmethod
    def __init__(self, config: JsonObject) -> None: ...

    @classmethod
    def recognises(cls, method: str, config: JsonObject) -> bool:
        """Return whether a checkpoint with this ``quant_method`` and ``quantization_config`` has the format."""
        return method == cls.method

    @classmethod
    def by_transformers(cls, config: JsonObject) -> bool:
        """Return whether Transformers loads the checkpoint."""
        return False

    @abstractmethod
    def describe(self, tensors: MatrixTensors) -> str:
        """Return type and granularity of a quantised matrix, such as ``int4, groups of 128``."""

    @abstractmethod
    def linear_of(self, tensors: MatrixTensors, outputs: int, inputs: int) -> QuantizedLinear | torch.Tensor:
        """Return a quantised matrix: a module, or dense weights in float32.

        Raises:
            ValueError: the tensors contradict the configuration, or are damaged.
            UnsupportedError: the tensors have an unsupported format.
        """


def unsupported_format(what: str) -> UnsupportedError:
    """Return the error for a quantisation that cannot be read."""
    return UnsupportedError(
        f"the checkpoint's weights are quantised as {what}, which panscan does not support: use {_READABLE}"
    )


def quantizations_in(config: JsonObject) -> Iterator[Any]:
    """Yield the descriptions of a quantisation in the contents of ``config.json``, of the whole and of its decoder."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    yield from (part[field] for part in parts for field in QUANTIZATION_FIELDS if part.get(field) is not None)


def field_of(config: JsonObject, name: str, kind: type, default: Any = None) -> Any:
    """Return a field of ``quantization_config``, or ``default`` if it is missing or null.

    Raises:
        ValueError: the field has the wrong type.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"config.json: quantization_config.{name}: expected {kind.__name__}, got {value!r:.60}")
    return value


def check_pattern(pattern: str) -> None:
    """Check a regular expression of ``quantization_config``.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"config.json: {pattern!r:.80} is not a regular expression: {error}") from error
