"""The packaged models, which need no download: ``mini``, which is trained, and ``tiny``, with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from panscan.core import BUNDLED, DemonstrationModelWarning, ModelError, split_adapters
from panscan.model.untrusted.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter_directory
from panscan.settings import Settings

_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Required files. Transformers silently replaces some of them by defaults."""


def is_demonstration(settings: Settings) -> bool:
    """Return whether settings select a bundled checkpoint, whose answers about real documents are usually wrong."""
    return settings.model in BUNDLED and not settings.random_weights


def warn_of_demonstration(settings: Settings) -> None:
    """Warn a program, not a command, if settings select a bundled checkpoint."""
    if is_demonstration(settings):
        reads = "it reads the documents of `panscan samples`, and its answers about others are usually wrong"
        why = reads if settings.model == "mini" else "its weights are random, and its answers mean nothing"
        text = f"{settings.model} is a demonstration model: {why}; name another, such as google/gemma-3-4b-it"
        warnings.warn(text, DemonstrationModelWarning, stacklevel=3)


def mini_directory() -> Path:
    """Return the directory of the trained model's checkpoint, for ``from_pretrained``.

    Raises:
        ModelError: the installation lacks files, as one without package data does.
    """
    return _packaged("mini")


def tiny_directory() -> Path:
    """Return the directory of the random model's checkpoint (see :func:`mini_directory`)."""
    return _packaged("tiny")


def bundled_directory(name: str) -> Path | None:
    """Return the directory of a bundled model's checkpoint; None for any other name (see :func:`mini_directory`)."""
    return _packaged(name) if name in BUNDLED else None


def _packaged(name: str) -> Path:
    directory = Path(str(files("panscan.model"))) / "weights" / name
    if missing := [file for file in _FILES if not (directory / file).is_file()]:
        raise ModelError(f"the {name} model in {directory} lacks {', '.join(missing)}: install panscan again")
    return directory


def fingerprints(models: Iterable[str]) -> dict[str, str]:
    """Return the start of the SHA-256 of weights that may change under their name, by the model's name.

    These are the weights of bundled models and of adapters in local directories, which are often trained again.

    Raises:
        ModelError: a checkpoint is incomplete.
    """
    fingerprints = {}
    for name in sorted({*models}):
        digests = []
        for path in (path for part in split_adapters(name) for path in _changing_files(part)):
            status = path.stat()
            digests.append(_weights_digest(path, status.st_size, status.st_mtime_ns, status.st_ino))
        if digests:
            fingerprints[name] = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()[:12]
    return fingerprints


def _changing_files(name: str) -> list[Path]:
    """Return the files of a bundled model or of a local adapter that decide its weights."""
    if (bundled := bundled_directory(name)) is not None:
        return [bundled / "model.safetensors"]
    directory = Path(name).expanduser()
    if not is_adapter_directory(directory):
        return []
    return [path for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (path := directory / file).is_file()]


@lru_cache
def _weights_digest(path: Path, _size: int, _mtime_ns: int, _inode: int) -> str:
    """Return the start of a file's SHA-256; hash it once per process, unless it changes."""
    return sha256(path.read_bytes()).hexdigest()[:12]
