"""JSON schemas before they become grammars: objects are closed by default, and costly keywords bounded."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
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
_NAMED = ("properties", "patternProperties")
_BRANCHES = ("anyOf", "oneOf")
_REPEATS = ("minItems", "minLength", "minProperties", "minContains")
_LISTS = ("allOf", *_BRANCHES)
_Names = dict[str, dict[str, Any]]  # keyword, then name of a property


def closed_schema(text: str) -> Any:
    """Return a JSON schema in which objects have no other properties than those it names.

    Of objects with ``properties``, vLLM and llama.cpp allow no others either. What several parts of a schema
    (``allOf``, ``$ref``, branches of ``anyOf``) say about one object is taken together, as by
    ``unevaluatedProperties: false``. An explicit ``additionalProperties`` or ``unevaluatedProperties: true`` stays, and
    so do objects without named properties.

    Args:
        text: JSON schema, an object or a boolean.

    Raises:
        SettingError: the schema is too complex.
    """
    _check_remainders(json.loads(text, parse_float=Decimal))
    schema = json.loads(text)
    try:
        return _Closing(schema).result() if isinstance(schema, dict) else schema
    except RecursionError:
        raise SettingError("json_schema: nested too deeply: flatten it, or use $ref") from None


class _Closing:
    """The closed copy of one schema.

    Args:
        root: the schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._steps = root, 0
        self._finite: set[str] = set()  # references to parts that have finite values
        self._open: dict[str, str] = {}  # references to parts that are closed where they are used: names of copies
        self._prefix = "open-"
        while any(str(name).startswith(self._prefix) for name in root.get("$defs") or ()):
            self._prefix += "-"

    def result(self) -> dict[str, Any]:
        """Return the copy."""
        if not self._is_finite(self._root, frozenset()):
            raise SettingError(f"json_schema: {UNSATISFIABLE}")
        schema = self._closed(self._root, {})
        copies: dict[str, Any] = {}
        while len(copies) < len(self._open):  # a copy may need further ones
            for reference, name in [*self._open.items()][len(copies) :]:
                copies[name] = self._copied(self._target(reference))
        return {**schema, "$defs": {**schema.get("$defs", {}), **copies}} if copies else schema

    def _closed(self, node: Any, outer: Mapping[str, dict[str, Any]]) -> Any:
        """Return a copy whose objects are closed.

        Args:
            node: schema.
            outer: names of properties that other parts of the schema give the same objects.
        """
        if not isinstance(node, dict):
            return node
        branches = next((keyword for keyword in _BRANCHES if _listed(node, keyword)), None)
        rest = {keyword: value for keyword, value in node.items() if keyword != branches}
        joined = not node.keys().isdisjoint((*_NAMED, "unevaluatedProperties")) or bool(outer)
        parts = _listed(node, "allOf")
        if not joined and branches is None and len(parts) + ("$ref" in node) == 1:  # the only part
            only = {"allOf": [self._closed(parts[0], {})]} if parts else {"$ref": node["$ref"]}
            return self._copied({keyword: value for keyword, value in rest.items() if keyword not in only}) | only
        names = {keyword: {**listed} for keyword, listed in outer.items()}
        self._count(sum(map(len, names.values())))
        if self._collect(rest, names, set()):
            return self._copied(node)
        if node.get("unevaluatedProperties") is False:
            names.setdefault("properties", {})
        if branches is not None:
            return {**self._copied(rest), branches: [self._closed(branch, names) for branch in node[branches]]}
        copy = self._copied(node)
        if not names.keys().isdisjoint(_NAMED):
            required = names.pop("required", {})
            if not names.get("patternProperties"):
                names["properties"] = {**names.get("properties", {}), **required}
            copy |= {keyword: {**listed, **copy.get(keyword, {})} for keyword, listed in names.items()}
            copy["additionalProperties"] = False
        return copy

    def _copied(self, node: Any) -> Any:
        """Return a copy that allows its own objects further properties, but not those inside them."""
        if not isinstance(node, dict):
            return node
        self._count(len(node))
        copy: dict[str, Any] = {}
        for keyword, value in node.items():
            match keyword, value:
                case (("properties" | "patternProperties" | "$defs" | "definitions"), _):
                    if not isinstance(value, dict):
                        raise SettingError(f"json_schema: {keyword} must be an object, got {shorten(value)}")
                    copy[keyword] = {name: self._closed(part, {}) for name, part in value.items()}
                case "items" | "prefixItems", list():
                    copy[keyword] = [self._closed(part, {}) for part in value]
                case (("items" | "additionalItems" | "additionalProperties" | "unevaluatedItems"), _):
                    copy[keyword] = self._closed(value, {})
                case (("allOf" | "anyOf" | "oneOf"), list()):
                    copy[keyword] = [*map(self._copied, value)]
                case "$ref", str():
                    copy[keyword] = self._open_reference(value)
                case "unevaluatedProperties", bool():
                    pass
                case _:
                    copy[keyword] = value
        return copy

    def _collect(self, node: Any, names: _Names, seen: set[str]) -> bool:
        """Add the names of properties in all parts of a schema; return whether it says what others an object may have.

        Args:
            node: schema.
            names: names by keyword.
            seen: references that were followed.
        """
        if not isinstance(node, dict):
            return False
        for keyword in (*_NAMED, "required"):
            value = node.get(keyword)
            if isinstance(value, dict | list):
                names.setdefault(keyword, {}).update((name, True) for name in value if isinstance(name, str))
                self._count(len(value))
        explicit = "additionalProperties" in node or node.get("unevaluatedProperties") is True
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            explicit |= self._collect(self._target(reference), names, seen)
        for keyword in _LISTS:
            for part in _listed(node, keyword):
                self._count()
                explicit |= self._collect(part, names, seen) and keyword == "allOf"
        return explicit

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
            if reference in followed or not self._is_finite(self._target(reference), further):
                return False
            self._finite.add(reference)
        branches = (_listed(node, keyword) for keyword in _BRANCHES)
        return all(self._is_finite(part, followed) for part in parts) and all(
            any(self._is_finite(branch, followed) for branch in listed) for listed in branches if listed
        )

    def _open_reference(self, reference: str) -> str:
        names: _Names = {}
        self._collect(self._target(reference), names, {reference})
        if names.keys().isdisjoint(_NAMED):  # closed or not is the same
            return reference
        if reference not in self._open:
            self._open[reference] = f"{self._prefix}{len(self._open)}"
        return f"#/$defs/{self._open[reference]}"

    def _target(self, reference: str) -> Any:
        """Return the part that a JSON pointer refers to; None if there is none."""
        node: Any = self._root if reference.startswith("#") else None
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(name)] if name.isdecimal() and len(name) < 10 and int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise SettingError("json_schema: too complex: use fewer references and branches")


