"""The shape of a model that a user names, without Transformers: a size, a hub id, or a configuration file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from panscan.core import BUNDLED, ModelError, SettingError
from panscan.core.option import shorten
from panscan.model.families import SUPPORTED, refused_model
from panscan.model.hub import model_source
from panscan.model.shapes import PATTERN, SHAPES, Shape, first_global_layer, text_shape, vision_shape
from panscan.model.untrusted.check import check_directory
from panscan.model.untrusted.fields import ConfigSizes
from panscan.model.untrusted.reading import DamagedFileError, read_json
from panscan.settings import nearest

_OWNED = re.compile(r"(?!\.)[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}(?<![.-])", re.ASCII)
_HUB = re.compile(r"[\w.-]+/[\w.-]*gemma-3-(270m|1b|4b|12b|27b)(?![0-9a-z])[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model: its shape, and the value of ``--model`` that runs it."""

    shape: Shape
    id: str


def model_named(text: str) -> PlannedModel:
    """Return the model of a ``--model`` value.

    Args:
        text: a size (27b), mini, tiny, the hub id of a published Gemma 3 or of a checkpoint whose ``config.json`` is in
            the hub's cache, or a directory with a ``config.json``, or that file; or an adapter on this machine, or
            ``MODEL+ADAPTER``, for the shape of the base.

    Raises:
        SettingError: an unknown name; the nearest one is suggested.
        ModelError: the configuration cannot be read, or is not that of a Gemma 3.
    """
    if (base := model_source(text, download=False).base) != text:
        return PlannedModel(model_named(base).shape, text)
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
    if _OWNED.fullmatch(text.strip()):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(text.strip(), "config.json"), str):
            return PlannedModel(_shape_of(Path(cached)), text)
    if match := _HUB.fullmatch(name):
        return PlannedModel(SHAPES[match[1]], text)
    if _OWNED.fullmatch(name):
        raise SettingError(
            f"--model: the config.json of {shorten(text)} is not on this machine: download the checkpoint, or give its"
            " size, such as 4b"
        )
    if not name:
        raise SettingError(f"--model is required: {', '.join(SHAPES)}, or a checkpoint")
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
        if (reason := refused_model({"model_type": "unknown", **config})) is not None:
            raise DamagedFileError(reason)
        kind = config.get("model_type", SUPPORTED[0])
        sizes = ConfigSizes.of(config)
    except DamagedFileError as error:
        raise ModelError(f"--model {path.parent}: {error}") from error
    text = sizes.text
    kinds, pattern = text.layer_types, text.sliding_window_pattern or PATTERN
    decoder = text_shape(text, pattern=pattern if kinds is None else first_global_layer(kinds))
    vision = None if sizes.vision is None else vision_shape(sizes.vision)
    return Shape(kind, decoder, vision, sizes.image_tokens)
