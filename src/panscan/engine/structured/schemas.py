"""JSON schemas before they become grammars: objects are closed by default, and costly keywords bounded."""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from math import lcm, prod
from typing import Any
from urllib.parse import unquote

from panscan.core import SettingError
from panscan.core.option import shorten

UNSATISFIABLE = "no value satisfies it: loosen it"
_MOST_REMAINDERS = 100_000
_MOST_DIGITS = 18
_MOST_STEPS = 200_000  # parts and names that are looked at: references and branches repeat them
_PROPERTIES = ("properties", "patternProperties")
_NAMED = (*_PROPERTIES, "$defs", "definitions")
_VALUES = ("items", "prefixItems", "additionalItems", "additionalProperties", "unevaluatedItems")
_BRANCHES = ("anyOf", "oneOf")
_REPEATS = ("minItems", "minLength", "minProperties", "minContains")
_OPEN = "x-open"  # where the copies of parts are that are closed where they are used
_Names = dict[str, dict[str, Any]]  # keyword, then name of a property


def closed_schema(text: str, path: str = "") -> dict[str, Any]:
    """Return a JSON schema in which objects have no other properties than those it names.

    Of objects with ``properties``, vLLM and llama.cpp allow no others either. What several parts of a schema
    (``allOf``, ``$ref``, branches of ``anyOf``) say about one object is taken together, as by
    ``unevaluatedProperties: false``. An explicit ``additionalProperties`` or ``unevaluatedProperties: true`` stays, and
    so do objects without named properties.

    Args:
        text: JSON schema, an object or a boolean.
        path: where in another schema it will be, as a JSON pointer: its references become those of the other.

    Raises:
        SettingError: the schema allows no value, is too complex, or overrides panscan's options.
    """
    schema = json.loads(text)
    if schema is True:
        return {}  # llguidance takes objects only
    if schema is False:
        raise SettingError(f"json_schema: {UNSATISFIABLE}")
    if "x-guidance" in schema:
        raise SettingError("json_schema: x-guidance is not supported; remove it")
    try:
        _check_remainders(json.dumps(schema))
        return _Closing(schema, path).result()
    except RecursionError:
        raise SettingError("json_schema: nested too deeply: flatten it, or use $ref") from None


class _Closing:
    """The closed copy of one schema.

    Args:
        root: the schema.
        path: see :func:`closed_schema`.
    """

    def __init__(self, root: dict[str, Any], path: str) -> None:
        self._root, self._path, self._steps = root, path, 0
        self._finite: set[str] = set()  # references to parts that have finite values
        self._open: list[str] = []  # references to parts that are closed where they are used

    def result(self) -> dict[str, Any]:
        """Return the copy."""
        if not self._is_finite(self._root, frozenset()):
            raise SettingError(f"json_schema: {UNSATISFIABLE}")
        schema: dict[str, Any] = self._closed(self._root, {})
        copies = [self._part(_target(self._root, reference)) for reference in self._open]  # which grows meanwhile
        return {**schema, _OPEN: copies} if copies else schema

    def _closed(self, node: Any, outer: _Names) -> Any:
        """Return a copy whose objects are closed.

        Args:
            node: schema.
            outer: names of properties that other parts of the schema give the same objects.
        """
        if not isinstance(node, dict):
            return node
        parts, branches = _listed(node, "allOf"), next((name for name in _BRANCHES if _listed(node, name)), None)
        named = bool(outer) or not node.keys().isdisjoint((*_PROPERTIES, "unevaluatedProperties"))
        if not named and branches is None and len(parts) + ("$ref" in node) == 1:  # the only part
            only = {"allOf": [self._closed(parts[0], {})]} if parts else {"$ref": self._moved(node["$ref"])}
            return self._part({keyword: value for keyword, value in node.items() if keyword not in only}) | only
        names = {keyword: {**listed} for keyword, listed in outer.items()}
        self._count(sum(map(len, names.values())))
        rest = {keyword: value for keyword, value in node.items() if keyword != branches}
        if self._collect(rest, names, set()):
            return self._part(node)
        copy = self._part(rest)
        if node.get("unevaluatedProperties") is False:
            names.setdefault("properties", {})
        if branches is not None:
            return {**copy, branches: [self._closed(branch, names) for branch in node[branches]]}
        if not names.keys().isdisjoint(_PROPERTIES):
            required = names.pop("required", {})
            if not names.get("patternProperties"):
                names["properties"] = {**names.get("properties", {}), **required}
            copy |= {keyword: {**listed, **copy.get(keyword, {})} for keyword, listed in names.items()}
            copy["additionalProperties"] = False
        return copy

    def _part(self, node: Any) -> Any:
        """Return a copy that allows its own objects further properties, but not those inside them."""
        if not isinstance(node, dict):
            return node
        self._count(len(node))
        return {
            keyword: self._value(keyword, value)
            for keyword, value in node.items()
            if keyword != "unevaluatedProperties" or not isinstance(value, bool)
        }

    def _value(self, keyword: str, value: Any) -> Any:
        """Return the copy of a keyword's value in a part."""
        if keyword in _NAMED:
            if not isinstance(value, dict):
                raise SettingError(f"json_schema: {keyword} must be an object, got {shorten(value)}")
            return {name: self._closed(part, {}) for name, part in value.items()}
        if keyword in _VALUES:
            return [self._closed(part, {}) for part in value] if isinstance(value, list) else self._closed(value, {})
        if keyword in ("allOf", *_BRANCHES) and isinstance(value, list):
            return [*map(self._part, value)]
        return self._open_reference(value) if keyword == "$ref" and isinstance(value, str) else value

    def _open_reference(self, reference: str) -> str:
        """Return a reference to the open copy of a part, or to the part itself if it is the same."""
        names: _Names = {}
        self._collect(_target(self._root, reference), names, {reference})
        if names.keys().isdisjoint(_PROPERTIES):
            return self._moved(reference)
        if reference not in self._open:
            self._open.append(reference)
        return self._moved(f"#/{_OPEN}/{self._open.index(reference)}")

    def _moved(self, reference: str) -> str:
        return f"#{self._path}{reference[1:]}" if str(reference).startswith("#") else reference

    def _collect(self, node: Any, names: _Names, seen: set[str]) -> bool:
        """Add the names of properties in all parts of a schema; return whether it says what others an object may have.

        Args:
            node: schema.
            names: names by keyword.
            seen: references that were followed.
        """
        if not isinstance(node, dict):
            return False
        for keyword in (*_PROPERTIES, "required"):
            value = node.get(keyword)
            if isinstance(value, dict | list):
                names.setdefault(keyword, {}).update((name, True) for name in value if isinstance(name, str))
                self._count(len(value))
        parts, branches = _listed(node, "allOf"), _listed(node, "anyOf") + _listed(node, "oneOf")
        self._count(len(parts) + len(branches))
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts = [_target(self._root, reference), *parts]
        explicit = [self._collect(part, names, seen) for part in parts]
        for branch in branches:
            self._collect(branch, names, seen)
        return any(explicit) or "additionalProperties" in node or node.get("unevaluatedProperties") is True

    def _is_finite(self, node: Any, followed: frozenset[str]) -> bool:
        """Return whether a schema has values of finite size; an object that requires another of its kind has none."""
        self._count()
        if not isinstance(node, dict):
            return True
        parts = [*_listed(node, "allOf")]
        if node.get("type") == "object" and isinstance(node.get("properties"), dict):
            parts += [node["properties"].get(name) for name in _listed(node, "required") if isinstance(name, str)]
        elif node.get("type") == "array" and node.get("minItems", 0) != 0:
            parts.append(node.get("items"))
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in self._finite:
            further = followed | {reference}
            if reference in followed or not self._is_finite(_target(self._root, reference), further):
                return False
            self._finite.add(reference)
        branches = (_listed(node, keyword) for keyword in _BRANCHES)
        return all(self._is_finite(part, followed) for part in parts) and all(
            any(self._is_finite(branch, followed) for branch in listed) for listed in branches if listed
        )

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise SettingError("json_schema: too complex: use fewer references and branches")


