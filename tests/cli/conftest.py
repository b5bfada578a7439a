"""The command line, as tests of commands use it."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from panscan.cli.main import run

Panscan = Callable[..., Any]
"""The type of :func:`panscan`."""


@pytest.fixture
def panscan(capsys: pytest.CaptureFixture[str]) -> Panscan:
    """Runs a command line, whose first argument is split as a shell does; returns what it printed."""

    def command(line: str, *words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run([*shlex.split(line), *words]) == code
        return capsys.readouterr()

    return command
