"""Conversion of exceptions from the hub, files and Transformers into one-line errors with a fix."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from panscan.core import ModelError, PanscanError, UnsupportedError
from panscan.core.errors import brief
from panscan.model.untrusted.reading import DamagedFileError, read_json

PICKLED = (
    "not all of its weights are in safetensors files: convert them with save_pretrained() (pickled weights, such as"
    " pytorch_model.bin, can run code and are not loaded)"
)
T = TypeVar("T")
_NO_SAFETENSORS = re.compile(r"file named \S*\.safetensors")  # both wordings of Transformers


@contextmanager
def friendly_errors(name: str) -> Iterator[None]:
    """Convert exceptions from the hub, files and Transformers into one-line errors with a fix."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(f"--model {name}: {brief(error, 300)}") from error
    except (OSError, ValueError, SafetensorError, HFValidationError) as error:
        raise ModelError(f"--model {name}: {_load_advice(name, error)}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        reason = brief(f"{type(error).__name__}: {error}")
        raise ModelError(f"--model {name}: config.json or another of its files is damaged ({reason})") from error


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Begin errors about the contents of a checkpoint with its option."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"--model {name}: {error}") from error
    except ValueError as error:
        raise ModelError(f"--model {name}: {error}") from error


def _load_advice(name: str, error: BaseException) -> str:
    if isinstance(error, DamagedFileError):
        return str(error)
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    text = " ".join(str(link) for link in chain)
    advice: dict[Any, str] = {
        GatedRepoError: (
            f"the checkpoint is gated: accept its licence at https://huggingface.co/{name}, then run"
            " 'hf auth login' (or set HF_TOKEN)"
        ),
        RevisionNotFoundError: "there is no such --revision",
        (RepositoryNotFoundError, HFValidationError): (
            "no such checkpoint on the hub, and no such directory (private ones need 'hf auth login')"
        ),
    }
    for kinds, reason in advice.items():
        if any(isinstance(link, kinds) for link in chain):
            return reason
    if _NO_SAFETENSORS.search(text):
        return PICKLED
    if "trust_remote_code" in text:
        return "it requires custom code (trust_remote_code), which panscan does not run"
    offline = any(isinstance(link, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError) for link in chain)
    if offline or "connect" in text.lower():
        return "not downloaded, and the hub cannot be reached: check the network, or give a local directory"
    return brief(error, 300)


def read_by_transformers(read: Callable[[str], T], source: str, *files: str) -> T:
    """Return what Transformers reads from the files of a checkpoint.

    Transformers and its tokenizers raise many kinds of exceptions for damaged files.

    Args:
        read: function of Transformers that takes the directory.
        source: directory of the checkpoint.
        files: names of the files that it reads, for messages; those that the directory lacks are left out.

    Raises:
        DamagedFileError: a file is damaged.
        ImportError: a package is missing.
        OSError: a file is missing.
    """
    try:
        return read(source)
    except (ImportError, OSError, PanscanError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        present = [Path(source) / file for file in files if (Path(source) / file).is_file()]
        for path in present:
            read_json(path)  # raises if it is not even JSON
        named = " or ".join(path.name for path in present)
        reason = brief(error)
        raise DamagedFileError(f"{named}: Transformers cannot read it ({type(error).__name__}: {reason})") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence Transformers' warnings, whose table of missing weights would push our own error off the screen."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
