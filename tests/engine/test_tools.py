"""Tools in the engine: which answers are calls, how their text is separated, and what the prompt says about them."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.test_grammar import allows

from panscan import Engine, GenerateRunner, Request, Sampling
from panscan.core import SettingError
from panscan.core.tools import CallFormat, ToolUse, tool_use
from panscan.engine.options import EngineOptions
from panscan.engine.structured.grammar import Grammars
from panscan.engine.structured.tool_calls import ToolCallParser
from panscan.model.prompt import conversation


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"To {name}", "parameters": parameters}}


TOOLS = [tool("go", to={"enum": ["a", '"}]']}), tool("stop"), tool("go.on", any={"type": "object"})]
GO, STOP = '{"name": "go", "parameters": {"to": "a"}}', '{"name": "stop", "parameters": {}}'
ODD = '{"name": "go", "parameters": {"to": "\\"}]"}}'
INDENTED = '{\n  "name": "go",\n  "parameters": {"to": "a"}\n}'
ANSWERS: dict[str, tuple[str, list[str] | None]] = {  # an answer, and the tools that it calls; None: text
    "one": (GO, ["go"]),
    "escapes": (ODD, ["go"]),
    "two": (f"[{GO}, {STOP}]", ["go", "stop"]),
    "the same twice": (f"[{ODD}, {ODD}]", ["go", "go"]),
    "open object": ('{"name": "go.on", "parameters": {"any": {"a": [{}], "b": "{"}}}', ["go.on"]),
    "fenced": (f"```json\n{INDENTED}\n```", ["go"]),
    "fenced list": (f"```tool_code\n[{GO},\n {STOP}\n]\n```", ["go", "stop"]),
    "text": ("The total is {", None),
    "nothing": ("", None),
    "JSON": ('{"name": "Anna"}', None),
    "other JSON": ('```json\n{"total": 3}\n```', None),
    "begun": ('{"na', None),
    "call after text": (f"So: {GO}", None),
    "after a space": (f"\n{GO}", ["go"]),
    "after several": (f" ```json\n {GO}\n```", ["go"]),
    "call with odd spaces": (GO.replace(": ", ":  ", 1), None),
    "fence in its line": (f"```json {GO}", None),
}
FORBIDDEN = [
    '{"name": "go", "parameters": {"to": "b"}}',
    '{"name": "go", "arguments": {}}',
    f"{GO} and text",
    f"[{GO}, 3]",
]
FORCED = {"one", "escapes", "two", "the same twice", "open object"}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_text_or_calls(grammars: Grammars, tiny: GenerateRunner, name: str) -> None:
    answer, called = ANSWERS[name]
    assert allows(grammars, tiny, answer, use=tool_use(TOOLS))
    assert allows(grammars, tiny, answer, use=tool_use(TOOLS, choice="required")) == (name in FORCED)
    one = called is not None and len(called) == 1
    assert allows(grammars, tiny, answer, use=tool_use(TOOLS, parallel=False)) == (called is None or one)
    named = {"type": "function", "function": {"name": "go"}}
    assert allows(grammars, tiny, answer, use=tool_use(TOOLS, choice=named)) == (name in FORCED and called == ["go"])
    check_separated(tool_use(TOOLS), answer, called)


def test_a_call_matches_its_tool(grammars: Grammars, tiny: GenerateRunner) -> None:
    for answer in FORBIDDEN:
        assert not allows(grammars, tiny, answer, use=tool_use(TOOLS)), answer


def check_separated(use: ToolUse, answer: str, called: list[str] | None) -> None:
    """Check that an answer is separated into text and calls however it is cut into pieces."""
    draw = random.Random(answer)
    for _ in range(20):
        parser, text, deltas = ToolCallParser(use), "", []
        cuts = sorted(draw.choices(range(len(answer) + 1), k=draw.randrange(9)))
        for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
            piece, calls = parser.push(answer[start:end])
            text, deltas = text + piece, [*deltas, *calls]
        text += parser.finish()[0]
        assert text == parser.text == (answer if called is None else "")
        assert [call.name for call in parser.calls] == (called or [])
        for index, call in enumerate(parser.calls):
            assert isinstance(json.loads(call.arguments), dict)
            assert "".join(delta.arguments for delta in deltas if delta.index == index) == call.arguments


TAGS = CallFormat("arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LIST = CallFormat("arguments", "[", ", ", "]")
CALLS = {GO: ["go"], f"[{GO}, {STOP}]": ["go", "stop"]}
ENTITY = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "total": {"type": "integer"}}})
FORMATS: dict[str, tuple[CallFormat | None, str | None, dict[str, list[str] | None]]] = {  # answers, as in ANSWERS
    "tags": (
        TAGS,
        None,
        {
            f"<tool_call>\n{GO}\n</tool_call>": ["go"],
            f"<tool_call>\n{GO}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>": ["go", "stop"],
            f"\n<tool_call>\n{ODD}\n</tool_call>": ["go"],
            GO: None,
            "<tool_call>": None,
            "text": None,
        },
    ),
    "list": (LIST, None, CALLS | {f"[{GO}]": ["go"], "[3]": None, GO: None}),
    "a schema": (None, ENTITY, CALLS | dict.fromkeys(['{"total": 3}', '{"name": "go"}', '{"name": "go", "total": 3}'])),
    "a schema and tags": (TAGS, ENTITY, {'{"name": "go"}': None, f"<tool_call>\n{GO}\n</tool_call>": ["go"]}),
}
NEITHER = {
    "tags": [f"<tool_call>\n{GO}", f"<tool_call>\n{GO} \n</tool_call>"],
    "list": [f"[{GO}", f"[{GO}, 3]"],
    "a schema": ["text", '{"other": 3}', FORBIDDEN[0], f"{GO} ", f"[{GO}, 3]", "[]"],
    "a schema and tags": ["text", GO.replace("parameters", "arguments")],
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_written_as_the_prompt_asks(grammars: Grammars, tiny: GenerateRunner, name: str) -> None:
    form, schema, answers = FORMATS[name]
    use = tool_use(TOOLS)
    use = replace(use, format=form, schema=schema)
    one, must = replace(use, parallel=False), replace(use, required=True)
    for text, called in answers.items():
        answer = text.replace('"parameters"', f'"{use.key}"') if called else text
        assert allows(grammars, tiny, answer, use=use), answer
        check_separated(use, answer, called)
        assert allows(grammars, tiny, answer, use=one) == (called is None or len(called) == 1)
        assert allows(grammars, tiny, answer, use=must) == (called is not None and not answer.startswith("\n"))
    for answer in NEITHER[name]:
        assert not allows(grammars, tiny, answer.replace('"parameters"', f'"{use.key}"'), use=use), answer


def test_references_in_a_tool_are_its_own_beside_a_schema(grammars: Grammars, tiny: GenerateRunner) -> None:
    cents = {"$ref": "#/$defs/cents"}
    names = {"cents": cents, "$ref": {"const": cents}, "enum": cents, "const": cents}
    parameters = {"properties": names, "$defs": {"cents": {"enum": [1, 2]}}}
    use = tool_use([{"type": "function", "function": {"name": "pay", "parameters": parameters}}])
    use = replace(use, schema=json.dumps({"properties": {"a": cents}, "$defs": {"cents": {"const": 7}}}))
    call = '{"name": "pay", "parameters": {"cents": %s}}'
    texts = (call % 1, call % 7, '{"a": 7}', '{"a": 1}')
    assert [text for text in texts if allows(grammars, tiny, text, use=use)] == [call % 1, '{"a": 7}']


def test_the_prompt_describes_tools_calls_and_results() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"to":"a"}'}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes.", "tool_calls": [call, {**call, "id": "2"}]},
        {"role": "tool", "tool_call_id": "2", "content": "gone"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "stayed"}]},
        {"role": "user", "content": "So?"},
    ]
    system, *others = conversation(Request(messages=turns, tools=TOOLS))
    texts = [system["content"][0]["text"], *(turn["content"][0]["text"] for turn in others)]
    assert texts[0].startswith("Be brief.\nYou have access to functions.")
    described = json.loads(texts[0][texts[0].index("\n[") :])
    assert described == [{**tool["function"]} for tool in TOOLS]
    results = "```tool_output\ngo:\ngone\n```\n```tool_output\ngo:\nstayed\n```\nSo?"
    assert texts[1:] == ["Hi", f"Yes.\n[{GO}, {GO}]", results]
    assert [turn["role"] for turn in others] == ["user", "assistant", "user"]


def test_the_engine_calls_a_tool_and_other_runners_refuse_it(tiny: GenerateRunner) -> None:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02)) as engine:
        how = {"tools": TOOLS[1:2], "tool_choice": "required", "parallel_tool_calls": False}
        [result] = engine.generate([engine.request("Go", sampling=Sampling(60), **how)])
    assert [(call.name, call.arguments) for call in result.tool_calls] == [("stop", "{}")] and result.text == ""
    with pytest.raises(SettingError, match="runner generate: tools are not supported; use the runner engine"):
        tiny.generate([Request(prompt="Go", tools=TOOLS)])
