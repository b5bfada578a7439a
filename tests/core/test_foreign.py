"""JSON and counts that strangers wrote."""

import json
from typing import Any

import pytest

from panscan.core import foreign
from panscan.core.foreign import DEEPEST, MOST_COUNT, is_count, parse_json


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_a_limit_far_below_python_s(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    deepest = opening * DEEPEST + "1" + closing * DEEPEST
    assert parse_json(deepest) == json.loads(deepest)
    for levels in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply: more than 100 levels"):
            parse_json(opening * levels + "1" + closing * levels)
    assert parse_json("[" + "[]," * 1000 + '"' + "[" * 1000 + '"]')  # many, and within a text: not deep


@pytest.mark.parametrize("text", ["[1,2,3,4,5]", '{"a":[{"b":[]}],"c":{}}'])
def test_values_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(foreign, "MOST_VALUES", 4)
    with pytest.raises(ValueError, match="more than 4 values"):
        parse_json(text)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"1" * 5000, "nul"])
def test_what_is_not_json_is_a_value_error(data: bytes | str) -> None:
    with pytest.raises(ValueError):
        parse_json(data)
    with pytest.raises(ValueError, match="longer than 2 bytes"):
        parse_json(b"123", most=2)


@pytest.mark.parametrize("value", [-1, MOST_COUNT + 1, True, 1.0, "1", None, 10**400, float("nan"), float("inf")])
def test_a_count_is_an_integer_within_bounds(value: Any) -> None:
    assert is_count(0) and is_count(MOST_COUNT)
    assert not is_count(value)
