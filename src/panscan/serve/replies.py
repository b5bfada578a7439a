"""Conversion of results and events to OpenAI's response bodies, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec
from starlette.responses import Response

from panscan.core import (
    ContextLengthError,
    EngineError,
    ImageError,
    PanscanError,
    Result,
    SettingError,
    TokenEvent,
    TokenLogprobs,
    ToolCallDelta,
    UnsupportedError,
)
from panscan.core.foreign import JsonObject
from panscan.serve.body import FieldError
from panscan.serve.client import EngineClient
from panscan.serve.sampling_fields import PARAMS, SamplingFields

DONE = b"data: [DONE]\n\n"
_LONGEST_MESSAGE = 1000  # characters: some errors quote what a client sent
_LOWEST = -9999.0  # JSON has no minus infinity
TIMED_OUT = "the request timed out (--timeout, or its header X-Request-Timeout)"


def server_sent(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_status(error: PanscanError) -> int:
    """Return the HTTP status of an error: 400 if the client can correct the request."""
    match error:
        case EngineError():
            return 503
        case SettingError() | ImageError():
            return 400
        case UnsupportedError():  # out of memory in a pass, which smaller requests may avoid
            return 503
    return 500


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> JsonObject:
    """Return an error in OpenAI's format."""
    kind = _TYPES.get(status, "invalid_request_error")
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: PanscanError) -> JsonObject:
    """Return an exception in OpenAI's format."""
    known = error.param if isinstance(error, FieldError | ContextLengthError) else None
    param = known or PARAMS.get(str(error).partition(":")[0])
    return error_body(str(error), error_status(error), param, getattr(error, "code", None))


def _call(id: str, name: str, arguments: str) -> JsonObject:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_delta(delta: ToolCallDelta) -> JsonObject:
    if delta.id is not None and delta.name is not None:
        return {"index": delta.index, **_call(delta.id, delta.name, delta.arguments)}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


class TokenNames(msgspec.Struct):
    """A cache of the bytes of tokens, which the backend provides."""

    backend: EngineClient
    _known: dict[int, bytes] = {}

    async def fetch(self, logprobs: Iterable[TokenLogprobs | None], tokens: Iterable[int]) -> None:
        """Fetch the bytes of all tokens that :meth:`entry` needs.

        Raises:
            EngineError: the backend cannot answer.
        """
        wanted = {*tokens, *(id for token in logprobs if token is not None for id, _ in token.top)}
        if missing := sorted(wanted - self._known.keys()):
            self._known |= zip(missing, await self.backend.token_texts(missing), strict=True)

    def text(self, *tokens: int) -> str:
        """Return the text of tokens, with replacement characters for incomplete UTF-8."""
        return b"".join(map(self._known.__getitem__, tokens)).decode(errors="replace")

    def key(self, token: int) -> str:
        """Return a token as a key of ``top_logprobs``: its text, or as ``bytes:\\xf0`` if that is not UTF-8."""
        content = self._known[token]
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def keyed(self, chosen: int, logprobs: TokenLogprobs, most: int | None) -> dict[str, float]:
        """Return log-probabilities of the top tokens and the chosen one by key; ``token_id:N`` for a key in use.

        The chosen token keeps its key; of the others, the most probable one.
        """
        owners = {self.key(chosen): chosen}
        entries = {}
        for token, value in (*logprobs.top[:most], (chosen, logprobs.logprob)):
            key = self.key(token)
            key = key if owners.setdefault(key, token) == token else f"token_id:{token}"
            entries[key] = max(value, _LOWEST)
        return entries

    def entry(self, token: int, logprobs: TokenLogprobs) -> msgspec.Raw:
        """Return one token of OpenAI's ``logprobs.content`` as JSON.

        A response with all tokens takes long to encode. In one piece, it would hold Python's lock, and with it the
        event loop, all that time.
        """
        top = [self._one(id, value) for id, value in logprobs.top]
        return msgspec.Raw(msgspec.json.encode({**self._one(token, logprobs.logprob), "top_logprobs": top}))

    def ranked(self, token: int, logprobs: TokenLogprobs | None) -> dict[int, JsonObject] | None:
        """Return one token of vLLM's ``prompt_logprobs``; None for the first one, which has no log-probability."""
        if logprobs is None:
            return None
        ranks = {id: (rank, value) for rank, (id, value) in enumerate(logprobs.top, start=1)}
        ranks.setdefault(token, (logprobs.rank or 0, logprobs.logprob))
        return {
            id: {"logprob": max(value, _LOWEST), "rank": rank, "decoded_token": self.text(id)}
            for id, (rank, value) in ranks.items()
        }

    def _one(self, token: int, logprob: float) -> JsonObject:
        return {"token": self.text(token), "bytes": list(self._known[token]), "logprob": max(logprob, _LOWEST)}


