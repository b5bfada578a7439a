"""Accepted answers as texts, whatever a dataset stores them as. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from math import isnan
from typing import Any

__all__ = ["ANSWER_KEYS", "Number", "answer_texts", "is_unicode"]

ANSWER_KEYS = ("answers", "answer", "text")


class Number(str):
    """A number of a JSON file as it is written there: "12.50" would lose its 0 as a float."""

    __slots__ = ()


def answer_texts(value: Any, *, people: bool = False) -> tuple[tuple[str, ...], bool]:
    """(the answers, whether they were a plain list of texts).

    Numbers are taken as they are written, a whole float without its ".0"; true and false as these words; dates and
    times as in ISO 8601, a space between them. Lists may be
    nested, and objects may hold their answers under "answers", "answer" or "text", as SQuAD and VQA have them. Nothing,
    not-a-number, blank texts and other objects are no answers. Repeats stay: they are other people's answers.

    Args:
        value: as it is stored.
        people: there is one answer of each person who was asked, so that blank ones among others count as well.
    """
    flat = value is None or (isinstance(value, list | tuple) and all(type(each) is str for each in value))
    found = tuple(_texts(value))
    said = any(text.strip() for text in found)
    return tuple(text for text in found if text.strip() or (people and said)), flat


def is_unicode(text: str) -> bool:
    """JSON's escapes can write code points that UTF-8, and so a tokenizer, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield str(value)
    elif isinstance(value, bool):
        yield str(value).lower()
    elif isinstance(value, float):
        if not isnan(value):
            yield str(int(value)) if value.is_integer() else repr(value)
    elif isinstance(value, int | Decimal | date | time):
        yield str(value)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Mapping):
        for key in ANSWER_KEYS:
            if key in value:
                yield from _texts(value[key])
                return
