"""Model families by the ``model_type`` of a checkpoint: what runs them, or why nothing does. No tensor library.

A new family is a line here, the package that it names (``config``, ``text_layers``, ``vision_layers``), and the checks
of its fields in :mod:`panscan.model.untrusted.fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


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
_REFUSED = {
    "gemma": "it reads no images, and its layers are others",
    "gemma2": "it reads no images, and its layers are others",
    "paligemma": "it is no chat model, and has no pan and scan",
    "shieldgemma2": "it classifies images, and writes no answers",
}


def refused_family(kind: str) -> str | None:
    """Return why the commands other than ``profile`` do not run a ``model_type``; None if they do."""
    if kind in SUPPORTED:
        return None
    if (family := FAMILIES.get(kind)) is not None:
        reason: str | None = f"only 'panscan profile' runs {family.name}"
    else:
        reason = _REFUSED.get(kind)
    return f"panscan runs Gemma 3; this is a {kind!r} model" + (f": {reason}" if reason else "")


def family_module(kind: str, name: str) -> Any:
    """Return a module of the package of a supported ``model_type``, such as ``text_layers``."""
    return import_module(f"panscan.model.{FAMILIES[kind].package}.{name}")
