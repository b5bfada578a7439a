"""Chat completions as a client: endpoints, encoded requests, and the outcome of each request."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

import panscan
from panscan.core import EndpointError, SettingError, now
from panscan.core.errors import one_line
from panscan.core.foreign import JsonObject, is_count, parse_json
from panscan.core.option import shorten
from panscan.load.connection import ConnectionPool, ErrorKind, Segments, ServerAddress

Dialect = Callable[[Mapping[str, Any]], JsonObject]
"""Changes the fields of a request to those that an endpoint takes."""

_COMPLETIONS = "/chat/completions"
_MOST_ERROR = 64 * 1024  # bytes of an error response that are read
_MOST_JSON = 16 * 1024 * 1024  # bytes of a response that is read as a whole; up to 35 times as many as objects
_LONGEST_EVENT = 1024 * 1024  # bytes
_MOST_CHUNKS = 65_536, 4  # content chunks of an answer: a number, and so many more per token that was asked for
_LONGEST_NAME = 1_000  # characters of a model's name
_LONGEST_ERROR = 200  # characters of an error message
_COUNTS = (
    *("completion_tokens", "prompt_tokens", "cached_tokens", "image_tokens", "views"),  # OpenAI, vLLM, TGI, panscan
    *("predicted_n", "prompt_n", "cache_n"),  # llama.cpp
)
_OWN_HEADERS = {
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "accept-encoding",
    "accept",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint.

    Args:
        url: ``http://host:port``, ``.../v1`` or the URL of the chat completions.
        model: model name to send.
        api_key: bearer token.
        headers: further request headers.
        timeout: seconds per request, including those for a new connection.
        adapt: changes the fields of a request to those that the endpoint takes.

    Raises:
        SettingError: the URL, the key, a header or the timeout is not usable.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 600.0
    adapt: Dialect = field(default=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _url_parts(self.url)
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise SettingError(f"the timeout: expected a positive number of seconds, got {self.timeout!r}")
        names = [name.lower() for name, _ in self.headers]
        for name, value in self.headers:
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not _sendable(value):
                raise SettingError(f"the request header {name!r} has characters that HTTP does not allow")
            if name.lower() in _OWN_HEADERS or names.count(name.lower()) > 1:
                raise SettingError(f"the request header {name!r} is set already: remove it")
        if self.api_key is not None and (not self.api_key or not _sendable(self.api_key)):
            raise SettingError("the API key is empty or has characters that HTTP does not allow")
        if self.api_key is not None and "authorization" in names:
            raise SettingError("give either the API key or a header Authorization")

    @property
    def address(self) -> ServerAddress:
        """The server's address."""
        parts = _url_parts(self.url)
        tls = parts.scheme == "https"
        return ServerAddress(parts.hostname or "", parts.port or (443 if tls else 80), tls)

    def path(self, path: str) -> str:
        """Return the path of a request.

        Args:
            path: path on a server without a prefix, such as ``/v1/models`` or ``/tokenize``.
        """
        parts = _url_parts(self.url)
        base = parts.path.rstrip("/")
        api = base.removesuffix(_COMPLETIONS) if base.endswith((_COMPLETIONS, "/v1")) else f"{base}/v1"
        full = f"{api}{path.removeprefix('/v1')}" if path.startswith("/v1/") else f"{api.removesuffix('/v1')}{path}"
        return f"{full}?{parts.query}" if parts.query else full

    def head(self, method: str, path: str, *, accept: str = "application/json") -> bytes:
        """Return a request's head up to the value of its last header, ``content-length``."""
        parts = _url_parts(self.url)
        lines = [
            f"{method} {self.path(path)} HTTP/1.1",
            f"host: {parts.netloc}",
            f"user-agent: panscan/{panscan.__version__}",
            f"accept: {accept}",
            "accept-encoding: identity",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "content-length: "]).encode("latin-1")


