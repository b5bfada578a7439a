"""The models that need no download: ``mini``, which was trained and is packaged, and ``tiny``, drawn at random."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from panscan.core import BUNDLED, ModelError

__all__ = ["BUNDLED", "bundled_directory", "fingerprints", "mini_directory"]

_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What loading needs. Without some of them Transformers would make up the rest, and say nothing."""


def mini_directory() -> Path:
    """The checkpoint's directory, where the package is installed; load it with ``from_pretrained``.

    Raises:
        ModelError: if the installation lacks files of it, as one made without package data does.
    """
    directory = Path(str(files("panscan.model"))) / "weights" / "mini"
    if missing := [name for name in _FILES if not (directory / name).is_file()]:
        raise ModelError(f"the mini model in {directory} lacks {', '.join(missing)}: install panscan again")
    return directory


def bundled_directory(name: str) -> Path | None:
    """Where a bundled model's checkpoint lies; None for any other name.

    Raises:
        ModelError: if it cannot be had.
    """
    if name == "mini":
        return mini_directory()
    if name == "tiny":
        from panscan.model.tiny import tiny_directory  # what draws it is loaded only where it is wanted

        return tiny_directory()
    return None


def fingerprints(models: Iterable[str]) -> dict[str, str]:
    """By name, the start of the SHA-256 of the weights of each bundled model among ``models``.

    A name stays when a model is trained anew, so what was measured or answered with it needs this beside it.

    Raises:
        ModelError: if one cannot be had.
    """
    found = {}
    for name in sorted({*models}.intersection(BUNDLED)):
        directory = bundled_directory(name)
        if directory is not None:
            found[name] = sha256((directory / "model.safetensors").read_bytes()).hexdigest()[:12]
    return found
