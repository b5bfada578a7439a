"""Options that several verbs share, made from the one table of settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from panscan.cli.console import errors
from panscan.cli.models import check_model_names
from panscan.cli.verb import option
from panscan.core import InputError, Sampling, SettingError
from panscan.core.ranges import Range
from panscan.core.request import MAX_PAGES, MAX_SCHEMA_BYTES, SAMPLING_RANGES
from panscan.engine.options import EngineOptions
from panscan.settings import Axis, RunnerChoice, axes, choose_runner, foreign_settings, parse_value

__all__ = [
    "ENGINE_ONLY",
    "RAW_PROMPT",
    "RUNNER_DEFAULT",
    "SEED",
    "InRange",
    "axis_options",
    "chosen_settings",
    "command_words",
    "common_options",
    "engine_settings",
    "external_images_option",
    "given_axes",
    "given_values",
    "json_schema_option",
    "max_pages_option",
    "one_preset",
    "preset_option",
    "print_ignored",
    "print_runner",
    "read_json_schema",
    "read_prompt",
    "storage_option",
    "url_options",
    "utf8",
]

Command = TypeVar("Command", bound=Callable[..., Any])


def common_options(command: Command) -> Command:
    """Add ``--debug`` to a command."""

    def remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    return option(
        "Output", "--debug", is_flag=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )(command)


def preset_option(command: Command) -> Command:
    """Add ``--preset`` to a command that runs once."""
    return option("Model", "--preset", metavar="NAME|FILE", help="Preset (baseline, balanced, ...) or YAML file.")(
        command
    )


def url_options(command: Command) -> Command:
    """Add ``--allow-private-urls`` to a command. Subprocesses inherit it through the environment."""

    def allow(_context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        if value:
            from panscan.images.fetch import ALLOW_PRIVATE

            os.environ[ALLOW_PRIVATE] = "1"
        return value

    return option(
        "Input",
        "--allow-private-urls",
        is_flag=True,
        callback=allow,
        rare=True,
        help="Fetch URLs of local and private addresses, too.",
    )(command)


def storage_option(command: Command) -> Command:
    """Add ``--storage-timeout`` to a command. Subprocesses inherit the value through the environment."""

    def keep(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None:
            from panscan.images.storage import STORAGE_TIMEOUT, STORAGE_TIMEOUT_RANGE

            STORAGE_TIMEOUT_RANGE.check("--storage-timeout", value)
            os.environ[STORAGE_TIMEOUT] = repr(value)
        return value

    return option(
        "Input",
        "--storage-timeout",
        type=float,
        callback=keep,
        metavar="SECONDS",
        rare=True,
        help="Deadline per stored object, seconds.  [default: 60]",
    )(command)


def max_pages_option(command: Command) -> Command:
    """Add ``--max-pages`` to a command."""
    return option(
        "Input",
        "--max-pages",
        type=InRange(Range(integer=True, ge=1, le=1_000_000)),
        default=MAX_PAGES,
        show_default=True,
        metavar="INT",
        rare=True,
        help="Maximum pages per PDF or TIFF.",
    )(command)


def json_schema_option(command: Command) -> Command:
    """Add ``--json-schema`` to a command. See :func:`read_json_schema`."""
    return option("Generation", "--json-schema", metavar="FILE", help="Constrain answers to a JSON schema.")(command)


def read_json_schema(path: str | None, *, ignore_eos: bool = False) -> str | None:
    """Return the checked schema of ``--json-schema``; None without a path.

    Args:
        path: value of the option.
        ignore_eos: value of ``--ignore-eos``, which excludes a schema.

    Raises:
        InputError: the file cannot be read.
        SettingError: it holds no JSON schema, or one that is not supported.
    """
    if path is None:
        return None
    from panscan.engine.grammar import check_schema

    option = f"--json-schema {path}"
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(MAX_SCHEMA_BYTES + 1)  # not more of it: the file may be of any size
    except OSError as error:
        raise InputError(f"{option}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{option}: not UTF-8 text: save it as UTF-8") from error
    try:
        Sampling(json_schema=text, ignore_eos=ignore_eos)
        check_schema(text)
    except SettingError as error:
        raise SettingError(f"{option}: {str(error).removeprefix('json_schema').lstrip(': ')}") from error
    return text


def external_images_option(command: Command) -> Command:
    """Add ``--allow-external-images`` to a command."""
    return option(
        "Input",
        "--allow-external-images",
        is_flag=True,
        rare=True,
        help="Allow dataset images from URLs and other folders.",
    )(command)


class InRange(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions of click
    """A number in a range, with the error messages of the settings."""

    def __init__(self, allowed: Range) -> None:
        self.allowed = allowed
        self.name = "integer" if allowed.integer else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number of a text; defaults are numbers already."""
        flag = param.opts[0] if param is not None else self.name
        return self.allowed.parse(flag, value) if isinstance(value, str) else value