def _listed(node: dict[str, Any], keyword: str) -> list[Any]:
    """Return the list under a keyword of a schema; empty if there is none."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def literal_length(text: str) -> int:
    """Return a bound on the length of a text that a JSON schema allows no choice in.

    All literals count, as often as they are repeated at least. A reference inside its own target does not: what
    repeats itself without a choice has no finite value.
    """
    root = json.loads(text)
    closing, lengths = _Closing(root if isinstance(root, dict) else {}), dict[str, int]()

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
                lengths[reference] = length(closing._target(reference))
            total += lengths[reference]
        return total * prod(max(1, int(node[name])) for name in _REPEATS if isinstance(node.get(name), int))

    try:
        return length(root)
    except RecursionError:
        return sys.maxsize


def _check_remainders(schema: Any) -> None:
    """Bound the states of ``multipleOf``: one per remainder, which llguidance's limits do not count.

    ``allOf`` may combine any of the values, so the bound uses their least common multiple.

    Raises:
        SettingError: the values need too many states, or have too many digits.
    """
    divisors: list[Decimal] = []
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            value = part.get("multipleOf")
            if isinstance(value, int | Decimal) and not isinstance(value, bool):
                divisors.append(Decimal(value))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    if not divisors:
        return
    fits = all(value.is_finite() and abs(value.adjusted()) <= _MOST_DIGITS for value in divisors)
    scale = max(0, *(-int(value.as_tuple().exponent) for value in divisors)) if fits else 0
    if not fits or scale > 2 * _MOST_DIGITS:
        raise SettingError("json_schema: a value of multipleOf has too many digits: round it")
    remainders = lcm(*(int(value.scaleb(scale)) for value in divisors)) * len(divisors)
    if remainders > _MOST_REMAINDERS:
        raise SettingError(
            f"json_schema: the values of multipleOf need {remainders:,} states, more than {_MOST_REMAINDERS:,};"
            " use fewer or smaller values"
        )
