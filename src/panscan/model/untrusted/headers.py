"""Headers of safetensors files: names, types and shapes of the tensors, checked against the size of the file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from panscan.core.option import shorten
from panscan.model.untrusted.reading import DamagedFileError, json_object, read_json, typed

_MAX_HEADER = 16 << 20  # bytes; the 27B model's headers have 200 kB
_MAX_SIZE = 1 << 40
_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)]
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
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
        return prod(self.shape) * _BITS[self.dtype] // 8


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
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise DamagedFileError(f"{path.name}: the header has a length of {length:,} bytes; the file {size:,}")
            text = file.read(length).decode()
    except OSError as error:
        raise DamagedFileError(f"{path.name}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path.name}: the header is not UTF-8") from error
    header = json_object(text, path.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError(f"{path.name}: __metadata__ is not a mapping of texts")
    tensors, spans = {}, []
    for name, facts in header.items():
        tensors[name], span = _stored_shape(path.name, name, facts)
        spans.append((*span, name))
    position = 0
    for start, end, name in sorted(spans):  # without gaps and overlaps
        if start != position:
            raise DamagedFileError(f"{path.name}: {shorten(name)} begins at byte {start:,}; expected {position:,}")
        position = end
    if position != size - 8 - length:
        raise DamagedFileError(
            f"{path.name}: its tensors have {position:,} bytes, the file {size - 8 - length:,}: download it again"
        )
    return tensors


class _TensorFacts(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def _stored_shape(file: str, name: str, facts: Any) -> tuple[StoredShape, tuple[int, int]]:
    """Return shape and position of a tensor."""
    where = f"{file}: {shorten(name)}"
    stored = typed(facts, _TensorFacts, where)
    (start, end), size = stored.data_offsets, prod(stored.shape)
    if stored.dtype not in _BITS:
        raise DamagedFileError(f"{where} has the unknown type {shorten(stored.dtype)}")
    if size > _MAX_SIZE or size * _BITS[stored.dtype] != 8 * (end - start):
        raise DamagedFileError(f"{where} of {stored.dtype} {stored.shape} does not have {end - start:,} bytes")
    return StoredShape(stored.dtype, tuple(stored.shape), file), (start, end)
