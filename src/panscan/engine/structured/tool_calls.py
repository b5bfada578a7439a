"""Tool calls in an answer: ``{"name": ..., "parameters": ...}``, or a list of them, as Gemma's documentation asks for.

A call begins the answer, possibly in a fence such as ```` ```json````. Anything else is text.
"""

from __future__ import annotations

import re
import uuid

from panscan.core.tools import ToolCall, ToolCallDelta, ToolUse

_SPACE = r"[ \n]{0,16}"  # of models that indent JSON; not in answers that must be calls
_FENCES = ("", "```\n", "```json\n", "```tool_code\n", "```tool_call\n")
_HEAD = re.compile(r'[ \n,\[]*\{[ \n]*"name":[ \n]*"([^"]*)",[ \n]*"parameters":[ \n]*')
_FENCE = f"{_SPACE}({'|'.join(_FENCES[1:])})?{_SPACE}".replace("\n", r"\n")


def _beginning(use: ToolUse) -> str:
    """Return the regular expression of what begins an answer that is not text."""
    names = "|".join(re.escape(tool.name) for tool in use.callable)
    return rf'{_FENCE}\[?{_SPACE}\{{{_SPACE}"name": ?"({names})"'


def call_grammar(use: ToolUse, schemas: list[str]) -> str:
    """Return the Lark grammar of an answer that may, or must, call tools.

    What precedes the arguments of a call is one terminal: the lexer takes the longest match, and text matches as well.

    Args:
        use: what the answer may call.
        schemas: the arguments of each callable tool, as an expression of the grammar.
    """
    fence = "" if use.required else _FENCE
    names = [re.escape(tool.name) for tool in use.callable]
    space, separator = ("", ", ") if use.required else (_SPACE, f",{_SPACE}")
    heads = [rf'\{{{space}"name": ?"{name}"{separator}"parameters": ' for name in names]
    rules = [rf"CLOSE: /{space}\}}/", rf"END: /{space}\]/"]
    for index, (head, schema) in enumerate(zip(heads, schemas, strict=True)):
        rules += [f"ONE{index}: /{fence}{head}/", f"one{index}: ONE{index} p{index} CLOSE", f"p{index}: {schema}"]
        if use.parallel:
            rules += [rf"FIRST{index}: /{fence}\[{space}{head}/", f"first{index}: FIRST{index} p{index} CLOSE"]
            rules += [f"NEXT{index}: /{separator}{head}/", f"next{index}: NEXT{index} p{index} CLOSE"]

    def any_of(kind: str) -> str:
        return "(" + " | ".join(f"{kind}{index}" for index in range(len(heads))) + ")"

    calls = any_of("one")
    if use.parallel:
        calls += f" | {any_of('first')} {any_of('next')}* END"
    if use.required:
        return "\n".join([f"start: {calls}", *rules])
    rules += [f"TEXT: /(?s:.*)/ & ~/(?s:{_beginning(use)}.*)/", r"FENCE: /\n```\n?/"]
    return "\n".join([f"start: TEXT | ({calls}) FENCE?", *rules])


class ToolCallParser:
    """Separates the text of an answer from its calls while the answer is written.

    Args:
        use: what the answer may call.
    """

    def __init__(self, use: ToolUse) -> None:
        self.text = ""
        """The answer without its calls."""
        self.is_text: bool | None = None
        """Whether the answer is text; None: not known yet."""
        self._fences = tuple("".join(fence.split()) for fence in _FENCES)
        self._beginning = re.compile(_beginning(use))
        self._names = tuple(tool.name for tool in use.callable)
        self._rest = ""  # not delivered yet
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._depth, self._in_string, self._escaped, self._in_call = 0, False, False, False

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [ToolCall(id, name, "".join(pieces)) for id, name, pieces in self._calls]

    def push(self, piece: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Append text of the answer; return the text, or the pieces of calls, that can now be delivered."""
        self._rest += piece
        if self.is_text is None:
            self.is_text = self._decide()
        if self.is_text:
            return self._deliver_text()
        return "", () if self.is_text is None else self._read_calls()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """End the answer; return the text that was held back."""
        if self.is_text is False:
            return "", ()
        self.is_text = True
        return self._deliver_text()

    def _deliver_text(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text, self._rest = self._rest, ""
        self.text += text
        return text, ()

    def _decide(self) -> bool | None:
        """Return False if the answer begins with a call, True if it cannot, and None if that is open."""
        if self._beginning.match(self._rest):
            return False
        begun = "".join(self._rest.split())
        for fence in self._fences:
            for bracket in ("", "["):
                head = f'{fence}{bracket}{{"name":"'
                if head.startswith(begun):
                    return None
                if begun.startswith(head):
                    name = begun[len(head) :]
                    if any(f'{known}"'.startswith(name) for known in self._names):
                        return None
        return True

    def _read_calls(self) -> tuple[ToolCallDelta, ...]:
        deltas: list[ToolCallDelta] = []
        while True:
            index = len(self._calls) - 1
            if self._in_call:
                if not self._calls[-1][2]:
                    self._rest = self._rest.lstrip(" \n")
                end = self._arguments_end()
                piece, self._rest = self._rest[:end], self._rest[end:]
                if piece:
                    self._calls[-1][2].append(piece)
                    deltas.append(ToolCallDelta(index, piece))
                if self._in_call:
                    return (*deltas,)
            found = _HEAD.search(self._rest)
            if found is None:
                return (*deltas,)
            self._calls.append((f"call_{uuid.uuid4().hex[:24]}", found[1], []))
            self._rest, self._in_call = self._rest[found.end() :], True
            id, name, _ = self._calls[-1]
            deltas.append(ToolCallDelta(index + 1, "", id, name))

    def _arguments_end(self) -> int:
        """Return where the arguments end in the rest, or its length, and note whether they do."""
        for index, character in enumerate(self._rest):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._in_call = False
                    return index + 1
        return len(self._rest)
