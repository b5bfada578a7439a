"""The command class of every verb: options from the table, grouped help, switches, other tools' option names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import click
import cloup

from panscan.core import SettingError
from panscan.core.ranges import Range, shorten
from panscan.settings import (
    BOOLEANS,
    GENERATE_AXES,
    GROUPS,
    NEEDS_GENERATE,
    Group,
    Option,
    Options,
    axes,
    options_of,
)
from panscan.settings.spellings import FOREIGN_OPTIONS, SWITCHES

__all__ = ["ClickOption", "InRange", "Verb", "verb"]

_HELP_ALL = "panscan.help_all"
_FORMATTER = cloup.HelpFormatter.settings(col1_max_width=30, col2_min_width=30)


class ClickOption(click.Option):
    """An option with its place in ``--help``.

    Args:
        section: heading.
        rare: whether only ``--help-all`` lists it.
        shown: first column of ``--help``; None: every spelling and the metavar.
        switch: whether it is on or off: ``--x``, ``--no-x``, ``--x=false``, or a comma list of values.
    """

    def __init__(
        self,
        *args: Any,
        section: Group = "Output",
        rare: bool = False,
        shown: str | None = None,
        switch: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.rare = rare
        self.shown = shown
        self.switch = switch

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record if record is None or self.shown is None else (self.shown, record[1])


class InRange(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions of click
    """A number in a range, with the error messages of the settings."""

    def __init__(self, allowed: Range) -> None:
        self.allowed = allowed
        self.name = "integer" if allowed.integer else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of a text; defaults are numbers already."""
        flag = param.opts[0] if param is not None else self.name
        return self.allowed.parse(flag, value) if isinstance(value, str) else value


def verb(name: str, epilog: str) -> Callable[[Callable[..., Any]], Verb]:
    """Return a decorator that makes a function the command of a verb, with the options that the table gives it.

    The function takes :class:`panscan.settings.Options`, then its positional arguments by name.

    Args:
        name: word after ``panscan``.
        epilog: end of its help: notes, then examples.
    """

    def decorate(function: Callable[..., Any]) -> Verb:
        @wraps(function)
        def call(**values: Any) -> Any:
            context = click.get_current_context()
            commandline = click.core.ParameterSource.COMMANDLINE
            given = frozenset(name for name in values if context.get_parameter_source(name) is commandline)
            positional = {
                parameter.name: values.pop(parameter.name)
                for parameter in context.command.params
                if isinstance(parameter, click.Argument) and parameter.name is not None
            }
            settings = {name: values.pop(name) for name in axes() if name in values}
            texts = {name: text for name, text in settings.items() if text is not None}
            return function(Options.parsed(values, texts, given), **positional)

        return click.command(name, cls=Verb, epilog=epilog, formatter_settings=_FORMATTER)(call)

    return decorate


class Verb(cloup.Command):
    """A command whose help lists its options by group, the rare ones under ``--help-all`` only."""

    def __init__(self, name: str, *args: Any, params: Sequence[click.Parameter], **kwargs: Any) -> None:
        table = map(_click_option, options_of(name).values())
        super().__init__(name, *args, params=[*params, *table, _debug(), _help_all()], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_respelled(self, ctx, args)))

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument) or (
                getattr(parameter, "rare", False) and not ctx.meta.get(_HELP_ALL)
            ):
                continue
            if (record := parameter.get_help_record(ctx)) is not None:
                rows[getattr(parameter, "section", "Output")].append(record)  # --help, Click's own, has none
        assert isinstance(formatter, cloup.HelpFormatter)  # the class of Cloup's contexts
        sections = [cloup.HelpSection(group, records) for group, records in rows.items() if records]
        formatter.write_many_sections(sections)


