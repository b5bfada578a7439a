"""Facts about quantised models: what is quantised, in how many bytes, and which unquantised model it was made from."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from panscan.core import BUNDLED, ModelError, UnsupportedError, split_adapters, with_adapters
from panscan.core.files import read_text
from panscan.core.weight_formats import weight_words
from panscan.model.checkpoint import quantization_method, stored_format
from panscan.model.files import checked_files
from panscan.model.hub import cached_snapshot
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.linear.vocabulary import VocabularyMatrix
from panscan.model.untrusted.adapter import is_adapter_directory
from panscan.model.untrusted.reading import DamagedFileError
from panscan.settings import Settings

_CARD = "README.md"
_MAX_CARD = 4 << 20
_MAX_FRONT_MATTER = 65_536  # characters
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_FIX = "use --reference with a reference of the unquantised model"


def unquantized_settings(settings: Settings) -> Settings:
    """Return the settings that load the same model with unquantised weights; equal ones for an unquantised model.

    Raises:
        ModelError: the checkpoint cannot be loaded, or it is quantised and its base model is unknown or not on this
            machine.
        UnsupportedError: its format cannot be read.
    """
    plain = replace(settings, quantization=None, quantization_group_size=None, quantize_head=None, quantize_vision=None)
    if settings.random_weights or stored_format(settings.model, settings.revision) is None:
        return plain
    return replace(plain, model=base_model_of(settings.model, settings.revision), revision=None)


def weights_name(model: Any) -> str | None:
    """Return what the weights of a model are quantised in, such as ``int4, groups of 128``; None if they are not."""
    tower = getattr(model, "quantized_tower", None)  # set by quantize_vision_tower() of the model's family
    names = dict.fromkeys(
        str(part.weight_format)
        for part in (layer_matrices(model.model.language_model) if tower else layer_matrices(model))
    )
    if dequantized := getattr(model, "dequantized_from", ""):  # set by panscan.model.formats.load
        names[f"{dequantized}, dequantised"] = None
    stored = getattr(model.config, "quantization_config", None)
    layers = " and ".join(names) or ("" if stored is None else quantization_method(stored))
    head = isinstance(model.get_output_embeddings(), VocabularyMatrix)
    return ", ".join(weight_words(layers, "int8" if head else None, tower)) or None


def layer_matrices(model: Any) -> list[QuantizedLinear]:
    """Return the quantised matrices of a model, without a quantised output matrix."""
    return [
        part for part in model.modules() if isinstance(part, QuantizedLinear) and not isinstance(part, VocabularyMatrix)
    ]


def weight_bytes(model: Any) -> int:
    """Return the bytes of all weights of a loaded model, scales and zero points included; shared ones count once."""
    stored = dict.fromkeys(model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            stored |= dict.fromkeys(module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in stored)


def base_model_of(model: str, revision: str | None = None) -> str:
    """Return the unquantised model that a quantised checkpoint's card names, if it is on this machine.

    Args:
        model: a directory or a hub id.
        revision: of a hub checkpoint.

    Raises:
        ModelError: the card names none, or one that is not on this machine or is quantised itself.
    """
    named = _named_base(model, revision)
    if named is None:
        raise ModelError(
            f"--model {model}: its {_CARD} names no base_model in its front matter; add one (a directory or a hub id), "
            f"or {_FIX}"
        )
    base = _on_this_machine(named, Path(model).expanduser())
    if base is None:
        raise ModelError(f"--model {model}: its base_model {named} is not on this machine; download it, or {_FIX}")
    try:
        quantized = stored_format(base) is not None
    except UnsupportedError:  # in a format that panscan does not read
        quantized = True
    if quantized:
        raise ModelError(f"--model {model}: its base_model {named} is also quantised; {_FIX}")
    return base


def _named_base(model: str, revision: str | None) -> str | None:
    """Return ``base_model`` of the model card's front matter; the first of several."""
    card = checked_files(model, revision, weights=False).directory / _CARD
    if not card.is_file():
        return None
    try:
        front_matter = _FRONT_MATTER.match(read_text(card, _MAX_CARD, _CARD, DamagedFileError))
        fields = yaml.safe_load(front_matter[1]) if front_matter and len(front_matter[1]) <= _MAX_FRONT_MATTER else None
    except (yaml.YAMLError, DamagedFileError, RecursionError):
        return None
    named = fields.get("base_model") if isinstance(fields, dict) else None
    if isinstance(named, list):
        named = named[0] if named else None
    return named if isinstance(named, str) and named else None


def _on_this_machine(named: str, checkpoint: Path) -> str | None:
    """Return a name or path that loads the model without a download; None if there is none.

    Candidates are bundled models, directories (relative ones also inside the checkpoint's directory) and hub ids whose
    weights are cached.
    """
    base, *adapters = split_adapters(named)
    if adapters:
        paths = [_on_this_machine(part, checkpoint) for part in (base, *adapters)]
        return None if None in paths else with_adapters(None, map(str, paths))
    if named in BUNDLED or is_adapter_directory(Path(named).expanduser()):
        return named
    if (Path(named).expanduser() / "config.json").is_file():
        return named  # not str(Path(named)): "./mini" would become "mini", which is bundled
    if (inside := checkpoint / named).joinpath("config.json").is_file():
        return str(inside)
    with suppress(ValueError):  # no hub id either, or a damaged index
        return None if cached_snapshot(named) is None else named
    return None
