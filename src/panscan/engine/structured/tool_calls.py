"""Tool calls in an answer: ``{"name": ..., "parameters": ...}``, or several, as the prompt asks for.

A call begins the answer: for Gemma's documented prompt, maybe in a fence such as ```` ```json````, or in a list; for a
chat template that knows tools, between the texts that the template writes around calls. Anything else is text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator

import regex

from panscan.core.tools import CallFormat, ToolCall, ToolCallDelta, ToolUse

_SPACE = r"[ \n]{0,16}"  # of models that indent JSON; not in answers that must be calls
_FENCE = rf"{_SPACE}(```(json|tool_code|tool_call)?\n)?{_SPACE}"


def _literal(text: str) -> str:
    """Return the regular expression of a text, for Python and for Lark."""
    return re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ").replace("/", r"\/")


def _opening(form: CallFormat) -> str:
    """Return the regular expression of what precedes the first call."""
    return _literal(form.opening.lstrip())


def _beginning(use: ToolUse) -> str:
    """Return the regular expression of what begins an answer that is not text."""
    names = "|".join(re.escape(tool.name) for tool in use.callable)
    before = rf"{_FENCE}\[?{_SPACE}" if use.format is None else f"{_SPACE}{_opening(use.format)}"
    after = "" if use.schema is None else rf',{_SPACE}"{use.key}": ?'  # the schema may have a name, too
    return rf'{before}\{{{_SPACE}"name": ?"({names})"{after}'


def text_or_call_grammar(use: ToolUse, schemas: list[str]) -> str:
    """Return the Lark grammar of an answer that is text or calls.

    What precedes the arguments of a call is one terminal: the lexer takes the longest match, and text matches as well.

    Args:
        use: what the answer may call.
        schemas: the arguments of each callable tool, as an expression of the grammar.
    """
    rules = [f"p{index}: {schema}" for index, schema in enumerate(schemas)]

    def call(kind: str, before: str) -> str:
        """Return a call of any tool behind a text, which is a regular expression."""
        for index, tool in enumerate(use.callable):
            head = rf'\{{{_SPACE}"name": ?"{re.escape(tool.name)}",{_SPACE}"{use.key}": '
            rules.append(f"{kind}{index}: /{before}{head}/")
        return "(" + " | ".join(f"{kind}{index} p{index}" for index in range(len(schemas))) + ") CLOSE"

    form = use.format
    if form is None:
        first, between, closing = rf"{_FENCE}\[{_SPACE}", f",{_SPACE}", rf"{_SPACE}\]"
    else:
        first, between, closing = _SPACE + _opening(form), _literal(form.between), _literal(form.closing)
    more = f"({call('NEXT', between)})*" if use.parallel else ""
    calls = f"{call('FIRST', first)} {more} {'END' if closing else ''}"
    if form is None:
        calls = f"({call('ONE', _FENCE)}{f' | {calls}' if use.parallel else ''}) FENCE?"
    rules += [rf"CLOSE: /{_SPACE}\}}/", r"FENCE: /\n```\n?/", f"TEXT: /(?s:.*)/ & ~/(?s:{_beginning(use)}.*)/"]
    return "\n".join([f"start: TEXT | {calls}", *rules, *([f"END: /{closing}/"] if closing else [])])


def json_call_grammar(use: ToolUse, calls: list[str], schema: str | None) -> str:
    """Return the Lark grammar of an answer that must be calls, or JSON of a schema.

    Calls are JSON as well, so that the lexer cuts both in the same places.

    Args:
        use: what the answer may call.
        calls: the call of each callable tool, as an expression of the grammar.
        schema: the schema as an expression of the grammar; None: the answer must be calls.
    """
    form = use.format
    texts = ("[", ", ", "]") if form is None else (form.opening.lstrip(), form.between, form.closing)
    opening, between, closing = (json.dumps(text, ensure_ascii=False) if text else "" for text in texts)
    answers = [f"{opening} call {f'({between} call)*' if use.parallel else ''} {closing}"]
    if form is None:
        answers = ["call", *(answers if use.parallel else [])]
    rules = [f"c{index}: {call}" for index, call in enumerate(calls)]
    rules.append("call: " + " | ".join(f"c{index}" for index in range(len(calls))))
    if schema is not None:
        answers.append("schema")
        rules.append(f"schema: {schema}")
    return "\n".join(["start: " + " | ".join(answers), *rules])


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
        self._beginning = regex.compile(_beginning(use))
        self._head = re.compile(rf'\{{[ \n]*"name":[ \n]*"([^"]*)",[ \n]*"{use.key}":[ \n]*')
        self._rest = ""  # not delivered yet
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._depth, self._in_call = 0, False  # of open objects and arrays; whether the arguments have begun
        self._in_string = self._escaped = False

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
            match = self._beginning.match(self._rest, partial=True)
            self.is_text = None if match is not None and match.partial else match is None
        if self.is_text:
            return self._deliver_text()
        return "", () if self.is_text is None else tuple(self._read_calls())

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

    def _read_calls(self) -> Iterator[ToolCallDelta]:
        """Take calls from the text that was not delivered yet, as far as it goes, and yield their pieces."""
        while True:
            if not self._in_call:
                if (head := self._head.search(self._rest)) is None:
                    return
                id, name = f"call_{uuid.uuid4().hex[:24]}", head[1]
                self._calls.append((id, name, []))
                yield ToolCallDelta(len(self._calls) - 1, "", id, name)
                self._rest, self._in_call = self._rest[head.end() :], True
            pieces = self._calls[-1][2]
            rest = self._rest if pieces else self._rest.lstrip(" \n")
            end = self._arguments_end(rest)
            piece, self._rest = rest[:end], rest[end:]
            if piece:
                pieces.append(piece)
                yield ToolCallDelta(len(self._calls) - 1, piece)
            if self._in_call:
                return

    def _arguments_end(self, rest: str) -> int:
        """Return where the arguments, a JSON object, end in the next text, or its length, and note whether they do."""
        for index, character in enumerate(rest):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                self._in_call = False
                return index + 1
        return len(rest)
