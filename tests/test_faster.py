"""The speed guide: its commands are valid, its gains compare like with like."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest
from benchmarks.faster import Figure, commands

from panscan.cli.main import VERBS
from panscan.core import PanscanError

PAGE = (Path(__file__).parent.parent / "docs" / "faster.md").read_text("utf-8")


def parse(line: str) -> None:
    """Parse a command line as ``panscan`` does, without running it."""
    program, verb, *arguments = shlex.split(line)
    assert program == "panscan" and verb in VERBS, line
    command: click.Command = import_module(f"panscan.cli.{verb}").command
    command.make_context(verb, arguments)


def test_every_command_of_the_guide_is_valid() -> None:
    shown = {*re.findall(r"^    (panscan .+)$", PAGE, re.M), *re.findall(r"\| `(panscan [^`]+)` \|", PAGE)}
    assert {*commands()} <= shown
    for line in shown:
        try:
            parse(line)
        except (click.UsageError, PanscanError) as error:
            pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("line", ["panscan batch scans/ --quantisation int8", "panscan serve --replicas many"])
def test_a_wrong_command_would_be_noticed(line: str) -> None:
    with pytest.raises((click.UsageError, PanscanError)):
        parse(line)


def test_figures_of_other_hardware_or_units_are_not_compared() -> None:
    figure = Figure([2.0], "requests/s", "w1", "H200")
    for other in (Figure([2.0], "requests/s", "w1", "A100"), Figure([2.0], "ms", "w1", "H200")):
        with pytest.raises(ValueError, match="cannot be compared"):
            figure.gain(other)
