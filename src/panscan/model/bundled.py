"""The models that need no download, by name: ``mini``, which was trained, and ``tiny``, which was drawn at random."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from panscan.model.mini import mini_directory

__all__ = ["BUNDLED", "bundled_directory", "fingerprints"]

BUNDLED = ("mini", "tiny")


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