def _click_option(declared: Option) -> ClickOption:
    """Return Click's form of an option. The values of settings stay text: they may be comma lists."""
    setting = declared.name in axes()
    spellings = declared.spellings if setting else declared.aliases
    flags = list(dict.fromkeys(f"--{name.replace('_', '-')}" for name in (declared.flag, *spellings)))
    switched_off = declared.kind is bool and (setting or declared.default)
    shown = f"--{declared.flag} / --no-{declared.flag}" if switched_off else f"--{declared.flag}"
    end = (
        "[required]"
        if setting and declared.required
        else declared.default_text and f"[default: {declared.default_text}]"
    )
    facts: dict[str, Any] = {"help": f"{declared.help}  {end}".rstrip()}
    if declared.kind is bool and not setting:
        facts["is_flag"] = True
        facts["default"] = declared.default
        if declared.default:
            flags[0] = f"{flags[0]}/--no-{declared.flag}"
    elif declared.kind is not bool:
        facts["metavar"] = declared.shown_metavar
        shown += f" {facts['metavar']}"
        if not setting:
            facts |= {"type": _click_type(declared), "multiple": declared.many, "envvar": declared.environment or None}
            facts |= {"required": True} if declared.required else {"default": declared.default}
    if declared.short:
        flags.insert(0, f"-{declared.short}")
        shown = f"-{declared.short}, {shown}"
    return ClickOption(
        [*flags, declared.name],
        section=declared.group,
        rare=declared.rare,
        hidden=declared.hidden,
        shown=shown,
        switch=setting and declared.kind is bool,
        **facts,
    )


def _click_type(declared: Option) -> Any:
    if declared.choices:
        return click.Choice(declared.choices)
    if declared.kind is Path:
        return click.Path(path_type=Path)
    return InRange(declared.range) if declared.range is not None and declared.kind is not str else None


def _debug() -> ClickOption:
    def remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    return ClickOption(
        ["--debug"], is_flag=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )


def _help_all() -> ClickOption:
    return ClickOption(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show all options and exit.",
    )


def _show_all(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _respelled(command: click.Command, ctx: click.Context, words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line with each switch as ``--x=value``, and other tools' switches replaced.

    The values of other options are yielded unchanged, whatever they look like.

    Raises:
        SettingError: another tool's option, with what to use instead.
    """
    options = {flag: item for item in command.get_params(ctx) for flag in (*item.opts, *item.secondary_opts)}
    negative = {f"--no-{flag[2:]}": flag for flag, item in options.items() if getattr(item, "switch", False)}
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
        known = options.get(name)
        if not word.startswith("-") or word == "-":
            yield word
        elif name in negative:
            if equals:
                raise SettingError(f"{name} takes no value; use {negative[name]}={value}")
            yield f"{negative[name]}=false"
        elif isinstance(known, ClickOption) and known.switch:
            yield f"{name}={value if equals else _boolean(left)}"
        elif isinstance(known, click.Option):
            yield f"{name}{equals}{value}"
            if not equals and not known.is_flag and left:
                yield left.popleft()
        else:
            takes = name.lstrip("-").replace("-", "_") in SWITCHES
            yield from _foreign(command, word, name, value if equals else _boolean(left, take=takes), options)


def _boolean(left: deque[str], *, take: bool = True) -> str:
    """Return the value of a switch: the next word if it is a list of booleans, else ``true``."""
    if not left or not all(part.strip().lower() in BOOLEANS for part in left[0].split(",")):
        return "true"
    return left.popleft() if take else left[0]


def _foreign(
    command: click.Command, word: str, name: str, value: str, options: dict[str, click.Parameter]
) -> Iterator[str]:
    """Yield the replacement of an option that the command lacks, or the word itself.

    Raises:
        SettingError: see :func:`_respelled`.
    """
    if "--max-num-seqs" in options and name in _generate_flags():
        raise SettingError(f"{name}: {NEEDS_GENERATE.format(verb=command.name)}")
    setting, implied = SWITCHES.get(name.lstrip("-").replace("-", "_"), ("", ""))
    if setting and f"--{axes()[setting].flag}" in options:
        if value.lower() not in BOOLEANS:
            raise SettingError(f"{name} takes true or false; got {shorten(value)}")
        if BOOLEANS[value.lower()]:
            yield f"--{axes()[setting].flag}={implied}"
        return
    reason = FOREIGN_OPTIONS.get(name[2:].replace("-", "_")) if name.startswith("--") else None
    named = re.findall(r"--[a-z-]+", reason or "")
    if reason is not None and (not named or any(flag in options for flag in named)):
        raise SettingError(f"{name}: {reason}")
    yield word


@cache
def _generate_flags() -> frozenset[str]:
    spellings = [spelling for name in GENERATE_AXES for spelling in axes()[name].spellings]
    return frozenset(f"--{spelling.replace('_', '-')}" for spelling in spellings)
