"""Tools in a conversation, for chat templates that know none: Gemma's documented function-calling prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from reprlib import repr as short
from typing import Any

from panscan.core import SettingError
from panscan.core.tools import ToolUse

_INSTRUCTIONS = (
    "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of\n"
    '{"name": function name, "parameters": dictionary of argument name and its value}\n'
    "You SHOULD NOT include any other text in the response if you call a function\n"
)
_SEVERAL = "To call several functions, put a list of these in the response.\n"


def with_tools(turns: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """Return a conversation of plain turns: definitions before the first one, calls as text, results as user turns.

    A conversation without definitions, calls and results is returned unchanged.

    Args:
        turns: turns with the keys ``role``, ``content``, ``tool_calls`` and ``tool_call_id``.
        use: what the answer may call.

    Raises:
        SettingError: a result belongs to no earlier call.
    """
    if use is None and not any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns):
        return [*map(dict, turns)]
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by id of the call
    for number, turn in enumerate(turns, start=1):
        role, content = turn["role"], [*turn["content"]]
        if calls := turn.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            content.append({"type": "text", "text": _calls_text(calls)})
        elif role == "tool":
            name = names.get(turn["tool_call_id"])
            if name is None:
                problem = f"is the result of call {short(turn['tool_call_id'])}, which no earlier turn makes"
                raise SettingError(f"messages: turn {number} {problem}")
            role, content = "user", _result_parts(name, content)
        if plain and role == plain[-1]["role"] == "user":  # several results, or a question after them
            content = plain.pop()["content"] + content
        plain.append({"role": role, "content": _merged_texts(content)})
    if use is None:
        return plain
    head = {"type": "text", "text": _definitions(use)}
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = _merged_texts([*plain[0]["content"], head])
        return plain
    return [{"role": "system", "content": [head]}, *plain]


def _definitions(use: ToolUse) -> str:
    listed = [
        {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
        for tool in use.tools
    ]
    several = _SEVERAL if use.parallel else ""
    return f"{_INSTRUCTIONS}{several}{json.dumps(listed, ensure_ascii=False, indent=2)}"


def _calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as the model would write them."""
    texts = []
    for call in calls:
        arguments = call["function"]["arguments"]
        with suppress(ValueError, RecursionError):  # of an answer that was cut
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        texts.append(f'{{"name": {json.dumps(call["function"]["name"])}, "parameters": {arguments}}}')
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _result_parts(name: str, content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the result of a call as parts of a user turn."""
    before, after = {"type": "text", "text": f"```tool_output\n{name}:"}, {"type": "text", "text": "```"}
    return [before, *content, after]


def _merged_texts(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring texts by line breaks: the template trims each part, and puts nothing between them."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if merged and part["type"] == merged[-1]["type"] == "text":
            merged[-1] = {"type": "text", "text": f"{merged[-1]['text']}\n{part['text']}"}
        elif part["type"] != "text" or part["text"]:
            merged.append({**part})
    return merged
