"""Answers under a JSON schema: alone, in mixed batches, compared with ``generate()``, under hostile schemas; and what
schemas allow beyond their keywords."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from tests.conftest import printed
from tests.engine.driving import Driver, Reference, crops, requests

from panscan import Engine, GenerateRunner, Request, Result, Sampling
from panscan.core import SettingError
from panscan.engine.options import EngineOptions
from panscan.engine.structured import grammar
from panscan.engine.structured.grammar import Grammars, check_structure
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.observation import ForcedTokens

TOKENS = 40


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHORT_TEXT = {"type": "string", "maxLength": 5}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, Any] = {
    "object": closed(total=SHORT_TEXT, paid={"type": "boolean"}),
    "enum": {"enum": ["cash", "card", "check", 7, None]},
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 3},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "nested": closed(items={"type": "array", "items": closed(n=DIGIT), "minItems": 1, "maxItems": 2}),
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}é$"},
    "reference": {"$defs": {"digit": DIGIT}, **closed(a={"$ref": "#/$defs/digit"}, b={"type": "null"})},
    "constant": {"const": "Total: 5 €"},
}


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    return bool(pytest.importorskip("jsonschema").Draft202012Validator(schema).is_valid(value))


def constrained(request: Request, schema: Any, **sampling: Any) -> Request:
    how = Sampling(**{"max_new_tokens": TOKENS, **sampling}, json_schema=json.dumps(schema))
    return replace(request, sampling=how)


def answers(engine: Engine, *asked: Request) -> list[Result]:
    results = engine.generate(asked)
    assert [result.error for result in results] == [None] * len(asked)
    return results


@pytest.fixture(scope="module")
def engine(tiny: GenerateRunner) -> Iterator[Engine]:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02)) as opened:
        yield opened


@pytest.fixture(scope="module")
def unforced(tiny: GenerateRunner) -> Iterator[Engine]:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02, force_tokens=False)) as opened:
        yield opened


HOW: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.5, "top_p": 0.9, "seed": 2}]
PLAIN = [requests()[index] for index in (1, 3, 7)]
CASES = [(name, index) for name in SCHEMAS for index in range(len(HOW))]
ASKED = {f"{name} {at}": constrained(requests()[at + 3], SCHEMAS[name], **HOW[at]) for name, at in CASES}


def test_answers_satisfy_schemas_in_any_batch(tiny: GenerateRunner, unforced: Engine, reference: Reference) -> None:
    """In a mixed batch with preemptions and cached prefixes, every token equals that of the request alone, whose
    forced tokens are sampled."""
    alone = {name: answers(unforced, request)[0] for name, request in ASKED.items()}
    for name, result in alone.items():
        schema = SCHEMAS[name.split()[0]]
        assert result.finish_reason == "stop" or name.startswith("number"), (name, result.text)
        assert result.finish_reason == "length" or satisfies(json.loads(result.text), schema), result.text
    driver = Driver(tiny, EngineOptions(kv_cache_gb=0.0020, max_num_seqs=32, overlap=True))
    for _ in range(2):
        plain = [driver.add(request) for request in PLAIN]
        schema_states = {name: driver.add(request) for name, request in ASKED.items()}
        driver.run()
        assert [state.tokens for state in plain] == [reference(request).token_ids for request in PLAIN]
        for name, state in schema_states.items():
            assert state.tokens == alone[name].token_ids, name
    stats = driver.loop.stats()
    assert stats.preemptions and unforced.stats().forced_tokens == 0
    assert stats.forced_tokens == 2 * sum(state.results[0].forced_tokens for state in schema_states.values()) > 40
    assert any(state.results[0].cached_tokens for state in schema_states.values())


@pytest.mark.parametrize("name", SCHEMAS)
def test_greedy_tokens_match_generate_under_the_same_grammar(tiny: GenerateRunner, engine: Engine, name: str) -> None:
    """Transformers applies the masks itself, through ``prefix_allowed_tokens_fn``."""
    request, loaded = ASKED[f"{name} 0"], tiny.loaded
    grammars = Grammars(loaded.reader.tokenizer, loaded.eos_ids)
    prepared = prepare(read_images(request), loaded.reader, loaded.device, loaded.dtype, on_device=False)
    inputs = collate([prepared], loaded)
    prompt = inputs["input_ids"].shape[1]

    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        constraint = grammars.start(request.sampling)
        for token in ids[prompt:].tolist():
            constraint.advance(token)
        return np.flatnonzero(np.unpackbits(constraint.allowed, bitorder="little")).tolist()

    before = tiny.settings
    tiny.configure(replace(before, attention="eager"))
    try:
        out = loaded.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, prefix_allowed_tokens_fn=allowed)
    finally:
        tiny.configure(before)
    [result] = answers(engine, request)
    assert result.token_ids == out[0, prompt:].tolist()


def test_a_run_of_forced_tokens_is_one_chunk_of_one_pass(tiny: GenerateRunner) -> None:
    """A run may end at a stop text or the maximum length, and does not enter a request for log-probabilities."""
    const = {"const": "x" * 20 + "yz"}
    how = [{}, {"stop": ("yz",)}, {"max_new_tokens": 9}, {"logprobs": 2, "repetition_penalty": 1.5}]
    asked = [constrained(requests()[0], const, **fields) for fields in how]
    runs: dict[bool, list[tuple[Result, int, int]]] = {True: [], False: []}
    for force, request in itertools.product(runs, asked):
        driver = Driver(tiny, EngineOptions(kv_cache_gb=0.02, force_tokens=force))
        driven = driver.add(request)
        driver.run()
        [result] = driven.results
        assert [event.finish_reason for event in driven.events][-1] == result.finish_reason
        assert len(result.stamps.tokens) == result.output_tokens == len(driven.tokens)
        runs[force].append((result, driver.loop.stats().steps, driver.loop.stats().prompt_tokens))
    for (forced, steps, prompt), (sampled, more, same) in zip(runs[True], runs[False], strict=True):
        for name in ("token_ids", "text", "finish_reason"):
            assert getattr(forced, name) == getattr(sampled, name)
        assert prompt == same == forced.prompt_tokens
        assert more == sampled.output_tokens and sampled.forced_tokens == 0
        assert steps == more - forced.forced_tokens
    assert [result.finish_reason for result, *_ in runs[True]] == ["stop", "stop", "length", "stop"]
    assert [steps for _, steps, _ in runs[True]][:3] == [2, 1, 1]
    logprobs = runs[True][3][0].logprobs
    assert runs[True][3][0].forced_tokens == 0 and logprobs is not None
    assert any(entry.top[0][1] > entry.logprob for entry in logprobs), "log-probabilities are those before the mask"


def test_the_engines_thread_is_not_held_by_long_forced_texts(tiny: GenerateRunner, unforced: Engine) -> None:
    """A long text is forced in parts; one that would take seconds to compute is sampled, whatever its names are."""
    long = constrained(requests()[0], {"const": "x" * 300}, max_new_tokens=400)
    driver = Driver(tiny, EngineOptions(kv_cache_gb=0.02))
    driven = driver.add(long)
    counts = [0]
    while driver.loop.step():
        counts.append(len(driven.tokens))
    assert max(np.diff(counts)) <= 257
    assert driven.results[0].forced_tokens > 260 and driven.tokens == answers(unforced, long)[0].token_ids
    repeated = {"type": "array", "items": {"const": "a" * 1000}, "minItems": 30, "maxItems": 30}
    loaded = tiny.loaded
    for name in ("definitions", "$defs"):
        schema = {"type": "object", "properties": {name: repeated}, "required": [name]}
        constraint = Grammars(loaded.reader.tokenizer, loaded.eos_ids).start(Sampling(json_schema=json.dumps(schema)))
        assert constraint is not None and not constraint.forced()


def test_the_trained_model_fills_in_what_it_reads(mini: GenerateRunner) -> None:
    """Its head has more rows than its tokenizer has tokens."""
    document = printed("receipt", 220, 660)
    ask = next(question for question in document.questions if question.type == "total")
    price = {"type": "string", "pattern": r"^\$[0-9]+\.[0-9]{2}$"}
    asked = Request(ask.question, [document.image], pan_and_scan=crops(4))
    with Engine(mini.loaded, EngineOptions(kv_cache_gb=0.02)) as engine:
        assert mini.loaded.model.config.get_text_config().vocab_size > len(mini.loaded.reader.tokenizer)
        plain, read, filled = answers(engine, asked, constrained(asked, price), constrained(asked, closed(total=price)))
    assert json.loads(read.text) == plain.text == ask.answers[0]
    assert satisfies(json.loads(filled.text), closed(total=price))


def lists(inner: Any, levels: int) -> Any:
    """Return the schema of lists inside each other."""
    return {"items": lists(inner, levels - 1)} if levels else inner


CHAIN = {f"d{at}": lists({"$ref": f"#/$defs/d{at + 1}"}, levels=100) for at in range(50)}
HOSTILE: dict[str, tuple[Any, str]] = {
    "remote": ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
    "local file": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    "endless": ({"$ref": "#"}, "no value satisfies"),
    "false": (False, "no value satisfies"),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "remainders": ({"type": "integer", "multipleOf": 999_999_937}, "multipleOf"),
    "remainders together": ({"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}, "multipleOf"),
    "digits": ({"type": "number", "multipleOf": 1e-300}, "multipleOf has too many digits"),
    "intersection": ({"allOf": [{"pattern": "^(.*a.{20})$"}, {"pattern": "^(.*b.{20})$"}], "type": "string"}, "empty"),
    "not a type": ({"type": "banana"}, "banana"),
    "ignored keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "other options": ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
    "definitions in a list": ({"$defs": [1]}, "must be an object"),
    "properties in a list": ({"properties": [1]}, "must be an object"),
    "long index": ({"$ref": "#/anyOf/" + "9" * 5_000, "anyOf": [{}]}, ""),
    "depth": (reduce(lambda inner, _: closed(a=inner), range(90), DIGIT), "nested too deeply"),
    "required recursion": (closed(a={"$ref": "#"}), "no value satisfies"),
}
BOUNDED: dict[str, Any] = {
    "catastrophic pattern": {"type": "string", "pattern": "^(a+)+$"},
    "repetitions": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "huge enum": {"enum": [f"value {index}" for index in range(4_000)]},
    "huge length": {"type": "string", "minLength": 10**9},
    "huge array": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "chain of references": {"$defs": {**CHAIN, "d50": {"type": "null"}}, "$ref": "#/$defs/d0"},
    "constant": {"const": "x" * 60_000},
    "states": {"type": "string", "pattern": "^(.*a.{50}|.*b.{60}|.*c.{61})$"},
}


def test_a_hostile_schema_fails_alone(engine: Engine) -> None:
    """In bounded time, which the timeout of the suite checks; already when it is checked without a checkpoint."""
    plain = requests()[0]
    expected = answers(engine, plain)[0].token_ids
    asked = [constrained(plain, schema) for schema, _ in HOSTILE.values()]
    for (name, (_, message)), request, result in zip(HOSTILE.items(), asked, engine.generate(asked), strict=True):
        with pytest.raises(SettingError, match=f"^json_schema: .*{message}") as refusal:
            check_structure(request.sampling)
        for error in (refusal.value, result.error):
            assert isinstance(error, SettingError), name
            assert message in str(error) and str(error).startswith("json_schema: ") and "\n" not in str(error), name
    bounded = engine.generate([constrained(plain, spec, temperature=1.0, seed=3) for spec in BOUNDED.values()])
    for name, result in zip(BOUNDED, bounded, strict=True):
        if result.finish_reason == "stop":
            json.loads(result.text)
        else:
            assert result.finish_reason == "length" or isinstance(result.error, SettingError), name
    assert answers(engine, plain)[0].token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": ""}, "not valid JSON"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[]"}, "JSON object, true or false"),
        ({"json_schema": "\ud800"}, "lone surrogate"),
        ({"json_schema": "[" * 60_000}, "nested too deeply"),
        ({"json_schema": json.dumps({"const": "x" * 2**16})}, "longer than 65,536"),
        ({"json_schema": {"type": "object"}}, r"use json\.dumps"),
        ({"regex": "a", "choice": ("a",)}, "regex and choice exclude each other"),
        ({"regex": "a" * 20_000}, "regex is longer than 16,384 bytes"),
        ({"choice": ()}, "choice must be a tuple of texts"),
        ({"choice": "yes"}, "choice must be a tuple of texts"),
        ({"grammar": "\ud800"}, "grammar is not Unicode text"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos and regex exclude each other"),
        ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos and json_schema exclude each other"),
    ],
)
def test_invalid_structures_are_refused_at_construction(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Sampling(**fields)


STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {  # the second: a pattern of the answer
    "regex": ({"regex": r"\d{3}-[a-c]/\"\w"}, r"\d{3}-[a-c]/\"\w"),
    "anchored": ({"regex": "^ab$"}, "ab"),
    "choice": ({"choice": ('yes "sir"', "no\n", "perhaps | é")}, 'yes "sir"|no\n|perhaps \\| é'),
    "Lark": ({"grammar": 'start: "a" b ~ 2\nb: "(" C ")"\nC: /x|y/'}, r"a\([xy]\)\([xy]\)"),
    "GBNF": ({"grammar": 'root ::= "a" [0-9]{2} end\nend ::= "!" | "?"'}, r"a\d\d[!?]"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_answers_follow_other_structures(engine: Engine, name: str) -> None:
    fields, pattern = STRUCTURES[name]
    how = [Sampling(TOKENS, **fields), Sampling(TOKENS, temperature=1.0, seed=1, **fields)]
    for result in answers(engine, *(replace(requests()[0], sampling=sampling) for sampling in how)):
        assert re.fullmatch(pattern, result.text) and result.finish_reason == "stop"


HOSTILE_STRUCTURES: dict[str, dict[str, Any]] = {
    "repetition": {"regex": "(a{1000}){1000}"},
    "optional repetition": {"regex": "(a?){5000}a{5000}"},
    "states": {"regex": "(.{0,500}a){500}"},
    "lookahead": {"regex": "a(?=b)"},
    "parentheses": {"regex": "(" * 16_000},
    "empty": {"regex": "a[^\\s\\S]"},
    "choices": {"choice": tuple(map(str, range(4_000)))},
    "chain": {"grammar": "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(900)) + '\nr900: "a"'},
    "GBNF chain": {"grammar": "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(700)) + 'r700 ::= "a"'},
    "doubling": {"grammar": "start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(60)) + '\nR60: "a"'},
    "ambiguous": {"grammar": 'start: start start | "a" | '},
    "deep": {"grammar": "start: " + "(" * 8_000 + '"a"' + ")" * 8_000},
    "deep GBNF": {"grammar": "root ::= " + "(" * 8_000 + '"a"' + ")" * 8_000},
    "no rule": {"grammar": "start: missing"},
    "remainders": {"grammar": 'start: %json {"multipleOf": 999999937}'},
    "options": {"grammar": '%llguidance {"no_forcing": false}\nstart: /a{1000000}/'},
    "special token": {"grammar": "start: <start_of_image>"},
    "image": {"grammar": "start: <image_soft_token>"},
}


@pytest.mark.parametrize("name", HOSTILE_STRUCTURES)
def test_a_hostile_structure_fails_alone(engine: Engine, name: str) -> None:
    request = replace(requests()[0], sampling=Sampling(TOKENS, temperature=1.0, seed=3, **HOSTILE_STRUCTURES[name]))
    [result] = engine.generate([request])
    field = next(iter(HOSTILE_STRUCTURES[name]))
    assert "llguidance" not in str(result.error)
    assert result.error is None or (str(result.error).startswith(f"{field}: ") and "\n" not in str(result.error))
    if name not in ("repetition", "optional repetition", "states", "choices", "chain", "GBNF chain", "ambiguous"):
        assert isinstance(result.error, SettingError)


def test_observed_requests_refuse_schemas(engine: Engine) -> None:
    with pytest.raises(SettingError, match="observed requests support no structured answers"):
        engine.observe([constrained(requests()[0], True)], [ForcedTokens(None, [], 3)])


def test_small_schemas_do_not_wait_for_large_ones(engine: Engine) -> None:
    """A request with a small schema ends before most of the requests with large schemas that came before it."""
    text = {"type": "string", "pattern": "^([a-z]{1,40}-){1,20}$"}
    large = [closed(**{f"p{index} {seed}": text for index in range(150)}) for seed in range(16)]
    asked = [constrained(requests()[0], schema, max_new_tokens=1) for schema in [*large, closed(a=DIGIT)]]
    order = [index for index, _ in engine.stream_results(asked, max_concurrency=99)]
    assert order.index(len(large)) < len(large) // 2  # the first large ones may be ready before it comes


NUMBER = {"const": 1}
A, B = ({"properties": {name: NUMBER}} for name in "ab")
BASE = {"$defs": {"A": A, "B": {**B, "required": ["b"]}}}
NAMES = ("", "a", "b", "ab", "c", "ac", "abc", "aa")
OBJECTS = {name: "{" + ", ".join(f'"{letter}": 1' for letter in name) + "}" for name in NAMES}
PROPERTIES: dict[str, tuple[dict[str, Any], str]] = {  # the second: objects of OBJECTS that a schema allows
    "closed by default": (A, "-,a"),
    "no properties": ({"type": "object", "properties": {}}, "-"),
    "any object": ({"type": "object"}, "-,a,b,ab,c,ac,abc,aa"),
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


def allows(grammars: Grammars, tiny: GenerateRunner, answer: str, schema: Any = None, use: Any = None) -> bool:
    """Return whether an answer is allowed; in tokens of the tokenizer and of single characters, which must agree."""
    encode, verdicts = tiny.loaded.reader.tokenizer.encode, set()
    end = min(tiny.loaded.eos_ids)
    for pieces in ([answer], answer) if use is None else ([answer],):  # names of tools are forced, token by token
        constraint = grammars.start(Sampling(json_schema=None if schema is None else json.dumps(schema)), use)
        allowed = True
        for token in [*(token for piece in pieces for token in encode(piece, add_special_tokens=False)), end]:
            allowed = bool(constraint.allowed[token // 8] >> token % 8 & 1)
            if not allowed or token == end:
                break
            constraint.advance(token)
        verdicts.add(allowed)
    [verdict] = verdicts
    return verdict


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("nested", [False, True])
def test_objects_have_named_properties_only(grammars: Grammars, tiny: GenerateRunner, name: str, nested: bool) -> None:
    schema, expected = PROPERTIES[name]
    around = "%s"
    if nested:
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        schema, around = {"type": "array", "items": schema, **definitions}, "[%s]"
    allowed = {objects for objects, text in OBJECTS.items() if allows(grammars, tiny, around % text, schema)}
    assert allowed == {"" if objects == "-" else objects for objects in expected.split(",")}


def test_references_that_multiply_are_refused() -> None:
    parts = {f"{level}": {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 9, **A} for level in range(200)}
    with pytest.raises(SettingError, match="too complex"):
        check_structure(Sampling(json_schema=json.dumps({"$defs": parts, "$ref": "#/$defs/0"})))


def test_a_full_lexer_fails_no_later_answer(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a grammar fill its lexers."""
    monkeypatch.setattr(grammar, "_GRAMMAR_LIMITS", LLParserLimits(max_lexer_states=200))
    monkeypatch.setattr(grammar, "_LEXERS", 1)
    grammars = Grammars(tiny.loaded.reader.tokenizer, tiny.loaded.eos_ids)
    lengths = []
    for seed in range(4):
        answer, draw = grammars.start(Sampling(regex="(.*a.{20}){3}")), np.random.default_rng(seed)
        assert answer is not None
        with pytest.raises(SettingError, match="too many states"):
            for length in itertools.count():
                lengths[seed:] = [length]
                answer.advance(int(draw.choice(np.flatnonzero(np.unpackbits(answer.allowed, bitorder="little")))))
    assert min(lengths) > 3
