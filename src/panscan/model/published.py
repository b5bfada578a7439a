"""Weights of our own under the names that Google's checkpoints use."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

__all__ = ["rename_as_published"]

_OWN, _PUBLISHED = "vision_tower.", "vision_tower.vision_model."


def rename_as_published(file: Path) -> None:
    """Rename, in place, the vision tower that Transformers saved: it reads both names, vLLM the published ones only."""
    renamed = {
        name if name.startswith(_PUBLISHED) else name.replace(_OWN, _PUBLISHED, 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
