"""How an option is declared, and what numbers it takes, in words that users of Python and of commands read alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

from panscan.core.errors import SettingError

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60


def shorten(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened in the middle if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        return "an integer of more than 4,300 digits"


def comma_list(option: str, text: str) -> list[str]:
    """Return the values of a comma-separated list, without the spaces around them.

    Raises:
        SettingError: an empty value; the message begins with ``option``.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SettingError(f"{option} has an empty value: {shorten(text)}")
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of accepted numbers; infinity, NaN, True and False are not accepted.

    Args:
        le: maximum, beyond which sizes would overflow or not fit into memory.
        integer: whether only integers are accepted.
        ge: minimum.
        gt: exclusive minimum.
        note: text to append to an error.
    """

    le: int
    integer: bool = False
    ge: float | None = None
    gt: float | None = None
    note: str = ""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else int | float):
            return False
        from_below = self.ge is None or value >= self.ge
        return from_below and (self.gt is None or value > self.gt) and value <= self.le

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        if self.gt is not None:
            return f"{kind} above {self.gt} and at most {self.le}"
        return f"{kind} " + (f"of at most {self.le}" if self.ge is None else f"from {self.ge} to {self.le}")

    def check(self, name: str, value: object) -> None:
        """Raise if a value is not in the range.

        Raises:
            SettingError: the value is out of range; the message names the setting, range and value.
        """
        if value not in self:
            note = f" ({self.note})" if self.note else ""
            raise SettingError(f"{name} is out of range: it must be {self}, got {shorten(value)}{note}")

    def parse(self, name: str, text: str) -> float:
        """Return the number that a text represents.

        Raises:
            SettingError: the text is not a number, or out of range.
        """
        try:
            number = int(text) if self.integer else float(text)
        except ValueError:  # also for integers of more digits than Python reads
            raise SettingError(f"{name} takes {self}; got {shorten(text)}") from None
        self.check(name, number)
        return number


def integers(least: int, most: int, note: str = "") -> Range:
    """Return a range of integers."""
    return Range(integer=True, ge=least, le=most, note=note)


SECONDS = Range(gt=0, le=86_400)
"""Of a timeout: up to a day."""


def option(default: Any, group: str, help: str, verbs: str, **facts: Any) -> Any:
    """Return a dataclass field that declares an option; see :class:`panscan.settings.Option` for the arguments."""
    return field(default=default, metadata={"group": group, "help": help, "verbs": verbs, **facts})
