"""Conversion of results and events to OpenAI's response bodies, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from panscan.core import (
    EngineError,
    ImageError,
    PanscanError,
    QueueFullError,
    Result,
    SettingError,
    TokenEvent,
    TokenLogprobs,
    UnsupportedError,
)
from panscan.serve.backend import ServeBackend
from panscan.serve.protocol import FieldError

__all__ = ["DONE", "TIMED_OUT", "Reply", "TokenNames", "error_body", "error_of", "error_status", "server_sent"]

DONE = b"data: [DONE]\n\n"
_LONGEST_MESSAGE = 1000  # characters: some errors quote what a client sent
_LOWEST = -9999.0  # JSON has no minus infinity
_LEVELS = 5  # depth of the part of a response that grows: choices, choice, logprobs, content, token
_ITEMS = 64  # items that are encoded at a time
TIMED_OUT = "the request timed out (--timeout, or its header X-Request-Timeout)"

Kind = Literal["chat", "text"]


def server_sent(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _dumps(body) + b"\n\n"


def error_status(error: PanscanError) -> int:
    """Return the HTTP status of an error: 400 if the client can correct the request."""
    match error:
        case QueueFullError():
            return 429
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


_PARAMS = {"json_schema": "response_format", "messages": "messages"}  # fields by the prefix of the engine's errors


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = _TYPES.get(status, "invalid_request_error")
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return a response as JSON, encoded in pieces: other threads run between them, such as the event loop's."""
    return b"".join(_pieces(body, _LEVELS))


