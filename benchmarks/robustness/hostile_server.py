"""Hostile OpenAI-compatible endpoints, one per first segment of the path.

    python -m benchmarks.robustness.hostile_server

Prints its port. Each endpoint answers ``GET /NAME/v1/models`` and ``POST /NAME/v1/chat/completions`` (streamed or
not) in bytes that are legal HTTP as far as possible, but endless, huge, deep or absurd.
"""

from __future__ import annotations

import contextlib
import json
import socketserver
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

Bytes = Iterator[bytes]
_MEGABYTE = b"x" * 2**20
_LONG = 400  # pieces of a megabyte: more than any client should read
_DRIP_SECONDS = 0.25


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _head(kind: str = "application/json", more: str = "", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n{more}\r\n".encode()


def _reply(body: bytes, **head: str) -> Bytes:
    yield _head(**head)
    yield body


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


_MODELS = _json({"object": "list", "data": [{"id": "m", "object": "model"}]})
_TOKEN = {"token": "hi", "logprob": -0.1, "top_logprobs": [{"token": "hi", "logprob": -0.1}]}
_USAGE = b'{"prompt_tokens":1,"completion_tokens":1}'
_DEEP = b"[" * 100_000 + b"]" * 100_000


def _chat(stream: bool, *, content: bytes = b'"hi"', usage: bytes = _USAGE, logprobs: bytes | None = None) -> Bytes:
    """An answer whose parts are JSON texts."""
    logprobs = _json({"content": [_TOKEN]}) if logprobs is None else logprobs
    name, kind = ("delta", "text/event-stream") if stream else ("message", "application/json")
    choice = b'{"index":0,"%b":{"role":"assistant","content":%b},"finish_reason":"stop","logprobs":%b}'
    body = b'{"id":"1","model":"m","choices":[%b],"usage":%b}' % (choice % (name.encode(), content, logprobs), usage)
    yield _head(kind)
    yield _event(body) + _event(b"[DONE]") if stream else body


def _endless(stream: bool, piece: bytes, *, before: bytes = b"", head: bytes | None = None) -> Bytes:
    kind = "text/event-stream" if stream else "application/json"
    return chain([head or _head(kind), before], repeat(piece, _LONG * 2**20 // len(piece)))


def _drip(pieces: Iterator[bytes]) -> Bytes:
    for piece in pieces:
        yield piece
        time.sleep(_DRIP_SECONDS)


def _chunked(stream: bool, rest: Bytes) -> Bytes:
    yield _head("text/event-stream" if stream else "application/json", "transfer-encoding: chunked\r\n")
    yield from rest


def _counts(text: str) -> Callable[[bool], Bytes]:
    usage = f'{{"prompt_tokens":{text},"completion_tokens":{text},"prompt_tokens_details":{{"cached_tokens":{text}}}}}'
    return lambda stream: _chat(stream, usage=usage.encode())


def _probabilities(text: str) -> Callable[[bool], Bytes]:
    token = f'{{"token":"hi","logprob":{text},"top_logprobs":[{{"token":"a","logprob":{text}}}]}}'
    return lambda stream: _chat(stream, logprobs=f'{{"content":[{token}]}}'.encode())


def _tokens(stream: bool) -> Bytes:
    token = {"token": "x" * 3_000_000, "bytes": [1] * 500_000, "logprob": -1.0}
    return _chat(stream, logprobs=_json({"content": [{**token, "top_logprobs": [token]}]}))


def _many_tops(stream: bool) -> Bytes:
    return _chat(stream, logprobs=_json({"content": [{**_TOKEN, "top_logprobs": [_TOKEN] * 50_000}]}))


def _chunks(stream: bool) -> Bytes:
    event = _event(b'{"choices":[{"delta":{"content":"a"}}]}')
    return _endless(stream, (event if stream else b"[],") * 1000, before=b"" if stream else b"[")


_CONTENT: dict[str, Callable[[bool], Bytes]] = {
    "400 digits of tokens": _counts("9" * 400),
    "5,000 digits of tokens": _counts("9" * 5000),
    "NaN tokens": _counts("NaN"),
    "1e400 tokens": _counts("1e400"),
    "negative tokens": _counts("-5"),
    "text for tokens": _counts('"many"'),
    "2^40 tokens": _counts(str(2**40)),
    "a million tokens": _counts("1000000"),
    "NaN log-probabilities": _probabilities("NaN"),
    "infinite log-probabilities": _probabilities("-Infinity"),
    "positive log-probabilities": _probabilities("1e308"),
    "400 digits of log-probability": _probabilities("-" + "9" * 400),
    "tokens of 3 MB": _tokens,
    "50,000 alternatives": _many_tops,
    "deep answer": lambda stream: _chat(stream, content=_DEEP),
    "deep finish": lambda stream: _reply(_event(b'{"choices":[{"delta":{},"finish_reason":' + _DEEP + b"}]}")),
    "answer of 10 MB": lambda stream: _chat(stream, content=b'"' + b"word " * 2_000_000 + b'"'),
    "a million names": lambda stream: _chat(stream, usage=b"{" + b'"a":1,' * 1_000_000 + b'"a":1}'),
    "a million empty lists": lambda stream: _chat(stream, logprobs=b"[" + b"[]," * 1_000_000 + b"[]]"),
    "half surrogates": lambda stream: _chat(stream, content=b'"\\ud800\\u0000\\u001b[31m"'),
}
"""Endpoints whose framing is right."""

_FRAMING: dict[str, Callable[[bool], Bytes]] = {
    "endless chunks": _chunks,
    "one event without end": lambda stream: _endless(stream, _MEGABYTE, before=b"data: "),
    "one event of endless lines": lambda stream: _endless(stream, b"data:\n" * 10_000),
    "endless comments": lambda stream: _endless(stream, b": keep-alive\n\n" * 10_000),
    "endless headers": lambda stream: _endless(stream, b"x-header: value\r\n" * 10_000, head=b"HTTP/1.1 200 OK\r\n"),
    "one header without end": lambda stream: _endless(stream, _MEGABYTE, head=b"HTTP/1.1 200 OK\r\nx-header: "),
    "endless interim responses": lambda stream: _endless(
        stream, b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, head=b"HTTP/1.1 102 Processing\r\n\r\n"
    ),
    "endless trailers": lambda stream: _chunked(
        stream, chain([b"5\r\ndata:\r\n0\r\n"], (b"x-%d: value\r\n" % n for n in range(10_000_000)))
    ),
    "endless chunk extension": lambda stream: _chunked(stream, chain([b"5;"], repeat(_MEGABYTE, _LONG))),
    "chunks of one byte": lambda stream: _chunked(stream, repeat(b"1\r\n:\r\n" * 10_000, 7000)),
    "one byte at a time": lambda stream: _drip(chain([_head("text/event-stream"), b"data: "], repeat(b"x"))),
    "comments for ever": lambda stream: _drip(chain([_head("text/event-stream")], repeat(b": still here\n\n"))),
    "a head for ever": lambda stream: _drip(chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"x: y\r\n"))),
    "silence": lambda stream: _drip(repeat(b"")),
    "error of 400 MB": lambda stream: _endless(stream, _MEGABYTE, head=_head(status="500 Broken")),
    "deep error": lambda stream: _reply(b'{"error":{"message":' + _DEEP + b"}}", status="400 Bad"),
    "redirects without end": lambda stream: _reply(b"", status="307 Moved", more="location: /again\r\n"),
    "gzip": lambda stream: _reply(b"\x1f\x8b" + _MEGABYTE, more="content-encoding: gzip\r\n"),
    "length of 10^30": lambda stream: _reply(b"x", more=f"content-length: {10**30}\r\n"),
    "closes at once": lambda stream: iter(()),
}
"""Endpoints whose framing is wrong, endless or slow."""

_LISTS: dict[str, Callable[[], Bytes]] = {
    "a million models": lambda: _reply(
        b'{"data":[' + b",".join(b'{"id":"model-%d"}' % n for n in range(1_000_000)) + b"]}"
    ),
    "model name of 10 MB": lambda: _reply(_json({"data": [{"id": "m" * 10_000_000}]})),
    "model names that are no texts": lambda: _reply(
        _json({"data": [{"id": 1}, {"id": None}, {"id": []}, {"id": {}}, 5]})
    ),
    "model name of control characters": lambda: _reply(_json({"data": [{"id": "\x1b[31m\ud800\n" + "\u202e"}]})),
    "deep list of models": lambda: _reply(b'{"data":' + _DEEP + b"}"),
    "models without end": lambda: _endless(False, b'{"id":"m"},' * 1000, before=b'{"data":['),
    "models of one byte at a time": lambda: _drip(chain([_head()], repeat(b" "))),
    "models with NaN": lambda: _reply(b'{"data":[{"id":"m","created":NaN,"owned_by":1e999}]}'),
}
"""Endpoints whose list of models is hostile."""

ENDPOINTS = (*_CONTENT, *_FRAMING, *_LISTS)


def _answer(name: str, path: str, stream: bool) -> Bytes:
    if path.endswith("/models"):
        return _LISTS[name]() if name in _LISTS else _reply(_MODELS)
    answer = _CONTENT.get(name) or _FRAMING.get(name)
    return _chat(stream) if answer is None else answer(stream)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            path = self.rfile.readline().split(b" ")[1].decode()
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            stream = b'"stream":true' in self.rfile.read(length)
            for piece in _answer(ENDPOINTS[int(path.split("/")[1])], path, stream):
                self.wfile.write(piece)


class HostileServer(socketserver.ThreadingTCPServer):
    """All endpoints on a free port of 127.0.0.1."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)


def serve() -> None:
    """Serve until the process is killed; print the port first."""
    with HostileServer() as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve()
