"""The command class of every verb: options from the table, grouped help, switches, other tools' option names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from typing import Any

import click
import cloup

from panscan.cli.console import show_warnings
from panscan.core import SettingError
from panscan.core.access import RemoteAccess, set_remote_access
from panscan.settings import (
    BOOLEANS,
    ENGINE_COMMANDS,
    GENERATE_AXES,
    GROUPS,
    NEEDS_GENERATE,
    Option,
    Options,
    axes,
    axis_names,
    options_of,
)
from panscan.settings.spellings import FOREIGN_OPTIONS

_HELP_ALL = "panscan.help_all"
_LIMIT = re.compile(r"\w+:(?!//)")  # of --goodput
_FORMATTER = cloup.HelpFormatter.settings(col1_max_width=30, col2_min_width=30)


class ClickOption(click.Option):
    """Click's form of an option. The values of settings stay text: they may be comma lists.

    Args:
        declared: the option in the table.
    """

    def __init__(self, declared: Option) -> None:
        setting = declared.name in axes()
        spellings = (declared.flag, *(declared.spellings if setting else declared.aliases))
        flags = list(dict.fromkeys(f"--{name.replace('_', '-')}" for name in spellings))
        super().__init__(
            [*([f"-{declared.short}"] if declared.short else []), *flags, declared.name],
            type=None if setting else _reader(declared),
            multiple=declared.many and not declared.comma,
            default=None if setting else declared.default,
            required=declared.required and not setting,
            envvar=declared.environment or None,
        )
        self.declared = declared
        self.setting = setting

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        declared = self.declared
        if declared.hidden or (declared.rare and not ctx.meta.get(_HELP_ALL)):
            return None
        flag = f"-{declared.short}, --{declared.flag}" if declared.short else f"--{declared.flag}"
        if declared.kind is bool:
            shown = f"{flag} / --no-{declared.flag}" if self.setting or declared.default else flag
        else:
            shown = f"{flag} {declared.metavar_text}"
        default = f"[default: {declared.default_text}]" if declared.default_text else ""
        return shown, f"{declared.help}  {'[required]' if declared.required else default}".rstrip()


def _reader(declared: Option) -> Callable[[Any], Any]:
    """Return a function that reads a value by the table of options, so that all options have the same messages."""

    def read(value: Any) -> Any:
        return declared.convert(value) if isinstance(value, str) else value  # a default is a value already

    return read


def verb(name: str, epilog: str) -> Callable[[Callable[..., Any]], Verb]:
    """Return a decorator that makes a function the command of a verb, with the options that the table gives it.

    The function takes :class:`panscan.settings.Options`, then its positional arguments by name.

    Args:
        name: word after ``panscan``.
        epilog: end of its help: notes, then examples.
    """

    def decorate(function: Callable[..., Any]) -> Verb:
        @wraps(function)
        def call(**_values: Any) -> Any:
            options, positional = parsed_options(name, click.get_current_context())
            show_warnings()
            set_remote_access(RemoteAccess(options.allow_private_urls, options.storage_timeout))
            return function(options, **positional)

        settings = {"help_option_names": ["-h", "--help"]}  # also where a command runs without the group
        declare = click.command(name, cls=Verb, epilog=epilog, context_settings=settings, formatter_settings=_FORMATTER)
        return declare(call)

    return decorate


def parsed_options(verb: str, context: click.Context) -> tuple[Options, dict[str, Any]]:
    """Return the options of a parsed command line, and its positional arguments by name."""
    values, declared = dict(context.params), options_of(verb)
    commandline = click.core.ParameterSource.COMMANDLINE
    given = frozenset(name for name in values if context.get_parameter_source(name) is commandline)
    positional = {name: values.pop(name) for name in list(values) if name not in declared}
    settings = {name: values.pop(name) for name in axes() if name in declared}
    texts = {name: text for name, text in settings.items() if text is not None}
    return Options.parsed(values, texts, given), positional


class Verb(cloup.Command):
    """A command whose help lists its options by group, the rare ones under ``--help-all`` only."""

    def __init__(self, name: str, *args: Any, params: Sequence[click.Parameter], **kwargs: Any) -> None:
        super().__init__(name, *args, params=[*params, *map(ClickOption, options_of(name).values())], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_respelled(self, ctx, args)))

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:  # --help is Click's own option
                group = parameter.declared.group if isinstance(parameter, ClickOption) else "Output"
                rows[group].append(record)
        assert isinstance(formatter, cloup.HelpFormatter)  # the class of Cloup's contexts
        sections = [cloup.HelpSection(group, records) for group, records in rows.items() if records]
        formatter.write_many_sections(sections)


def _respelled(command: Verb, ctx: click.Context, words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line with each switch as ``--x=value``.

    The values of other options are yielded unchanged, whatever they look like. ``--help-all`` ends the command.

    Raises:
        SettingError: another tool's option, with what to use instead.
    """
    options = {flag: item for item in command.get_params(ctx) for flag in item.opts if isinstance(item, click.Option)}
    switches = {
        flag: item for flag, item in options.items() if isinstance(item, ClickOption) and item.declared.kind is bool
    }
    negative = {f"--no-{flag[2:]}": flag for flag in switches}
    left = deque(words)
    while left:
        word = left.popleft()
        if word == "--":
            yield word
            yield from left
            return
        name, equals, value = word.partition("=")
        name = ctx.token_normalize_func(name) if ctx.token_normalize_func is not None else name
        name = "--tp" if name == "-tp" else name  # Click reads it as -t p
        if not word.startswith("-") or word == "-":
            yield word
        elif name == "--help-all":
            ctx.meta[_HELP_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()
        elif name in negative:
            if equals:
                raise SettingError(f"{name} takes no value; use {negative[name]}={value}")
            yield f"{negative[name]}=false"
        elif name in switches:
            yield f"{name}={value if equals else _boolean(left) if switches[name].setting else 'true'}"
        elif name in options:
            yield f"{name}{equals}{value}"
            if not equals and not options[name].is_flag and left:  # only Click's own --help is a flag
                yield left.popleft()
            while name == "--goodput" and left and _LIMIT.match(left[0]):  # several, as vLLM takes them
                yield f"{name}={left.popleft()}"
        else:
            _refuse_foreign(str(command.name), name, options)
            yield word


def _boolean(left: deque[str]) -> str:
    """Return the value of a switch: the next word if it is a list of booleans, else ``true``."""
    follows = left and all(part.strip().lower() in BOOLEANS for part in left[0].split(","))
    return left.popleft() if follows else "true"


def _refuse_foreign(verb: str, name: str, options: Collection[str]) -> None:
    """Raise for an option that the command lacks, and of which it is known what to use instead.

    Raises:
        SettingError: see :func:`_respelled`.
    """
    key = name.removeprefix("--").replace("-", "_")
    if verb in ENGINE_COMMANDS and axis_names().get(key) in GENERATE_AXES:
        raise SettingError(f"{name}: {NEEDS_GENERATE.format(verb=verb)}")
    reason = FOREIGN_OPTIONS.get(key) if name.startswith("--") else None
    named = re.findall(r"--[a-z-]+", reason or "")
    useful = not named or any(flag in options for flag in named)
    if reason is not None and (useful or reason.startswith("removed")):
        raise SettingError(f"{name}: {reason}")
