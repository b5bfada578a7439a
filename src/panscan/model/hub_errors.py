"""Conversion of exceptions from the hub, files and Transformers into one-line errors with a fix."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from panscan.core import ModelError, UnsupportedError

__all__ = ["PICKLED", "friendly_errors", "quiet_transformers"]

PICKLED = (
    "not all of its weights are in safetensors files: convert them with save_pretrained() (pickled weights, such as"
    " pytorch_model.bin, can run code and are not loaded)"
)
_NO_SAFETENSORS = re.compile(r"file named \S*\.safetensors")  # both wordings of Transformers


@contextmanager
def friendly_errors(name: str) -> Iterator[None]:
    """Convert exceptions from the hub, files and Transformers into one-line errors with a fix."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(f"--model {name}: {' '.join(str(error).split())[:300]}") from error
    except (OSError, ValueError, SafetensorError, HFValidationError) as error:
        raise ModelError(f"--model {name}: {_advice(name, error)}") from error


def _advice(name: str, error: BaseException) -> str:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    text = " ".join(str(link) for link in chain)
    if any(isinstance(link, GatedRepoError) for link in chain):
        return (
            f"the checkpoint is gated: accept its licence at https://huggingface.co/{name}, then run"
            " 'hf auth login' (or set HF_TOKEN)"
        )
    if any(isinstance(link, RevisionNotFoundError) for link in chain):
        return "there is no such --revision"
    if any(isinstance(link, RepositoryNotFoundError | HFValidationError) for link in chain):
        return "no such checkpoint on the hub, and no such directory (private ones need 'hf auth login')"
    if _NO_SAFETENSORS.search(text):
        return PICKLED
    if "trust_remote_code" in text:
        return "it requires custom code (trust_remote_code), which panscan does not run"
    offline = any(isinstance(link, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError) for link in chain)
    if offline or "connect" in text.lower():
        return "not downloaded, and the hub cannot be reached: check the network, or give a local directory"
    return " ".join(str(error).split())[:300]


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
