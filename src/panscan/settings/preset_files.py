"""Settings in YAML: the shipped presets by name, preset files and grid files; and the reader of all YAML files.

A YAML document can hold objects, references to its own parts, and nesting without end. Files of options need none of
these. The values of settings stay text until the table of settings types them, so ``revision: 2026-01-01`` is a branch
name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from panscan.core import SettingError
from panscan.core.files import read_text
from panscan.core.option import shorten
from panscan.settings.declaration import nearest
from panscan.settings.sweep_settings import SettingValues, axes, axis_name

MAX_VALUES = 1000
"""Values of one setting; a sweep multiplies them."""

Axes = dict[str, list[Any]]
"""Settings by their canonical name, each with its values."""

_MAX_BYTES = 65_536  # a preset has a few hundred, and a grid file is typed by hand
_DEEPEST = 20  # levels of a file, of which a scenario has 4; PyYAML's time grows with their square
_NOTHING = ("", "~", "null", "Null", "NULL")
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


def single_preset(name: str, takes: Collection[str]) -> tuple[SettingValues, list[str]]:
    """Return the settings of a preset for a single run, and the names of those that it does not take.

    Args:
        name: a shipped preset, or a YAML file.
        takes: names of the settings to return.

    Raises:
        SettingError: no such preset, or several values of a wanted setting.
    """
    preset = load_preset(name)
    used = {setting: values for setting, values in preset.items() if setting in takes}
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
    axes: dict[str, list[str | None]] = {}
    for name, given in read_yaml(path, str(path), _Texts).items():
        values = given if isinstance(given, list) else [given]
        if not all(isinstance(value, str) for value in values):
            raise SettingError(f"{path}: {name}: expected a value or a list of values")
        axes[name] = [None if value in _NOTHING else value for value in values]
    return parse_axes(axes, str(path))


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


class YamlLoader(yaml.SafeLoader):
    """A loader of plain values that refuses a key that is set twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node.

        Raises:
            yaml.YAMLError: a key is set twice.
        """
        keys: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{shorten(name)} is set twice", key.start_mark)
            keys.add(name)
        return super().construct_mapping(node, deep)


class _Texts(YamlLoader):
    """A loader that leaves all values text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # one of the class in PyYAML


def read_yaml(path: Path, where: str, loader: type[YamlLoader] = YamlLoader) -> dict[str, Any]:
    """Return the mapping of a YAML file without anchors, aliases and tags, which could grow or build objects.

    Args:
        path: of the file.
        where: start of error messages: the path, and the option that named it.
        loader: of its values.

    Raises:
        SettingError: the file cannot be read, is not a regular file, is larger than 65,536 bytes, or is not such a
            mapping.
    """
    text, depth = read_text(path, _MAX_BYTES, where, SettingError), 0
    event: Any
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
                raise SettingError(
                    f"{where}, line {line}: anchors, aliases and tags are not supported; write plain values"
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise SettingError(f"{where}, line {line}: nested too deeply")
        values = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of dates that do not exist, and huge numbers
        raise SettingError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SettingError(f"{where}: {'the file is empty; ' if values is None else ''}expected lines of 'name: value'")
    return values