SEED = InRange(SAMPLING_RANGES["seed"])
RUNNER_DEFAULT = {"runner": "engine; generate with options of generate()"}
"""The default of ``--runner`` for ``--help``; see :func:`panscan.settings.choose_runner`."""
ENGINE_ONLY = {"runner": "Runner: engine; ask and bench have others."}
"""The help line of ``--runner`` where only the engine is supported."""
RAW_PROMPT = "Send -p as is, with one <start_of_image> per image."
"""The help line of ``--raw-prompt``."""
_ENGINE_DEFAULTS = {"prefill_chunk_size": EngineOptions().prefill_chunk_size}
"""Defaults of the engine for settings that are off in the table."""


def axis_options(
    names: Iterable[str] | None = None,
    *,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    required: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Return a decorator that adds one option per setting; values stay text (see :func:`given_axes`).

    Args:
        names: settings to add; None: all of them.
        leave_out: settings without an option.
        defaults: defaults of this command, for ``--help``, where they differ from the table's.
        texts: help lines of this command, where they differ from the table's.
        required: settings that the command refuses to go without, for ``--help``.
    """

    def add(command: Command) -> Command:
        for name in reversed(list(names if names is not None else axes())):
            if name in leave_out:
                continue
            axis = axes()[name]
            default = (defaults or {}).get(name, _default_text(axis))
            end = "  [required]" if name in required else f"  [default: {default}]" if default else ""
            command = _option(axis, (texts or {}).get(name, axis.help) + end)(command)
        return command

    return add


def _default_text(axis: Axis) -> str:
    """Return the default of a setting for ``--help``; empty where there is none, or a switch is off."""
    if axis.kind is bool:
        return "on" if axis.default else ""
    default = _ENGINE_DEFAULTS.get(axis.name, axis.default)
    return "" if default is None else f"{default:g}" if axis.kind is float else str(default)


def _option(axis: Axis, text: str) -> Callable[[Command], Command]:
    kinds = {bool: "", int: "INT", float: "FLOAT", str: "TEXT"}
    choices = "|".join(axis.choices)
    metavar = kinds[axis.kind] if not choices else choices if len(axis.flag + choices) < 34 else "NAME"
    shown = f"--{axis.flag} / --no-{axis.flag}" if axis.kind is bool else f"--{axis.flag} {metavar}"
    return option(
        axis.group,
        *dict.fromkeys(f"--{spelling.replace('_', '-')}" for spelling in (axis.flag, *axis.spellings)),
        axis.name,
        rare=axis.rare,
        switch=axis.kind is bool,
        shown=shown,
        metavar=metavar,
        help=text,
    )


def given_axes(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the settings that the user gave, each with the parts of its comma list.

    Raises:
        SettingError: an empty value, or too many of them.
    """
    from panscan.presets.parse import MAX_VALUES

    found = {}
    for name, axis in axes().items():
        if (text := options.get(name)) is None:
            continue
        if (count := text.count(",") + 1) > MAX_VALUES:
            raise SettingError(f"--{axis.flag} has {count:,} values: give at most {MAX_VALUES:,}")
        found[name] = [part.strip() for part in text.split(",")]
        if not all(found[name]):
            raise SettingError(f"--{axis.flag} has an empty value: {text!r}")
    return found


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave a command that runs once, each with one typed value.

    Raises:
        SettingError: an empty value, or one of another kind.
    """
    found = {}
    for name, axis in axes().items():
        if (text := options.get(name)) is None:
            continue
        if not text:
            raise SettingError(f"--{axis.flag} has an empty value: {text!r}")
        found[name] = parse_value(name, text)
    return found


def one_preset(name: str | None, verb: str, takes: Collection[str]) -> dict[str, Any]:
    """Return the settings of a preset for a command that runs once; none without a name.

    Settings that the command does not have are ignored with a note.

    Raises:
        SettingError: no such preset, or one with several values of a setting.
    """
    from panscan.presets.parse import single_preset

    if name is None:
        return {}
    found, left_out = single_preset(name, takes)
    if left_out:
        print_ignored(name, f"panscan {verb}", left_out)
    return found


def chosen_settings(
    options: Mapping[str, Any], verb: str, leave_out: Collection[str]
) -> tuple[dict[str, Any], RunnerChoice]:
    """Return the settings of a command that runs one model: options over a preset, with the chosen runner.

    Preset settings that the runner does not support are ignored with a note.

    Args:
        options: parsed options, ``preset`` among them.
        verb: name of the command.
        leave_out: settings that the command does not have.

    Raises:
        SettingError: as :func:`given_values` and :func:`one_preset`.
        ModelError: as :func:`panscan.cli.models.check_model_names`.
    """
    preset = one_preset(options["preset"], verb, [name for name in axes() if name not in leave_out])
    given = given_values(options)
    if "model" in given:
        check_model_names([given["model"]])
    choice = choose_runner(given, preset)
    idle = [
        name
        for name in foreign_settings(choice.runner)
        if name in preset and name not in given and preset[name] != axes()[name].default
    ]
    if idle:
        print_ignored(options["preset"], f"runner {choice.runner}", idle)
    used = {name: value for name, value in preset.items() if name not in idle}
    return used | given | {"runner": choice.runner}, choice


def engine_settings(options: Mapping[str, Any], verb: str, leave_out: Collection[str]) -> dict[str, Any]:
    """Return the settings of a command that computes on the engine only; arguments as :func:`chosen_settings`.

    Raises:
        SettingError: another runner, or an option that the engine does not support; and as :func:`chosen_settings`.
        ModelError: as :func:`chosen_settings`.
    """
    chosen, choice = chosen_settings(options, verb, leave_out)
    if choice.runner != "engine":
        from_preset = options["runner"] is None and not choice.option
        named = f"--preset {options['preset']}: runner {choice.runner}" if from_preset else f"--runner {choice.runner}"
        raise SettingError(
            f"{choice.option or named}: not supported by panscan {verb}, which runs on the engine; "
            "use panscan ask or panscan bench"
        )
    return chosen


def print_ignored(preset: str, who: str, settings: Iterable[str]) -> None:
    """Report the settings of a preset that a command or runner does not support."""
    errors().print(f"--preset {preset}: ignoring {', '.join(settings)}: not supported by {who}", soft_wrap=True)


def print_runner(choice: RunnerChoice) -> None:
    """Report a runner that panscan chose, and why; nothing if the user or a preset names it."""
    if choice.reason:
        errors().print(f"runner: {choice.runner} ({choice.reason})", style="dim", soft_wrap=True)


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


def read_prompt(text: str | None) -> str:
    """Return the value of ``-p``; for none or ``-``, standard input. Spaces are kept: the chat template trims them.

    Raises:
        SettingError: there is no prompt, it is empty, or it is not UTF-8 text.
    """
    if text is None or text == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise SettingError("-p: no prompt is given; add -p 'What is the total?', or pipe it in")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            raise SettingError("the prompt on standard input is not UTF-8 text") from None
    if not text.strip():
        raise SettingError("-p: the prompt is empty; give a question with -p or on standard input")
    utf8("the prompt", text)
    return text


def command_words(context: click.Context, *, without: Collection[str] = (), extra: Iterable[str] = ()) -> list[str]:
    """Rebuild the present command line from its parsed values, as words.

    Positional arguments come first, then options in the order in which the user gave them.

    Args:
        context: of the command.
        without: names of parameters to leave out.
        extra: words to add after the options.
    """
    parameters = {parameter.name: parameter for parameter in context.command.params}
    places, options = [], []
    for name, value in context.params.items():
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not typed or name in without:
            continue
        parameter = parameters[name]
        if isinstance(parameter, click.Argument):
            places += [str(each) for each in (value if isinstance(value, tuple) else (value,))]
        else:
            options += _option_words(parameter, value)
    if (context.obj or {}).get("debug"):
        options.append("--debug")
    before = ["--"] if any(place.startswith("-") for place in places) else []
    found = [*options, *extra]
    return [*found, *before, *places] if before else [*places, *found]


def _option_words(parameter: click.Parameter, value: Any) -> list[str]:
    """Return an option as words; a value that looks like an option is attached to its flag."""
    flag = parameter.opts[0]
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return [flag]
    words = []
    for each in map(str, value if isinstance(value, tuple) else (value,)):
        alone = getattr(parameter, "switch", False)  # it may stand without a value
        long = next((name for name in parameter.opts if name.startswith("--")), flag)
        words += [f"{long}={each}"] if alone or each.startswith("-") else [flag, each]
    return words
