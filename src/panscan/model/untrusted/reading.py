"""Files of a checkpoint: regular ones, inside its directory, of a bounded size; and the JSON in them.

Imports neither PyTorch nor Transformers, and runs before they read anything.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections.abc import Mapping
from functools import reduce
from math import isfinite
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from panscan.core.files import read_bytes
from panscan.core.option import shorten

T = TypeVar("T")

JsonObject = Mapping[str, Any]
"""A JSON object of a stranger: its fields by name."""

_MIB = 1 << 20
_LIMITS = {
    "chat_template.jinja": _MIB,
    "model.safetensors.index.json": 16 * _MIB,
    "tokenizer.json": 128 * _MIB,
    **dict.fromkeys(("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"), 16 * _MIB),
    **dict.fromkeys(("merges.txt", "tokenizer.model", "vocab.json"), 64 * _MIB),
    **dict.fromkeys(
        (
            "adapter_config.json",
            "audio_tokenizer_config.json",
            "chat_template.json",
            "config.json",
            "generation_config.json",
            "preprocessor_config.json",
            "processor_config.json",
            "video_preprocessor_config.json",
        ),
        4 * _MIB,
    ),
}
"""The largest size of each file that is read. Other files are not read, but for safetensors files."""
_TEMPLATES = "additional_chat_templates"  # a directory that Transformers reads
_MAX_DEPTH = 32
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class DamagedFileError(ValueError):
    """A file of a checkpoint that cannot be used; the message begins with its name."""


def checkpoint_entries(directory: Path) -> dict[str, os.stat_result]:
    """Check the files of a checkpoint that panscan and Transformers may open; return their status by name.

    A link must lead to a file of the directory, or to a blob of a hub's cache.

    Raises:
        DamagedFileError: one is not a regular file, lies elsewhere, or is too large.
    """
    root = directory.resolve()
    entries = {}
    for path in [*directory.iterdir(), *(directory / _TEMPLATES).glob("*.jinja")]:
        if (limit := _limit(path)) is None:
            continue
        name = path.relative_to(directory).as_posix()
        try:
            status, target = path.stat(), path.resolve() if path.is_symlink() else root
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DamagedFileError(f"{name}: cannot be opened ({reason})") from error
        is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")  # of a hub's cache
        if not target.is_relative_to(root) and not is_blob:
            raise DamagedFileError(f"{name}: links to a file outside the checkpoint: copy the file instead")
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
            raise DamagedFileError(f"{name}: not a regular file, but {kind}")
        if status.st_size > limit:
            raise DamagedFileError(f"{name}: {status.st_size:,} bytes; at most {limit:,} are read")
        entries[name] = status
    return entries


def read_text(path: Path) -> str:
    """Return a text file.

    Raises:
        DamagedFileError: it is not a regular file, too large, or not UTF-8 without a byte order mark, which the readers
            of Transformers refuse or would take for a part of the text.
    """
    data = read_bytes(path, _limit(path) or 4 * _MIB, path.name, DamagedFileError)
    if data.startswith(codecs.BOM_UTF8):
        raise DamagedFileError(f"{path.name}: begins with a byte order mark: save it as UTF-8 without one")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path.name}: not UTF-8 at byte {error.start:,}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DamagedFileError: the file cannot be read, or is not a JSON object with unique names and finite numbers.
    """
    return json_object(read_text(path), path.name)


def json_object(text: str, name: str) -> dict[str, Any]:
    """Return a JSON object with unique names and finite numbers.

    Args:
        text: JSON.
        name: the file that it comes from, for messages.

    Raises:
        DamagedFileError: it is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise DamagedFileError(f"{name}: the field {shorten(twice)} is there twice")
        return names

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except DamagedFileError:
        raise
    except RecursionError as error:
        raise DamagedFileError(f"{name}: nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers of too many digits
        raise DamagedFileError(f"{name}: not JSON ({shorten(str(error))})") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{name}: expected a JSON object, got {shorten(value)}")
    _check_values(value, name)
    return value


def typed(value: Any, kind: type[T], name: str) -> T:
    """Return a JSON value as a msgspec structure.

    Args:
        value: the value.
        kind: the structure.
        name: the file that it comes from, for messages.

    Raises:
        DamagedFileError: a field has another type or range; the message names it and its value.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")  # "Expected `int`, got `str` - at `$.field[0]`"
        problem = f"{problem[:1].lower()}{problem[1:]}"
        if fields := re.match(r"`\$\.([\w.]+)", path):
            inner = reduce(getitem, fields[1].split("."), value)
            problem = f"{fields[1]} is {shorten(inner)}; {problem.partition(', got ')[0]}"
        raise DamagedFileError(f"{name}: {problem}") from error


def _check_values(value: JsonObject, name: str) -> None:
    """Check that the numbers in an object are finite, and that it is not deep.

    Raises:
        DamagedFileError: one is not; the message names the field.
    """
    rest: list[tuple[str, Any, int]] = [("", value, 0)]
    while rest:
        field, item, depth = rest.pop()
        if isinstance(item, float) and not isfinite(item):
            raise DamagedFileError(f"{name}: {field} is {item}; expected a finite number")
        if depth > _MAX_DEPTH:
            raise DamagedFileError(f"{name}: nested too deeply")
        if isinstance(item, dict):
            rest += [(f"{field}.{key}" if field else key, inner, depth + 1) for key, inner in item.items()]
        elif isinstance(item, list):
            rest += [(f"{field}[{index}]", inner, depth + 1) for index, inner in enumerate(item)]


def _limit(path: Path) -> int | None:
    if path.suffix == ".safetensors":
        return 1 << 50
    return _MIB if path.suffix == ".jinja" else _LIMITS.get(path.name)