def _url_parts(url: str) -> SplitResult:
    """Return the parts of an endpoint's URL.

    Raises:
        SettingError: the text is not a URL of an endpoint.
    """
    shown = _shown(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its message may repeat a password
        raise SettingError(f"{shown}: not a URL: check the host and the port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise SettingError(f"{shown}: expected the URL of an endpoint, such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise SettingError("the URL has a user name or password: give an API key instead")
    if not url.isascii() or re.search(r"[\x00-\x20\x7f]", url) or parts.fragment:
        raise SettingError(f"{shown}: not the URL of an endpoint: remove spaces, fragments and non-ASCII characters")
    return parts


def _shown(url: str) -> str:
    """Return a URL for messages: one line, without a login and without its query, which may hold a key."""
    return one_line(re.sub(r"^([a-zA-Z]+://)?.*@", r"\1***@", url.partition("?")[0], flags=re.DOTALL))


def _sendable(value: str) -> bool:
    return re.search(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]", value) is None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """An encoded chat completion request.

    Args:
        id: name of the request in the results.
        body: JSON body in segments; requests may share segments, such as an image.
        max_tokens: maximum number of output tokens, as in the body.
    """

    id: str
    body: Segments
    max_tokens: int


def data_url(media_type: str, data: bytes) -> bytes:
    """Return a ``data:`` URL for an image part of :func:`chat_body`."""
    return b"data:%s;base64,%s" % (media_type.encode("ascii"), base64.b64encode(data))


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    *,
    adapt: Dialect = dict,
    **fields: Any,
) -> Segments:
    """Return the body of a chat completion request, in segments.

    Args:
        model: model name.
        messages: messages in OpenAI's format. A value of type ``bytes``, such as the URL of an image part from
            :func:`data_url`, becomes a segment, which is not copied.
        max_tokens: maximum number of output tokens.
        adapt: changes the fields to those that the endpoint takes.
        fields: further fields, without those that are None. By default, the answer is greedy and a stream with its
            usage.
    """
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0.0}
    body |= fields
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    fields = adapt({name: value for name, value in body.items() if value is not None})
    mark = f"segment-{uuid.uuid4().hex}"
    segments: list[bytes] = []

    def hold(value: bytes) -> str:
        segments.append(value)
        return mark

    texts = json.dumps(fields, default=hold, separators=(",", ":")).encode("ascii").split(mark.encode("ascii"))
    pairs = zip(segments, texts[1:], strict=True)
    return texts[0], *chain.from_iterable(pairs)


class RequestOutcome(Struct):
    """The outcome of one request. Times are seconds of :func:`panscan.core.now`.

    A request failed if it has an ``error``. An ``error_kind`` of ``usage`` without an ``error`` marks a complete answer
    whose token counts the endpoint did not report: ``output_tokens`` is then the number of content chunks.

    Args:
        id: name of the request.
        due: when the arrival process wanted it sent; in a closed loop, when its slot became free.
        queued: seconds that it waited for a slot of the maximum concurrency.
        accepted: when it was sent, before a connection was opened for it.
        tokens: receipt times of the content chunks, each with one or more tokens. Content may be empty, as a token may
            lack a text; with random weights, most do.
        end: receipt time of the last token or of the finish reason, whichever is later; of a failure, its time.
        events: receipt times of all events with a choice, as vLLM's client takes them for tokens: also of one that only
            names the role, and of one with the finish reason.
        text: answer, without reasoning.
        logprobs: log-probabilities of the tokens, as the endpoint writes them; empty unless the request asked for them.
        finish_reason: reported reason.
        output_tokens: number of output tokens.
        prompt_tokens: number of prompt tokens; None if not reported.
        cached_tokens: number of prompt tokens from a cache; None if not reported.
        image_tokens: number of image tokens of the prompt; None if not reported.
        views: number of views, images and their crops; None if not reported.
        status: HTTP status; None without a response.
        error: why the request failed; None if it did not.
        error_kind: kind of the failure.
    """

    id: str
    due: float
    queued: float
    accepted: float
    tokens: list[float] = []
    end: float = 0.0
    events: list[float] = []
    text: str = ""
    logprobs: list[Any] = []
    finish_reason: str | None = None
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    image_tokens: int | None = None
    views: int | None = None
    status: int | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def lag(self) -> float:
        """The client's own delay, in seconds."""
        return self.accepted - self.due - self.queued


def most_characters(max_tokens: int) -> int:
    """Return how long an answer may be: far more than any tokenizer writes with so many tokens."""
    return 1_048_576 + 256 * max_tokens


class ChatStream:
    """A streamed chat completion: a :class:`panscan.load.connection.ResponseHandler`.

    Args:
        exchange: outcome to fill.
        max_tokens: maximum number of output tokens that was asked for; it limits what an answer may take in memory.
        on_end: called once, with the receipt time of the end of the response.
    """

    def __init__(
        self, exchange: RequestOutcome, max_tokens: int, on_end: Callable[[RequestOutcome, float], None]
    ) -> None:
        self.exchange = exchange
        self._max_tokens = max_tokens
        self._most_chunks = _MOST_CHUNKS[0] + _MOST_CHUNKS[1] * max_tokens
        self._most_characters = most_characters(max_tokens)
        self.complete = False
        self._on_end = on_end
        self._streams: bool | None = None  # None: decided by the first bytes of the body
        self._body = bytearray()  # of a response that is not a stream
        self._line = bytearray()  # incomplete
        self._event: list[bytes] = []
        self._event_bytes = 0  # with the line breaks
        self._texts: list[str] = []
        self._characters = 0
        self._counts: JsonObject = {}

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Refuse statuses other than 200 and responses that are no stream of events."""
        self.exchange.status = status
        kind = headers.get("content-type", "")
        if status != 200:
            where = f" to {_shown(headers['location'])}" if "location" in headers else ""
            self._fail("http", f"HTTP {status}{where}")
        elif headers.get("content-encoding", "identity") != "identity":
            self._fail("protocol", f"the response is compressed ({headers['content-encoding']})")
        elif kind.startswith("text/html"):
            self._fail("protocol", "the response is an HTML page: check the URL")
        elif kind.startswith("application/json"):
            self._fail("protocol", "the response is not a stream (application/json)")
        if self.exchange.error is not None:
            self._streams = False
        elif kind.startswith("text/event-stream"):
            self._streams = True

    def on_data(self, data: bytes, at: float) -> None:
        """Take the events of a part of the body, received at ``at``."""
        if self._streams is None:
            self._streams = data.lstrip()[:5].startswith((b"data:", b"event", b"id:", b":"))
            if not self._streams:
                self._fail("protocol", "the response is not a stream of events")
        if not self._streams:
            self._body += data[: max(0, _MOST_ERROR - len(self._body))]
            return
        lines = data.split(b"\n")
        if len(lines) > 1 and self._line:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        for line in lines[:-1]:
            self._take_line(line, at)
            if not self._streams:  # refused
                return
        self._line += lines[-1]
        if len(self._line) > _LONGEST_EVENT:
            self._refuse("malformed event: too long")

    def _refuse(self, message: str) -> None:
        """Fail, and read nothing more of the response."""
        self._fail("stream", message)
        self._streams, self.complete = False, True
        self._line.clear()
        self._event.clear()

    def _take_line(self, line: bytes, at: float) -> None:
        line = line.removesuffix(b"\r")
        if not line:
            if self._event:
                self._take_event(b"\n".join(self._event), at)
                self._event.clear()
                self._event_bytes = 0
        elif line.startswith(b"data:"):
            self._event.append(line[5:].lstrip(b" "))
            self._event_bytes += len(line)
            if self._event_bytes > _LONGEST_EVENT:
                self._refuse("malformed event: too long")

    def _take_event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        event = _json_or_none(data)
        if not isinstance(event, dict):
            kind = "JSON" if event is None else "a JSON object"
            self._fail("stream", f"malformed event: not {kind}")
            return
        if event.get("error"):
            self._fail("stream", _error_message(event) or "error event")
            return
        usage = event.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        for counts in (event.get("timings"), event.get("panscan"), usage, details):
            if isinstance(counts, dict):  # later ones replace earlier ones
                self._counts |= {name: counts[name] for name in _COUNTS if counts.get(name) is not None}
        choices = event.get("choices")
        if choices:
            self._take_choice(choices, at)
        elif choices is None and not self._counts and not isinstance(usage, dict):
            self._fail("stream", "malformed event: no choices")

    def _take_choice(self, choices: Any, at: float) -> None:
        choice = choices[0] if isinstance(choices, list) else None
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(delta, dict):
            self._fail("stream", "malformed event: a choice without a delta")
            return
        exchange = self.exchange
        exchange.events.append(at)
        content = delta.get("content")
        if content or delta.get("reasoning_content") or delta.get("reasoning"):
            exchange.tokens.append(at)
            exchange.end = at
            if isinstance(content, str):
                self._texts.append(content)
                self._characters += len(content)
        elif content == "" and "role" not in delta and not choice.get("finish_reason"):  # else it holds no token
            exchange.tokens.append(at)
        reported = choice.get("logprobs")
        if isinstance(reported, dict) and isinstance(rows := reported.get("content"), list):
            exchange.logprobs += rows[: max(0, self._most_chunks - len(exchange.logprobs))]
        if choice.get("finish_reason"):
            exchange.finish_reason = _short(str(choice["finish_reason"]))
            exchange.end = at
        if len(exchange.events) > self._most_chunks:  # far beyond the tokens that were asked for
            self._refuse(f"more than {self._most_chunks:,} chunks for max_tokens {self._max_tokens:,}")
        elif self._characters > self._most_characters:
            self._refuse(f"more than {self._most_characters:,} characters for max_tokens {self._max_tokens:,}")

    def on_end(self, at: float) -> None:
        """Take the last event, check that the answer is complete, and report the outcome."""
        if self._streams:
            self._take_line(bytes(self._line), at)
            self._take_line(b"", at)  # the last event may lack its empty line
            if not self.complete and self.exchange.finish_reason is None:
                self._fail("stream", "the stream ended before the answer was complete")
            elif not self.exchange.tokens and self.exchange.finish_reason is None:
                self._fail("stream", "the stream has no tokens")
        elif self.exchange.error is None:
            self._fail("protocol", "the response is empty")
        else:
            self._explain()
        self._close(at)

    def on_failure(self, kind: ErrorKind, message: str, at: float) -> None:
        """Fail, with the server's message if it sent one, and report the outcome."""
        self._fail(kind, message)
        self._explain()
        self._close(at)

    def _explain(self) -> None:
        """Add the message of an error response to the error."""
        exchange = self.exchange
        if self._streams or exchange.error_kind not in ("http", "protocol"):
            return
        message = _error_message(_json_or_none(bytes(self._body)))
        if message is not None:
            status = "" if exchange.status in (None, 200) else f"HTTP {exchange.status}: "
            exchange.error = _short(status + message)
        elif exchange.error_kind == "http" and self._body.lstrip()[:1] == b"<":
            exchange.error = f"{exchange.error} (an HTML page)"

    def _fail(self, kind: ErrorKind, message: str) -> None:
        """Record a failure, unless there was one before."""
        if self.exchange.error is None:
            self.exchange.error, self.exchange.error_kind = _short(message), kind

    def _close(self, at: float) -> None:
        exchange = self.exchange
        exchange.text = "".join(self._texts)
        for name in ("completion_tokens", "predicted_n"):
            # Every throughput is computed from these counts. Some endpoints ignore max_tokens.
            value = self._counts.get(name)
            if isinstance(value, int) and value > self._most_chunks:
                self._fail("protocol", f"{name}: {shorten(value)} is far more than max_tokens {self._max_tokens:,}")
        exchange.cached_tokens = self._reported("cached_tokens", "cache_n")
        computed = self._reported("prompt_n")
        exchange.prompt_tokens = self._reported("prompt_tokens")
        if exchange.prompt_tokens is None and computed is not None:
            exchange.prompt_tokens = computed + (exchange.cached_tokens or 0)
        output = self._reported("completion_tokens", "predicted_n")
        exchange.output_tokens = len(exchange.tokens) if output is None else output
        if output is None and exchange.error is None:
            exchange.error_kind = "usage"
        exchange.image_tokens = self._reported("image_tokens")
        exchange.views = self._reported("views")
        if exchange.error is not None:
            exchange.end = at
        self._on_end(exchange, at)

    def _reported(self, *names: str) -> int | None:
        """Return the first of these counts that the endpoint has reported."""
        for name in names:
            value = self._counts.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if is_count(value):
                return value
        return None


def _json_or_none(data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError:
        return None


def _error_message(body: Any) -> str | None:
    """Return the message of an error response: OpenAI's ``error.message``, FastAPI's ``detail``, or ``message``."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    text = (error.get("message") if isinstance(error, dict) else error) or body.get("detail") or body.get("message")
    return None if not text else text if isinstance(text, str) else json.dumps(text)


def _short(message: str) -> str:
    line = one_line(message)
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 4]} ..."


class _WholeResponse:
    """A response read as a whole: a :class:`panscan.load.connection.ResponseHandler`."""

    def __init__(self, request: str) -> None:
        self._request = request
        self.complete = False
        self.status = 0
        self.body = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        if status == 200 and headers.get("content-encoding", "identity") != "identity":
            self._refuse(f"the response is compressed ({headers['content-encoding']})")

    def on_data(self, data: bytes, at: float) -> None:
        if self.complete:
            return
        self.body += data
        if self.status != 200 and len(self.body) > _MOST_ERROR:
            del self.body[_MOST_ERROR:]
        elif len(self.body) > _MOST_JSON:
            self._refuse(f"the response is longer than {_MOST_JSON >> 20} MiB")

    def _refuse(self, message: str) -> None:
        """Fail, and read nothing more of the response."""
        self.complete = True
        self.body.clear()
        self.on_failure("protocol", message, now())

    def on_end(self, at: float) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def on_failure(self, kind: ErrorKind, message: str, at: float) -> None:
        if not self.ended.done():
            error = f"{self._request}: {_short(message)}"
            self.ended.set_exception(EndpointError(error, kind=kind, status=self.status or None))


def fetch_json(endpoint: Endpoint, method: str, path: str, body: Segments = (), deadline: float | None = None) -> Any:
    """Send one request and return the JSON of its response. Blocks; not for use inside an event loop.

    Args:
        endpoint: endpoint to ask.
        method: ``GET`` or ``POST``.
        path: path on a server without a prefix, such as ``/v1/models`` or ``/tokenize``.
        body: segments of the body, such as those of :func:`chat_body`.
        deadline: time of :func:`panscan.core.now` by which the response must have ended; default: the endpoint's
            timeout from now.

    Raises:
        EndpointError: no response in time, an error status, or a response that is not JSON.
    """
    seconds = endpoint.timeout if deadline is None else deadline - now()
    return asyncio.run(_fetch(endpoint, method, path, body, seconds))


async def _fetch(endpoint: Endpoint, method: str, path: str, body: Segments, seconds: float) -> Any:
    shown = f"{method} {endpoint.path(path).partition('?')[0]}"  # a query may hold a key
    if seconds <= 0:
        raise EndpointError(f"{shown}: the deadline has passed", kind="timeout")
    pool, response = ConnectionPool(endpoint.address), _WholeResponse(shown)
    head = endpoint.head(method, path) + b"%d\r\n\r\n" % sum(map(len, body))
    try:
        pool.send(head, body, response, seconds)
        await response.ended
    finally:
        await pool.close()
    status, content = response.status, _json_or_none(bytes(response.body))
    if status != 200:
        message = _error_message(content) or ("an HTML page" if response.body.lstrip()[:1] == b"<" else "no message")
        raise EndpointError(f"{shown}: HTTP {status}: {_short(message)}", kind="http", status=status)
    if content is None:
        raise EndpointError(f"{shown}: the response is not JSON: check the URL", kind="protocol", status=status)
    return content


def served_models(endpoint: Endpoint, deadline: float | None = None) -> dict[str, str | None]:
    """Return the owner of each model that an endpoint lists, such as ``vllm``; None if unknown.

    Names that are empty, longer than 1,000 characters or not printable are left out.

    Args:
        endpoint: endpoint to ask.
        deadline: see :func:`fetch_json`.

    Raises:
        EndpointError: see :func:`fetch_json`.
    """
    listed, models = fetch_json(endpoint, "GET", "/v1/models", deadline=deadline), dict[str, str | None]()
    rows = listed.get("data") if isinstance(listed, dict) else None
    for row in rows if isinstance(rows, list) else []:
        match row:
            case {"id": str(name)} if 0 < len(name) <= _LONGEST_NAME and name.isprintable():
                owner = row.get("owned_by")
                models[name] = _short(owner) if isinstance(owner, str) and owner else None
    return models
