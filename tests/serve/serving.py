"""A real server in a separate process, and HTTP requests to it."""

import base64
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import httpx
import psutil
from PIL import Image
from tests import forked_workers

LOAD_SECONDS = 240.0
DEADLINE = 120.0
TLS = ssl.create_default_context()
"""For requests without TLS, too: HTTPX would read all certificates for each, ten times the request's own CPU time."""


def engines_of(pid: int) -> list[psutil.Process]:
    """Return the engine processes of a server, without its decoding processes, and those that have ended."""
    engines = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if forked_workers.runs(child, "panscan.serve.engine_worker"):
                engines.append(child)
    return engines


@dataclass
class Server:
    """A running ``panscan serve``.

    Args:
        process: process of the HTTP server.
        url: root URL.
        log: lines written to standard error so far.
        headers: of requests for metrics.
    """

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.url

    @property
    def pid(self) -> int:
        """Process id of the HTTP server."""
        return self.process.pid

    @property
    def port(self) -> int:
        """TCP port."""
        return int(self.url.rpartition(":")[2])

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        [process] = engines_of(self.pid)
        return process

    def metrics(self) -> str:
        """Return the page of all metrics."""
        return get(self, "/metrics", headers=self.headers, timeout=DEADLINE).text

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return sum_of(self.metrics(), name, **labels)

    def idle(self) -> bool:
        """Return whether no request is active and no KV block is in use."""
        names = ("panscan:http_requests_active", "vllm:num_requests_running", "vllm:num_requests_waiting")
        page = self.metrics()
        return not any(sum_of(page, name) for name in (*names, "vllm:kv_cache_usage_perc"))

    def stop(self, seconds: float = DEADLINE) -> int:
        """Send SIGTERM if the process runs, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def sum_of(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels, on the page of all metrics."""
    pairs = [f'{label}="{value}"' for label, value in labels.items()]
    assert f"# HELP {name} " in metrics, f"no metric {name}"
    samples = [line for line in metrics.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(pair in line for pair in pairs))


def command(*options: str) -> list[str]:
    """Return the command line of a server on a free port."""
    return [sys.executable, "-m", "panscan", "serve", "--port", "0", "--device", "cpu", *options]


def launch(*options: str, environment: dict[str, str] | None = None) -> Server:
    """Start a server and return it once it is ready.

    Raises:
        RuntimeError: the server exits before it is ready.
    """
    pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True, "errors": "replace"}
    process = subprocess.Popen(command(*options), **pipes, env={**os.environ, **(environment or {})})
    server, known = Server(process), threading.Event()

    def read() -> None:
        for line in process.stderr:
            server.log.append(line)
            if match := re.match(r"Serving .+ on (\S+)$", line):
                server.url = match[1]
                known.set()
        known.set()

    threading.Thread(target=read, daemon=True).start()
    known.wait(LOAD_SECONDS)
    if not server.url:
        process.kill()
        raise RuntimeError("".join(server.log))
    return server


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(content: bytes) -> str:
    """Return the bytes of a file as a data URL."""
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"


def image_part(url: str) -> dict[str, Any]:
    """Return an image part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation of one turn; texts become text parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def get(server: Server, path: str, **options: Any) -> httpx.Response:
    """Return the answer, which has to come within five seconds unless ``options`` have a ``timeout``."""
    return httpx.get(f"{server.url}{path}", verify=TLS, **options)


def post(server: Server, path: str, body: Any, **options: Any) -> httpx.Response:
    """Send a JSON body."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=DEADLINE, verify=TLS, **options)


def chat(server: Server, messages: Any, **fields: Any) -> httpx.Response:
    """Ask for a chat completion."""
    return post(server, "/v1/chat/completions", {"messages": messages, **fields})


def open_request(server: Server, path: str, content: bytes, *headers: str, length: int | None = None) -> socket.socket:
    """Return a connection on which a request with a JSON body was sent; ``length``: of a body of which more follows."""
    size = len(content) if length is None else length
    fixed = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {size}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *fixed, *headers, "", ""))
    connection = socket.create_connection(("127.0.0.1", server.port), DEADLINE)
    connection.sendall(head.encode() + content)
    return connection


def received(connection: socket.socket) -> bytes:
    """Return all that arrives until the other side closes the connection."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def refused(response: httpx.Response, status: int, param: str | None = None) -> str:
    """Check the shape of an error and return its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    message: str = error["message"]
    assert len(message) < 500 and "\n" not in message and "Traceback" not in message
    return message
