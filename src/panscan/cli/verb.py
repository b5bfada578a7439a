"""The command class of every verb: grouped help, ``--x/--no-x`` switches, and other tools' option names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click
import cloup

from panscan.core import SettingError
from panscan.core.ranges import shorten
from panscan.settings import BOOLEANS, GROUPS, Group, axes, foreign_option
from panscan.spellings import SWITCHES

__all__ = ["Option", "Verb", "option", "verb"]

Command = TypeVar("Command", bound=Callable[..., Any])

_HELP_ALL = "panscan.help_all"
_FORMATTER = cloup.HelpFormatter.settings(col1_max_width=30, col2_min_width=30)


class Option(click.Option):
    """An option with its place in ``--help``.

    Args:
        group: heading.
        rare: whether only ``--help-all`` lists it.
        shown: first column of ``--help``; None: every spelling and the metavar.
        switch: whether it is on or off: ``--x``, ``--no-x``, ``--x=false``, or a comma list of values.
    """

    def __init__(
        self,
        *args: Any,
        group: Group,
        rare: bool = False,
        shown: str | None = None,
        switch: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("show_default") is True and isinstance(kwargs["default"], float):
            # Click would print a float as 600.0, and a text in brackets.
            kwargs["help"] += f"  [default: {kwargs['default']:g}]"
            kwargs["show_default"] = False
        super().__init__(*args, **kwargs)
        self.section = group  # Cloup has a meaning for "group"
        self.rare = rare
        self.shown = shown
        self.switch = switch

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record if record is None or self.shown is None else (self.shown, record[1])


def option(group: Group, *flags: str, **attributes: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds an :class:`Option`; see :func:`click.option`."""
    return click.option(*flags, cls=Option, group=group, **attributes)


def verb(name: str, epilog: str) -> Callable[[Callable[..., Any]], Verb]:
    """Return a decorator that makes a function the command of a verb.

    Args:
        name: word after ``panscan``.
        epilog: end of its help: notes, then examples.
    """
    return click.command(name, cls=Verb, epilog=epilog, formatter_settings=_FORMATTER)


class Verb(cloup.Command):
    """A command whose help lists its options by group, the rare ones under ``--help-all`` only."""

    def __init__(self, *args: Any, params: list[click.Parameter] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, params=[*(params or ()), _help_all()], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_respelled(self, ctx, args)))

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for each in self.get_params(ctx):
            if isinstance(each, click.Argument) or (getattr(each, "rare", False) and not ctx.meta.get(_HELP_ALL)):
                continue
            if (record := each.get_help_record(ctx)) is not None:
                rows[getattr(each, "section", GROUPS[-1])].append(record)  # --help, Click's own, has none
        assert isinstance(formatter, cloup.HelpFormatter)  # the class of Cloup's contexts
        formatter.write_many_sections([cloup.HelpSection(group, found) for group, found in rows.items() if found])


def _help_all() -> Option:
    return Option(
        ["--help-all"],
        group="Output",
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
    options = {flag: each for each in command.get_params(ctx) for flag in (*each.opts, *each.secondary_opts)}
    negative = {f"--no-{flag[2:]}": flag for flag, each in options.items() if getattr(each, "switch", False)}
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
        elif isinstance(known, Option) and known.switch:
            yield f"{name}={value if equals else _boolean(left)}"
        elif isinstance(known, click.Option):
            yield f"{name}{equals}{value}"
            if not equals and not known.is_flag and left:
                yield left.popleft()
        else:
            takes = name.lstrip("-").replace("-", "_") in SWITCHES
            yield from _foreign(word, name, value if equals else _boolean(left, take=takes), options)


def _boolean(left: deque[str], *, take: bool = True) -> str:
    """Return the value of a switch: the next word if it is a list of booleans, else ``true``."""
    if not left or not all(part.strip().lower() in BOOLEANS for part in left[0].split(",")):
        return "true"
    return left.popleft() if take else left[0]


def _foreign(word: str, name: str, value: str, options: dict[str, click.Parameter]) -> Iterator[str]:
    """Yield the replacement of an option that the command lacks, or the word itself.

    Raises:
        SettingError: see :func:`_respelled`.
    """
    setting, implied = SWITCHES.get(name.lstrip("-").replace("-", "_"), ("", ""))
    if setting and f"--{axes()[setting].flag}" in options:
        if value.lower() not in BOOLEANS:
            raise SettingError(f"{name} takes true or false; got {shorten(value)}")
        if BOOLEANS[value.lower()]:
            yield f"--{axes()[setting].flag}={implied}"
        return
    reason = foreign_option(name) if name.startswith("--") else None
    named = re.findall(r"--[a-z-]+", reason or "")
    if reason is not None and (not named or any(each in options for each in named)):
        raise SettingError(f"{name}: {reason}")
    yield word
