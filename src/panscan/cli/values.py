"""Values of options that several verbs share: settings and presets, prompts, schemas, the command line as words."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from panscan.cli.console import note
from panscan.cli.models import check_first_adapter, check_model_names
from panscan.cli.verb import ClickOption
from panscan.core import InputError, Request, Sampling, SettingError, with_adapters
from panscan.core.files import read_text
from panscan.core.option import comma_list
from panscan.core.sampling import MAX_SCHEMA_BYTES
from panscan.settings import (
    NEEDS_GENERATE,
    Options,
    RunnerChoice,
    Settings,
    SettingValues,
    axes,
    choose_runner,
    default_of,
    foreign_settings,
    options_of,
)
from panscan.settings.declaration import json_object


def read_structures(options: Options, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the checked constraints on answers as fields of :class:`panscan.core.Sampling`.

    Args:
        options: the options of the command.
        ignore_eos: value of ``--ignore-eos``, which excludes constraints.

    Raises:
        InputError: the file of a schema or a grammar cannot be read.
        SettingError: a constraint is invalid, or not supported.
    """
    values: dict[str, Any] = {
        "json_schema": read_bounded(options.json_schema, "--json-schema"),
        "regex": utf8("--regex", options.regex),
        "choice": options.choice or None,
        "grammar": read_bounded(options.grammar, "--grammar"),
    }
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        from panscan.engine.structured.grammar import check_structure
    for name, value in given.items():
        try:
            check_structure(Sampling(**{name: value}, ignore_eos=ignore_eos))
        except SettingError as error:
            option = f"--json-schema {options.json_schema}" if name == "json_schema" else f"--{name}"
            raise SettingError(f"{option}: {str(error).removeprefix(name).lstrip(': ')}") from error
    return given


def read_bounded(path: str | None, flag: str, most: int = MAX_SCHEMA_BYTES) -> str | None:
    """Return the text of a file of at most ``most`` bytes; None without a path.

    Raises:
        InputError: the file cannot be read, is larger, or is not text.
    """
    return None if path is None else read_text(Path(path), most, f"{flag} {path}", InputError, pipe=True)


def request_of(
    options: Options, prompt: str, pages: Sequence[Any], settings: Settings, sampling: Sampling | None = None
) -> Request:
    """Return the request of a command that asks once.

    Raises:
        SettingError: an option has a value that no request can have.
    """
    return Request(
        prompt=prompt,
        images=pages,
        system=utf8("--system", options.system),
        raw=options.raw_prompt,
        pan_and_scan=settings.pan_and_scan,
        sampling=sampling or Sampling(),
        max_pages=options.max_pages,
        template_kwargs=read_template_kwargs(options.template_kwargs),
    )


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """Return the values of ``--template-kwargs``; none without the option.

    Raises:
        SettingError: it is no JSON object.
    """
    return {} if text is None else json_object("--template-kwargs", text, MAX_SCHEMA_BYTES)


def given_axes(options: Options) -> dict[str, list[str]]:
    """Return the settings that the user gave, each with the parts of its comma list.

    Raises:
        SettingError: an empty value, or too many of them.
    """
    from panscan.settings.preset_files import MAX_VALUES

    given = {}
    for name, text in options.settings.items():
        flag = f"--{axes()[name].flag}"
        if (count := text.count(",") + 1) > MAX_VALUES:
            raise SettingError(f"{flag} has {count:,} values: give at most {MAX_VALUES:,}")
        given[name] = comma_list(flag, text)
    return given


def given_values(options: Options, model: str | None = None) -> SettingValues:
    """Return the settings that the user gave a command that runs once, each with one typed value.

    Args:
        options: the options of the command.
        model: model to merge ``--adapter`` into if the user names none; None: the base of the first adapter.

    Raises:
        SettingError: an empty value, or one of another kind.
    """
    for name, text in options.settings.items():
        if not text:
            raise SettingError(f"--{axes()[name].flag} has an empty value: {text!r}")
    values = {name: axes()[name].parse(text) for name, text in options.settings.items()}
    if options.adapter:
        if (model := values.get("model", model)) is None:
            check_first_adapter(options.adapter)
        values["model"] = with_adapters(model, options.adapter)
    return values


