"""The shape of a model that a user names, without Transformers: a size, a hub id, or a configuration file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panscan.checkpoints.check import check_directory
from panscan.checkpoints.fields import ConfigSizes
from panscan.checkpoints.files import DamagedFileError, read_json
from panscan.core import BUNDLED, ModelError, SettingError
from panscan.core.ranges import shorten
from panscan.model.shapes import PATTERN, SHAPES, Shape, TextShape, VisionShape
from panscan.settings import nearest

__all__ = ["PlannedModel", "model_named"]

_HUB = re.compile(r"[\w.-]+/[\w.-]*gemma-3-(270m|1b|4b|12b|27b)(?![0-9a-z])[\w.-]*", re.ASCII)


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
        if path.name == "config.json":
            check_directory(path.parent)
        config = read_json(path)
        kind = config.get("model_type")
        if kind not in ("gemma3", "gemma3_text"):
            raise DamagedFileError(f"model_type {shorten(kind)} is not supported; expected gemma3 or gemma3_text")
        sizes = ConfigSizes.of(config)
    except DamagedFileError as error:
        raise ModelError(f"--model {path.parent}: {error}") from error
    part = config if sizes.vision is None else config.get("text_config") or {}
    return _shape_of_sizes(sizes, _pattern(part, sizes.text["num_hidden_layers"]))


def _shape_of_sizes(sizes: ConfigSizes, pattern: int) -> Shape:
    text, vision = sizes.text, sizes.vision
    decoder = TextShape(
        vocabulary=text["vocab_size"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_size=text["head_dim"],
        window=text["sliding_window"],
        query_scale=text["query_pre_attn_scalar"],
        max_positions=text["max_position_embeddings"],
        pattern=pattern,
    )
    if vision is None:
        return Shape("gemma3", decoder)
    tower = VisionShape(
        hidden=vision["hidden_size"],
        intermediate=vision["intermediate_size"],
        layers=vision["num_hidden_layers"],
        heads=vision["num_attention_heads"],
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
    )
    return Shape("gemma3", decoder, vision=tower, image_tokens=sizes.image_tokens)


def _pattern(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of the first global layer."""
    kinds = config.get("layer_types")
    if kinds is None:
        return int(config.get("sliding_window_pattern") or PATTERN)
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else max(PATTERN, layers + 1)
