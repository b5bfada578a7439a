"""Tools in the engine: which answers are calls, how their text is separated, and what the prompt says about them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from panscan import Engine, GenerateRunner, Request, Sampling
from panscan.core import SettingError
from panscan.core.tools import tool_use
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
    '{"name": "go.on", "parameters": {"any": {"a": 1, "a": 2}}}',
]
FORCED = {"one", "escapes", "two", "the same twice", "open object"}


@pytest.fixture(scope="module")
def grammars(tiny: GenerateRunner) -> Grammars:
    return Grammars(tiny.loaded.reader.tokenizer, tiny.loaded.eos_ids)


def allows(grammars: Grammars, tiny: GenerateRunner, answer: str, **fields: Any) -> bool:
    constraint = grammars.start(Sampling(), tool_use(TOOLS, **fields))
    assert constraint is not None
    end = min(tiny.loaded.eos_ids)
    for token in [*tiny.loaded.reader.tokenizer.encode(answer, add_special_tokens=False), end]:
        if not constraint.allowed[token // 8] >> token % 8 & 1:
            return False
        if token != end:
            constraint.advance(token)
    return True


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_text_or_calls(grammars: Grammars, tiny: GenerateRunner, name: str) -> None:
    answer, called = ANSWERS[name]
    assert allows(grammars, tiny, answer)
    assert allows(grammars, tiny, answer, choice="required") == (name in FORCED)
    one = called is not None and len(called) == 1
    assert allows(grammars, tiny, answer, parallel=False) == (called is None or one)
    named = {"type": "function", "function": {"name": "go"}}
    assert allows(grammars, tiny, answer, choice=named) == (name in FORCED and called == ["go"])
    use = tool_use(TOOLS)
    assert use is not None
    draw = random.Random(name)
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


@pytest.mark.parametrize("answer", FORBIDDEN)
def test_a_call_matches_its_tool(grammars: Grammars, tiny: GenerateRunner, answer: str) -> None:
    assert not allows(grammars, tiny, answer)


def test_results_hold_calls_and_text(tiny: GenerateRunner) -> None:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02)) as engine:
        how = [Sampling(60, temperature=1.0, seed=seed) for seed in range(4)]
        asked = [
            engine.request("Go", tools=TOOLS, tool_choice=choice, sampling=each)
            for choice in ("auto", "required")
            for each in how
        ]
        asked.append(engine.request("Go", tools=TOOLS, tool_choice="none", sampling=how[0]))
        plain = engine.request("Go", sampling=how[0])
        *results, without, untooled = engine.generate([*asked, plain])
        assert [result.error for result in results] == [None] * 8
        assert without.token_ids == untooled.token_ids
        for request, result in zip(asked, results, strict=False):
            assert bool(result.tool_calls) == (request.tool_choice == "required") or result.text == ""
            if result.finish_reason == "stop":
                assert all(isinstance(json.loads(call.arguments), dict) for call in result.tool_calls)


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
    assert described == [{**each["function"]} for each in TOOLS]
    assert texts[1:] == [
        "Hi",
        f"Yes.\n[{GO}, {GO}]",
        "```tool_output\ngo:\ngone\n```\n```tool_output\ngo:\nstayed\n```\nSo?",
    ]
    assert [turn["role"] for turn in others] == ["user", "assistant", "user"]


def test_a_conversation_without_tools_is_unchanged() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": ""}]}]
    expected = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in ("a", "")]
    assert conversation(Request(messages=turns)) == expected
    assert conversation(Request(messages=turns, tools=TOOLS, tool_choice="none")) == expected


def test_other_runners_refuse_tools(tiny: GenerateRunner) -> None:
    with pytest.raises(SettingError, match="runner generate: tools are not supported; use the runner engine"):
        tiny.generate([Request(prompt="Go", tools=TOOLS)])
