"""``--help``: groups, short lines, one default, an example at the end."""

from __future__ import annotations

import click
import pytest

from panscan.cli.main import SECTIONS, VERBS, cli, run
from panscan.cli.verb import Option, Verb
from panscan.settings import GROUPS, axes


def command_of(verb: str) -> Verb:
    command = cli.get_command(click.Context(cli), verb)
    assert isinstance(command, Verb)
    return command


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert run(list(words)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the width of help texts, as in a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_help_of_bench_is_grouped_and_fits_on_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, "bench", "--help")
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    wanted = ["Input", "Model", "Pan and scan", "Runner", "Engine", "Generation", "Measurement", "Output"]
    assert headings == wanted


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_lists_every_option_in_a_known_group_and_ends_with_an_example(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [each for each in command_of(verb).params if isinstance(each, click.Option)]
    folded = [each for each in options if isinstance(each, Option) and each.rare]
    short = help_of(capsys, verb, "--help")
    whole = help_of(capsys, verb, "--help-all") if folded else short
    headings = [line[:-1] for line in whole if line.endswith(":") and not line.startswith(" ")]
    assert headings == [group for group in GROUPS if group in headings]
    shown = [word.rstrip(",") for line in whole for word in line.split()[:3]]
    for each in options:
        assert any(flag in shown for flag in each.opts), each.opts
    assert all(f"  {each.opts[0]} " not in "\n".join(short) for each in folded)
    assert "Examples" in short
    assert set(" ".join(short[short.index("Examples") + 1 :]).split()) & {"panscan"}
    assert not any(line.endswith(":") for line in short[short.index("Examples") :])


@pytest.mark.parametrize("verb", VERBS)
def test_help_lines_are_short_sentences_with_one_default(verb: str) -> None:
    context = click.Context(command_of(verb), info_name=verb)
    for each in context.command.params:
        if not isinstance(each, click.Option):
            continue
        record = each.get_help_record(context)
        assert record is not None, each.opts
        text, *default = record[1].split("  [")
        assert len(text) < 60, text
        assert text[0].isupper() and text.endswith("."), text
        assert len(default) <= 1, record
    assert len(VERBS[verb]) < 60
    assert VERBS[verb][0].isupper() and VERBS[verb].endswith(".")


def test_every_choice_of_a_setting_is_in_its_help() -> None:
    context = click.Context(command_of("bench"), info_name="bench")
    for each in context.command.params:
        for choice in axes()[each.name].choices if each.name in axes() else ():
            record = each.get_help_record(context) if isinstance(each, click.Option) else None
            assert record is not None
            assert choice in " ".join(record), each.name


def test_the_commands_are_listed_by_task_also_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys)
    assert lines == help_of(capsys, "--help")
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", *SECTIONS]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in VERBS] == list(VERBS)
    assert "--batch-size" not in " ".join(lines)  # it would select generate()


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("serve", ["Runner: engine; ask and bench have others."]),
        ("batch", ["Runner: engine; ask and bench have others.", "--prompt-column"]),
        ("verify", ["'tiny'. [required]"]),
        ("profile", ["Requests at once."]),
        ("bench", ["selects --runner generate.", "breaks images in generate(). [default: 2048]"]),
        ("plan", ["Prompt tokens per pass. [default: 2048]"]),
    ],
)
def test_a_command_describes_what_its_options_do_there(
    verb: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(" ".join(help_of(capsys, verb, "--help")).split())
    assert [words for words in expected if words not in text] == []


def test_serve_has_no_options_of_runners_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert "vllm" not in "\n".join(help_of(capsys, "serve", "--help-all")).lower()
