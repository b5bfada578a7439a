"""What a model's name stands for: directories of checkpoints and adapters, local ones and snapshots of the hub.

Imports neither PyTorch nor Transformers, so that a command reports an unreachable hub before it imports them.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, XetDownloadError
from safetensors import SafetensorError
from tqdm import tqdm

from panscan.core import BUNDLED, ModelError, PanscanWarning, split_adapters
from panscan.core.activity import activity
from panscan.core.daemons import run_in_daemon
from panscan.core.errors import brief
from panscan.core.model_names import local_directory
from panscan.core.option import shorten
from panscan.model.hub_errors import friendly_errors
from panscan.model.untrusted.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    is_adapter_directory,
    is_adapter_listing,
    read_adapter_config,
)
from panscan.model.untrusted.headers import weight_files

_DEADLINE_S = 4.0  # for the hub's first answer, name resolution included
_PARALLEL = 8  # downloads
_SMALL = (".json", ".jinja", ".md", ".model", ".txt")
_CONFIG = "config.json"
_CYCLE = "its base leads back to itself: set base_model_name_or_path to a model"
_PUBLISHED = re.compile(r"(?:gemma-?3[-:])?(270m|1b|4b|12b|27b)(-it|-pt)?")  # without its owner, or as Ollama has it
_LONGEST_ID = 96  # characters of a hub id

# A connection that fails: HTTPError of httpx or httpx2, whichever this version of huggingface_hub uses.
_TransportError: type[Exception] = HfHubHTTPError.__bases__[0]

_found: dict[tuple[str, str | None, bool], Path] = {}  # by name, revision, and whether it has the weights


def check_model_name(name: str) -> None:
    """Check that a name can be that of a checkpoint that is not bundled, without contacting the hub.

    Raises:
        ModelError: it is neither a path of this machine nor a hub id.
    """
    model, *adapters = split_adapters(name)
    if not all(adapters):
        raise ModelError(f"--adapter: an empty name in {shorten(name)}; give a directory or a hub id")
    if "/" in model or local_directory(model) is not None or (adapters and model in BUNDLED):
        return
    message = f"--model {model}: neither 'mini' nor 'tiny', nor a directory, nor a hub id (owner/name)"
    if published := _PUBLISHED.fullmatch(model.lower()):
        size, kind = published[1], published[2] or "-it"
        message += f"; use google/gemma-3-{size}{kind}, or --random-weights --model-shape {size}"
    raise ModelError(message)


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


def model_source(name: str, revision: str | None = None, *, download: bool = True) -> ModelSource:
    """Return the checkpoint and the adapters that a name stands for, downloading adapters if necessary.

    Args:
        name: ``mini``, ``tiny``, a directory or a hub id of a checkpoint or an adapter, which stands for the base that
            it names; then further adapters, each after a ``+``.
        revision: revision of the first of these on the hub.
        download: False: follow adapters on this machine only, and leave out the further ones.

    Raises:
        ModelError: an adapter is not available or damaged, names no base, or its base leads back to itself.
    """
    base, *names = split_adapters(name)
    chain: list[AdapterSource] = []
    while (directory := _adapter_directory(base, revision, download=download)) is not None:
        adapter = AdapterSource(f"--model {base}", directory)
        if any(directory.samefile(other.directory) for other in chain):
            raise ModelError(f"{adapter.option}: {_CYCLE}")
        chain.insert(0, adapter)
        base, revision = base_of(adapter, base)
    return ModelSource(base, revision, (*chain, *map(named_adapter, names if download else ())))


def base_of(adapter: AdapterSource, name: str) -> tuple[str, str | None]:
    """Return the base of an adapter, and its revision; a relative path may start in the adapter's directory."""
    with adapter.friendly_errors():
        config = read_adapter_config(adapter.directory)
    fix = f"name the base with --model BASE --adapter {name}"
    if not (base := config.base_model_name_or_path):
        raise ModelError(f"{adapter.option}: its adapter_config.json has no base_model_name_or_path; {fix}")
    if base in BUNDLED or local_directory(base) is not None:
        return base, config.revision
    if local_directory(inside := str(adapter.directory / base)) is not None:
        return inside, config.revision
    if base.startswith(("/", ".", "~")) or base.count("/") != 1 or len(base) > _LONGEST_ID:
        raise ModelError(f"{adapter.option}: its base {brief(base, 150)} is not on this machine; {fix}")
    return base, config.revision


