"""Requests to token ids: the checkpoint's chat template, with one span of image tokens per view.

The token ids equal those of Transformers' ``Gemma3Processor``, with one intended difference: special tokens in the
user's texts, or formed where the chat template joins them, are encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from reprlib import repr as short
from typing import Any, TypeGuard

from panscan.core import ContextLengthError, Message, ModelError, Request, SettingError
from panscan.core.lru import LruCache
from panscan.core.request import IMAGE_KEYS
from panscan.core.tools import CallFormat
from panscan.images.views import PromptCost
from panscan.model.tool_prompt import PROBE, PROBE_TOOL, Part, Turn, call_format, named_results, uses_tools, with_tools
from panscan.model.untrusted.template import render_template


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one request, and the number of image tokens among them."""

    ids: list[int]
    image_tokens: int


def conversation(request: Request, *, plain: bool = True) -> list[Turn]:
    """Convert a request to chat turns, whose content is always a list of ``text`` and ``image`` parts.

    Args:
        request: the request.
        plain: write tools, calls and results as texts.

    Raises:
        SettingError: the messages are malformed; it names the turn and the part.
    """
    turns = _turns_of_prompt(request) if request.messages is None else _turns_of_messages(request.messages)
    return with_tools(turns, request.tool_use) if plain else turns


def _turns_of_prompt(request: Request) -> list[Turn]:
    user = [{"type": "image"} for _ in request.images]
    if request.prompt or not user:
        user.append({"type": "text", "text": str(request.prompt)})
    turns: list[Turn] = [{"role": "user", "content": [{**request.template_kwargs, **part} for part in user]}]
    if request.system is not None:
        turns.insert(0, {"role": "system", "content": [{"type": "text", "text": request.system}]})
    return turns


def _turns_of_messages(messages: Sequence[Message]) -> list[Turn]:
    if not _is_list(messages) or not messages:
        raise SettingError(f"messages must be a list of turns, not empty, got {short(messages)}")
    turns = [_turn(turn, f"turn {number}") for number, turn in enumerate(messages, start=1)]
    if all(turn["role"] == "system" for turn in turns):
        raise SettingError("messages: a system message alone asks nothing: add a turn of the role 'user'")
    return named_results(turns) if any(turn["role"] == "tool" for turn in turns) else turns


def _turn(turn: Message, where: str) -> Turn:
    if not isinstance(turn, (dict, Mapping)) or not isinstance(role := turn.get("role"), str):
        raise SettingError(f"messages: {where} must be {{'role': ..., 'content': ...}}, got {short(turn)}")
    if not role.isidentifier():  # The template writes it unchanged, special tokens included.
        raise SettingError(
            f"messages: the role of {where} must be a word such as 'user' or 'assistant', got {short(role)}"
        )
    content, calls = turn.get("content"), turn.get("tool_calls")
    if content is None and calls:
        content = []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not _is_list(content):
        raise SettingError(f"messages: the content of {where} must be a text or a list of parts, got {short(content)}")
    parts = [_part(part, f"part {number} of {where}") for number, part in enumerate(content, start=1)]
    checked: Turn = {"role": role, "content": [_joined(parts, where)] if role == "system" else parts}
    if role == "tool":
        checked["tool_call_id"] = turn.get("tool_call_id")
        if not isinstance(checked["tool_call_id"], str):
            raise SettingError(f"messages: {where} must have the tool_call_id of the call that it is the result of")
    elif calls:
        if role != "assistant" or not _is_list(calls) or not all(map(_is_call, calls)):
            expected = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': a JSON text}}"
            raise SettingError(f"messages: tool_calls of {where} must be of an 'assistant', and each {expected}")
        checked["tool_calls"] = [*calls]
    return checked


def _is_call(call: Any) -> bool:
    match call:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
    return False


def _joined(parts: Sequence[Part], where: str) -> Part:
    """Return the parts of a system message as one, joined by line breaks as in vLLM: Gemma 3's template reads one."""
    if any(part["type"] != "text" for part in parts):
        raise SettingError(f"messages: {where} is a system message with an image: move the image to a 'user' turn")
    return {"type": "text", "text": "\n".join(part["text"] for part in parts)}


