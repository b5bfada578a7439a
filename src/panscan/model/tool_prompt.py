"""Tools in a conversation: how a chat template writes them, or Gemma's documented prompt if it knows none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from reprlib import repr as short
from typing import Any

from panscan.core import SettingError
from panscan.core.tools import CallFormat, ToolUse

Turn = dict[str, Any]
"""A turn for the chat template: ``role``, ``content`` (a list of parts), and perhaps ``tool_calls`` or ``name``."""
Part = dict[str, Any]

_INSTRUCTIONS = (
    "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of\n"
    '{"name": function name, "parameters": dictionary of argument name and its value}\n'
    "You SHOULD NOT include any other text in the response if you call a function\n"
)
_SEVERAL = "To call several functions, put a list of these in the response.\n"


def uses_tools(turns: Sequence[Turn], use: ToolUse | None) -> bool:
    """Return whether a conversation has definitions of tools, calls or results."""
    return use is not None or any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)


def named_results(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which each result has the ``name`` of the function that was called.

    Raises:
        SettingError: a result belongs to no earlier call.
    """
    named: list[Turn] = []
    names: dict[str, str] = {}  # of functions, by id of the call
    for number, turn in enumerate(turns, start=1):
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls") or ()}
        named.append({**turn})
        if turn["role"] == "tool":
            if (name := names.get(turn["tool_call_id"])) is None:
                problem = f"is the result of call {short(turn['tool_call_id'])}, which no earlier turn makes"
                raise SettingError(f"messages: turn {number} {problem}")
            named[-1]["name"] = name
    return named


def with_tools(turns: Sequence[Turn], use: ToolUse | None) -> list[Turn]:
    """Return a conversation of plain turns: definitions before the first one, calls as text, results as user turns.

    A conversation without definitions, calls and results is returned unchanged.

    Args:
        turns: turns with the keys ``role``, ``content``, ``tool_calls`` and, of results, ``name``.
        use: what the answer may call.
    """
    if not uses_tools(turns, use):
        return [*turns]
    plain: list[Turn] = []
    for turn in turns:
        role, content = turn["role"], [*turn["content"]]
        if calls := turn.get("tool_calls"):
            content.append(_text_part(_calls_text(calls)))
        elif role == "tool":
            before, after = (_text_part(text) for text in (f"```tool_output\n{turn['name']}:", "```"))
            role, content = "user", [before, *content, after]
        if plain and role == plain[-1]["role"] == "user":  # several results, or a question after them
            content = plain.pop()["content"] + content
        plain.append({"role": role, "content": _merged_texts(content)})
    if use is None:
        return plain
    head = _text_part(_definitions(use))
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = _merged_texts([*plain[0]["content"], head])
        return plain
    return [{"role": "system", "content": [head]}, *plain]


def _definitions(use: ToolUse) -> str:
    listed = [definition["function"] for definition in use.definitions]
    several = _SEVERAL if use.parallel else ""
    return f"{_INSTRUCTIONS}{several}{json.dumps(listed, ensure_ascii=False, indent=2)}"


def _calls_text(calls: Sequence[Part]) -> str:
    """Return calls as the model would write them."""
    texts = []
    for call in calls:
        arguments = call["function"]["arguments"]
        with suppress(ValueError, RecursionError):  # of an answer that was cut
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        texts.append(f'{{"name": {json.dumps(call["function"]["name"])}, "parameters": {arguments}}}')
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def _merged_texts(parts: Sequence[Part]) -> list[Part]:
    """Join neighbouring texts by line breaks: the template trims each part, and puts nothing between them."""
    merged: list[Part] = []
    for part in parts:
        if merged and part["type"] == merged[-1]["type"] == "text":
            merged[-1] = _text_part(f"{merged[-1]['text']}\n{part['text']}")
        elif part["type"] != "text" or part["text"]:
            merged.append({**part})
    return merged


_PROBE_CALL = {"function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}}, "type": "function"}
PROBE: list[Turn] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [], "tool_calls": [{"id": f"probe{n}", **_PROBE_CALL} for n in "12"]},
    {
        "role": "tool",
        "content": [{"type": "text", "text": "probe_result"}],
        "tool_call_id": "probe1",
        "name": "probe_tool",
    },
]
"""A question, two calls and a result, whose rendering shows what a chat template does with them."""
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe_description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "a"}}},
    },
}
_PROBED = re.compile(
    r'\{\s*"name":\s*"probe_tool",\s*"(arguments|parameters)":\s*\{\s*"probe_key":\s*"probe_value"\s*\}\s*\}'
)


def call_format(asked: str, told: str, specials: re.Pattern[str]) -> CallFormat | None:
    """Return how a chat template writes calls; None if it does not know tools, or writes no JSON.

    Args:
        asked: the rendered question of :data:`PROBE`, with :data:`PROBE_TOOL`.
        told: the same for all of :data:`PROBE`.
        specials: matches special tokens, which cannot be part of the format.
    """
    calls = [*_PROBED.finditer(told, len(asked))]
    known = all(word in asked for word in ("probe_tool", "probe_description", "probe_key"))
    if not known or not told.startswith(asked) or "probe_result" not in told or len(calls) != 2:
        return None
    first, second = calls
    after = told[second.end() :]
    end = specials.search(after)
    closing = after[: None if end is None else end.start()].rstrip()
    form = CallFormat(first[1], told[len(asked) : first.start()], told[first.end() : second.start()], closing)
    return None if specials.search(form.opening + form.between) or "probe_result" in closing else form
