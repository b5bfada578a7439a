"""Flat YAML: one mapping of ``key: value`` or ``key: [values]``, read from events, so that nothing is constructed.

A YAML document can hold dates, objects, references to its own parts and nesting without end. Settings need none of
these. The values stay text until the table of settings types them, so ``revision: 2026-01-01`` is a branch name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from panscan.core import SettingError
from panscan.core.ranges import shorten
from panscan.presets.yaml_text import read_yaml_text

__all__ = ["read_flat_yaml"]

Values = dict[str, list[str | None]]

_NOTHING = ("", "~", "null", "Null", "NULL")
_EXPECTED = "expected lines of 'setting: value' or 'setting: [values]'"


def read_flat_yaml(path: Path) -> Values:
    """The keys of a YAML file, each with its values; None stands for an empty value.

    Raises:
        SettingError: the file cannot be read, is too large, or is not such a mapping; the message names the line.
    """
    try:
        return _mapping(yaml.parse(read_yaml_text(path, str(path)), Loader=yaml.SafeLoader), path)
    except yaml.YAMLError as error:
        raise SettingError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def _mapping(events: Iterator[Any], path: Path) -> Values:
    found: Values = {}
    _take(events, path, yaml.StreamStartEvent)
    if not isinstance(_take(events, path, yaml.DocumentStartEvent, yaml.StreamEndEvent), yaml.DocumentStartEvent):
        raise SettingError(f"{path}: the file is empty; {_EXPECTED}")
    _take(events, path, yaml.MappingStartEvent)
    while isinstance(event := _take(events, path, yaml.ScalarEvent, yaml.MappingEndEvent), yaml.ScalarEvent):
        if event.value in found:
            raise SettingError(f"{_where(path, event)}: {shorten(event.value)} is set twice")
        found[event.value] = _values(events, path)
    _take(events, path, yaml.DocumentEndEvent)
    _take(events, path, yaml.StreamEndEvent)
    return found


def _values(events: Iterator[Any], path: Path) -> list[str | None]:
    event = _take(events, path, yaml.ScalarEvent, yaml.SequenceStartEvent)
    if isinstance(event, yaml.ScalarEvent):
        return [_value(event)]
    found = []
    while isinstance(event := _take(events, path, yaml.ScalarEvent, yaml.SequenceEndEvent), yaml.ScalarEvent):
        found.append(_value(event))
    return found


def _value(event: yaml.ScalarEvent) -> str | None:
    return None if event.style is None and event.value in _NOTHING else str(event.value)


def _take(events: Iterator[Any], path: Path, *expected: type) -> Any:
    """The next event, of one of the expected types.

    Raises:
        SettingError: an event of another type, or one that grows or builds objects: an anchor, an alias, a tag.
    """
    event = next(events)
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise SettingError(f"{_where(path, event)}: anchors and aliases are not supported; write the value out")
    if getattr(event, "tag", None) is not None:
        raise SettingError(f"{_where(path, event)}: tags are not supported; write a plain value")
    if not isinstance(event, expected):
        raise SettingError(f"{_where(path, event)}: {_EXPECTED}")
    return event


def _where(path: Path, event: Any) -> str:
    return f"{path}, line {event.start_mark.line + 1}"
