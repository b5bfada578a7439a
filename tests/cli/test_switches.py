"""``--x/--no-x``, the older spellings of a switch, and other tools' option names, as the command line reads them."""

from typing import Any

import click
import pytest

from panscan.cli.main import cli
from panscan.cli.values import given_axes
from panscan.settings import Options

pytestmark = pytest.mark.usefixtures("without_charts")


def parsed(verb: str, *words: str) -> dict[str, Any]:
    """The parameters of a command line, without running it."""
    command = cli.get_command(click.Context(cli), verb)
    return command.make_context(verb, list(words), **cli.context_settings).params


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--prefix-caching"], ["true"]),
        (["--no-prefix-caching"], ["false"]),
        (["--prefix-caching", "false"], ["false"]),
        (["--prefix-caching=off"], ["off"]),
        (["--prefix_caching", "true,false"], ["true", "false"]),
        (["--prefix-caching=true, false"], ["true", "false"]),
        (["--no_prefix_caching"], ["false"]),
        (["--enable-prefix-caching"], ["true"]),
        (["--no-enable-prefix-caching"], ["false"]),
        (["--prefix-caching", "--no-prefix-caching"], ["false"]),
    ],
)
def test_a_switch_has_many_spellings(words: list[str], value: list[str] | None) -> None:
    found = parsed("bench", *words, "page.png")
    settings = {"prefix_caching": text} if (text := found["prefix_caching"]) is not None else {}
    assert given_axes(Options.parsed({}, settings, frozenset())).get("prefix_caching") == value
    assert found["more_images"] == ("page.png",)


def test_a_switch_leaves_the_next_word_alone() -> None:
    found = parsed("ask", "--ignore-eos", "page.png", "-p", "--no-ignore-eos", "--", "--ignore-eos")
    assert (found["ignore_eos"], found["prompt"]) == ("true", "--no-ignore-eos")
    assert found["images"] == ("page.png", "--ignore-eos")


@pytest.mark.parametrize(
    ("verb", "words", "name", "value"),
    [
        ("ask", ["-tp", "2"], "tensor_parallel_size", "2"),
        ("ask", ["--tp=2"], "tensor_parallel_size", "2"),
        ("ask", ["--no-pan-and-scan"], "do_pan_and_scan", "false"),
        ("load", ["http://a", "--max-tokens", "9"], "max_new_tokens", "9"),
        ("profile", ["--output-tokens=9"], "max_new_tokens", "9"),
        ("plan", ["--model", "4b", "--output-tokens", "9"], "answer_lengths", "9"),
        ("verify", ["http://a", "--max-tokens", "9"], "max_tokens", "9"),
        ("bench", ["--num-samples", "9"], "limit", "9"),
        ("batch", ["a", "--limit", "9"], "limit", "9"),
        ("load", ["http://a", "--limit", "9"], "num_prompts", "9"),
        ("serve", ["--request-timeout", "9"], "request_timeout", "9.0"),
        ("quantize", ["--overwrite"], "force", "True"),
        ("demo", ["--overwrite"], "force", "True"),
    ],
)
def test_spellings_of_other_tools_and_older_names_are_read(verb: str, words: list[str], name: str, value: str) -> None:
    assert str(parsed(verb, *words)[name]) == value


def test_a_commands_own_option_comes_first() -> None:
    assert parsed("bench", "--seed", "3")["seed"] == 3
