"""The models that need no download, by name: ``mini``, which was trained, and ``tiny``, which was drawn at random."""

from __future__ import annotations

from pathlib import Path

from panscan.model.mini import mini_directory

__all__ = ["bundled_directory"]


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
