"""Axes of a sweep become cells: flags over a YAML file over presets, every combination once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from panscan.core import SettingError, with_adapters
from panscan.core.sampling import FILTERS
from panscan.core.weight_formats import FORMATS
from panscan.settings import ALL_AT_ONCE, RunnerChoice, Settings, axes, choose_runner, foreign_settings
from panscan.settings.preset_files import MAX_VALUES, Axes, load_preset, parse_axes

MAX_CELLS = 10_000
"""Cells of a sweep; each is measured for seconds at least."""

_CROP_AXES = tuple(name for name in axes() if name.startswith("pan_and_scan_"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the sweep.

    ``id`` is a hash of the settings that are not at their defaults, so it is the same on every machine and in every
    run, and stays what it was when panscan learns new settings. ``preset`` is the preset that the settings began with.
    ``aliases`` are cells that lead to the same work on the run's documents, so that this one is measured for them, too.
    """

    id: str
    settings: Settings
    preset: str | None = None
    aliases: tuple[Cell, ...] = ()

    @classmethod
    def of(cls, settings: Settings, preset: str | None = None) -> Cell:
        """The cell of some settings. Without pan and scan its other settings mean nothing, so they are set back."""
        if not settings.do_pan_and_scan:
            settings = replace(settings, **{name: axes()[name].default for name in _CROP_AXES})
        text = json.dumps(settings.changed(), sort_keys=True)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:10], settings, preset)


def build_cells(
    flags: Mapping[str, Sequence[Any]],
    *,
    file: Axes | None = None,
    presets: Sequence[str] = (),
    on_choice: Callable[[RunnerChoice], None] | None = None,
    adapters: Sequence[Sequence[str]] = (),
) -> list[Cell]:
    """Return every combination of values, in the order given; equal cells once.

    Args:
        flags: setting (any spelling) -> values, from the command line; they win over the file, the file over presets.
        file: axes from a YAML file.
        presets: each is combined with all other axes.
        on_choice: takes the runner of :func:`panscan.settings.choose_runner`, which all cells of a preset without a
            runner get, so that they differ in the swept settings only; None: these run on ``generate``.
        adapters: adapters to merge into each model (:func:`adapter_sums`); each tuple is one value of the sweep.

    Raises:
        SettingError: an unknown setting or value, settings that contradict each other, or more than
            :data:`MAX_CELLS` cells.
    """
    if len(presets) > MAX_VALUES:
        raise SettingError(f"--preset names {len(presets):,} presets: give at most {MAX_VALUES:,}")
    over = {**(file or {}), **parse_axes(flags)}
    cells: dict[str, Cell] = {}
    bases: list[tuple[str | None, Axes]] = [(name, load_preset(name)) for name in presets] or [(None, {})]
    points = [(preset, base, _adapted({**base, **over}, adapters)) for preset, base in bases]
    # Counted before any is made: a file of a few lines can mean billions.
    if (count := sum(prod(map(len, chosen.values())) for _, _, chosen in points)) > MAX_CELLS:
        many = ", ".join(f"{name}: {len(values)}" for name, values in over.items() if len(values) > 1)
        raise SettingError(f"the sweep has {count:,} cells, the limit is {MAX_CELLS:,}: give fewer values ({many})")
    for preset, base, chosen in points:
        named = base.get("runner", [])
        if on_choice is not None and "runner" not in over and len(named) < 2:  # else the user or the preset names them
            choice = choose_runner(over, {**base, "runner": named[0]} if named else base)
            on_choice(choice)
            chosen["runner"] = [choice.runner]
        for values in product(*chosen.values()):
            cell = Cell.of(Settings(**_without_unused_settings(dict(zip(chosen, values, strict=True)), chosen)), preset)
            cells.setdefault(cell.id, cell)
    crops = [name for name in over if name in _CROP_AXES]
    if crops and not any(cell.settings.do_pan_and_scan for cell in cells.values()):
        raise SettingError(
            f"--{axes()[crops[0]].flag}: there are no crops with --no-pan-and-scan; leave out one of them"
        )
    return list(cells.values())


def adapter_sums(options: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the adapters of each value of a sweep: one of each comma list, summed; ``none`` adds none.

    Args:
        options: values of ``--adapter``.

    Raises:
        SettingError: an empty name, or too many values.
    """
    lists = [[name.strip() for name in text.split(",")] for text in options]
    if not all(name for names in lists for name in names):
        raise SettingError(f"--adapter has an empty value: {', '.join(map(repr, options))}")
    if (count := prod(map(len, lists))) > MAX_VALUES:
        raise SettingError(f"--adapter has {count:,} values: give at most {MAX_VALUES:,}")
    return [tuple(name for name in names if name != "none") for names in product(*lists)] if lists else []


def _adapted(chosen: Axes, adapters: Sequence[Sequence[str]]) -> Axes:
    """Return axes whose models have these adapters merged into them, or the base of the first adapter without one."""
    if not adapters:
        return chosen
    if "model" not in chosen and not all(adapters):
        raise SettingError("--adapter none: which model? name it with --model")
    models = [with_adapters(model, names) for model in chosen.get("model", [None]) for names in adapters]
    return {**chosen, "model": models}


def merge_equal_work(cells: Sequence[Cell], views: Callable[[Settings], Hashable]) -> list[Cell]:
    """The cells that do different work, each with the later ones that do the same as its aliases.

    Args:
        cells: of a sweep.
        views: all views of the workload under a cell's settings. Cells with the same ones, and the same settings apart
            from pan and scan, send the same tokens and pixels.

    Cells whose views cannot be planned (``views`` raises SettingError) stay alone.
    """
    idle = {name: axes()[name].default for name in (*_CROP_AXES, "do_pan_and_scan")}
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        key: Hashable = cell.id
        if cell.settings.runner != "vllm":  # it plans its memory for the most crops, whatever the documents need
            with suppress(SettingError):
                key = replace(cell.settings, **idle), views(cell.settings)
        groups.setdefault(key, []).append(cell)
    return [replace(first, aliases=tuple(others)) for first, *others in groups.values()]


_GOVERNED = {"temperature": (*FILTERS, "sampling_seed"), "device_map": ("max_memory",)}
"""A setting, and those that mean nothing where it is off."""


def _without_unused_settings(point: dict[str, Any], axes_: Axes) -> dict[str, Any]:
    """Drop settings without effect in this cell, because a swept setting that they depend on is off here.

    If that setting is off in the whole sweep, they are kept, and :class:`Settings` may reject them. If several runners
    are swept, settings that this cell's runner does not support are dropped, too.
    """
    runners = axes_.get("runner", ())
    unused = set(foreign_settings(point["runner"])) if {*ALL_AT_ONCE} & {*runners} and len(runners) > 1 else set()
    for name, governed in _GOVERNED.items():
        if (name in unused or not point.get(name)) and any(axes_.get(name, ())):
            unused.update(governed)
    grouped = [name for name in axes_.get("quantization", ()) if name in FORMATS and FORMATS[name].grouped]
    if grouped and ("quantization" in unused or point.get("quantization") not in grouped):
        unused.add("quantization_group_size")
    return {name: value for name, value in point.items() if name not in unused}
