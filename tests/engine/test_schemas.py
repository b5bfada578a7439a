"""What JSON schemas allow beyond their keywords: which further properties an object may have, and that none repeats."""

import json
import random
from typing import Any

import numpy as np
import pytest

from panscan import GenerateRunner, Sampling
from panscan.core import SettingError
from panscan.engine.structured.grammar import Grammars, check_structure

NUMBER = {"const": 1}
A, B = ({"properties": {name: NUMBER}} for name in "ab")
BASE = {"$defs": {"A": A, "B": {**B, "required": ["b"]}}}
OBJECTS = {
    name: "{" + ", ".join(f'"{letter}": 1' for letter in name) + "}"
    for name in ("", "a", "b", "ab", "c", "ac", "abc", "aa")
}
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {  # the second: objects of OBJECTS that a schema allows
    "closed by default": (A, "-,a"),
    "no properties": ({"type": "object", "properties": {}}, "-"),
    "any object": ({"type": "object"}, "-,a,b,ab,c,ac,abc"),
    "explicitly open": ({**A, "additionalProperties": True}, "-,a,b,ab,c,ac,abc"),
    "explicitly open, new word": ({**A, "unevaluatedProperties": True}, "-,a,b,ab,c,ac,abc"),
    "a schema for the others": ({**A, "additionalProperties": NUMBER}, "-,a,b,ab,c,ac,abc"),
    "patterns": ({**A, "patternProperties": {"^b$": NUMBER}}, "-,a,b,ab"),
    "required only": ({**A, "required": ["c"]}, "ac,c"),
    "closed with the new word": ({"allOf": [A, B], "unevaluatedProperties": False}, "-,a,b,ab"),
    "two parts": ({"allOf": [A, B]}, "-,a,b,ab"),
    "one part": ({"allOf": [A]}, "-,a"),
    "one of the parts is open": ({"allOf": [{**A, "additionalProperties": True}, B]}, "-,a,b,ab,c,ac,abc"),
    "reference": ({**BASE, "$ref": "#/$defs/A", "description": "annotated"}, "-,a"),
    "extended reference": ({**BASE, "$ref": "#/$defs/A", **B}, "-,a,b,ab"),
    "inheritance": ({**BASE, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, "b,ab"),
    "branches": ({"anyOf": [A, B]}, "-,a,b"),
    "branches beside properties": ({**A, "anyOf": [{**B, "required": ["b"]}, {"required": ["a"]}]}, "a,b,ab"),
    "branches by reference": ({**BASE, **A, "anyOf": [{"$ref": "#/$defs/B"}]}, "b,ab"),
}


def allows(grammars: Grammars, tiny: GenerateRunner, schema: Any, answer: str) -> bool:
    """Return whether an answer is allowed; in tokens of the tokenizer and of single characters, which must agree."""
    encode, verdicts = tiny.loaded.reader.tokenizer.encode, set()
    for pieces in ([answer], answer):
        constraint, allowed = grammars.start(Sampling(json_schema=json.dumps(schema))), True
        tokens = [token for piece in pieces for token in encode(piece, add_special_tokens=False)]
        for token in [*tokens, min(tiny.loaded.eos_ids)]:
            allowed = bool(constraint.allowed[token // 8] >> token % 8 & 1)
            if not allowed or token == min(tiny.loaded.eos_ids):
                break
            constraint.advance(token)
        verdicts.add(allowed)
    [verdict] = verdicts
    return verdict


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("nested", [False, True])
def test_objects_have_named_properties_only(grammars: Grammars, tiny: GenerateRunner, name: str, nested: bool) -> None:
    schema, expected = SCHEMAS[name]
    around = "%s"
    if nested:
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        schema, around = {"type": "array", "items": schema, **definitions}, "[%s]"
    allowed = {objects for objects, text in OBJECTS.items() if allows(grammars, tiny, schema, around % text)}
    assert allowed == {"" if objects == "-" else objects for objects in expected.split(",")}


@pytest.mark.parametrize(
    ("answer", "allowed"),
    [
        ('{"a": 1, "b": 1}', True),
        ('{"a": 1, "\\u0061": 1}', False),
        ('{"a": 1, "\\u0062": 1}', True),
        ('{"b": 1, "b": 1}', False),
        ('{"b": 1, "\\u0062": 1}', False),
        ('{"é": 1, "\\u00e9": 1}', False),
        ('{"b": {"b": 1, "c": {}}, "c": [{"b": 1}, {"b": 1}]}', True),
        ('{"b": {"b": 1, "b": 2}}', False),
        ('{"b": [{}, {"c": 1, "c": 1}]}', False),
        ('{"b": "b", "c": "\\", \\"b\\": "}', True),
        ('{"b\\"": 1, "b": 1, "b\\\\": 1}', True),
        ('{"": 1, "": 1}', False),
    ],
)
def test_no_name_comes_twice(grammars: Grammars, tiny: GenerateRunner, answer: str, allowed: bool) -> None:
    assert allows(grammars, tiny, {**A, "additionalProperties": True}, answer) == allowed


def test_random_answers_repeat_no_name(grammars: Grammars, tiny: GenerateRunner) -> None:
    schema = json.dumps({"type": "object", "patternProperties": {"^[ab]*$": NUMBER}})
    lengths = []
    for seed in range(30):
        draw, constraint, text, token = random.Random(seed), grammars.start(Sampling(json_schema=schema)), b"", -1
        while token not in tiny.loaded.eos_ids and len(text) < 200:
            token = draw.choice(np.flatnonzero(np.unpackbits(constraint.allowed, bitorder="little")).tolist())
            if token not in tiny.loaded.eos_ids:
                constraint.advance(token)
                text += tiny.loaded.reader.tokenizer.decode([token]).encode()
        names = [name for name, _ in json.loads(text, object_pairs_hook=list)] if text.endswith(b"}") else []
        assert len(names) == len(set(names))
        lengths.append(len(names))
    assert max(lengths) > 3


def test_references_that_multiply_are_refused() -> None:
    parts = {f"{level}": {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 9, **A} for level in range(200)}
    with pytest.raises(SettingError, match="too complex"):
        check_structure(Sampling(json_schema=json.dumps({"$defs": parts, "$ref": "#/$defs/0"})))
