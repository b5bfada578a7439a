"""Objects of request bodies: parsing in linear work, and the refusal of fields that are not supported."""

from __future__ import annotations

import codecs
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from panscan.core import SettingError
from panscan.core.foreign import JsonObject
from panscan.core.option import shorten
from panscan.core.text import listed
from panscan.settings import nearest

_MOST_VALUES = 50_000  # JSON values of a body
_BASE64 = b";base64,"
_LARGE_PAYLOAD = 64 * 1024  # bytes
_SIGNATURE = 16  # characters of a payload that tell a plain image
_DECODER = msgspec.json.Decoder(bytes)
_LONGEST_SHOWN = 100  # characters of a client's name in a message
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # matches at every quote: linear work
_SURROGATE = re.compile(rb"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])")  # a high one without a low one
_FOR_TEMPLATE = "template_values"

References = list[tuple["Body", str]]
"""Objects of a body that hold URLs of documents, with the name of the field."""
MOST_PARTS = 4096
"""Maximum number of parts over all messages."""


class FieldError(SettingError):
    """An error in a field of a request body. ``param``: path of the field, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of a request body. It refuses unknown fields and treats ``null`` as absent.

    ``NEUTRAL``: fields of OpenAI's API that are accepted only with these values, which have no effect.
    ``REPLACED``: old fields of OpenAI's API, which are refused, with those that replace them.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    REPLACED: ClassVar[Mapping[str, str]] = {}

    def references(self) -> References:
        """Return where the body holds URLs of documents."""
        return []


Parsed = TypeVar("Parsed", bound=Body)


class DataUrl(str):
    """The start of a large ``data:`` URL, and the decoded ``content`` of all of it."""

    content: bytes


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Return the parsed body. The work is linear in its size.

    Large base64 payloads are decoded straight from the body, and their URLs become :class:`DataUrl`: JSON parsers and
    checks would pass over them five times. Other bodies are parsed without this step.

    Raises:
        FieldError: the body is not valid JSON, has too many values, or a field is unknown, invalid or repeated.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    rest, files = _cut_payloads(body)
    if files:
        with suppress(FieldError):  # its message may quote what was cut
            parsed = _parse_json(kind, rest)
            if _attach(parsed, files):
                return parsed
    return _parse_json(kind, body)


def _cut_payloads(body: bytes) -> tuple[bytes, dict[str, DataUrl]]:
    """Return the body with a mark instead of each large payload, and the URLs by their text with the mark."""
    files: dict[str, DataUrl] = {}
    pieces: list[bytes] = []
    mark, copied, position = uuid.uuid4().hex, 0, 0
    while (start := body.find(_BASE64, position) + len(_BASE64)) >= len(_BASE64):
        position = body.find(b'"', start)  # also past other occurrences in this string: the work stays linear
        if position < 0:
            break
        head = body[body.rfind(b'"', copied, start) + 1 : start].decode(errors="replace")
        if position - start < _LARGE_PAYLOAD or body.find(b"\\", start, position) >= 0 or head.count(",") > 1:
            continue
        try:  # twice as fast as binascii, and stricter
            content = _DECODER.decode(b"".join((b'"', memoryview(body)[start:position], b'"')))
        except msgspec.MsgspecError:
            continue
        name = f"{mark}{len(files)}"
        url = files[head + name] = DataUrl(head + body[start : start + _SIGNATURE].decode())
        url.content = content
        pieces += body[copied:start], name.encode()
        copied = position
    return b"".join([*pieces, body[copied:]]), files


def _attach(body: Body, files: dict[str, DataUrl]) -> bool:
    """Replace the URLs of a parsed body that were cut; return whether these are all of ``files``."""
    for owner, name in body.references():
        if (url := files.pop(getattr(owner, name), None)) is not None:
            setattr(owner, name, url)
    return not files


def _parse_json(kind: type[Parsed], body: bytes) -> Parsed:
    if count_values(body) > _MOST_VALUES and count_values(_STRING.sub(b"", body)) > _MOST_VALUES:
        raise FieldError(f"the body has more than {_MOST_VALUES} JSON values")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cut = "truncated" in str(error) and _SURROGATE.search(body)  # msgspec's word for both
        problem = f"{cut[0].decode()} is half of a surrogate pair, as of an emoji cut in two" if cut else error
        raise FieldError(f"the body is not valid JSON in UTF-8: {problem}") from None
    try:
        parsed = msgspec.convert(_supported_fields(content, kind), kind, str_keys=True)
    except msgspec.ValidationError as error:  # with the path as OpenAI writes it, such as messages.0.role
        problem, _, location = str(error).replace(" - at `key` in", " as a key - at").partition(" - at `$")
        path = re.sub(r"\[(\d+)\]", r".\1", location.rstrip("`")).replace("[...]", "").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
            path, problem = f"{path}.{missing[1]}".removeprefix("."), "this field is required"
        elif not path and (name := re.split("[ :]", problem)[0]) in kind.__struct_fields__:
            raise FieldError(problem, name) from None
        problem = problem[:1].lower() + problem[1:]
        raise FieldError(f"{path}: {problem}" if path else problem, path or None) from None
    try:
        json.loads(body, object_pairs_hook=_unique)  # last, because it takes longest
    except RecursionError:
        raise FieldError("the body is nested too deeply") from None
    return parsed


def count_values(body: bytes) -> int:
    """Return an upper bound on the number of JSON values: each follows a comma or opens a container, but for one."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return a JSON object. If a name is repeated, a proxy may use the first value, and Python the last.

    Raises:
        FieldError: a name is repeated.
    """
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name[:_LONGEST_SHOWN] if name.isprintable() else shorten(name)
                raise FieldError(f"{shown}: the JSON body repeats this field", shown)
            seen.add(name)
    return unique


_Kind = type[Body] | Mapping[str, type[Body]]
"""A type of objects, or several types by the field ``type``."""


def _supported_fields(value: Any, kind: _Kind, path: str = "") -> Any:
    """Return a JSON object without nulls and neutral fields; any other value unchanged.

    Args:
        value: JSON value.
        kind: type of the object.
        path: path of the object with a final dot; empty for the body.

    Raises:
        FieldError: a field of the object, or of one in it, is not supported, or has none of a list of values.
    """
    if not isinstance(value, dict):
        return value
    if isinstance(kind, Mapping):
        _check_choice(f"{path}type", value.get("type"), tuple(kind))
        kind = kind[value["type"]]
    supported: JsonObject = {}
    known = _known_fields(kind)
    for name, inner in value.items():
        neutral = kind.NEUTRAL.get(name)
        if inner is None or any(type(inner) is type(item) and inner == item for item in neutral or ()):
            continue
        if neutral is not None and name not in known:
            raise _unsupported(path, name, f"; it may be {' or '.join(map(repr, neutral))}" if neutral else "")
        if _FOR_TEMPLATE in known and (name not in known or name == _FOR_TEMPLATE):
            supported.setdefault(_FOR_TEMPLATE, {})[name] = inner
            continue
        if name not in known:
            new = kind.REPLACED.get(name)
            hint = f"; use {new}" if new else nearest(name[:_LONGEST_SHOWN], kind.__struct_fields__)
            raise _unsupported(path, name, hint)
        choices, nested = known[name]
        if choices:
            _check_choice(f"{path}{name}", inner, choices)
        if nested is None:
            supported[name] = inner
        elif isinstance(inner, list):
            items = enumerate(inner[: MOST_PARTS + 1])  # a longer list is refused
            supported[name] = [_supported_fields(item, nested, f"{path}{name}.{index}.") for index, item in items]
        else:
            supported[name] = _supported_fields(inner, nested, f"{path}{name}.")
    return supported


def _unsupported(path: str, name: str, hint: str) -> FieldError:
    name = name[:_LONGEST_SHOWN]
    shown = name if name.isprintable() and name else repr(name)
    return FieldError(f"{path[:-1]}{': ' if path else ''}{shown} is not supported{hint}", f"{path}{name}")


@cache
def _known_fields(kind: type[Body]) -> dict[str, tuple[tuple[str, ...], _Kind | None]]:
    """Return the fields of a type: the values that one may have, if they are few, and the type of objects in it."""
    hints, tag = get_type_hints(kind), kind.__struct_config__.tag_field
    known: dict[str, tuple[tuple[str, ...], _Kind | None]] = {}
    for name in (*kind.__struct_fields__, *([] if tag is None else [tag])):
        hint = hints.get(name)
        tagged = {str(body.__struct_config__.tag): body for body in _bodies(hint)}
        nested = tagged if len(tagged) > 1 else next(iter(tagged.values()), None)
        known[name] = get_args(hint) if get_origin(hint) is Literal else (), nested
    return known


def _bodies(hint: Any) -> list[type[Body]]:
    if isinstance(hint, type) and issubclass(hint, Body):
        return [hint]
    return [body for argument in get_args(hint) for body in _bodies(argument)]


def _check_choice(path: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a FieldError unless a value is one of a few."""
    if value not in choices:
        raise FieldError(f"{path}: expected {listed(map(repr, choices))}, got {shorten(value)}", path)