def _target(root: Any, reference: str) -> Any:
    """Return the part of a schema that a JSON pointer refers to; None if there is none."""
    node = root if reference.startswith("#") else None
    for step in reference.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and len(name) < 10 and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _listed(node: dict[str, Any], keyword: str) -> list[Any]:
    """Return the list under a keyword of a schema; empty if there is none."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def literal_length(text: str) -> int:
    """Return a bound on the length of a text that a JSON schema allows no choice in.

    All literals count, as often as they are repeated at least. A reference inside its own target does not: what
    repeats itself without a choice has no finite value.
    """
    root, lengths = json.loads(text), dict[str, int]()

    def length(node: Any) -> int:
        if isinstance(node, list):
            return sum(map(length, node))
        if not isinstance(node, dict):
            counts = re.findall(r"\{(\d{1,9})", str(node))
            return len(str(node)) * prod(max(1, int(count)) for count in counts)
        total = sum(length(name) + length(part) for name, part in node.items())
        if isinstance(reference := node.get("$ref"), str):
            if reference not in lengths:
                lengths[reference] = 0
                lengths[reference] = length(_target(root, reference))
            total += lengths[reference]
        return total * prod(max(1, int(node[name])) for name in _REPEATS if isinstance(node.get(name), int))

    try:
        return length(root)
    except RecursionError:
        return sys.maxsize


def _check_remainders(text: str) -> None:
    """Bound the states of ``multipleOf``: one per remainder, which llguidance's limits do not count.

    ``allOf`` may combine any of the values, so the bound uses their least common multiple.

    Args:
        text: JSON schema, as :func:`json.dumps` writes it.

    Raises:
        SettingError: the values need too many states, or have too many digits.
    """
    divisors = [*map(Decimal, re.findall(r'"multipleOf": (-?[\d.e+-]+|Infinity)', text))]
    if not all(value.is_finite() and abs(value.adjusted()) <= _MOST_DIGITS for value in divisors):
        raise SettingError("json_schema: a value of multipleOf has too many digits: round it")
    scale = max((0, *(-int(value.as_tuple().exponent) for value in divisors)))
    remainders = lcm(*(int(value.scaleb(scale)) for value in divisors)) * len(divisors)
    if remainders > _MOST_REMAINDERS:
        raise SettingError(
            f"json_schema: the values of multipleOf need {remainders:,} states, more than {_MOST_REMAINDERS:,};"
            " use fewer or smaller values"
        )
