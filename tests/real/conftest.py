"""Collect these tests for ``make test-real`` only, which names the cache of trained weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CACHE = os.environ.get("PANSCAN_REAL_CACHE")
collect_ignore_glob = [] if CACHE else ["test_*.py"]


@pytest.fixture(scope="session")
def real() -> tuple[Path, Path]:
    """The trained checkpoint, and one without weights that reads images; both have the true vocabulary."""
    from tests.real.prepare import prepare

    assert CACHE is not None
    return prepare(Path(CACHE))
