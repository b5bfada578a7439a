"""What a model's name stands for: a checkpoint, and the adapters to merge into it. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from panscan.core import BUNDLED, ModelError, split_adapters
from panscan.model.hub import checkpoint_directory
from panscan.model.untrusted.adapter import is_adapter_directory, read_adapter_config


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter on this machine.

    Args:
        option: the option that names it, for messages.
        directory: its files.
    """

    option: str
    directory: Path

    @contextmanager
    def friendly_errors(self) -> Iterator[None]:
        """Convert errors about the adapter's files into one line that names the option."""
        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:  # also DamagedFileError
            raise ModelError(f"{self.option}: {error}") from error


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by name.

    Args:
        base: ``mini``, ``tiny``, a directory or a hub id of a checkpoint.
        revision: revision of a hub checkpoint.
        adapters: adapters to merge into it, in order.
    """

    base: str
    revision: str | None
    adapters: tuple[AdapterSource, ...] = ()


def model_source(name: str, revision: str | None = None) -> ModelSource:
    """Return the checkpoint and the adapters that a name stands for, downloading adapters if necessary.

    Args:
        name: ``mini``, ``tiny``, a directory or a hub id of a checkpoint or an adapter, which stands for the base that
            it names; then further adapters, each after a ``+``.
        revision: revision of the first of these on the hub.

    Raises:
        ModelError: an adapter is not available or damaged, names no base, or its base leads back to itself.
    """
    base, *names = split_adapters(name)
    chain: list[AdapterSource] = []
    while (directory := _adapter_directory(base, revision)) is not None:
        adapter = AdapterSource(f"--model {base}", directory)
        if any(directory.samefile(other.directory) for other in chain):
            raise ModelError(f"{adapter.option}: its base leads back to itself: set base_model_name_or_path to a model")
        chain.insert(0, adapter)
        base, revision = _base_of(adapter, base)
    return ModelSource(base, revision, (*chain, *map(_named_adapter, names)))


def _base_of(adapter: AdapterSource, name: str) -> tuple[str, str | None]:
    """Return the base of an adapter, and its revision; a relative path may start in the adapter's directory."""
    with adapter.friendly_errors():
        config = read_adapter_config(adapter.directory)
    fix = f"name the base with --model BASE --adapter {name}"
    if config.base is None:
        raise ModelError(f"{adapter.option}: its adapter_config.json has no base_model_name_or_path; {fix}")
    base = Path(config.base).expanduser()
    if config.base in BUNDLED or base.is_dir():
        return config.base, config.revision
    if (inside := adapter.directory / base).is_dir():
        return str(inside), config.revision
    if base.is_absolute() or config.base.startswith((".", "~")) or config.base.count("/") != 1:
        raise ModelError(f"{adapter.option}: its base {config.base} is not on this machine; {fix}")
    return config.base, config.revision


def _named_adapter(name: str) -> AdapterSource:
    """Return the adapter of ``--adapter``."""
    try:
        directory = _adapter_directory(name, None)
    except ModelError as error:
        raise ModelError(str(error).replace("--model", "--adapter", 1)) from error
    if directory is None:
        raise ModelError(f"--adapter {name}: not an adapter, which has an adapter_config.json and no model weights")
    return AdapterSource(f"--adapter {name}", directory)


def _adapter_directory(name: str, revision: str | None) -> Path | None:
    """Return the directory of an adapter; None if the name stands for a checkpoint."""
    if name in BUNDLED:
        return None
    directory = checkpoint_directory(name, revision, weights=False)
    return directory if is_adapter_directory(directory) else None
