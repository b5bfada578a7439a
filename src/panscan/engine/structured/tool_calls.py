"""Tool calls in an answer: ``{"name": ..., "parameters": ...}``, or several, as the prompt asks for.

A call begins the answer: for Gemma's documented prompt, maybe in a fence such as ```` ```json````, or in a list; for a
chat template that knows tools, between the texts that the template writes around calls. Anything else is text.
"""

from __future__ import annotations

import json
import re
import uuid

from panscan.core.tools import ToolCall, ToolCallDelta, ToolUse

_SPACE = r"[ \n]{0,16}"  # of models that indent JSON; not in answers that must be calls
_FENCES = ("", "```\n", "```json\n", "```tool_code\n", "```tool_call\n")
_FENCE = f"{_SPACE}({'|'.join(_FENCES[1:])})?{_SPACE}".replace("\n", r"\n")


def _literal(text: str) -> str:
    """Return the regular expression of a text, for Python and for Lark."""
    return re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ").replace("/", r"\/")


def _beginning(use: ToolUse) -> str:
    """Return the regular expression of what begins an answer that is not text."""
    names = "|".join(re.escape(tool.name) for tool in use.callable)
    before = rf"{_FENCE}\[?{_SPACE}" if use.format is None else f"{_SPACE}{_literal(use.format.opening.lstrip())}"
    after = "" if use.schema is None else rf',{_SPACE}"{use.key}": ?'  # the schema may have a name, too
    return rf'{before}\{{{_SPACE}"name": ?"({names})"{after}'


def call_grammar(use: ToolUse, schemas: list[str]) -> str:
    """Return the Lark grammar of an answer that is text or calls, or that must be calls.

    What precedes the arguments of a call is one terminal: the lexer takes the longest match, and text matches as well.

    Args:
        use: what the answer may call.
        schemas: the arguments of each callable tool, as an expression of the grammar.
    """
    space, separator = ("", ", ") if use.required else (_SPACE, f",{_SPACE}")
    fence = "" if use.required else _FENCE
    heads = [rf'\{{{space}"name": ?"{re.escape(tool.name)}"{separator}"{use.key}": ' for tool in use.callable]
    if use.format is None:
        one, first, following, end = fence, rf"{fence}\[{space}", separator, rf"{space}\]"
    else:
        one = first = ("" if use.required else _SPACE) + _literal(use.format.opening.lstrip())
        following, end = _literal(use.format.between), _literal(use.format.closing)
    rules = [rf"CLOSE: /{space}\}}/", *([f"END: /{end}/"] if end else [])]
    for index, (head, schema) in enumerate(zip(heads, schemas, strict=True)):
        rules.append(f"p{index}: {schema}")
        for kind, before in (("one", one), ("first", first), ("next", following)):
            terminal = f"{kind.upper()}{index}"
            rules += [f"{terminal}: /{before}{head}/", f"{kind}{index}: {terminal} p{index} CLOSE"]

    def any_of(kind: str) -> str:
        return "(" + " | ".join(f"{kind}{index}" for index in range(len(heads))) + ")"

    more = f" {any_of('next')}*" if use.parallel else ""
    several = f"{any_of('first')}{more} {'END' if end else ''}"
    calls = several if use.format is not None else any_of("one") + (f" | {several}" if use.parallel else "")
    if use.required:
        return "\n".join([f"start: {calls}", *rules])
    rules += [f"TEXT: /(?s:.*)/ & ~/(?s:{_beginning(use)}.*)/", r"FENCE: /\n```\n?/"]
    return "\n".join([f"start: TEXT | ({calls}) {'FENCE?' if use.format is None else ''}", *rules])


def call_or_schema_grammar(use: ToolUse, schema: str, calls: list[str]) -> str:
    """Return the Lark grammar of an answer that is JSON of a schema, or calls.

    Calls are JSON as well, so that the lexer cuts both in the same places.

    Args:
        use: what the answer may call.
        schema: the schema as an expression of the grammar.
        calls: the call of each callable tool, as an expression of the grammar.
    """
    rules = [f"c{index}: {call}" for index, call in enumerate(calls)]
    rules += ["call: " + " | ".join(f"c{index}" for index in range(len(calls))), f"schema: {schema}"]
    form = use.format
    texts = ("[", ", ", "]") if form is None else (form.opening.lstrip(), form.between, form.closing)
    opening, between, closing = (json.dumps(text, ensure_ascii=False) if text else "" for text in texts)
    more = f"({between} call)*" if use.parallel else ""
    around = f"{opening} call {more} {closing}"
    listed = around if form is not None else f"call | {around}" if use.parallel else "call"
    return "\n".join([f"start: schema | {listed}", *rules])


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
        before = [f"{fence}{bracket}" for fence in _FENCES for bracket in ("", "[")]
        openings = before if use.format is None else [use.format.opening]
        self._openings = ["".join(text.split()) + '{"name":"' for text in openings]
        self._beginning = re.compile(_beginning(use))
        after = "" if use.schema is None else f',"{use.key}":'
        self._names = tuple(f'{tool.name}"{after}' for tool in use.callable)
        self._head = re.compile(rf'\{{[ \n]*"name":[ \n]*"([^"]*)",[ \n]*"{use.key}":[ \n]*')
        self._rest = ""  # not delivered yet
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._depth, self._in_string, self._escaped, self._in_call = 0, False, False, False

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [ToolCall(id, name, "".join(pieces)) for id, name, pieces in self._calls]

    @property
    def cut(self) -> bool:
        """Whether the answer so far ends inside a call."""
        return self.is_text is False and (self._in_call or not self._calls)

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
        if self._calls:
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
        for opening in self._openings:
            if opening.startswith(begun):
                return None
            if begun.startswith(opening) and any(name.startswith(begun[len(opening) :]) for name in self._names):
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
            head = self._head.search(self._rest)
            if head is None:
                return (*deltas,)
            self._calls.append((f"call_{uuid.uuid4().hex[:24]}", head[1], []))
            self._rest, self._in_call = self._rest[head.end() :], True
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