def named_adapter(name: str) -> AdapterSource:
    """Return the adapter of ``--adapter``, downloading it if necessary.

    Raises:
        ModelError: it is not available, or is a checkpoint.
    """
    try:
        directory = _adapter_directory(name, None)
    except ModelError as error:
        raise ModelError(str(error).replace("--model", "--adapter", 1)) from error
    if directory is None:
        raise ModelError(f"--adapter {name}: not an adapter, which has an adapter_config.json and no model weights")
    return AdapterSource(f"--adapter {name}", directory)


def _adapter_directory(name: str, revision: str | None, *, download: bool = True) -> Path | None:
    """Return the directory of an adapter; None if the name stands for a checkpoint."""
    local = None if download else local_directory(name)
    if name in BUNDLED or not (download or (local and is_adapter_directory(Path(local)))):
        return None
    directory = checkpoint_directory(name, revision, weights=False)
    return directory if is_adapter_directory(directory) else None


def checkpoint_directory(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint or adapter that is not bundled, downloading it if necessary.

    Args:
        name: a directory or a hub id.
        revision: revision of a hub checkpoint.
        weights: False if the configuration, the tokenizer and the processor are enough.

    Raises:
        ModelError: there is no such checkpoint, or it cannot be downloaded.
    """
    if local_directory(name) is not None:
        path = Path(name).expanduser()
        if not (path / _CONFIG).is_file() and not is_adapter_directory(path):
            raise ModelError(f"--model {name}: the directory has no config.json (is it a Transformers checkpoint?)")
        return path
    check_model_name(name)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or len(name) > _LONGEST_ID or Path(name).is_file():
        raise ModelError(f"--model {brief(name, 150)}: there is no such directory")
    with friendly_errors(name):
        return _snapshot(name, revision, weights=weights)


def _snapshot(name: str, revision: str | None, *, weights: bool) -> Path:
    """Return the cached snapshot of a hub checkpoint, downloading what is missing.

    If the hub cannot be reached, a complete copy of an earlier download is used. The hub is asked once per process.
    """
    for key in ((name, revision, True), (name, revision, weights)):
        if key in _found:
            return _found[key]
    cached = cached_snapshot(name, revision, weights=weights)
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise ModelError(
                f"--model {name}: not downloaded, and HF_HUB_OFFLINE is set: unset it, or give a local directory"
            )
        return cached
    try:
        info = _repo_info(name, revision)
    except (HfHubHTTPError, ModelError):
        if cached is None:
            raise
        weights = cached_snapshot(name, revision, weights=True) is not None
        directory = cached
    else:
        try:
            directory = _updated(name, revision, info, weights=weights)
        except (ModelError, OSError) as error:  # HfHubHTTPError is an OSError
            if cached is None:
                raise
            reason = brief(str(error).removeprefix(f"--model {name}: "), 150)
            message = f"--model {name}: using the cached copy, because the latest commit was not downloaded: {reason}"
            warnings.warn(message, PanscanWarning, stacklevel=2)
            directory = cached
    return _found.setdefault((name, revision, weights), directory)


def _updated(name: str, revision: str | None, info: Any, *, weights: bool) -> Path:
    """Download the missing files of a commit, and return the directory of its snapshot.

    Args:
        name: hub id.
        revision: requested revision.
        info: the hub's description of it.
        weights: False to leave out the weights.
    """
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings if "/" not in sibling.rfilename}
    is_adapter = is_adapter_listing(files)
    if _CONFIG not in files and not is_adapter:
        raise ModelError(f"--model {name}: the repository has no config.json (is it a Transformers checkpoint?)")
    # The named revision is recorded with the first files, so that the cache is found without the hub.
    first = {file: files[file] for file in files if file.endswith(_SMALL)}
    if is_adapter and ADAPTER_WEIGHTS in files:
        first[ADAPTER_WEIGHTS] = files[ADAPTER_WEIGHTS]
    _download(name, revision, info.sha, first)
    config = try_to_load_from_cache(name, ADAPTER_CONFIG if is_adapter else _CONFIG, revision=info.sha)
    if not isinstance(config, str):
        raise ModelError(f"--model {name}: it changed while it was downloaded: run the command again")
    directory = Path(config).parent
    if weights and not is_adapter:
        _download(name, info.sha, info.sha, {file: files[file] for file in weight_files(directory, files)})
    return directory


def _download(name: str, revision: str | None, commit: str, files: dict[str, int]) -> None:
    """Download the files of a commit that are not cached.

    Args:
        name: hub id.
        revision: name of the commit to record in the cache.
        commit: hash of the commit.
        files: size of each file in bytes.

    Raises:
        HfHubHTTPError: the hub refuses a file.
        ModelError: the connection is lost.
        OSError: a file cannot be written.
    """
    missing = [file for file in files if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)]
    if not missing:
        return
    done = dict.fromkeys(missing, 0.0)
    with activity(f"downloading {name}", total=sum(files[file] for file in missing) or None, unit="B") as step:

        def fetch(file: str) -> None:
            with slots:

                class Bar(tqdm):  # type: ignore[misc]  # it has no types
                    """Reports bytes instead of drawing them."""

                    def __init__(self, *args: Any, **options: Any) -> None:
                        super().__init__(*args, **{**options, "leave": False})  # else closing it prints an empty line

                    def display(self, *_: Any, **__: Any) -> None:
                        done[file] = max(done[file], self.n)  # there may be bars of received and of written bytes
                        step.update(sum(done.values()))

                hf_hub_download(name, file, revision=revision, tqdm_class=Bar)

        slots = threading.Semaphore(_PARALLEL)
        for download in [run_in_daemon(partial(fetch, file), "panscan-hub") for file in missing]:
            try:
                download.result()
            except HfHubHTTPError:
                raise
            except (_TransportError, XetDownloadError, RuntimeError) as error:  # hf_xet raises RuntimeError, too
                reason = brief(error, 150)
                raise ModelError(f"--model {name}: the download broke off ({reason}): run the command again") from error


def cached_snapshot(name: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """Return the snapshot of a checkpoint or adapter in the hub's cache; None if files are missing."""
    paths = [try_to_load_from_cache(name, file, revision=revision) for file in (_CONFIG, ADAPTER_CONFIG)]
    if (config := next((path for path in paths if isinstance(path, str)), None)) is None:
        return None
    directory = Path(config).parent
    names = {path.name for path in directory.iterdir()}
    if is_adapter_listing(names):
        return directory if ADAPTER_WEIGHTS in names else None
    complete = "tokenizer_config.json" in names and (not weights or weight_files(directory, names))
    return directory if complete else None


def _repo_info(name: str, revision: str | None) -> Any:
    """Return the hub's description of a checkpoint: commit, files and their sizes.

    Raises:
        HfHubHTTPError: the hub refuses, or has no such checkpoint.
        ModelError: the hub does not answer in time. HF_HUB_ETAG_TIMEOUT sets the deadline in seconds.
    """
    is_set = "HF_HUB_ETAG_TIMEOUT" in os.environ
    seconds = float(constants.HF_HUB_ETAG_TIMEOUT) if is_set else _DEADLINE_S
    with activity(f"contacting {constants.ENDPOINT}"):
        try:
            # HTTP timeouts alone are not enough: they apply to each address of the host, and exclude name resolution.
            ask = partial(HfApi().model_info, name, revision=revision, files_metadata=True, timeout=seconds)
            return run_in_daemon(ask, "panscan-hub").result(seconds)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception as error:  # of httpx or httpx2, by the version of huggingface_hub, or a proxy's page, not JSON
            reason = f"no answer within {seconds:g} s" if "Timeout" in type(error).__name__ else str(error)
            raise ModelError(
                f"--model {name}: not downloaded, and {constants.ENDPOINT} cannot be reached"
                f" ({brief(reason, 150)}): check the network, or give a local directory"
            ) from error
