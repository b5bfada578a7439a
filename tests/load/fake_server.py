"""A fake OpenAI-compatible endpoint with set TTFT and ITL, and with the faults that real ones have.

    python -m tests.load.fake_server '{"ttft_ms": 50, "itl_ms": 5}'

Prints its URL. The model name of a request may select another fault: ``fake:500``. The answer is made of time stamps:
the receipt of the request, then the sending of each chunk, in seconds of ``time.perf_counter`` (one clock for all
processes of a host), so that tests can compare a client's stamps with what really happened.
"""

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools

IMAGE_TOKENS = 256  # of each view
CROPS = 2  # of each image, with pan and scan


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the endpoint does.

    Args:
        ttft_ms: from the receipt of a request to its first chunk.
        itl_ms: between chunks.
        tokens: output tokens; 0: ``max_tokens`` of the request.
        slots: requests answered at once, the others wait; 0: no limit.
        dialect: whose usage fields the answers have: panscan or vllm.
        fault: see :class:`Completion`.
    """

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    tokens: int = 0
    slots: int = 0
    dialect: str = "panscan"
    fault: str = ""


class Endpoint:
    """The state that connections share."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.answering = 0
        self.counts = {"connections": 0, "requests": 0, "most_at_once": 0}
        self.waiting: deque[Callable[[], None]] = deque()

    def enter(self, start: Callable[[], None]) -> None:
        """Call ``start`` when a slot is free."""
        if self.behaviour.slots and self.answering >= self.behaviour.slots:
            self.waiting.append(start)
        else:
            self.answering += 1
            self.counts["most_at_once"] = max(self.counts["most_at_once"], self.answering)
            start()

    def leave(self) -> None:
        """Free a slot."""
        self.answering -= 1
        if self.waiting:
            self.answering += 1
            self.waiting.popleft()()


class Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body = b"", bytearray()
        self.received = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.endpoint.counts["connections"] += 1

    def data_received(self, data: bytes) -> None:
        self.received = time.perf_counter()
        with contextlib.suppress(httptools.HttpParserError):
            self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url.partition(b"?")[0]  # a gateway's key is ignored

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        path, body = self.path.decode(), bytes(self.body)
        self.body.clear()
        if path == "/health":
            self.reply(200, b"")
        elif path == "/counts":
            self.reply_json(200, self.endpoint.counts)
        elif path == "/v1/models":
            self.reply_json(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif path == "/tokenize":
            prompt, _ = count_tokens(json.loads(body))
            self.reply_json(200, {"count": prompt, "tokens": list(range(prompt))})
        elif path == "/v1/chat/completions":
            self.endpoint.counts["requests"] += 1
            Completion(self, json.loads(body)).begin()
        else:
            self.reply_json(404, {"detail": "Not Found"})

    def reply(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        """Send a whole response."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def reply_json(self, status: int, body: Any) -> None:
        """Send a whole JSON response."""
        self.reply(status, json.dumps(body).encode(), "application/json")


class Completion:
    """The answer to one chat completion."""

    def __init__(self, connection: Connection, body: dict[str, Any]) -> None:
        self.connection, self.loop = connection, connection.loop
        self.behaviour = behaviour = connection.endpoint.behaviour
        self.received = connection.received
        self.fault = body["model"].partition(":")[2] or behaviour.fault
        self.streams = body.get("stream", False)
        self.count = behaviour.tokens or body.get("max_tokens") or 1
        self.prompt, self.image_tokens = count_tokens(body, ignore=self.fault == "ignore-images")
        self.views = self.image_tokens // IMAGE_TOKENS
        self.sent = 0  # tokens
        self.text = f"{self.received:.6f}"

    def begin(self) -> None:
        """Answer at once with a fault, or stream later."""
        if not self.answered_with_fault():
            self.connection.endpoint.enter(self.start)

    def answered_with_fault(self) -> bool:
        """Send a response that is no answer, if that is the fault."""
        connection, fault = self.connection, self.fault
        if fault == "html":
            connection.reply(200, b"<html><body>Welcome to nginx!</body></html>", "text/html")
        elif fault == "not-http":
            connection.transport.write(b"220 mail.example.com ESMTP\r\n")
        elif fault == "close":
            connection.transport.close()
        elif fault == "500":
            connection.reply_json(500, {"error": {"message": "CUDA out of memory", "type": "x", "code": None}})
        elif fault == "refuse-images" and self.views:
            connection.reply_json(400, {"object": "error", "message": "this model does not support image inputs"})
        elif fault != "silent":
            return False
        return True

    def start(self) -> None:
        """Send the first chunk after the time to the first token."""
        begun = self.received if not self.behaviour.slots else time.perf_counter()
        slow = 1000 if self.fault == "slow" else 1
        wait = begun + slow * self.behaviour.ttft_ms / 1e3 - time.perf_counter()
        self.first = self.loop.time() + wait
        self.loop.call_at(self.first, self.step)

    def step(self) -> None:
        """Send a chunk."""
        if self.connection.transport.is_closing():
            self.connection.endpoint.leave()
            return
        now = time.perf_counter()
        if self.streams and self.fault != "no-stream":
            if self.sent == 0:
                self.connection.transport.write(STREAM_HEAD)
            self.send_token(now)
        self.sent += 1
        if self.sent >= self.count:
            self.finish()
        else:
            self.loop.call_at(self.first + self.sent * self.behaviour.itl_ms / 1e3, self.step)

    def send_token(self, now: float) -> None:
        """Send the event of a chunk."""
        if self.fault == "malformed" and self.sent == 1:
            self.write_event(b'{"choices": [{"delta": {"content": "half')
            return
        if self.fault == "early-close" and self.sent == 1:
            self.connection.transport.close()
            return
        text = f"{self.received:.6f} {now:.6f}" if self.sent == 0 else f" {now:.6f}"
        self.write_event(b'{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}' % text.encode())

    def finish(self) -> None:
        """Send the end of the answer."""
        connection = self.connection
        connection.endpoint.leave()
        if connection.transport.is_closing():
            return
        if not self.streams or self.fault == "no-stream":
            message = {"role": "assistant", "content": self.text}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            connection.reply_json(200, {"choices": [choice], **self.usage()})
            return
        self.write_event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}')
        if self.fault != "no-usage":
            self.write_event(json.dumps({"choices": [], **self.usage()}).encode())
        self.write_event(b"[DONE]")
        if self.fault != "no-end":
            connection.transport.write(b"0\r\n\r\n")

    def usage(self) -> dict[str, Any]:
        """Return the fields with token counts."""
        usage: dict[str, Any] = {"prompt_tokens": self.prompt, "completion_tokens": self.count}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        if self.behaviour.dialect == "vllm":
            return {"usage": usage}
        usage["prompt_tokens_details"]["image_tokens"] = self.image_tokens
        return {"usage": usage, "panscan": {"views": self.views, "image_tokens": self.image_tokens}}

    def write_event(self, data: bytes) -> None:
        """Write a server-sent event as one HTTP chunk."""
        event = b"data: %s\n\n" % data
        self.connection.transport.write(b"%x\r\n%s\r\n" % (len(event), event))


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def count_tokens(body: dict[str, Any], *, ignore: bool = False) -> tuple[int, int]:
    """Return the prompt tokens (one per word, and those of images) and the image tokens."""
    words = images = 0
    for message in body.get("messages", []):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "text":
                words += len(part["text"].split())
            else:
                images += 1
    crops = CROPS if (body.get("mm_processor_kwargs") or {}).get("do_pan_and_scan") else 0
    image_tokens = 0 if ignore else images * (1 + crops) * IMAGE_TOKENS
    return 4 + words + image_tokens, image_tokens


@contextmanager
def fake_server(certificate: Path | None = None, key: Path | None = None, **behaviour: Any) -> Iterator[str]:
    """Run the server in a process of its own until the end of the block.

    Args:
        certificate: serve TLS with it.
        key: of the certificate.
        behaviour: fields of :class:`Behaviour`.
    """
    files = [] if certificate is None else [str(certificate), str(key)]
    command = [sys.executable, "-m", "tests.load.fake_server", json.dumps(behaviour), *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url, "the fake server did not start"
            yield url
        finally:
            process.kill()


async def serve(behaviour: str, *files: str) -> None:
    """Serve until the process is killed."""
    endpoint = Endpoint(Behaviour(**json.loads(behaviour)))
    tls = None
    if files:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*files)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(endpoint), "127.0.0.1", 0, ssl=tls, backlog=4096)
    sys.stdout.write(f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
