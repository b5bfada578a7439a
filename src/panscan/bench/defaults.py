"""What a run uses when the user brings no documents."""

from __future__ import annotations

import tempfile
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import PIL

import panscan
from panscan.core import SettingError, cache_directory
from panscan.images.samples import write_samples

__all__ = ["sample_dataset"]


def sample_dataset() -> Path:
    """The bundled sample documents' ``questions.jsonl``, drawn into the cache on first use.

    Another recipe draws into another folder: its documents do not mix with older ones, and runs that read those resume.
    A cache that cannot be written is replaced by a fixed folder among the temporary files, so that a run can resume.
    """
    name = f"samples-{panscan.__version__}-{_digest()}"
    try:
        return write_samples(cache_directory() / name, overwrite=True)
    except SettingError:
        return write_samples(Path(tempfile.gettempdir()) / f"panscan-{name}", overwrite=True)


def _digest() -> str:
    """Changes with the source that draws the documents and with the library that does."""
    images = files("panscan.images")
    sources = [images / "ink.py", images / "samples.py", *(images / "documents").iterdir()]
    digest = sha256(PIL.__version__.encode())
    for source in sorted((each for each in sources if each.name.endswith(".py")), key=lambda each: each.name):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
