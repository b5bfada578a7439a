"""The work that one rendering of a chat template may do, and the size of values, counted before they are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError

MAX_TEXT = 4 << 20
"""Characters of a rendered prompt, beyond the texts of the messages."""
MAX_WORK = 16 << 20
"""Units of work of a rendering, beyond those that the messages add: one per character that is read or written,
:data:`ITEM` per value in a container, and :data:`OPERATION` per operation."""
OPERATION, ITEM = 64, 32
_PER_ENTRY = 2048 * OPERATION  # work that each turn or part of a turn adds
_PER_CHARACTER = 32
_MAX_BITS = 16_384  # of an integer: no more digits than Python converts
_MAX_DEPTH = 64  # macros and recursive loops inside each other


class TemplateLimitError(SecurityError):
    """A chat template exceeds a limit."""


class TemplateBudget:
    """The work that is left of one rendering.

    Args:
        messages: the conversation, which adds to what a template may do.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]] = ()) -> None:
        self.left = 1 << 62
        entries = sum(1 + len(turn["content"]) for turn in messages)
        characters = sum(self._size_of(turn) for turn in messages)
        self.max_text = MAX_TEXT + characters
        self.left = MAX_WORK + _PER_ENTRY * entries + _PER_CHARACTER * characters
        self.depth = 0

    def spend(self, units: int) -> None:
        """Count work.

        Raises:
            TemplateLimitError: none is left.
        """
        self.left -= units
        if self.left < 0:
            raise TemplateLimitError("it takes too many steps, or builds too much text")

    def operation(self) -> None:
        """Count one operation."""
        self.spend(OPERATION)

    def weigh(self, *values: Any, factor: int = 1) -> None:
        """Count the work of reading values, with everything inside them.

        Raises:
            TemplateLimitError: there are more than the work that is left, or an integer is too large.
        """
        for value in values:
            self.spend(factor * self._size_of(value))

    def repeat(self, value: Any, count: Any) -> None:
        """Count the work of repeating a value."""
        if isinstance(count, int) and count > 0:
            self.spend(self._size_of(value) * count)

    def enter(self) -> None:
        """Count a macro or a recursive loop that begins; decrement ``depth`` when it ends."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise TemplateLimitError(f"its macros or loops call each other more than {_MAX_DEPTH} deep")

    def _size_of(self, value: Any) -> int:
        """Return the work of reading a value, with everything inside it.

        Values are walked, not remembered, so a list that contains another one many times counts it many times: that is
        what comparing or printing it costs.
        """
        size, rest = 0, [value]
        while rest:
            item = rest.pop()
            size += 1
            if isinstance(item, str | bytes | range):
                size += len(item)
            elif isinstance(item, int):
                if item.bit_length() > _MAX_BITS:
                    raise TemplateLimitError(f"it computes an integer of more than {_MAX_BITS:,} bits")
                size += item.bit_length() >> 3
            elif isinstance(item, list | tuple | Set | Mapping | ValuesView):
                size += ITEM * (1 + len(item))
                if size <= self.left:
                    rest.extend(item)
                    rest.extend(item.values() if isinstance(item, Mapping) else ())
            if size > self.left:
                raise TemplateLimitError("it takes too many steps, or builds too much text")
        return size