def _pieces(value: Any, levels: int) -> Iterator[bytes]:
    """Yield the JSON of a value. Containers are split down to a number of levels, and lists below it by items."""
    if isinstance(value, Mapping) and levels:
        for index, (name, inner) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if index else b"{", _dumps(name))
            yield from _pieces(inner, levels - 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and levels and len(value) <= _ITEMS:
        for index, inner in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(inner, levels - 1)
        yield b"]" if value else b"[]"
    elif isinstance(value, list):
        for start in range(0, len(value), _ITEMS):
            yield b"," if start else b"["
            yield _dumps(value[start : start + _ITEMS])[1:-1]
        yield b"]" if value else b"[]"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_of(error: PanscanError) -> dict[str, Any]:
    """Return an exception in OpenAI's format."""
    param = error.param if isinstance(error, FieldError) else _PARAMS.get(str(error).partition(":")[0])
    return error_body(str(error), error_status(error), param)


@dataclass(slots=True)
class TokenNames:
    """A cache of the bytes of tokens, which the backend provides."""

    backend: ServeBackend
    _known: dict[int, bytes] = field(default_factory=dict)

    async def fetch(self, logprobs: Iterable[TokenLogprobs | None], tokens: Iterable[int]) -> None:
        """Fetch the bytes of all tokens that :meth:`entry` needs.

        Raises:
            EngineError: the backend cannot answer.
        """
        wanted = {*tokens, *(id for each in logprobs if each is not None for id, _ in each.top)}
        if missing := sorted(wanted - self._known.keys()):
            self._known |= zip(missing, await self.backend.token_texts(missing), strict=True)

    def text(self, token: int) -> str:
        """Return a token's text, with replacement characters for incomplete UTF-8."""
        return self._known[token].decode(errors="replace")

    def entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """Return one token of OpenAI's ``logprobs.content``."""
        top = [self._one(id, value) for id, value in logprobs.top]
        return {**self._one(token, logprobs.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "bytes": list(self._known[token]), "logprob": max(logprob, _LOWEST)}


class Reply:
    """The response to one HTTP request.

    Args:
        kind: chat or text completion.
        model: the model's name in the API.
        names: token texts, for log-probabilities.
        logprobs: whether the request asks for log-probabilities.
        continuous_usage: whether each chunk of a stream has the token counts of its choice so far, as in vLLM.
    """

    def __init__(
        self, kind: Kind, model: str, names: TokenNames, *, logprobs: bool, continuous_usage: bool = False
    ) -> None:
        self._kind, self._names, self.logprobs = kind, names, logprobs
        self._continuous_usage = continuous_usage
        self._offsets: dict[int, int] = {}  # characters of each streamed choice so far
        self._counts: Counter[int] = Counter()  # tokens of each streamed choice so far
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    async def fetch_token_bytes(self, results: Sequence[Result]) -> None:
        """Fetch the token texts that :meth:`whole` needs.

        Raises:
            EngineError: the backend cannot answer.
        """
        if self.logprobs:
            for result in results:
                await self._names.fetch(result.logprobs or (), result.token_ids)

    def whole(self, results: Sequence[Result], per_prompt: int) -> dict[str, Any]:
        """Return the response with all choices, after :meth:`fetch_token_bytes`.

        Args:
            results: results of all choices, grouped by prompt.
            per_prompt: number of choices per prompt.
        """
        object_name = "chat.completion" if self._kind == "chat" else "text_completion"
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {
            **self._head,
            "object": object_name,
            "choices": choices,
            "usage": usage(results, per_prompt),
            "panscan": figures(results),
        }

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the first chunks of a stream: for a chat, the role of each choice."""
        if self._kind == "text":
            return []
        opening = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": index, "delta": opening, "finish_reason": None}]) for index in range(count)]

    async def chunk(self, index: int, event: TokenEvent) -> dict[str, Any] | None:
        """Return the chunk of an event; None if there is nothing to send.

        Raises:
            EngineError: see :meth:`fetch_token_bytes`.
        """
        self._counts[index] += event.token_id is not None
        reason = event.finish_reason if event.finish_reason in ("stop", "length") else None
        if not event.text and reason is None and (event.logprobs is None or not self.logprobs):
            return None
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if self._kind == "chat":
            choice["delta"] = {"content": event.text} if event.text else {}
        else:
            choice["text"] = event.text
        if self.logprobs and event.logprobs is not None and event.token_id is not None:
            await self._names.fetch([event.logprobs], [event.token_id])
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = self._logprobs_of([event.token_id], [event.logprobs], offset)
            self._offsets[index] = offset + len(self._names.text(event.token_id))
        chunk = self._chunk([choice])
        if self._continuous_usage:
            prompt, completion = event.prompt_tokens, self._counts[index]
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            chunk["usage"] = counts
        return chunk

    def last(self, results: Sequence[Result], per_prompt: int) -> dict[str, Any]:
        """Return the chunk with the usage."""
        return {**self._chunk([]), "usage": usage(results, per_prompt), "panscan": figures(results)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        object_name = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return {**self._head, "object": object_name, "choices": choices}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs = self._logprobs_of(result.token_ids, result.logprobs or []) if self.logprobs else None
        choice = {"index": index, "finish_reason": result.finish_reason, "logprobs": logprobs}
        if self._kind == "chat":
            return {**choice, "message": {"role": "assistant", "content": result.text, "refusal": None}}
        return {**choice, "text": result.text}

    def _logprobs_of(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
        pairs = list(zip(tokens, logprobs, strict=False))
        if self._kind == "chat":
            return {"content": [self._names.entry(token, each) for token, each in pairs], "refusal": None}
        texts = [self._names.text(token) for token, _ in pairs]
        offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
        top = [{self._names.text(id): max(value, _LOWEST) for id, value in each.top} for _, each in pairs]
        values = [max(each.logprob, _LOWEST) for _, each in pairs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def usage(results: Sequence[Result], per_prompt: int) -> dict[str, Any]:
    """Return token counts: each prompt counts once, and every choice counts.

    Args:
        results: results of all choices, grouped by prompt.
        per_prompt: number of choices per prompt.
    """
    prompts = results[::per_prompt]
    prompt_tokens = sum(result.prompt_tokens for result in prompts)
    completion_tokens = sum(result.output_tokens for result in results)
    details = {
        "cached_tokens": sum(result.cached_tokens for result in prompts),
        "image_tokens": sum(result.image_tokens for result in prompts),
    }
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
        "views": sum(result.views for result in prompts),
    }


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the measurements of the first choice: views, TTFT, TPOT, end-to-end latency and stages, milliseconds."""
    result = results[0]
    ttft, e2e, count = result.stamps.ttft, result.stamps.e2e, result.output_tokens
    tpot = (e2e - ttft) / (count - 1) if ttft is not None and e2e is not None and count > 1 else None
    times = {"ttft_ms": ttft, "tpot_ms": tpot, "e2e_ms": e2e}
    return {
        "views": result.views,
        "crops": result.crops,
        "image_tokens": result.image_tokens,
        **{name: None if value is None else round(1e3 * value, 3) for name, value in times.items()},
        "stages_ms": {name: round(value, 3) for name, value in result.stages_ms.items()},
    }