def _part(part: Any, where: str) -> Part:
    if not isinstance(part, (dict, Mapping)):  # the check of a dict alone is 20 times as fast
        raise SettingError(f"messages: {where} must be {{'type': ..., ...}}, got {short(part)}")
    kind = part.get("type")
    if kind not in ("text", "image", "image_url"):
        raise SettingError(f"messages: {where} is of type {short(kind)}, not 'text' or 'image'")
    others = {key: value for key, value in part.items() if key not in ("type", "text", *IMAGE_KEYS)}
    if kind != "text":
        return {**others, "type": "image"}
    if not isinstance(part.get("text"), str):
        raise SettingError(f"messages: 'text' of {where} must be a text, got {short(part.get('text'))}")
    return {**others, "type": "text", "text": part["text"]}


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, Sequence)) and not isinstance(value, str | bytes)


class PromptWriter:
    """Encodes prompts for one checkpoint.

    Args:
        tokenizer: the checkpoint's Transformers tokenizer. Only its chat template may change afterwards.
        image_tokens: image tokens per view; 0 for a text-only checkpoint.
        context: context length of the model, in tokens; None: unknown.
        template_source: the file of the chat template, for messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_tokens: int,
        context: int | None = None,
        template_source: str = "chat_template.jinja",
    ) -> None:
        self.tokenizer = tokenizer
        self.template_source = template_source
        self.vocabulary: int | None = None
        """Tokens that the model has embeddings of, if known."""
        self.image_tokens = image_tokens
        self.context = context
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = sorted((added | set(tokenizer.all_special_tokens)) - {""}, key=len, reverse=True)
        self._specials = re.compile("|".join(re.escape(token) for token in specials))
        self._edges = {token[end] for token in specials for end in (0, -1)} | {_MARK_START, _MARK_END}
        self._known = LruCache[Any, Any](_KNOWN)
        if image_tokens:
            self.boi, self.eoi = tokenizer.boi_token, tokenizer.eoi_token
            self.soft_id: int | None = tokenizer.image_token_id
        else:
            self.boi, self.eoi, self.soft_id = "<start_of_image>", "<end_of_image>", None

    def cost(self) -> PromptCost:
        """Return the cost of an image in prompt tokens, with this tokenizer.

        Counted in a whole prompt: line breaks around the image may merge with those of the chat template.
        """
        raw = not self.tokenizer.chat_template

        def tokens(crops: list[int]) -> int:
            marks = self.boi * len(crops) if raw else ""
            request = Request(prompt=f"{marks}What?", images=[] if raw else ["image"] * len(crops), raw=raw)
            return len(self.write(request, crops).ids)

        bare = tokens([])
        plain, one, two = (tokens([crops]) - bare - (crops + 1) * self.image_tokens for crops in range(3))
        return PromptCost(self.image_tokens, plain, 2 * one - two, two - one)

    def write(self, request: Request, crops: Sequence[int], *, around_view: str = "\n\n") -> Prompt:
        """Return the prompt of a request.

        Args:
            request: the request.
            crops: number of crops of each image, in order.
            around_view: text before and after each view; the default is Gemma 3's.

        Raises:
            SettingError: the numbers of images and image placeholders differ, the checkpoint is text-only but images
                are given, the messages are malformed, a text contains a lone surrogate, or the prompt is too long
                (:meth:`check_length`).
            ModelError: the prompt is not raw, and the checkpoint has no chat template or one that cannot be rendered
                within the limits.
        """
        self.check_length(request, sum(n + 1 for n in crops))
        if crops and not self.image_tokens:
            raise SettingError("this checkpoint reads text only: leave the images out, or take Gemma 3 4B or larger")
        texts: list[str] = []
        if request.prompt_ids is not None:
            return Prompt(self._checked_ids(request.prompt_ids), 0)
        if request.raw:
            assert request.prompt is not None  # Request holds this for raw prompts
            text, bos = request.prompt, self.tokenizer.bos_token
            if self.image_tokens and self.tokenizer.image_token in text:
                raise SettingError(f"a raw prompt marks an image with {self.boi}, not {self.tokenizer.image_token}")
            _check_unicode(text)
            text = text if text.startswith(bos) or not request.add_special_tokens else bos + text
        else:
            turns, tools = self._conversation(request)
            _check_unicode("".join(part.get("text", "") for turn in turns for part in turn["content"]))
            self._check_values(request, turns)
            held_out = [_held_out(turn, texts) for turn in turns]
            if tools is None:
                text = self._render_without_texts(held_out, request.template_kwargs)
            else:
                text = self._render_with_tools(held_out, tools, request.template_kwargs, len(texts))
            self._check_rendered(text, texts)
            texts += self._edges  # which marks replace in definitions and calls
        first, *pieces = text.split(self.boi)
        if len(pieces) != len(crops):
            raise SettingError(
                f"the prompt has {len(pieces)} image placeholder(s) ({self.boi}), but {len(crops)} image(s) were given"
            )
        filled = (self._block(n, around_view) + piece for n, piece in zip(crops, pieces, strict=True))
        ids = self._ids(first + "".join(filled), texts)
        if self.vocabulary is not None and max(ids, default=0) >= self.vocabulary:
            raise ModelError(f"tokenizer.json: the token {max(ids)} is not one of the model's {self.vocabulary:,}")
        return Prompt(ids, self.image_tokens * sum(n + 1 for n in crops))

    @property
    def token_ids(self) -> int:
        """Number of token ids."""
        return self.vocabulary or len(self.tokenizer)

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            SettingError: there are none, or one is no id of a text token.
        """
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.token_ids or token == self.soft_id:
                raise SettingError(f"prompt: {short(token)} is not the id of a text token (0 to {self.token_ids - 1})")
        if not ids:
            raise SettingError("prompt: there are no token ids")
        return list(ids)

    def check_length(self, request: Request, views: int) -> None:
        """Check, before a prompt is encoded, that it may fit into the context: a tokenizer takes 200 bytes of memory
        per byte of text.

        Raises:
            ContextLengthError: the prompt has more tokens than the context, by its numbers of characters and views.
        """
        if self.context is None:
            return
        if request.prompt_ids is not None:
            characters = len(request.prompt_ids) * self._longest_token
        elif request.raw and request.prompt is not None:
            characters = len(request.prompt)
        else:  # trimmed, as by the chat template
            turns, _ = self._conversation(request)
            parts = [part for turn in turns for part in turn["content"]]
            calls = [call["function"]["arguments"] for turn in turns for call in turn.get("tool_calls", ())]
            characters = sum(len(part.get("text", "").strip()) for part in parts) + sum(map(len, calls))
        images = views * self.image_tokens
        if images + characters < self.context:
            return
        least = images + ceil(characters / self._longest_token)
        if least >= self.context:
            raise ContextLengthError(
                f"the prompt has at least {least} tokens ({views} views);"
                f" this model's maximum context length is {self.context} tokens",
                raw=request.raw,
            )

    @cached_property
    def _longest_token(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def call_format(self) -> CallFormat | None:
        """How the chat template writes calls; None if it does not know tools, or writes calls that are not JSON."""
        template = str(self.tokenizer.chat_template)
        [form] = self._known.computed(("calls", template), lambda: [self._probed_format()])
        return form if isinstance(form, CallFormat) else None

    def _probed_format(self) -> CallFormat | None:
        try:
            asked, told = (self._render(turns, {"tools": [PROBE_TOOL]}) for turns in (PROBE[:1], PROBE))
        except (ModelError, SettingError):
            return None
        return call_format(asked, told, self._specials)

    def _conversation(self, request: Request) -> tuple[list[Turn], list[Turn] | None]:
        """Return the turns of a request, and the definitions of tools for the chat template; None if they are texts."""
        turns, use = conversation(request, plain=False), request.tool_use
        if not uses_tools(turns, use) or self.call_format is None:
            return with_tools(turns, use), None
        return turns, [] if use is None else use.definitions

    def _render_with_tools(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn],
        values: Mapping[str, Any],
        first: int,
    ) -> str:
        """Render turns whose texts are marks, with definitions and calls, in which no special token can form: marks
        from ``first`` replace the characters that special tokens begin or end with.

        Raises:
            SettingError: the chat template cannot render these tools.
        """
        marks = {ord(edge): f"{_MARK_START}{mark}{_MARK_END}" for mark, edge in enumerate(self._edges, first)}
        try:
            return self._render(
                [_translated({**turn, "content": []}, marks) | {"content": turn["content"]} for turn in turns],
                {**values, "tools": _translated(tools, marks) or None},
            )
        except ModelError as error:
            raise SettingError(f"tools: {error}") from error

    def special_in(self, request: Request) -> str | None:
        """Return the first special token that a conversation's texts add to those of the chat template, or None."""
        held_out = [_held_out(turn, []) for turn in conversation(request)]
        template = Counter(self._specials.findall(self._render(held_out, request.template_kwargs)))
        rendered = Counter(self._specials.findall(self.render(request)))
        return next(iter(rendered - template), None)

    def _render_without_texts(self, turns: list[Turn], values: Mapping[str, Any]) -> str:
        """Render turns whose texts are marks: most requests have one of a few layouts, and short ones are remembered.

        A template that asks for the date, or takes further values, is rendered every time.
        """
        layout = repr(turns)
        template = str(self.tokenizer.chat_template)
        if values or len(layout) > _LONGEST_LAYOUT or "strftime_now" in template:
            return self._render(turns, values)
        text: str = self._known.computed((template, layout), lambda: self._render(turns))
        return text

    def _check_rendered(self, text: str, texts: Sequence[str]) -> None:
        """Refuse a conversation if the rendered ``text`` lacks one of its texts."""
        if dropped := {*range(len(texts))} - {int(mark) for mark in _MARK.findall(text)}:
            raise SettingError(
                f"messages: the chat template ({self.template_source}) drops the text"
                f" {short(texts[min(dropped)])}: join the text parts of its turn"
            )

    def _check_values(self, request: Request, turns: Sequence[Turn]) -> None:
        """Check the values for the template: it must read each, and none may be, or become, a special token.

        Raises:
            SettingError: one is not JSON, too long, unknown to the template, or has a character of a special token.
        """
        values = [(f"template_kwargs: {short(name)}", name, value) for name, value in request.template_kwargs.items()]
        for part in (part for turn in turns for part in turn["content"]) if request.messages is not None else ():
            others = part.keys() - {"type", "text"}
            values += [(f"messages: the key {short(name)} of a part", name, part[name]) for name in others]
        if not values:
            return
        template = self._template()
        for where, name, value in values:
            if name in _RESERVED or name in self.tokenizer.special_tokens_map:
                raise SettingError(f"{where} cannot be set")
            if not isinstance(name, str) or re.search(rf"\b{re.escape(name)}\b", template) is None:
                raise SettingError(f"{where} is not read by the chat template ({self.template_source})")
            try:
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise SettingError(f"{where} must be a JSON value: {error}") from error
            if len(text) > _MOST_VALUE:
                raise SettingError(f"{where} has {len(text):,} characters; at most {_MOST_VALUE:,} are supported")
            _check_unicode(text)
            unchanged = _translated(value, {})
            if edges := {edge for edge in self._edges if _translated(value, {ord(edge): None}) != unchanged}:
                raise SettingError(f"{where} contains {min(edges)!r}, which could become part of a special token")

    def _template(self) -> str:
        """Return the checkpoint's chat template.

        Raises:
            ModelError: there is none, or none is called default.
        """
        if not self.tokenizer.chat_template:
            raise ModelError(
                "this checkpoint has no chat template (a base model?): use a raw prompt with"
                f" {self.boi} where each image goes (--raw-prompt)"
            )
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise ModelError(
                f"chat template ({self.template_source}): several templates, none called default"
            ) from error
        return template

    def render(self, request: Request) -> str:
        """Return the text of a request in the checkpoint's chat template.

        Everything that renders a template calls this, because Transformers renders without limits.

        Raises:
            SettingError: the template rejects the conversation.
            ModelError: there is no template, or it cannot be rendered within the limits.
        """
        return self._render(conversation(request), request.template_kwargs)

    def _render(self, turns: Sequence[Turn], values: Mapping[str, Any] | None = None) -> str:
        template = self._template()
        if self._known.computed(("takes texts", template), lambda: self._takes_texts(template)):
            # The parts of images have no text.
            turns = [
                {**turn, "content": "".join(part.get("text", self.boi) for part in turn["content"])} for turn in turns
            ]
        return self._rendered(template, turns, values or {})

    def _rendered(self, template: str, turns: Sequence[Turn], values: Mapping[str, Any]) -> str:
        return render_template(template, self.template_source, turns, **self.tokenizer.special_tokens_map, **values)

    def _takes_texts(self, template: str) -> bool:
        """Return whether a template expects texts as contents, not lists of parts, as those of text-only models do."""
        text, part = "Hi", {"type": "text", "text": "Hi"}
        outcomes = []
        for content in ([part], text):
            try:
                outcomes.append(self._rendered(template, [{"role": "user", "content": content}], {}))
            except (ModelError, SettingError):
                outcomes.append("")
        listed, plain = outcomes
        return text in plain and (text not in listed or str(part) in listed or json.dumps(part) in listed)

    def check_template(self) -> None:
        """Render a short conversation, so that a damaged chat template is an error of loading, not of each request.

        Raises:
            ModelError: it is damaged, or cannot be rendered within the limits.
        """
        if not self.tokenizer.chat_template:
            return
        with suppress(SettingError):  # it may reject this conversation
            self.render(Request("Hi"))

    def _block(self, crops: int, around_view: str) -> str:
        """Return the text of an image, worded as by ``Gemma3Processor``, with one start-of-image token per view."""
        view = f"{around_view}{self.boi}{self.eoi}{around_view}"
        if not crops:
            return view
        listed = " ".join([view] * crops)
        return f"Here is the original image {view} and here are some crops to help you see better {listed}"

    def _ids(self, text: str, texts: Sequence[str]) -> list[int]:
        """Encode a rendered prompt: special tokens as such, everything between them as plain text.

        The user's ``texts`` replace their marks before encoding, so that tokens merge across their edges as they do in
        Transformers.
        """
        ids: list[int] = []
        at = 0
        for match in [*self._specials.finditer(text), None]:
            plain = text[at : match.start() if match else None]
            if plain:
                plain = _MARK.sub(lambda mark: texts[int(mark[1])], plain) if texts else plain
                ids += self._encode(plain)
            if match:
                ids.append(self.tokenizer.convert_tokens_to_ids(match[0]))
                if match[0] == self.boi and self.soft_id is not None:
                    ids += [self.soft_id] * self.image_tokens
                at = match.end()
        return ids

    def _encode(self, plain: str) -> tuple[int, ...]:
        """Return the ids of a plain text. Short ones are remembered: those of the template, and around views."""

        def encode() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=True))

        ids: tuple[int, ...] = self._known.computed(plain, encode) if len(plain) <= _SHORT else encode()
        return ids


