"""The bundled mini model: a Gemma 3 trained to read made-up documents, in the package as a plain checkpoint."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from panscan.core import ModelError

__all__ = ["mini_directory"]

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
