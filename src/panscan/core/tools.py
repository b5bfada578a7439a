"""Tools that an answer may call, and calls: OpenAI's format, checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from panscan.core.errors import SettingError
from panscan.core.option import shorten
from panscan.core.sampling import MAX_SCHEMA_BYTES

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18
"""Longest definitions of all tools together, in characters."""
_CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``arguments``: a JSON object as text, incomplete if the answer ended at its maximum length."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call in a stream. The first one of a call has its id and its name.

    ``index``: number of the call in the answer. ``arguments``: the next characters of its arguments.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call. ``parameters``: JSON schema of its arguments as text."""

    name: str
    description: str
    parameters: str
    strict: bool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of calls in a chat template that knows tools: ``{"name": ..., KEY: arguments}`` and texts around it.

    Args:
        key: name of the arguments.
        opening: text before the first call.
        between: text between two calls.
        closing: text after the last call.
    """

    key: str
    opening: str
    between: str
    closing: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one answer may call.

    Args:
        tools: tools that the prompt describes.
        callable: those of them that the answer may call.
        required: whether the answer must be a call.
        parallel: whether it may be several.
        format: how it writes calls; None: as Gemma's documentation asks for.
        schema: JSON schema of an answer that calls nothing; None: it is text.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    required: bool
    parallel: bool
    format: CallFormat | None = None
    schema: str | None = None

    @property
    def key(self) -> str:
        """Name of the arguments in a call."""
        return "parameters" if self.format is None else self.format.key

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": json.loads(tool.parameters),
                },
            }
            for tool in self.tools
        ]


class _Function(msgspec.Struct):
    """A function in OpenAI's format."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None


class _Definition(msgspec.Struct):
    """A tool in OpenAI's format."""

    type: Literal["function"]
    function: _Function


_Definitions = Annotated[list[_Definition], msgspec.Meta(max_length=MAX_TOOLS)]


def tool_use(tools: Any, choice: Any = "auto", parallel: Any = True) -> ToolUse | None:
    """Return what an answer may call; None if it may call nothing.

    Args:
        tools: definitions in OpenAI's format.
        choice: ``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name": ...}}``.
        parallel: whether it may call several tools, or one of them several times.

    Raises:
        SettingError: a definition is malformed, two have the same name, or the chosen function is not among them.
    """
    if not isinstance(parallel, bool):
        raise SettingError(f"parallel_tool_calls must be true or false, got {shorten(parallel)}")
    try:
        definitions = msgspec.convert(tools, _Definitions)
    except msgspec.ValidationError as error:  # it says where
        raise SettingError(f"tools: {error}") from None
    known = {item.function.name: _checked_tool(item.function) for item in definitions}
    if len(known) < len(definitions):
        names = [item.function.name for item in definitions]
        raise SettingError(f"tools: two have the name {next(name for name in names if names.count(name) > 1)!r}")
    if sum(len(tool.parameters) + len(tool.description) for tool in known.values()) > MAX_TOOLS_BYTES:
        raise SettingError(f"tools: the definitions are longer than {MAX_TOOLS_BYTES:,} characters")
    name: str | None = None
    if choice not in _CHOICES:
        match choice:
            case {"type": "function", "function": {"name": str(name)}}:
                pass
            case _:
                expected = f"{', '.join(_CHOICES)} or a function"
                raise SettingError(f"tool_choice: expected {expected}, got {shorten(choice)}")
        if name not in known:
            raise SettingError(f"tool_choice: no tool has the name {shorten(name)}; add it to tools")
    if choice == "required" and not known:
        raise SettingError("tool_choice: 'required' needs tools")
    if choice == "none" or not known:
        return None
    callable = (*known.values(),) if name is None else (known[name],)
    return ToolUse((*known.values(),), callable, choice != "auto", parallel and name is None)


def _checked_tool(function: _Function) -> Tool:
    name, description = function.name, function.description or ""
    if _NAME.fullmatch(name) is None:
        raise SettingError(f"tools: a name has 1 to 64 letters, digits, '_', '.' or '-', got {shorten(name)}")
    parameters = {"properties": {}} if function.parameters is None else function.parameters
    if parameters.get("type", "object") != "object":
        raise SettingError(f"tools: the parameters of {name} must be a JSON schema of type 'object'")
    try:
        text = json.dumps({"type": "object", **parameters}, ensure_ascii=False, allow_nan=False)
        size = len(text.encode()) + len(description.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"tools: {name} is not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise SettingError(f"tools: {name} is longer than {MAX_SCHEMA_BYTES:,} bytes: shorten it")
    return Tool(name, description, text, function.strict is True)
