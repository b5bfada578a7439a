"""The shape of a model that a user names, without Transformers: a size, a hub id, or a configuration file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from panscan.core import BUNDLED, ModelError, SettingError
from panscan.core.ranges import shorten
from panscan.model.shapes import PATTERN, SHAPES, Shape, TextShape, VisionShape
from panscan.settings import nearest

__all__ = ["PlannedModel", "model_named"]

_MOST_BYTES = 1 << 20
_HUB = re.compile(r"[\w.-]+/[\w.-]*gemma-3-(270m|1b|4b|12b|27b)(?![0-9a-z])[\w.-]*", re.ASCII)
_TEXT_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Defaults of Transformers' Gemma3TextConfig, which published configuration files leave out."""
_VISION_DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip
"""Defaults of Transformers' SiglipVisionConfig."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model: its shape, and the value of ``--model`` that runs it."""

    shape: Shape
    id: str


def model_named(text: str) -> PlannedModel:
    """Return the model of a ``--model`` value.

    Args:
        text: a size (27b), mini, tiny, a hub id of a published Gemma 3, or a directory with a ``config.json``, or that
            file.

    Raises:
        SettingError: an unknown name; the nearest one is suggested.
        ModelError: the configuration cannot be read, or is not that of a Gemma 3.
    """
    name = text.strip().lower()
    if name in BUNDLED:
        return PlannedModel(SHAPES[name], name)
    if name in SHAPES:
        return PlannedModel(SHAPES[name], f"google/gemma-3-{name}-it")
    path = Path(text).expanduser() if text.isprintable() and 0 < len(text) < 4096 else None
    try:
        if path is not None and path.is_dir():
            return PlannedModel(_shape_of(path / "config.json"), text)
        if path is not None and path.is_file():
            return PlannedModel(_shape_of(path), str(path.parent))
    except (OSError, RuntimeError):  # a path that the system refuses, or "~" of an unknown user
        path = None
    if match := _HUB.fullmatch(name):
        return PlannedModel(SHAPES[match[1]], text)
    known = [*SHAPES, *(f"google/gemma-3-{size}-it" for size in SHAPES if size not in BUNDLED)]
    raise SettingError(
        f"--model: unknown model {shorten(text)}{nearest(name, known)}; expected {', '.join(SHAPES)}, the hub id of a"
        " Gemma 3, or a directory with a config.json"
    )


def _shape_of(path: Path) -> Shape:
    """Return the shape of a configuration file.

    Raises:
        ModelError: it cannot be read, or is not that of a Gemma 3.
    """
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        raise ModelError(f"--model {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"--model {path}: not JSON, or larger than {_MOST_BYTES:,} bytes") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in ("gemma3", "gemma3_text"):
        raise ModelError(f"--model {path}: model_type {shorten(kind)} is not supported; expected gemma3 or gemma3_text")
    shape = Shape("gemma3", _text(path, _part(config, "text_config") if kind == "gemma3" else config))
    if kind == "gemma3":
        vision = _numbers(path, _part(config, "vision_config"), _VISION_DEFAULTS)
        tokens = _numbers(path, config, {"mm_tokens_per_image": 256})["mm_tokens_per_image"]
        shape = replace(
            shape, image_tokens=tokens,
            vision=VisionShape(
                vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"],
                vision["num_attention_heads"], vision["image_size"], vision["patch_size"],
            ),
        )  # fmt: skip
    return shape


def _text(path: Path, config: Mapping[str, Any]) -> TextShape:
    found = _numbers(path, config, _TEXT_DEFAULTS)
    layers, types = found["num_hidden_layers"], config.get("layer_types")
    pattern = config.get("sliding_window_pattern") or PATTERN
    if isinstance(types, list):
        pattern = types.index("full_attention") + 1 if "full_attention" in types else max(PATTERN, layers + 1)
    if not isinstance(pattern, int) or pattern < 1:
        raise ModelError(f"--model {path}: sliding_window_pattern {shorten(pattern)} is not a positive integer")
    return TextShape(
        vocabulary=found["vocab_size"], hidden=found["hidden_size"], intermediate=found["intermediate_size"],
        layers=layers, heads=found["num_attention_heads"], kv_heads=found["num_key_value_heads"],
        head_size=found["head_dim"], window=found["sliding_window"], query_scale=found["query_pre_attn_scalar"],
        max_positions=found["max_position_embeddings"], pattern=pattern,
    )  # fmt: skip


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _numbers(path: Path, config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of a configuration.

    Raises:
        ModelError: one is not a positive integer.
    """
    found = {}
    for name, default in defaults.items():
        value = config.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelError(f"--model {path}: {name} is {shorten(value)}; expected a positive integer")
        found[name] = value
    return found
