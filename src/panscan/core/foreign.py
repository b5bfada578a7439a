"""Values that a stranger wrote: JSON and counts of endpoints, records and files, within limits; ``data:`` URLs."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

from panscan.core.errors import ImageError

JsonObject = dict[str, Any]
"""A decoded JSON object, or one to encode."""

DEEPEST = 100
"""Levels of arrays and objects. Python's own limit depends on the caller, and ``repr`` and ``pickle`` have others."""

MOST_VALUES = 8_000_000
"""Values of one JSON text: Python takes up to 250 bytes for each."""

MOST_COUNT = 2**31 - 1
"""The largest count of tokens, views or images: the sum of a billion of them fits 64 bits."""


def parse_json(
    data: str | bytes,
    *,
    most: int | None = None,
    parse_int: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a JSON text in UTF-8, with or without a byte order mark.

    Args:
        data: the text.
        most: its longest length, in bytes or characters; None: the caller has limited it.
        parse_int: converter of integers, as in :func:`json.loads`.
        parse_float: converter of other numbers.

    Raises:
        ValueError: the text is not JSON, too long, nested deeper than :data:`DEEPEST` levels, or has more than
            :data:`MOST_VALUES` values. Where it is not JSON, a :class:`json.JSONDecodeError` or
            :class:`UnicodeDecodeError`.
    """
    if most is not None and len(data) > most:
        raise ValueError(f"longer than {most:,} bytes")
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    if len(text) > MOST_VALUES and sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    try:
        value = json.loads(text, parse_int=parse_int, parse_float=parse_float)
    except RecursionError:
        raise ValueError(f"nested too deeply: more than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(f"nested too deeply: more than {DEEPEST} levels")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, list | dict)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 to :data:`MOST_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


_WHITESPACE = b" \t\r\n"  # base64(1) and MIME encoders break lines, and browsers read such URLs


def data_url_content(url: str) -> bytes:
    """Return the bytes of a ``data:`` URL.

    Raises:
        ImageError: the URL is not base64, or is empty.
    """
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ImageError("a data: URL must be base64: data:image/png;base64,...")
    try:
        content = base64.b64decode(payload.encode().translate(None, _WHITESPACE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data: URL is not valid base64, or is its URL-safe form ({error})") from error
    if not content:
        raise ImageError("the data: URL is empty")
    return content
