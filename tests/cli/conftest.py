"""The working directory of commands."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; several files put documents into theirs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
