"""Models: the bundled ones, what all published ones share, and when two names mean the same checkpoint."""

from __future__ import annotations

from pathlib import Path

BUNDLED = ("mini", "tiny")
"""The models in the package: ``mini``, which was trained to read, and ``tiny``, with random weights."""
IMAGE_TOKENS, VIEW_SIDE = 256, 896
"""Image tokens of a view of every published Gemma 3, and its side in pixels: where no checkpoint says otherwise."""


def canonical_model(name: str) -> str:
    """Return the resolved path of a local directory, and any other name (bundled model, hub id) unchanged."""
    if name in BUNDLED:
        return name
    try:
        directory = Path(name).expanduser()
        return str(directory.resolve()) if directory.is_dir() else name
    except (OSError, RuntimeError):  # not accessible, or "~" of an unknown user
        return name


def same_model(one: str | None, other: str | None) -> bool:
    """Return whether two names mean the same model; equal names do, also if the directory is not on this machine."""
    if one is None or other is None:
        return one is other
    return one == other or canonical_model(one) == canonical_model(other)
