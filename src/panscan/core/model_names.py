"""Models: the bundled ones, what all published ones share, and when two names mean the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUNDLED = ("mini", "tiny")
"""The models in the package: ``mini``, which was trained to read, and ``tiny``, with random weights."""
IMAGE_TOKENS, VIEW_SIDE = 256, 896
"""Image tokens of a view of every published Gemma 3, and its side in pixels: where no checkpoint says otherwise."""
MAX_ADAPTERS = 16
"""Adapters that one name may contain."""
_SIGN = "+"


def with_adapters(model: str | None, adapters: Iterable[str]) -> str:
    """Return the name of a model with adapters merged into it in this order: ``MODEL+ADAPTER+...``.

    Args:
        model: name of the model; None: the base of the first adapter.
        adapters: hub ids or directories.
    """
    return _SIGN.join([*([] if model is None else [model]), *adapters])


def split_adapters(name: str) -> list[str]:
    """Return the model of a name, then its adapters. A sign inside the path of a directory does not separate."""
    parts, names = name.split(_SIGN), []
    if len(parts) > MAX_ADAPTERS + 1:
        return [name]
    while parts:
        length = next((n for n in range(len(parts), 1, -1) if local_directory(_SIGN.join(parts[:n])) is not None), 1)
        names.append(_SIGN.join(parts[:length]))
        del parts[:length]
    return names


def canonical_model(name: str) -> str:
    """Return a name with the resolved paths of local directories; bundled models and hub ids stay unchanged."""
    return _SIGN.join(part if part in BUNDLED else local_directory(part) or part for part in split_adapters(name))


def local_directory(name: str) -> str | None:
    """Return the resolved path of a directory of this machine; None for any other name."""
    try:
        directory = Path(name).expanduser()
        return str(directory.resolve()) if name and directory.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # not accessible, "~" of an unknown user, or a null character
        return None


def same_model(one: str | None, other: str | None) -> bool:
    """Return whether two names mean the same model; equal names do, also if the directory is not on this machine."""
    if one is None or other is None:
        return one is other
    return one == other or canonical_model(one) == canonical_model(other)
