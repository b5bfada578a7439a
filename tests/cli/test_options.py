"""Options of all verbs: help texts, which are kept in ``help/``, switches, names of other tools, what all share."""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from tests.conftest import noise

from panscan.cli.main import VERBS, cli, run
from panscan.cli.values import given_axes
from panscan.cli.verb import ClickOption, Verb
from panscan.settings import Options, options_of

TEXTS = Path(__file__).parent / "help"


def command_of(verb: str) -> Verb:
    command = cli.get_command(click.Context(cli), verb)
    assert isinstance(command, Verb)
    return command


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the width of help texts, as in a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("verb", ["panscan", *VERBS])
def test_help_is_the_kept_text(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``PANSCAN_RENEW_HELP=1 pytest tests/cli/test_options.py`` writes the present texts."""
    commands = [["--help"]] if verb == "panscan" else [[verb, "--help"], [verb, "--help-all"]]
    shown = "\n".join(f"$ panscan {' '.join(words)}\n{help_of(capsys, *words)}" for words in commands)
    file = TEXTS / f"{verb}.txt"
    if os.environ.get("PANSCAN_RENEW_HELP"):
        file.write_text(shown, "utf-8")
    assert shown.splitlines() == file.read_text("utf-8").splitlines()


def test_no_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys) == help_of(capsys, "--help")
    assert {path.stem for path in TEXTS.iterdir()} == {"panscan", *VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_help_lines_are_short_sentences_with_one_default(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(command_of(verb), info_name=verb)
    shown = {word.rstrip(",") for line in help_of(capsys, verb, "--help-all").splitlines() for word in line.split()[:3]}
    for parameter in context.command.params:
        if not isinstance(parameter, ClickOption) or parameter.declared.hidden:
            continue
        context.meta["panscan.help_all"] = True
        record = parameter.get_help_record(context)
        assert record is not None, parameter.opts
        text, *default = record[1].split("  [")
        assert len(text) < 60, text
        assert text[0].isupper() and text.endswith("."), text
        assert len(default) <= 1, record
        assert shown.intersection(parameter.opts), parameter.opts
    assert len(VERBS[verb]) < 60
    assert VERBS[verb][0].isupper() and VERBS[verb].endswith(".")


@pytest.mark.parametrize("verb", VERBS)
def test_short_help_has_no_rare_options_but_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, verb, "--help")
    rare = [option for option in command_of(verb).params if isinstance(option, ClickOption) and option.declared.rare]
    assert [option.opts[0] for option in rare if f"  {option.opts[0]} " in text] == []
    examples = text.partition("Examples\n")[2]
    assert "panscan" in examples
    assert not any(line.endswith(":") for line in examples.splitlines())


def test_every_choice_of_a_setting_is_in_its_help() -> None:
    for name, item in options_of("bench").items():
        shown = f"{item.metavar_text} {item.help}"
        assert [choice for choice in item.choices if choice not in shown] == [], name


# ``--x/--no-x``, the older spellings of a switch, and other tools' option names, as the command line reads them.


pytestmark = pytest.mark.usefixtures("without_charts")


def parsed(verb: str, *words: str) -> dict[str, Any]:
    """The parameters of a command line, without running it."""
    command = cli.get_command(click.Context(cli), verb)
    return command.make_context(verb, list(words), **cli.context_settings).params


SWITCHES: dict[str, list[str]] = {
    "": [""],
    "true": ["--prefix-caching", "--enable-prefix-caching"],
    "false": ["--no-prefix-caching", "--prefix-caching false", "--no_prefix_caching", "--no-enable-prefix-caching"],
    "off": ["--prefix-caching=off"],
    "true,false": ["--prefix_caching true,false", "'--prefix-caching=true, false'"],
}
SWITCHES["false"].append("--prefix-caching --no-prefix-caching")


@pytest.mark.parametrize("value", SWITCHES)
def test_a_switch_has_many_spellings(value: str) -> None:
    for words in SWITCHES[value]:
        values = parsed("bench", *shlex.split(words), "page.png")
        settings = {"prefix_caching": text} if (text := values["prefix_caching"]) is not None else {}
        given = given_axes(Options.parsed({}, settings, frozenset())).get("prefix_caching")
        assert given == (value.split(",") if value else None), words
        assert values["more_images"] == ("page.png",)


def test_a_switch_leaves_the_next_word_alone() -> None:
    values = parsed("ask", "--ignore-eos", "page.png", "-p", "--no-ignore-eos", "--", "--ignore-eos")
    assert (values["ignore_eos"], values["prompt"]) == ("true", "--no-ignore-eos")
    assert values["images"] == ("page.png", "--ignore-eos")


SPELLINGS = [
    ("ask", ["-tp", "2"], "tensor_parallel_size", "2"),
    ("ask", ["--tp=2"], "tensor_parallel_size", "2"),
    ("ask", ["--no-pan-and-scan"], "do_pan_and_scan", "false"),
    ("load", ["http://a", "--max-tokens", "9"], "max_new_tokens", "9"),
    ("profile", ["--output-tokens=9"], "max_new_tokens", "9"),
    ("plan", ["--model", "4b", "--output-tokens", "9"], "answer_lengths", "9"),
    ("verify", ["http://a", "--max-tokens", "9"], "max_tokens", "9"),
    ("bench", ["--num-samples", "9"], "limit", "9"),
    ("bench", ["--seed", "3"], "seed", "3"),  # its own option comes first
    ("batch", ["a", "--limit", "9"], "limit", "9"),
    ("load", ["http://a", "--limit", "9"], "num_prompts", "9"),
    ("serve", ["--request-timeout", "9"], "request_timeout", "9.0"),
    ("quantize", ["--overwrite"], "force", "True"),
    ("demo", ["--overwrite"], "force", "True"),
]


@pytest.mark.parametrize(("verb", "words", "name", "value"), SPELLINGS)
def test_spellings_of_other_tools_and_older_names_are_read(verb: str, words: list[str], name: str, value: str) -> None:
    assert str(parsed(verb, *words)[name]) == value


# What all verbs share.


def test_what_the_engine_says_at_its_start_goes_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["samples", "--help"]) == 0
    capsys.readouterr()
    logging.getLogger("panscan.engine").info("prefill warm-up: 3.2 s")
    logging.getLogger("panscan.engine").debug("a graph of 8 rows")
    assert capsys.readouterr() == ("", "prefill warm-up: 3.2 s\n")


@pytest.mark.parametrize("verb", ["ask", "batch -o a", "bench --repeats 1 --runner engine --no-verify --warmup 0"])
def test_limits_of_gpus_change_nothing_on_a_cpu(verb: str, folder: Path) -> None:
    noise(60, 60).save("doc.png")
    limits = ["--gpu-memory-utilization", "0.1", "--gpu-memory-gb", "0.001", "--tensor-parallel-size", "1"]
    words = ["-p", "What?", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "1"]
    assert run([*verb.split(), "doc.png", *words, *limits]) == 0
