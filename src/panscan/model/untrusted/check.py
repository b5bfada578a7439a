"""Checks of a checkpoint's directory, before PyTorch or Transformers open a file of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panscan.core.option import shorten
from panscan.model.families import SUPPORTED
from panscan.model.untrusted.fields import (
    ConfigSizes,
    TokenizerFields,
    check_generation,
    check_other_model,
    check_processor,
    check_quantization,
    check_shapes,
)
from panscan.model.untrusted.headers import StoredShape, index_files, key_of, read_header, weight_files
from panscan.model.untrusted.reading import DamagedFileError, checkpoint_entries, read_json, read_text, typed
from panscan.model.untrusted.template import MAX_TEMPLATE

_JSON = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class CheckedFiles:
    """Contents of a checkpoint that passed :func:`check_directory`.

    Args:
        directory: its directory.
        config: contents of ``config.json``.
        tensors: type, shape and file of each stored tensor; empty if the weights are missing or not downloaded.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredShape]


_checked: dict[Path, tuple[object, CheckedFiles]] = {}  # status of the files of each directory that passed


def check_directory(directory: Path) -> CheckedFiles:
    """Check the files of a checkpoint: kinds, sizes, JSON, and the configuration against the weights.

    A directory whose files have not changed is checked once per process.

    Raises:
        DamagedFileError: a file is damaged; the message names it and the field.
    """
    entries = checkpoint_entries(directory)
    state = tuple((name, status.st_mtime_ns, status.st_size, status.st_ino) for name, status in sorted(entries.items()))
    known = _checked.get(directory)
    if known is not None and known[0] == state:
        return known[1]
    objects = {name: read_json(directory / name) for name in (*_JSON, *_PROCESSORS) if name in entries}
    if "chat_template.jinja" in entries and len(read_text(directory / "chat_template.jinja")) > MAX_TEMPLATE:
        raise DamagedFileError(f"chat_template.jinja: more than {MAX_TEMPLATE:,} characters")
    config = read_json(directory / "config.json")
    if (kernel := _kernel_in(config)) is not None:
        raise DamagedFileError(
            f"config.json names code to download ({shorten(kernel)}), which panscan does not run: remove its"
            " attn_implementation"
        )
    check_quantization(config)
    typed(objects.get("tokenizer_config.json", {}), TokenizerFields, "tokenizer_config.json")
    files = weight_files(directory, entries)
    tensors = _tensors(directory, files)
    if files and _INDEX in entries:
        _check_index(index_files(directory / _INDEX), files, tensors)
    if config.get("model_type") in SUPPORTED:
        sizes = ConfigSizes.of(config)
        check_generation(objects.get("generation_config.json", {}), sizes)
        for name in _PROCESSORS:
            check_processor(name, objects.get(name, {}), sizes)
        if tensors:
            check_shapes(sizes, tensors)
    else:
        check_other_model(config)
    checked = CheckedFiles(directory, config, tensors)
    _checked[directory] = state, checked
    return checked


def template_file(directory: Path) -> str:
    """Return the name of the file that holds a checkpoint's chat template."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (directory / name).is_file():
            return name
    return "tokenizer_config.json"


def stored_template(directory: Path) -> Any:
    """Return the chat template in a directory; None without one.

    Raises:
        DamagedFileError: its file is damaged.
    """
    path = directory / template_file(directory)
    if path.suffix == ".jinja":
        return read_text(path)
    return read_json(path).get("chat_template") if path.is_file() else None


def _kernel_in(stored: Any) -> str | None:
    """Return the first attention kernel on the hub (``owner/name``) in a configuration, at any depth, or None."""
    if not isinstance(stored, dict):
        return None
    for key, value in stored.items():
        if key.startswith(("attn_implementation", "_attn_implementation")):
            named = value.values() if isinstance(value, dict) else [value]
            if (kernel := next((str(name) for name in named if "/" in str(name)), None)) is not None:
                return kernel
        if (kernel := _kernel_in(value)) is not None:
            return kernel
    return None


def _tensors(directory: Path, files: list[str]) -> Mapping[str, StoredShape]:
    """Return the tensors of some files.

    Raises:
        DamagedFileError: a header is damaged, or two tensors are the same parameter.
    """
    tensors: dict[str, StoredShape] = {}
    keys: dict[str, str] = {}
    for file in files:
        for name, facts in read_header(directory / file).items():
            if (other := keys.setdefault(key_of(name), name)) != name or name in tensors:
                raise DamagedFileError(f"{file}: the tensors {other} and {name} refer to the same parameter")
            tensors[name] = facts
    return tensors


def _check_index(named: Mapping[str, str], files: list[str], tensors: Mapping[str, StoredShape]) -> None:
    """Check that the files of an index hold the tensors that it names; an index of other files is ignored."""
    absent = sorted(name for name, file in named.items() if file in files and name not in tensors)
    if absent:
        raise DamagedFileError(
            f"{named[absent[0]]}: {len(absent)} tensors of {_INDEX} are missing, e.g. {absent[0]}: download it again"
        )
