"""What a run uses when the user brings no documents."""

from __future__ import annotations

import tempfile
from pathlib import Path

import panscan
from panscan.core import SettingError, cache_directory
from panscan.images.samples import write_samples

__all__ = ["sample_dataset"]


def sample_dataset() -> Path:
    """The bundled sample documents' ``questions.jsonl``, drawn into the cache on first use.

    A cache that cannot be written is replaced by a fixed folder among the temporary files, so that a run can resume.
    """
    name = f"samples-{panscan.__version__}"
    try:
        return write_samples(cache_directory() / name, overwrite=True)
    except SettingError:
        return write_samples(Path(tempfile.gettempdir()) / f"panscan-{name}", overwrite=True)
