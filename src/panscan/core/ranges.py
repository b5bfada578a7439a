"""What numbers a setting takes, in words that a user of Python and of the command line reads alike."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import Repr

from panscan.core.errors import SettingError

__all__ = ["Range", "shorten"]

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60


def shorten(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened in the middle if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        return "an integer of more than 4,300 digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from ``least``, or above ``above``, to ``most``; infinity, NaN, True and False are refused.

    Args:
        most: the greatest number that is accepted: where sizes would overflow, or memory could not hold them.
        whole: integers only.
        least: the smallest number that is accepted.
        above: a number that all accepted ones exceed.
        note: text that a refusal adds.
    """

    most: int
    whole: bool = False
    least: float | None = None
    above: float | None = None
    note: str = ""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        from_below = self.least is None or value >= self.least
        return from_below and (self.above is None or value > self.above) and value <= self.most

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.above is not None:
            return f"{kind} above {self.above} and at most {self.most}"
        return f"{kind} " + (f"of at most {self.most}" if self.least is None else f"from {self.least} to {self.most}")

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is not in the range.

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
            number = int(text) if self.whole else float(text)
        except ValueError:  # also for integers of more digits than Python reads
            raise SettingError(f"{name} takes {self}; got {shorten(text)}") from None
        self.check(name, number)
        return number
