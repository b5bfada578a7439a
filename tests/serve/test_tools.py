"""Tools over HTTP: the openai client calls them, streamed or not, sends results, and gets errors that name them."""

import json
import re
from typing import Any

import pytest
from tests.serve.serving import Server, post, refused, user

openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

CITY = {"type": "string", "maxLength": 6}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city"}}
WEATHER["function"]["parameters"] = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
CENTS: dict[str, Any] = {"type": "object", "properties": {"cents": {"$ref": "#/$defs/cents"}}, "required": ["cents"]}
CENTS["$defs"] = {"cents": {"type": "integer", "minimum": 10, "maximum": 99}}
PAY: Any = {"type": "function", "function": {"name": "pay", "strict": True, "parameters": CENTS}}
ABOUT_PAY: Any = {"type": "function", "function": {"name": "pay"}}
QUESTION: Any = user("What is the total?")
CALL = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": '{"cents":3}'}}
CALLED: list[dict[str, Any]] = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def created(client: openai.OpenAI, choice: Any, **fields: Any) -> Any:
    messages = fields.pop("messages", QUESTION)
    how = {"tools": [WEATHER, PAY], "tool_choice": choice, "max_tokens": 80, **fields}
    return client.chat.completions.create(model="mini", messages=messages, **how)


def check_arguments(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "pay":
        assert values.keys() == {"cents"} and 10 <= values["cents"] <= 99
    else:
        assert values.keys() == {"city"} and len(values["city"]) <= 6


@pytest.mark.parametrize("choice", ["required", ABOUT_PAY], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("seed", [None, 1])
def test_calls_are_streamed_alike(client: openai.OpenAI, choice: Any, parallel: bool, seed: int | None) -> None:
    how: dict[str, Any] = {"parallel_tool_calls": parallel}
    how |= {} if seed is None else {"temperature": 1.5, "seed": seed}
    [unstreamed] = created(client, choice, **how).choices
    assert unstreamed.finish_reason in ("tool_calls", "length") and unstreamed.message.content is None
    calls = unstreamed.message.tool_calls
    assert calls and len({call.id for call in calls}) == len(calls)
    assert len(calls) == 1 or (parallel and choice == "required")
    if unstreamed.finish_reason == "tool_calls":
        for call in calls:
            assert call.type == "function" and (choice == "required" or call.function.name == "pay")
            check_arguments(call.function.name, call.function.arguments)
    pieces: list[Any] = [chunk.choices[0] for chunk in created(client, choice, stream=True, **how) if chunk.choices]
    assert pieces[-1].finish_reason == unstreamed.finish_reason
    assert not any(piece.delta.content for piece in pieces)
    deltas = [delta for piece in pieces for delta in piece.delta.tool_calls or ()]
    heads = [delta for delta in deltas if delta.id is not None]
    assert [delta.index for delta in heads] == [*range(len(calls))] and len(deltas) > len(heads)
    assert all((delta.type, delta.function.name) == (None, None) for delta in deltas if delta.id is None)
    for index, call in enumerate(calls):
        texts = [delta.function.arguments for delta in deltas if delta.index == index]
        assert (heads[index].function.name, "".join(texts)) == (call.function.name, call.function.arguments)


def test_auto_answers_in_text_or_calls(client: openai.OpenAI) -> None:
    [plain] = created(client, "none").choices
    untooled = client.chat.completions.create(model="mini", messages=QUESTION, max_tokens=80)
    assert plain.message.content == untooled.choices[0].message.content and plain.message.tool_calls is None
    [text] = created(client, "auto").choices
    assert text.message.content and text.message.tool_calls is None and text.finish_reason == "stop"
    stream = created(client, "auto", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text.message.content


def test_results_go_back_and_the_conversation_goes_on(client: openai.OpenAI) -> None:
    [choice] = created(client, ABOUT_PAY).choices
    call = choice.message.tool_calls[0]
    paid = {"role": "tool", "tool_call_id": call.id, "content": "paid"}
    messages: Any = [*QUESTION, choice.message.model_dump(), paid]
    for question in ([], user("And now?")):
        [answer] = created(client, "auto", messages=[*messages, *question]).choices
        assert answer.message.content


def result(call: str, **fields: Any) -> list[dict[str, Any]]:
    return [*CALLED, {"role": "tool", "tool_call_id": call, "content": "ok", **fields}]


def with_parameters(parameters: Any, **fields: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "odd", "parameters": parameters, **fields}}]}


ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [PAY, PAY]}, "tools", "'pay'"),
    ({"tools": [PAY], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "'fly'"),
    ({"tool_choice": ABOUT_PAY}, "tool_choice", "'pay'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [PAY], "tool_choice": "any"}, "tool_choice", "any"),
    ({"tools": [PAY] * 129}, "tools", "128"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
    ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools.0.type", "retrieval"),
    ({"messages": result("call_2")}, "messages", "'call_2'"),
    ({"messages": [*QUESTION, {"role": "tool", "tool_call_id": "x", "content": "a"}]}, "messages", "'x'"),
    ({"messages": [*QUESTION, {"role": "tool", "content": "a"}]}, "messages.1", "tool_call_id"),
    ({"messages": [{**QUESTION[0], "tool_calls": [CALL]}]}, "messages.0", "assistant"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    (with_parameters({"type": "string"}), "tools", "odd"),
    (with_parameters({"properties": {"a": {"not": {}}}, "required": ["a"]}, strict=True), "tools", "odd"),
    (with_parameters({"properties": {"a": False}, "required": ["a"]}), "tools", "odd"),
    (with_parameters({"$ref": "https://example.com/a.json"}), "tools", "odd"),
    (with_parameters({"x-guidance": {"whitespace_flexible": True}}), "tools", "odd"),
    (with_parameters({"properties": {"a": {"multipleOf": 999_999_937, "type": "integer"}}}), "tools", "odd"),
    (with_parameters({"description": "x" * 70_000}), "tools", "odd"),
    ({"tools": [PAY], "guided_regex": "a"}, "tools", "regex and tools"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_tool(server: Server, stream: bool) -> None:
    for fields, param, message in ERRORS:
        response = post(server, "/v1/chat/completions", {"messages": QUESTION, **fields, "stream": stream})
        assert message in refused(response, 400, param)


def test_an_answer_is_a_call_or_json_of_the_schema(client: openai.OpenAI) -> None:
    price = {"properties": {"price": {"type": "integer", "maximum": 99}}, "required": ["price"], "type": "object"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "price", "schema": price}}
    seen = set()
    for seed in range(4):
        how: Any = {"temperature": 2.0, "seed": seed, "response_format": form}
        [unstreamed] = created(client, "auto", **how).choices
        pieces = [chunk.choices[0] for chunk in created(client, "auto", stream=True, **how) if chunk.choices]
        assert pieces[-1].finish_reason == unstreamed.finish_reason
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == (unstreamed.message.content or "") and bool(text) != bool(unstreamed.message.tool_calls)
        if unstreamed.finish_reason == "stop":
            assert json.loads(text).keys() == {"price"}
        seen.add(unstreamed.finish_reason)
    assert "stop" in seen
    [called] = created(client, ABOUT_PAY, response_format=form).choices
    check_arguments("pay", called.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("stop", ["param", '"cents"', "}"])
def test_a_stop_text_inside_a_call_ends_the_answer_without_calls(client: openai.OpenAI, stop: str) -> None:
    [choice] = created(client, ABOUT_PAY, stop=stop).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    content, call = choice.message.content, '{"name": "pay", "parameters": {"cents": '
    assert content == call.partition(stop)[0] or (stop == "}" and re.fullmatch(call + r"\d\d", content))
    pieces = [chunk.choices[0] for chunk in created(client, ABOUT_PAY, stop=stop, stream=True) if chunk.choices]
    assert pieces[-1].finish_reason == "stop"
    text = "".join(piece.delta.content or "" for piece in pieces)
    assert text == (content if stop == "param" else "")  # later, the call has begun


def test_tokenize_counts_tools(server: Server, client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        fields = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
        usage = post(server, "/v1/chat/completions", {**fields, "max_tokens": 1}).json()["usage"]
        assert post(server, "/tokenize", fields).json()["count"] == usage["prompt_tokens"]
    unknown = post(server, "/tokenize", {**fields, "tool_choice": ABOUT_PAY})
    assert "'pay'" in refused(unknown, 400, "tool_choice")
    refused(post(server, "/tokenize", {"prompt": "a", "tools": [PAY]}), 400, "tools")
