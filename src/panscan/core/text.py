"""Foreign text on a terminal, which would obey its control characters."""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"  # a lone carriage return overwrites its line
    r"|[\u202a-\u202e\u2066-\u2069]"  # these show text in another order
)


def escape_controls(text: str) -> str:
    """Write control characters and changes of direction as ``\\uXXXX``, as in JSON; tabs and line breaks stay."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
