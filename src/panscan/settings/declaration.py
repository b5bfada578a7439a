"""How an option is declared: its type, default, range, help, names, and the verbs that take it, once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from panscan.core import SettingError
from panscan.core.foreign import parse_json
from panscan.core.option import Range, comma_list, option, shorten
from panscan.settings.spellings import FOREIGN_VALUES, SAME_OPTION

Group = Literal[
    "Input", "Model", "Pan and scan", "Runner", "Engine", "Generation", "Server", "Traffic", "Measurement", "Output"
]
GROUPS: tuple[Group, ...] = get_args(Group)
"""Headings of ``--help``, in their order."""
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Words for the values of a setting that is on or off."""
_MOST_VALUES = 100  # of a comma list
_WIDEST_CHOICES = 34  # characters of a flag and its choices in help


rare_option = partial(option, rare=True)
"""Declares an option that only ``--help-all`` lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Args:
        name: field of its table, YAML key and key in records.
        kind: type of its values.
        optional: whether a word stands for leaving it off.
        many: whether its value is a tuple: it may be repeated, or is a comma list.
        default: value without an option.
        group: heading in ``--help``; one of :data:`GROUPS`.
        help: line in ``--help``.
        verbs: commands that have it, separated by spaces; empty: all of them.
        flag: option in ``--help`` and in errors, without dashes in front.
        short: one-letter option.
        aliases: other accepted names.
        choices: accepted values; empty if there are others.
        range: accepted numbers; None for other kinds.
        comma: whether it is a comma list.
        none: words for leaving it off.
        metavar: placeholder of the value in ``--help``, its unit for example; empty: by the kind.
        shown_default: default in ``--help``; None: ``default``.
        environment: variables that hold the value where the option is not given.
        required: whether the command needs it.
        rare: whether only ``--help-all`` lists it.
        hidden: whether no help lists it.
        mapping: whether YAML and Python may also give a mapping, for ``KEY=VALUE;...``.
        off: values that other APIs use for no effect, of a filter of tokens; None: not a filter.
        level: whether it counts when a model is loaded, or for each call.
        only: the one runner that has this setting; empty if several do.
        by_verb: fields that differ in some commands, by the names of these commands.
    """

    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    group: Group
    help: str
    verbs: str
    flag: str
    short: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    range: Range | None = None
    comma: bool = False
    none: tuple[str, ...] = ("none",)
    metavar: str = ""
    shown_default: str | None = None
    environment: tuple[str, ...] = ()
    required: bool = False
    rare: bool = False
    hidden: bool = False
    mapping: bool = False
    off: tuple[float, ...] | None = None
    level: Literal["load", "call"] = "call"
    only: str = ""
    by_verb: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every accepted name, as an identifier."""
        return tuple(dict.fromkeys((self.name, self.flag.replace("-", "_"), *self.aliases)))

    @property
    def default_text(self) -> str:
        """The default in words; empty where there is none, or a switch is off."""
        if self.shown_default is not None:
            return self.shown_default
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        if self.default in (None, ()):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def written(self, value: object) -> str:
        """A value as ``--help`` and users write it."""
        if value is None:
            return self.none[0]
        if isinstance(value, bool):
            return str(value).lower()
        return self.default_text if value == self.default else str(value)

    @property
    def metavar_text(self) -> str:
        """The placeholder of the value in ``--help``; empty for a switch."""
        if self.metavar or self.kind is bool:
            return self.metavar
        choices = "|".join(self.choices)
        if choices:
            return choices if len(self.flag + choices) < _WIDEST_CHOICES else "NAME"
        return {int: "INT", float: "FLOAT"}.get(self.kind, "TEXT")

    def of_verb(self, verb: str) -> Option:
        """Return the option as one command has it."""
        changes = [facts for verbs, facts in self.by_verb.items() if verb in verbs.split()]
        return replace(self, **{name: value for facts in changes for name, value in facts.items()})

    def check(self, value: object) -> None:
        """Raise a SettingError unless a typed value is one of the choices, in the range, or of the kind."""
        if isinstance(value, tuple) and self.comma:
            for item in value:
                self.check(item)
            return
        if value is None and self.optional:
            return
        if self.choices and value not in self.choices:
            hint = nearest(value, self.choices)
            raise SettingError(f"--{self.flag} takes {', '.join(self.choices)}; got {shorten(value)}{hint}")
        if self.range is not None:
            self.range.check(f"--{self.flag}", value)
        elif not isinstance(value, self.kind):
            kind = "true or false" if self.kind is bool else "text"
            raise SettingError(f"--{self.flag} takes {kind}; got {shorten(value)}")

    def convert(self, text: str) -> Any:
        """Return the value that a word of a command line stands for; of a comma list, each value once.

        Raises:
            SettingError: it is none of the choices, not a number, or out of range; or too many values.
        """
        if self.comma:
            parts = comma_list(f"--{self.flag}", text)
            if len(parts) > _MOST_VALUES:
                raise SettingError(f"--{self.flag}: {len(parts):,} values: give at most {_MOST_VALUES}")
            values = tuple(dict.fromkeys(map(self.parse, parts)))
            self.check(values)
            return values
        if self.kind is Path:
            return Path(text)
        if self.kind is str:
            self.check(text)
            return text
        return self.parse(text)

    def parse(self, value: Any) -> Any:
        """Return one typed value, from text or from a typed YAML value.

        Raises:
            SettingError: naming the flag, if the value is of another kind.
        """
        flag, allowed = f"--{self.flag}", self.range
        if value is None or (isinstance(value, str) and value.lower() in self.none):
            if self.optional:
                return None
            raise SettingError(f"{flag} takes no 'none'")
        if allowed is not None and isinstance(value, int | float) and not isinstance(value, bool):
            allowed.check(flag, value)
            return self.kind(value)
        if self.mapping and isinstance(value, dict):
            value = ";".join(f"{key}={limit}" for key, limit in value.items())
        if isinstance(value, list | tuple | dict | set | bytes):
            raise SettingError(f"{flag} takes {allowed or 'one value'}; got {shorten(value)}")
        text = str(value).strip()
        if allowed is not None:
            return allowed.parse(flag, text)
        if self.kind is not bool:
            return FOREIGN_VALUES.get(self.name, {}).get(text.removeprefix("torch."), text)
        if text.lower() not in BOOLEANS:
            raise SettingError(f"{flag} takes true or false; got {shorten(text)}")
        return BOOLEANS[text.lower()]


@cache
def declared_options(table: type) -> dict[str, Option]:
    """Return the options that a dataclass declares by :func:`panscan.core.option.option`, by name, in its order."""
    hints = get_type_hints(table)
    options = {}
    for item in fields(table):
        if not item.metadata:
            continue
        kind = hints[item.name]
        many = get_origin(kind) is tuple
        kind = get_args(kind)[0] if many else kind
        optional = NoneType in get_args(kind)
        kind = get_args(kind)[0] if optional else kind
        facts: dict[str, Any] = {"flag": item.name.replace("_", "-"), **item.metadata}
        facts["aliases"] = (*facts.get("aliases", ()), *SAME_OPTION.get(facts["flag"], ()))
        if get_origin(kind) is Literal:
            facts["choices"], kind = get_args(kind), str
        options[item.name] = Option(
            name=item.name,
            kind=kind,
            optional=optional,
            many=many,
            default=item.default,
            **facts,
        )
    return options


def json_object(flag: str, text: str, most: int) -> dict[str, Any]:
    """Return the value of an option that takes a JSON object of at most so many bytes.

    Raises:
        SettingError: the text is none.
    """
    try:
        value = parse_json(text.encode(), most=most)
    except ValueError as error:
        raise SettingError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingError(f"{flag}: expected a JSON object, got {shorten(text)}")
    return value


def nearest(word: object, known: Iterable[str]) -> str:
    """`` (did you mean ...?)`` if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
