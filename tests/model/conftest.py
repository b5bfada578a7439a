"""A checkpoint that tests of the loaders change."""

import shutil
from pathlib import Path

import pytest

from panscan.model.bundled import tiny_directory


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tiny checkpoint as somebody's local directory."""
    return Path(shutil.copytree(tiny_directory(), tmp_path / "checkpoint"))
