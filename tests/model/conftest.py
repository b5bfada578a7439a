"""A checkpoint that tests of the loaders change, and the change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from panscan.model.bundled import tiny_directory


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tiny checkpoint as somebody's local directory."""
    return Path(shutil.copytree(tiny_directory(), tmp_path / "checkpoint"))


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
