"""Headers of safetensors files: names, types and shapes of the tensors, checked against the size of the file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from panscan.core.option import shorten
from panscan.model.untrusted.reading import DamagedFileError, read_json

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Keys of the embedding and of the output matrix."""
_LAYOUT_SEGMENTS = frozenset({"model", "language_model", "vision_model"})
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredShape:
    """Type and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def bytes(self) -> int:
        """Size in the file."""
        digits = re.search(r"\d+", self.dtype)  # bits of a value, as in BF16 and F8_E4M3
        return prod(self.shape) * (8 if digits is None else int(digits[0])) // 8


def key_of(name: str) -> str:
    """Return a tensor's or module's name without the segments in which the layouts of checkpoints differ."""
    return ".".join(segment for segment in name.split(".") if segment not in _LAYOUT_SEGMENTS)


def weight_files(directory: Path, entries: Iterable[str]) -> list[str]:
    """Return the safetensors files of a checkpoint: those that its index names, or else the single file.

    Args:
        directory: directory of the index.
        entries: names of the checkpoint's files.

    Returns:
        Without safetensors files, or if some are not there, an empty list. An index without its files is ignored.

    Raises:
        DamagedFileError: the index is damaged, names a file outside the checkpoint, or there are both its files and a
            single file, of which each loader would choose another.
    """
    names = frozenset(entries)
    single = [_SINGLE] if _SINGLE in names else []
    if _INDEX not in names:
        return single
    listed = sorted(set(index_files(directory / _INDEX).values()))
    if not listed or not all(file in names and file.endswith(".safetensors") for file in listed):
        return single
    if single and _SINGLE not in listed:
        raise DamagedFileError(
            f"two sets of weights: {_SINGLE}, and {listed[0]} with the other files of {_INDEX}: remove one of them"
        )
    return listed


def missing_files(directory: Path, entries: Iterable[str]) -> str | None:
    """Return which file of an index is missing; None without an index, or if its files are there.

    Raises:
        DamagedFileError: the index is damaged.
    """
    names = frozenset(entries)
    files = set(index_files(directory / _INDEX).values()) if _INDEX in names else set()
    absent = sorted(files - names)
    return f"{_INDEX} names {absent[0]}, which is missing: download it again" if absent else None


def index_files(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index.

    Raises:
        DamagedFileError: it is damaged, or names a file outside the checkpoint.
    """
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        raise DamagedFileError(f"{path.name}: has no weight_map of files")
    for tensor, file in files.items():
        if not isinstance(file, str) or file in ("", ".", "..") or {"/", "\\", "\0"}.intersection(file):
            raise DamagedFileError(
                f"{path.name}: weight_map of {shorten(tensor)} is {shorten(file)}; expected a file of the checkpoint"
            )
    return files


def read_header(path: Path) -> dict[str, StoredShape]:
    """Return type and shape of each tensor of a safetensors file.

    Raises:
        DamagedFileError: the header is damaged, or does not fit the size of the file.
    """
    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return {
                name: StoredShape(part.get_dtype(), tuple(part.get_shape()), path.name) for name, part in parts.items()
            }
    except OSError as error:
        raise DamagedFileError(f"{path.name}: cannot be read ({error})") from error
    except SafetensorError as error:
        raise DamagedFileError(
            f"{path.name}: the header does not fit the file ({shorten(str(error))}): download it again"
        ) from error