_KNOWN = 128  # layouts and short texts that are remembered
_SHORT = 256  # characters of a text
_LONGEST_LAYOUT = 2_048  # characters
_MOST_VALUE = 65_536  # characters of a value for the template, as JSON
_RESERVED = ("add_generation_prompt", "messages", "tools")
_MARK_START, _MARK_END = "\ue000", "\ue001"
_MARK = re.compile(f"{_MARK_START}([0-9]+){_MARK_END}")
"""Replaces a text while the chat template is rendered and searched for special tokens."""


def _held_out(turn: Turn, texts: list[str]) -> Turn:
    """Replace a turn's texts by marks, and append them to ``texts``. The template still trims the space around them."""
    content = []
    for part in turn["content"]:
        text = part.get("text", "")
        inner = text.strip()
        if not inner:
            content.append(part)
            continue
        before, after = text.split(inner, 1)
        content.append({**part, "text": f"{before}{_MARK_START}{len(texts)}{_MARK_END}{after}"})
        texts.append(inner)
    held_out = {**turn, "content": content}
    if calls := turn.get("tool_calls"):
        held_out["tool_calls"] = [{**call, "function": _parsed_call(call["function"])} for call in calls]
    return held_out


def _parsed_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a called function with parsed arguments, as templates expect them; those that are no JSON stay a text."""
    arguments = function["arguments"]
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _translated(value: Any, marks: Mapping[int, str | None]) -> Any:
    """Return a JSON value with characters of its texts replaced, those of names included."""
    if isinstance(value, str):
        return value.translate(marks)
    if isinstance(value, Mapping):
        return {name.translate(marks): _translated(inner, marks) for name, inner in value.items()}
    return [_translated(inner, marks) for inner in value] if isinstance(value, list | tuple) else value


def _check_unicode(text: str) -> None:
    """Refuse lone surrogates (JSON's ``\\ud83d``, bytes of file names), which have no UTF-8 for the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingError(
            f"the prompt is not Unicode text: it holds the lone surrogate {text[error.start]!r}"
        ) from None
