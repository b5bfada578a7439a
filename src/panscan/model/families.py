"""Model families by the ``model_type`` of a checkpoint: what runs them, or why nothing does. No tensor library.

A new family is a line here, the package that it names (``config``, ``text_layers``, ``vision_layers``), and the checks
of its fields in :mod:`panscan.model.untrusted.fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from panscan.core.option import shorten


@dataclass(frozen=True, slots=True)
class Family:
    """Checkpoints that the same code runs.

    Args:
        name: the family in messages.
        package: package of its layers and configurations under ``panscan.model``; None: panscan has none, and only
            ``panscan profile`` runs it, through Transformers' ``generate()``.
        reads_images: whether the checkpoint has a vision tower.
    """

    name: str
    package: str | None
    reads_images: bool


FAMILIES = {
    "gemma3": Family("Gemma 3", "gemma3", reads_images=True),
    "gemma3_text": Family("Gemma 3", "gemma3", reads_images=False),
    "gemma3n": Family("Gemma 3n", None, reads_images=True),
    "gemma3n_text": Family("Gemma 3n", None, reads_images=False),
}
"""Each family that some command runs, by ``model_type``."""
SUPPORTED = tuple(kind for kind, family in FAMILIES.items() if family.package is not None)
"""The ``model_type`` of the families that every command runs."""
_GENERATING = ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM")
_REFUSED = {
    "gemma": "it reads no images, and its layers are others",
    "gemma2": "it reads no images, and its layers are others",
    "paligemma": "it is no chat model, and has no pan and scan",
    "shieldgemma2": "it classifies images, and writes no answers",
}


def refused_model(config: Mapping[str, Any]) -> str | None:
    """Return why the commands other than ``profile`` do not run a model; None if they do.

    Args:
        config: contents of its ``config.json``. Without a ``model_type``, the model is not refused.
    """
    kind = config.get("model_type")
    if kind is None:
        return None
    if kind not in SUPPORTED:
        family = FAMILIES.get(kind)
        reason = _REFUSED.get(kind) if family is None else f"only 'panscan profile' runs {family.name}"
        return f"panscan runs Gemma 3; this is a {kind!r} model" + (f": {reason}" if reason else "")
    named = config.get("architectures") or [_GENERATING[0]]
    if not any(name in _GENERATING for name in named):
        expected = " or ".join(_GENERATING)
        return f"it does not generate text: architectures of config.json is {shorten(named)}; expected {expected}"
    text = config.get("text_config") or config
    if config.get("use_bidirectional_attention") or text.get("use_bidirectional_attention"):
        return "it does not generate text, but embeds it: use_bidirectional_attention of config.json is true"
    return None


def family_module(kind: str, name: str) -> Any:
    """Return a module of the package of a supported ``model_type``, such as ``text_layers``."""
    return import_module(f"panscan.model.{FAMILIES[kind].package}.{name}")
