"""A fake OpenAI-compatible endpoint with set TTFT and ITL, and with the faults that real ones have.

    python -m tests.load.fake_server '{"ttft_ms": 50, "itl_ms": 5}'

Prints its URL. The model name of a request may select another fault: ``fake:500``. The answer is made of time stamps:
the receipt of the request, then the sending of each chunk, in seconds of ``time.perf_counter`` (one clock for all
processes of a host), so that tests can compare a client's stamps with what really happened.
"""

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE_TOKENS = 256  # of each view
CROPS = 2  # of each image, with pan and scan
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


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
        self.slots = asyncio.Semaphore(behaviour.slots or sys.maxsize)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until either side closes it."""
        self.counts["connections"] += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                path = head.split(b" ", 2)[1].partition(b"?")[0]  # a gateway's key is ignored
                await self.answer(path.decode(), body, time.perf_counter(), writer)
        writer.close()

    async def answer(self, path: str, body: bytes, received: float, writer: asyncio.StreamWriter) -> None:
        """Answer a request."""
        if path == "/health":
            reply(writer, 200, b"", "text/plain")
        elif path == "/counts":
            reply_json(writer, 200, self.counts)
        elif path == "/v1/models":
            reply_json(writer, 200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif path == "/tokenize":
            prompt, _ = count_tokens(json.loads(body))
            reply_json(writer, 200, {"count": prompt, "tokens": list(range(prompt))})
        elif path == "/v1/chat/completions":
            self.counts["requests"] += 1
            completion = Completion(self.behaviour, writer, json.loads(body), received)
            if not completion.answered_with_fault():
                async with self.slots:
                    self.answering += 1
                    self.counts["most_at_once"] = max(self.counts["most_at_once"], self.answering)
                    await completion.stream()
                    self.answering -= 1
        else:
            reply_json(writer, 404, {"detail": "Not Found"})


def reply(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
    """Send a whole response."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def reply_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    """Send a whole JSON response."""
    reply(writer, status, json.dumps(body).encode(), "application/json")


class Completion:
    """The answer to one chat completion."""

    def __init__(
        self, behaviour: Behaviour, writer: asyncio.StreamWriter, body: dict[str, Any], received: float
    ) -> None:
        self.behaviour, self.writer, self.received = behaviour, writer, received
        self.fault = body["model"].partition(":")[2] or behaviour.fault
        self.streams = body.get("stream", False) and self.fault != "no-stream"
        self.count = behaviour.tokens or body.get("max_tokens") or 1
        self.prompt, self.image_tokens = count_tokens(body, ignore=self.fault == "ignore-images")
        self.views = self.image_tokens // IMAGE_TOKENS

    def answered_with_fault(self) -> bool:
        """Send a response that is no answer, if that is the fault."""
        writer, fault = self.writer, self.fault
        if fault == "html":
            reply(writer, 200, b"<html><body>Welcome to nginx!</body></html>", "text/html")
        elif fault == "not-http":
            writer.write(b"220 mail.example.com ESMTP\r\n")
        elif fault == "close":
            writer.close()
        elif fault == "500":
            reply_json(writer, 500, {"error": {"message": "CUDA out of memory", "type": "x", "code": None}})
        elif fault == "refuse-images" and self.views:
            reply_json(writer, 400, {"object": "error", "message": "this model does not support image inputs"})
        elif fault != "silent":
            return False
        return True

    async def stream(self) -> None:
        """Send chunks at their times, and the end, unless the client has left."""
        begun = time.perf_counter() if self.behaviour.slots else self.received
        first = begun + (1000 if self.fault == "slow" else 1) * self.behaviour.ttft_ms / 1e3
        for sent in range(self.count):
            due = first + sent * self.behaviour.itl_ms / 1e3
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.streams and not self.writer.is_closing():
                self.send_token(sent)
            if self.writer.is_closing():
                return
        self.finish()

    def send_token(self, sent: int) -> None:
        """Send the event of a chunk, whose text is when it was sent."""
        text = f" {time.perf_counter():.6f}"
        if sent == 0:
            self.writer.write(STREAM_HEAD)
            text = f"{self.received:.6f}{text}"
        elif sent == 1 and self.fault == "early-close":
            self.writer.close()
            return
        elif sent == 1 and self.fault == "malformed":
            self.write_event(b'{"choices": [{"delta": {"content": "half')
            return
        self.write_event(b'{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}' % text.encode())

    def finish(self) -> None:
        """Send the end of the answer."""
        if not self.streams:
            message = {"role": "assistant", "content": f"{self.received:.6f}"}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            reply_json(self.writer, 200, {"choices": [choice], **self.usage()})
            return
        self.write_event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}')
        if self.fault != "no-usage":
            self.write_event(json.dumps({"choices": [], **self.usage()}).encode())
        self.write_event(b"[DONE]")
        if self.fault != "no-end":
            self.writer.write(b"0\r\n\r\n")

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
        self.writer.write(b"%x\r\n%s\r\n" % (len(event), event))


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
    server = await asyncio.start_server(endpoint.connect, "127.0.0.1", 0, ssl=tls, backlog=4096)
    sys.stdout.write(f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
