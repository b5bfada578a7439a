"""Swept settings as axes: the values that a setting took, and the curves that the other settings make over it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from panscan.bench.rows import Row, distinguishing, label

__all__ = ["Sweep", "speed", "sweeps"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One setting, and the cells that differ in nothing else.

    Args:
        name: the setting.
        numeric: whether its values are numbers; then they ascend, else they stand in the order of the rows.
        values: the distinct values. None is one of them where cells differ in that alone (no quantisation); it is none
            where it says that the setting means nothing (crops without pan and scan).
        series: rows in the order of ``values``, by the label of their other varying settings; the fastest series first.
    """

    name: str
    numeric: bool
    values: tuple[Any, ...]
    series: Mapping[str, Sequence[Row]]

    def at(self, row: Row) -> int:
        """Where a row of the series stands among the values. Charts draw them at equal distances: sweeps double more
        often than they add."""
        return self.values.index(row.settings.get(self.name))


def speed(row: Row) -> float:
    """Requests per second, 0 where they could not be had."""
    return row.metrics.values["request_throughput"] or 0.0


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """The settings that were swept: some cells differ in that setting alone."""
    varying = distinguishing([row.settings for row in rows])
    found = [_sweep(rows, name, varying) for name in varying]
    return [sweep for sweep in found if any(len(points) > 1 for points in sweep.series.values())]


def _sweep(rows: Sequence[Row], name: str, varying: Sequence[str]) -> Sweep:
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[label({other: row.settings.get(other) for other in varying if other != name})].append(row)
    alone = [points[0] for points in series.values() if len(points) == 1]
    nothing = {row.cell for row in alone if row.settings.get(name) is None}
    values: list[Any] = []
    for row in rows:
        value = row.settings.get(name)
        if row.cell not in nothing and value not in values:  # a list: another version's values need not be hashable
            values.append(value)
    numeric = all(_is_number(value) for value in values)
    ordered = tuple(sorted(values)) if numeric else tuple(values)
    placed = {
        each: sorted(points, key=lambda row: ordered.index(row.settings.get(name)))
        for each, points in series.items()
        if points[0].cell not in nothing
    }
    fastest = sorted(placed, key=lambda each: -max(map(speed, placed[each])))
    return Sweep(name, numeric, ordered, {each: placed[each] for each in fastest})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
