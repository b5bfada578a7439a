"""Options that several verbs share, made from the one table of settings."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from panscan.core import InputError, PanscanWarning, Sampling, SettingError, escape_controls
from panscan.core.ranges import Range
from panscan.core.request import MAX_PAGES, MAX_SCHEMA_BYTES, SAMPLING_RANGES
from panscan.settings import Axis, axes, choose_runner, foreign_settings, parse_value

__all__ = [
    "SEED",
    "InRange",
    "axis_options",
    "chosen_settings",
    "common_options",
    "echo",
    "errors",
    "external_images_option",
    "first_process",
    "given_axes",
    "given_values",
    "import_libraries",
    "json_schema_option",
    "max_pages_option",
    "one_preset",
    "out",
    "read_json_schema",
    "read_prompt",
    "say_left_out",
    "say_log",
    "say_mini",
    "show_warnings",
    "storage_option",
    "typed_again",
    "url_options",
    "utf8",
]

Command = TypeVar("Command", bound=Callable[..., Any])


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let it reach the command line's end: ``| head`` is no failure, and rich would exit with 1."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape what a terminal would obey: names and reasons come from outside."""
        return super().render_str(escape_controls(text) if self.is_terminal else text, **options)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text exactly, except that a terminal gets its control characters escaped."""
    stream = sys.stderr if err else sys.stdout
    terminal = stream is not None and stream.isatty()
    click.echo(escape_controls(text) if terminal else text, err=err, nl=nl)


def out() -> Console:
    """Results go here. Names and reasons are printed as they are: nothing in them is markup or an emoji."""
    return _Console(markup=False, emoji=False, highlight=False)


@cache
def errors() -> Console:
    """Progress and remarks go here, so that results can be piped. Under torchrun only the first process speaks.

    There is one, so that a remark does not tear a progress bar apart.
    """
    return _Console(stderr=True, quiet=not first_process(), markup=False, emoji=False, highlight=False)


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        errors().print(record.getMessage(), style="dim", soft_wrap=True)


def say_log() -> None:
    """What the engine does at its start, which may take a minute on a GPU, is said as it goes."""
    log = logging.getLogger("panscan")
    if not any(isinstance(handler, _Remarks) for handler in log.handlers):
        log.addHandler(_Remarks())
        log.setLevel(logging.INFO)
        log.propagate = False


def first_process() -> bool:
    """Whether this is the only process, or torchrun's first."""
    return os.environ.get("RANK", "0") == "0"


def import_libraries() -> None:
    """Import PyTorch and Transformers. It takes seconds, so call it after the options are checked."""
    with errors().status("importing PyTorch and Transformers"):
        from panscan.model.runtime import quiet_libraries

        quiet_libraries()


def common_options(command: Command) -> Command:
    """``--debug``, on every verb."""

    def remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show a traceback when something fails."
    )(command)


