"""Settings in YAML: the shipped presets by name, preset files and grid files; the text of other YAML files.

A YAML document can hold dates, objects, references to its own parts and nesting without end. Settings need none of
these: a file is one mapping of ``key: value`` or ``key: [values]``, read from events, so that nothing is constructed.
The values stay text until the table of settings types them, so ``revision: 2026-01-01`` is a branch name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from panscan.core import SettingError
from panscan.core.option import shorten
from panscan.settings.declaration import nearest
from panscan.settings.sweep_settings import axes, axis_name

MAX_VALUES = 1000
"""Values of one setting; a sweep multiplies them."""

Axes = dict[str, list[Any]]
"""Settings by their canonical name, each with its values."""

_MAX_BYTES = 65_536  # a preset has a few hundred, and a grid file is typed by hand
_NOTHING = ("", "~", "null", "Null", "NULL")
_EXPECTED = "expected lines of 'setting: value' or 'setting: [values]'"
_SHIPPED = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def load_preset(name: str) -> Axes:
    """Return the settings of a shipped preset by name, or of a YAML file by path.

    Raises:
        SettingError: neither; the nearest preset is suggested.
    """
    if name in preset_names():
        return read_grid_file(_SHIPPED / f"{name}.yaml")
    if Path(name).suffix in (".yaml", ".yml"):
        return read_grid_file(Path(name))
    raise SettingError(
        f"--preset takes {', '.join(preset_names())} or a YAML file; got {name!r}{nearest(name, preset_names())}"
    )


def single_preset(name: str, takes: Collection[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a preset for a single run, and the names of those that it does not take.

    Args:
        name: a shipped preset, or a YAML file.
        takes: names of the settings to return; None: all.

    Raises:
        SettingError: no such preset, or several values of a wanted setting.
    """
    preset = load_preset(name)
    used = {setting: values for setting, values in preset.items() if takes is None or setting in takes}
    for setting, values in used.items():
        if len(values) > 1:
            raise SettingError(
                f"--preset {name}: one {setting} is wanted, not {len(values)}; panscan bench sweeps several"
            )
    return {setting: values[0] for setting, values in used.items()}, [name for name in preset if name not in used]


def read_grid_file(path: Path) -> Axes:
    """Return the axes of a YAML file of ``setting: value`` or ``setting: [values]``.

    Raises:
        SettingError: no such file, not such a mapping, a key given twice, or an unknown setting.
    """
    return parse_axes(_read_flat_yaml(path), str(path))


def parse_axes(given: Mapping[str, Sequence[Any]], where: str | None = None) -> Axes:
    """Return typed values of settings in any spelling.

    Raises:
        SettingError: an unknown setting or value, or one without values; the message begins with ``where``,
            if it is given.
    """
    parsed: Axes = {}
    for spelling, values in given.items():
        try:
            name = axis_name(spelling)
            if name in parsed:
                raise SettingError(f"{name} is set twice")
            if not values:
                raise SettingError(f"{name} has no value")
            if len(values) > MAX_VALUES:
                raise SettingError(f"{name} has {len(values):,} values: give at most {MAX_VALUES:,}")
            parsed[name] = [axes()[name].parse(value) for value in values]
        except SettingError as error:
            raise SettingError(str(error) if where is None else f"{where}: {error}") from None
    return parsed


def read_yaml_text(path: Path, where: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        path: of the file.
        where: start of error messages: the path, and the option that named it.

    Raises:
        SettingError: it cannot be read, is not a regular file, is not UTF-8, or is larger than 65,536 bytes.
    """
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
            raise SettingError(f"{where}: not a regular file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise SettingError(f"{where}: larger than {_MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_flat_yaml(path: Path) -> dict[str, list[str | None]]:
    """Return the keys of a YAML file, each with its values; None stands for an empty value.

    Raises:
        SettingError: the file cannot be read, is too large, or is not such a mapping; the message names the line.
    """
    try:
        return _Events(yaml.parse(read_yaml_text(path, str(path)), Loader=yaml.SafeLoader), path).mapping()
    except yaml.YAMLError as error:
        raise SettingError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


class _Events:
    """The events of a flat YAML file."""

    def __init__(self, events: Iterator[Any], path: Path) -> None:
        self._events, self._path = events, path

    def mapping(self) -> dict[str, list[str | None]]:
        """Return the file's keys with their values."""
        values: dict[str, list[str | None]] = {}
        self._take(yaml.StreamStartEvent)
        if isinstance(self._take(yaml.DocumentStartEvent, yaml.StreamEndEvent), yaml.StreamEndEvent):
            raise SettingError(f"{self._path}: the file is empty; {_EXPECTED}")
        self._take(yaml.MappingStartEvent)
        while isinstance(event := self._take(yaml.ScalarEvent, yaml.MappingEndEvent), yaml.ScalarEvent):
            if event.value in values:
                raise self._error(event, f"{shorten(event.value)} is set twice")
            first = self._take(yaml.ScalarEvent, yaml.SequenceStartEvent)
            scalars = [first] if isinstance(first, yaml.ScalarEvent) else self._sequence()
            values[event.value] = [
                None if scalar.style is None and scalar.value in _NOTHING else str(scalar.value) for scalar in scalars
            ]
        self._take(yaml.DocumentEndEvent)
        self._take(yaml.StreamEndEvent)
        return values

    def _sequence(self) -> Iterator[Any]:
        while isinstance(event := self._take(yaml.ScalarEvent, yaml.SequenceEndEvent), yaml.ScalarEvent):
            yield event

    def _take(self, *expected: type) -> Any:
        """Return the next event, of one of the expected types.

        Raises:
            SettingError: an event of another type, or one that grows or builds objects: an anchor, an alias, a tag.
        """
        event = next(self._events)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._error(event, "anchors and aliases are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise self._error(event, "tags are not supported; write a plain value")
        if not isinstance(event, expected):
            raise self._error(event, _EXPECTED)
        return event

    def _error(self, event: Any, problem: str) -> SettingError:
        return SettingError(f"{self._path}, line {event.start_mark.line + 1}: {problem}")