class Reply:
    """The response to one HTTP request.

    Args:
        body: request body; only its options are kept.
        model: the model's name in the API.
        names: token texts, for log-probabilities.
    """

    def __init__(self, body: SamplingFields, model: str, names: TokenNames) -> None:
        self._chat, self._names, self._per_prompt = body.is_chat, names, body.n
        self._top = body.logprobs_per_token
        self.logprobs = self._top is not None
        self.prompt_logprobs = body.prompt_logprobs is not None
        self._echoed, self._only_echo = body.echoed, body.only_echo
        self.include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._continuous_usage = body.stream_options is not None and body.stream_options.continuous_usage_stats
        self._offsets: Counter[int] = Counter()  # characters of each streamed choice so far
        self._counts: Counter[int] = Counter()  # tokens of each streamed choice so far
        self._called: Counter[int] = Counter()  # pieces of tool calls of each streamed choice so far
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    @property
    def needs_token_bytes(self) -> bool:
        """Whether the response needs the texts of tokens."""
        return self.logprobs or self.prompt_logprobs or self._echoed is not None

    async def fetch_token_bytes(self, results: Sequence[Result]) -> None:
        """Fetch the token texts that :meth:`whole` needs.

        Raises:
            EngineError: the backend cannot answer.
        """
        for result in results:
            if self.logprobs:
                await self._names.fetch(result.logprobs or (), result.token_ids)
            await self._names.fetch(result.prompt_logprobs or (), result.prompt_ids or ())
        await self.fetch_echoed_bytes()

    async def fetch_echoed_bytes(self) -> None:
        """Fetch the texts of prompts that were given as token ids; raises as :meth:`fetch_token_bytes`."""
        for prompt in self._echoed or ():
            if not isinstance(prompt, str):
                await self._names.fetch((), prompt)

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice, if the response repeats it."""
        if self._echoed is None:
            return ""
        prompt = self._echoed[index // self._per_prompt]
        return prompt if isinstance(prompt, str) else self._names.text(*prompt)

    def whole(self, results: Sequence[Result]) -> JsonObject:
        """Return the response with all choices, grouped by prompt, after :meth:`fetch_token_bytes`."""
        object_name = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        body = {**self._head, "object": object_name, "choices": choices, **self._totals(results)}
        if self._chat and self.prompt_logprobs:
            body["prompt_logprobs"] = self._ranked_prompt(results[0])
        return body

    def first(self, count: int, prompt_tokens: int) -> list[JsonObject]:
        """Return the first chunks of a stream: for a chat, the role of each choice; else the prompt, if repeated."""
        first: JsonObject = {"delta": {"role": "assistant", "content": ""}}
        choices = []
        for index in range(count if self._chat or self._echoed else 0):
            choice = first if self._chat else {"text": self._echo(index)}
            choices.append({"index": index, **choice, "finish_reason": None})
        return [self._chunk([choice]) | self._usage_so_far(prompt_tokens, 0) for choice in choices]

    def _usage_so_far(self, prompt_tokens: int, output_tokens: int) -> JsonObject:
        """Return the field with the token counts of a chunk; none unless the client asks for it."""
        if not self._continuous_usage:
            return {}
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        return {"usage": {**counts, "total_tokens": prompt_tokens + output_tokens}}

    async def fetch_event_bytes(self, event: TokenEvent) -> None:
        """Fetch the token texts that :meth:`chunk` needs; raises as :meth:`fetch_token_bytes`."""
        if event.logprobs is not None and event.token_id is not None:
            await self._names.fetch([event.logprobs], [event.token_id])

    def chunk(self, index: int, event: TokenEvent) -> JsonObject | None:
        """Return the chunk of an event; None if there is nothing to send."""
        if self._only_echo:
            event = replace(event, token_id=None, text="")
        self._counts[index] += event.token_id is not None
        self._called[index] += len(event.tool_calls)
        reason: str | None = event.finish_reason if event.finish_reason in ("stop", "length") else None
        if reason == "stop" and self._called[index] and not event.cut_call:
            reason = "tool_calls"
        if reason == "stop" and self._only_echo:  # by the token that is dropped
            reason = "length"
        logprobs = event.logprobs if self.logprobs else None
        # Clients measure the time to the first token, and those with continuous usage count all, also without text.
        counted = event.token_id is not None and (self._continuous_usage or self._counts[index] == 1)
        if not event.text and not event.tool_calls and reason is None and logprobs is None and not counted:
            return None
        choice: JsonObject = {"index": index, "finish_reason": reason}
        if self._chat:
            choice["delta"] = {"content": event.text} if event.text or counted else {}
            if event.tool_calls:
                choice["delta"]["tool_calls"] = [*map(_call_delta, event.tool_calls)]
        else:
            choice["text"] = event.text
        if logprobs is not None and event.token_id is not None:
            choice["logprobs"] = self._logprobs_of([event.token_id], [logprobs], self._offsets[index])
            self._offsets[index] += len(self._names.text(event.token_id))
        return self._chunk([choice]) | self._usage_so_far(event.prompt_tokens, self._counts[index])

    def last(self, results: Sequence[Result]) -> JsonObject:
        """Return the chunk with the usage."""
        return {**self._chunk([]), **self._totals(results)}

    def _totals(self, results: Sequence[Result]) -> JsonObject:
        """Return the token counts, where each prompt counts once, and the figures of the first choice, milliseconds."""
        prompts, first = results[:: self._per_prompt], results[0]
        prompt_tokens = sum(result.prompt_tokens for result in prompts)
        completion_tokens = 0 if self._only_echo else sum(result.output_tokens for result in results)
        details = {name: sum(getattr(result, name) for result in prompts) for name in ("cached_tokens", "image_tokens")}
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": details,
            "views": sum(result.views for result in prompts),
        }
        times = {f"{name}_ms": getattr(first.stamps, name) for name in ("ttft", "tpot", "e2e")}
        figures = {
            "views": first.views,
            "crops": first.crops,
            "image_tokens": first.image_tokens,
            **{name: None if value is None else round(1e3 * value, 3) for name, value in times.items()},
            "stages_ms": {name: round(value, 3) for name, value in first.stages_ms.items()},
        }
        return {"usage": usage, "panscan": figures}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        object_name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": object_name, "choices": choices}

    def _choice(self, index: int, result: Result) -> JsonObject:
        if self._only_echo:
            result = replace(result, text="", token_ids=[], logprobs=[], finish_reason="length")
        logprobs = None
        if self.logprobs:
            echo = self._echoed is not None
            tokens = [*(result.prompt_ids or ()), *result.token_ids] if echo else result.token_ids
            values = [*(result.prompt_logprobs or ()), *(result.logprobs or ())] if echo else result.logprobs or []
            logprobs = self._logprobs_of(tokens, values)
        choice: JsonObject = {"index": index, "finish_reason": result.finish_reason, "logprobs": logprobs}
        if self._chat:
            message: JsonObject = {"role": "assistant", "content": result.text, "refusal": None}
            if result.tool_calls:
                message["content"] = result.text or None
                message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in result.tool_calls]
                choice["finish_reason"] = "tool_calls" if result.finish_reason == "stop" else result.finish_reason
            return {**choice, "message": message}
        if self.prompt_logprobs:
            choice["prompt_logprobs"] = self._ranked_prompt(result)
        return {**choice, "text": self._echo(index) + result.text}

    def _ranked_prompt(self, result: Result) -> list[Any]:
        return [*map(self._names.ranked, result.prompt_ids or (), result.prompt_logprobs or ())]

    def _logprobs_of(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int = 0
    ) -> JsonObject:
        pairs = list(zip(tokens, logprobs, strict=False))
        if self._chat:
            entries = [self._names.entry(token, values) for token, values in pairs if values is not None]
            return {"content": entries, "refusal": None}
        offsets = list(accumulate((len(self._names.text(token)) for token, _ in pairs), initial=offset))[:-1]
        return {
            "tokens": [self._names.key(token) for token, _ in pairs],
            "token_logprobs": [values and max(values.logprob, _LOWEST) for _, values in pairs],
            "top_logprobs": [values and self._names.keyed(token, values, self._top) for token, values in pairs],
            "text_offset": offsets,
        }