def url_options(command: Command) -> Command:
    """``--allow-private-urls``, on every verb that opens documents. The environment carries it to other processes."""

    def allow(_context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        if value:
            from panscan.images.fetch import ALLOW_PRIVATE

            os.environ[ALLOW_PRIVATE] = "1"
        return value

    return click.option(
        "--allow-private-urls",
        is_flag=True,
        callback=allow,
        help="Also fetch URLs that lead to local or private addresses.",
    )(command)


def storage_option(command: Command) -> Command:
    """Add ``--storage-timeout`` to a command. Subprocesses inherit the value through the environment."""

    def keep(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None:
            from panscan.images.storage import STORAGE_TIMEOUT, STORAGE_TIMEOUT_RANGE

            STORAGE_TIMEOUT_RANGE.check("--storage-timeout", value)
            os.environ[STORAGE_TIMEOUT] = repr(value)
        return value

    return click.option(
        "--storage-timeout", type=float, callback=keep, metavar="SECONDS",
        help="Deadline for each stored object, with retries.  [default: 60]",
    )(command)  # fmt: skip


def max_pages_option(command: Command) -> Command:
    """``--max-pages``, on every verb that opens documents."""
    return click.option(
        "--max-pages", type=InRange(Range(whole=True, least=1, most=1_000_000)), default=MAX_PAGES, show_default=True,
        help="Refuse a PDF or TIFF with more pages.",
    )(command)  # fmt: skip


def json_schema_option(command: Command) -> Command:
    """``--json-schema``, on every verb that prints answers. See :func:`read_json_schema`."""
    return click.option("--json-schema", metavar="FILE", help="Constrain answers to the JSON schema in FILE.")(command)


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
    """``--allow-external-images``, on every verb that reads a dataset."""
    return click.option(
        "--allow-external-images", is_flag=True, help="Allow dataset images from URLs and other folders."
    )(command)


class InRange(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions of click
    """A number in a range, refused in the words of the settings."""

    def __init__(self, allowed: Range) -> None:
        self.allowed = allowed
        self.name = "integer" if allowed.whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number of a text; defaults are numbers already."""
        flag = param.opts[0] if param is not None else self.name
        return self.allowed.parse(flag, value) if isinstance(value, str) else value


SEED = InRange(SAMPLING_RANGES["seed"])


def axis_options(
    names: Iterable[str] | None = None, *, leave_out: Collection[str] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """One option per setting, with all its spellings; values stay text (see :func:`given_axes`).

    Args:
        names: of the settings; None: all of them.
        leave_out: those without an option.
        defaults: what ``--help`` says of settings for which the verb has a default of its own.
    """

    def add(command: Command) -> Command:
        for name in reversed(list(names if names is not None else axes())):
            if name not in leave_out:
                axis = axes()[name]
                default = None if axis.default is None else str(axis.default).lower()
                command = _option(axis, (defaults or {}).get(name, default))(command)
        return command

    return add


def _option(axis: Axis, default: str | None) -> Callable[[Command], Command]:
    flags = [f"--{axis.flag}", *(f"--{alias.replace('_', '-')}" for alias in axis.aliases)]
    kinds = {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT"}
    choices = "|".join(axis.choices)
    shown = "" if default is None else f"  [default: {default}]"
    bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if axis.kind is bool else {}
    return click.option(
        *flags,
        axis.name,
        metavar=choices if 0 < len(choices) <= 40 else kinds[axis.kind],
        help=axis.help + (f" ({choices})" if len(choices) > 40 else "") + shown,
        **bare,
    )


def given_axes(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings among parsed options that the user gave, each a comma list cut into texts.

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
    """The settings that the user gave a command that runs once, each as one typed value.

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
    """The settings of a preset that a verb takes, which runs once; none without a name.

    A preset is made for a whole sweep, so what else it sets is left out, with a note.

    Raises:
        SettingError: no such preset, or one with several values of a setting.
    """
    from panscan.presets.parse import single_preset

    if name is None:
        return {}
    found, left_out = single_preset(name, takes)
    if left_out:
        say_left_out(name, f"panscan {verb}", left_out)
    return found


def chosen_settings(options: Mapping[str, Any], verb: str, leave_out: Collection[str]) -> dict[str, Any]:
    """Return the settings of a command that runs one model: options over a preset, and the runner that suits them.

    Preset settings that the runner does not support are ignored with a note.

    Args:
        options: parsed options, ``preset`` among them.
        verb: name of the command.
        leave_out: settings that the command does not have.

    Raises:
        SettingError: as :func:`given_values` and :func:`one_preset`.
    """
    preset = one_preset(options["preset"], verb, [name for name in axes() if name not in leave_out])
    given = given_values(options)
    runner = choose_runner(given, preset)
    idle = [
        name
        for name in foreign_settings(runner)
        if name in preset and name not in given and preset[name] != axes()[name].default
    ]
    if idle:
        say_left_out(options["preset"], f"runner {runner}", idle)
    return {name: value for name, value in preset.items() if name not in idle} | given | {"runner": runner}


def say_left_out(preset: str, who: str, settings: Iterable[str]) -> None:
    """Say which settings of a preset do not count, and for whom."""
    errors().print(f"--preset {preset}: left out, as {who} takes no {', '.join(settings)}", soft_wrap=True)


def utf8(flag: str, text: str | None) -> str | None:
    """The text of an option.

    Raises:
        SettingError: it was typed in another encoding than UTF-8, so it holds no text.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise SettingError(f"{flag} is not UTF-8 text: {text!r}") from None
    return text


def read_prompt(text: str | None) -> str:
    """The value of ``-p``, or standard input where there is none (or ``-``). Kept as it is: the turn template trims it,
    and a raw prompt means its spaces.

    Raises:
        SettingError: nobody gave a prompt, it is empty, or it is not UTF-8 text.
    """
    if text is None or text == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise SettingError("-p is missing: what is the question?")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            raise SettingError("the prompt on standard input is not UTF-8 text") from None
    if not text.strip():
        raise SettingError("the prompt is empty: give a question with -p, or on standard input")
    utf8("the prompt", text)
    return text


def say_mini() -> None:
    """Say that nobody named a model."""
    text = "no --model given: running the bundled mini Gemma 3, trained to read made-up documents"
    errors().print(text, soft_wrap=True)


def show_warnings(console: Console) -> None:
    """panscan's own warnings become one line each, once; other libraries' stay theirs."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = str(message)
        if issubclass(category, PanscanWarning) and text not in shown:
            shown.add(text)
            console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    warnings.simplefilter("always", PanscanWarning)
    warnings.showwarning = show


def typed_again(context: click.Context, *, without: Collection[str] = (), extra: Iterable[str] = ()) -> list[str]:
    """Rebuild the present command line from its parsed values, as words.

    Positional arguments come first, then options in the order in which the user gave them.

    Args:
        context: of the command.
        without: names of parameters to leave out.
        extra: words to add behind the options.
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
            options += _words_of(parameter, value)
    if (context.obj or {}).get("debug"):
        options.append("--debug")
    before = ["--"] if any(place.startswith("-") for place in places) else []
    found = [*options, *extra]
    return [*found, *before, *places] if before else [*places, *found]


def _words_of(option: click.Parameter, value: Any) -> list[str]:
    """An option as words; a value that could pass for an option is attached to its flag."""
    flag = option.opts[0]
    if isinstance(option, click.Option) and option.is_flag:
        return [flag]
    words = []
    for each in map(str, value if isinstance(value, tuple) else (value,)):
        alone = option.name in axes() and axes()[option.name].kind is bool  # it may stand without a value
        long = next((name for name in option.opts if name.startswith("--")), flag)
        words += [f"{long}={each}"] if alone or each.startswith("-") else [flag, each]
    return words