def one_preset(options: Options, verb: str) -> SettingValues:
    """Return the settings of a preset for a command that runs once; none without a preset.

    Settings that the command does not have are ignored with a note.

    Raises:
        SettingError: no such preset, or one with several values of a setting.
    """
    from panscan.settings.preset_files import single_preset

    if options.preset is None:
        return {}
    settings, ignored = single_preset(options.preset, options_of(verb).keys() & axes().keys())
    if ignored:
        print_ignored(options.preset, f"panscan {verb}", ignored)
    if verb == "serve" and settings.pop("max_new_tokens", None) is not None:
        ignored_length = "max_new_tokens, the length of measured answers: --max-new-tokens bounds those of clients"
        note(f"--preset {options.preset}: ignoring {ignored_length}")
    return settings


def chosen_settings(options: Options, verb: str) -> tuple[SettingValues, RunnerChoice]:
    """Return the settings of a command that runs one model: options over a preset, with the chosen runner.

    Preset settings that the runner does not support are ignored with a note.

    Raises:
        SettingError: as :func:`given_values` and :func:`one_preset`.
        ModelError: as :func:`panscan.cli.models.check_model_names`.
    """
    preset = one_preset(options, verb)
    given = given_values(options, preset.get("model"))
    if "model" in given:
        check_model_names([given["model"]])
    choice = choose_runner(given, preset)
    idle = [
        name
        for name in foreign_settings(choice.runner)
        if name in preset and name not in given and preset[name] != axes()[name].default
    ]
    if idle:
        print_ignored(str(options.preset), f"runner {choice.runner}", idle)
    used = {name: value for name, value in preset.items() if name not in idle}
    return used | given | {"runner": choice.runner}, choice


def engine_settings(options: Options, verb: str) -> Settings:
    """Return the settings of a command that computes on the engine only.

    Raises:
        SettingError: another runner, or a value that the engine does not support; and as :func:`chosen_settings`.
        ModelError: as :func:`chosen_settings`.
    """
    chosen, choice = chosen_settings(options, verb)
    if choice.runner != "engine":
        from_preset = "runner" not in options.given and not choice.option
        named = f"--preset {options.preset}: runner {choice.runner}" if from_preset else f"--runner {choice.runner}"
        raise SettingError(f"{choice.option or named}: {NEEDS_GENERATE.format(verb=verb)}")
    return Settings(**{name: default_of(name, verb) for name in ("tpot_target_ms", "max_new_tokens")} | chosen)


def print_skipped(problem: Exception) -> None:
    """Report a document that cannot be used."""
    note(f"skipped: {problem}", "yellow")


def print_ignored(preset: str, who: str, settings: Iterable[str]) -> None:
    """Report the settings of a preset that a command or runner does not support."""
    note(f"--preset {preset}: ignoring {', '.join(settings)}: not supported by {who}")


def print_runner(choice: RunnerChoice) -> None:
    """Report a runner that panscan chose, and why; nothing if the user or a preset names it."""
    if choice.reason:
        note(f"runner: {choice.runner} ({choice.reason})", "dim")


def utf8(flag: str, text: str | None) -> str | None:
    """Return the text of an option.

    Raises:
        SettingError: it is not UTF-8 text.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise SettingError(f"{flag} is not UTF-8 text: {text!r}") from None
    return text


def read_prompt(text: str | None, lacking: str = "") -> str:
    """Return the value of ``-p``; for none or ``-``, standard input. Spaces are kept: the chat template trims them.

    Args:
        text: value of the option; None without it.
        lacking: message if there is no prompt, where the input could have had them.

    Raises:
        SettingError: there is no prompt, it is empty, or it is not UTF-8 text.
    """
    if text is None or text == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise SettingError(lacking or "-p: no prompt is given; add -p 'What is the total?', or pipe it in")
        try:
            text = sys.stdin.read().removeprefix("\ufeff")
        except UnicodeDecodeError:
            raise SettingError("the prompt on standard input is not UTF-8 text") from None
    if not text.strip():
        raise SettingError(lacking or "-p: the prompt is empty; give a question with -p or on standard input")
    utf8("the prompt", text)
    return text


def public_words(without: Collection[str] = ("api_key", "header")) -> list[str]:
    """Return the command line as it was typed, but for credentials, for records and hints.

    Args:
        without: names of options to leave out, with their values.
    """
    from panscan.images.fetch import conceal

    context = click.get_current_context()
    options = {flag: item for item in context.command.params if isinstance(item, ClickOption) for flag in item.opts}
    words = iter(context.obj["arguments"])
    public = ["panscan"]
    for word in words:
        flag, equals, _ = word.partition("=")
        option = options.get(flag.replace("_", "-"))
        typed = [word]
        if word == "--":
            typed += words
        elif option is not None and option.declared.kind is not bool and not equals:
            typed += islice(words, 1)
        if option is None or option.name not in without:
            public += map(conceal, typed)
    return public
