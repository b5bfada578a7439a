"""Presets and grid files: settings in YAML, parsed and checked; the shipped presets by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from panscan.core import SettingError
from panscan.presets.flat_yaml import read_flat_yaml
from panscan.settings import axis_name, nearest, parse_value

__all__ = ["MAX_VALUES", "Axes", "load_preset", "parse_axes", "preset_names", "read_grid_file", "single_preset"]

MAX_VALUES = 1000
"""Values of one setting; a sweep multiplies them."""

Axes = dict[str, list[Any]]
"""Settings by their canonical name, each with its values."""


def preset_names() -> list[str]:
    """The shipped presets."""
    return sorted(item.name.removesuffix(".yaml") for item in _presets().iterdir() if item.name.endswith(".yaml"))


def load_preset(name: str) -> Axes:
    """A shipped preset by name, or a YAML file by path.

    Raises:
        SettingError: neither; the nearest preset is suggested.
    """
    if name in preset_names():
        with as_file(_presets() / f"{name}.yaml") as path:
            return read_grid_file(path)
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
    found: dict[str, Any] = {}
    left_out = []
    for setting, values in load_preset(name).items():
        if takes is not None and setting not in takes:
            left_out.append(setting)
        elif len(values) > 1:
            raise SettingError(
                f"--preset {name}: one {setting} is wanted, not {len(values)}; panscan bench sweeps several"
            )
        else:
            found[setting] = values[0]
    return found, left_out


def read_grid_file(path: Path) -> Axes:
    """Axes from a YAML file of ``setting: value`` or ``setting: [values]``.

    Raises:
        SettingError: no such file, not such a mapping, a key given twice, or an unknown setting.
    """
    return parse_axes(read_flat_yaml(path), str(path))


def parse_axes(given: Mapping[str, Sequence[Any]], where: str | None = None) -> Axes:
    """Typed values of settings in any spelling.

    Raises:
        SettingError: an unknown setting or value, or one without values; the message begins with ``where``,
            if it is given.
    """
    found: Axes = {}
    for spelling, values in given.items():
        try:
            name = axis_name(spelling)
            if name in found:
                raise SettingError(f"{name} is set twice")
            if not values:
                raise SettingError(f"{name} has no value")
            if len(values) > MAX_VALUES:
                raise SettingError(f"{name} has {len(values):,} values: give at most {MAX_VALUES:,}")
            found[name] = [parse_value(name, value) for value in values]
        except SettingError as error:
            raise SettingError(str(error) if where is None else f"{where}: {error}") from None
    return found


def _presets() -> Any:
    return files("panscan.presets")
