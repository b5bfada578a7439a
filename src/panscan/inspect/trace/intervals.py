"""Sets of time intervals as pairs of arrays: union, complement, overlap and nesting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Spans:
    """Disjoint intervals in ascending order.

    Args:
        start, end: bounds in microseconds; every end is before the next start.
    """

    start: Floats
    end: Floats

    @classmethod
    def union(cls, start: Floats, end: Floats) -> Spans:
        """Return the union of intervals in any order; those that touch become one."""
        if not len(start):
            return cls(np.empty(0), np.empty(0))
        order = np.argsort(start, kind="stable")
        start, latest = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > latest[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(start[first], latest[last])

    @property
    def total(self) -> float:
        """Microseconds in all intervals."""
        return float((self.end - self.start).sum())

    def gaps(self, begin: float, end: float) -> Spans:
        """Return the complement between two times."""
        start = np.concatenate(([begin], np.clip(self.end, begin, end)))
        stop = np.concatenate((np.clip(self.start, begin, end), [end]))
        wide = stop > start
        return Spans(start[wide], stop[wide])

    def overlap(self, start: Floats, end: Floats) -> Floats:
        """Return the microseconds that each interval shares with this set."""
        return self._before(end) - self._before(start)

    def _before(self, time: Floats) -> Floats:
        """Return the microseconds of this set before each time."""
        if not len(self.start):
            return np.zeros(len(time))
        summed = np.concatenate(([0.0], np.cumsum(self.end - self.start)))
        index = np.searchsorted(self.start, time, side="right")
        inside = np.clip(self.end[index - 1] - time, 0.0, None)  # where the index is 0, this is multiplied by 0
        return np.asarray(summed[index] - np.where(index > 0, inside, 0.0))

    def within(self, other: Spans) -> Spans:
        """Return the intersection with another set that is not empty: the complement of what either lacks."""
        begin, end = float(other.start[0]), float(other.end[-1])
        one, two = self.gaps(begin, end), other.gaps(begin, end)
        lacking = Spans.union(np.concatenate((one.start, two.start)), np.concatenate((one.end, two.end)))
        return lacking.gaps(begin, end)


def nesting(start: Floats, end: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the parent, the depth and the end of each range of one thread.

    Args:
        start, end: bounds, ordered by start, then by descending end.

    Returns:
        Indices of the innermost ranges around them (-1: none), the number of ranges around them, and their ends, cut
        where a range ends after the one around it.
    """
    parents, depths = np.full(len(start), -1, dtype=np.int64), np.zeros(len(start), dtype=np.int64)
    stack: list[int] = []
    ends = end.tolist()
    for index, begin in enumerate(start.tolist()):
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        if stack:
            parents[index], depths[index] = stack[-1], len(stack)
            ends[index] = min(ends[index], ends[stack[-1]])
        stack.append(index)
    return parents, depths, np.array(ends, dtype=np.float64)
