"""``--help`` and ``--help-all``: each verb's text is kept in ``help/``, and follows rules that a reader relies on."""

import os
from pathlib import Path

import click
import pytest

from panscan.cli.main import VERBS, cli, run
from panscan.cli.verb import ClickOption, Verb
from panscan.settings import options_of

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
    """``PANSCAN_RENEW_HELP=1 pytest tests/cli/test_help.py`` writes the present texts."""
    commands = [["--help"]] if verb == "panscan" else [[verb, "--help"], [verb, "--help-all"]]
    shown = "\n".join(f"$ panscan {' '.join(words)}\n{help_of(capsys, *words)}" for words in commands)
    kept = TEXTS / f"{verb}.txt"
    if os.environ.get("PANSCAN_RENEW_HELP"):
        kept.write_text(shown, "utf-8")
    assert shown.splitlines() == kept.read_text("utf-8").splitlines()


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
    rare = [each for each in command_of(verb).params if isinstance(each, ClickOption) and each.declared.rare]
    assert [each.opts[0] for each in rare if f"  {each.opts[0]} " in text] == []
    examples = text.partition("Examples\n")[2]
    assert "panscan" in examples
    assert not any(line.endswith(":") for line in examples.splitlines())


def test_every_choice_of_a_setting_is_in_its_help() -> None:
    for name, item in options_of("bench").items():
        shown = f"{item.metavar_text} {item.help}"
        assert [choice for choice in item.choices if choice not in shown] == [], name
