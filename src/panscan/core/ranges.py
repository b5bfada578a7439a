"""What numbers a setting takes, in words that a user of Python and of the command line reads alike."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from reprlib import repr as short

from panscan.core.errors import SettingError

__all__ = ["Range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from ``least``, or above ``above``, to ``most``; infinity, NaN, True and False are none of them.

    Args:
        whole: integers only.
        least: the smallest that is taken.
        above: what all that is taken is greater than.
        most: the greatest that is taken.
        note: what a refusal says besides.
    """

    whole: bool = False
    least: int | None = None
    above: int | None = None
    most: int | None = None
    note: str = ""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        from_below = self.least is None or value >= self.least
        most = sys.float_info.max if self.most is None else self.most
        return from_below and (self.above is None or value > self.above) and value <= most

    def __str__(self) -> str:
        words = ["a whole number" if self.whole else "a number"]
        if self.least is not None:
            words.append(f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}")
        elif self.above is not None:
            words.append(f"above {self.above}" + ("" if self.most is None else f" and at most {self.most}"))
        return " ".join(words)

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is not in the range.

        Raises:
            SettingError: naming the setting, its range and the value.
        """
        if value not in self:
            note = f" ({self.note})" if self.note else ""
            raise SettingError(f"{name} is out of range: it must be {self}, got {short(value)}{note}")
