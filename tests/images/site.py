"""A web server on this machine, for tests that fetch."""

import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Site(ThreadingHTTPServer):
    """Serves ``answers`` (path, with its query or without, to status, headers and body) on this machine, and counts
    what was asked for.

    ``before_answer`` is called with the path and the client's port, and may wait. ``reply`` gives the status and the
    body of the answer to a POST; status 0: the bytes take the place of HTTP. With ``tls``, its port takes both HTTP and
    HTTPS.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: Counter[str] = Counter()
        self.headers: dict[str, Message] = {}
        self.before_answer: Callable[[str, int], None] = lambda path, port: None
        self.reply: Callable[[bytes], tuple[int, bytes]] = lambda body: (404, b"")
        self.tls: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        if self.tls is not None and client.recv(1, socket.MSG_PEEK) == b"\x16":  # a handshake, not a method's name
            client = self.tls.wrap_socket(client, server_side=True)
        return client, address

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"

    def put(self, path: str, body: bytes = b"", status: int = 200, **headers: str) -> str:
        self.answers[path] = status, {name.replace("_", "-"): value for name, value in headers.items()}, body
        return self.url(path)


class Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        self.server.headers[self.path] = self.headers
        answers = self.server.answers
        self.send(*(answers.get(self.path) or answers.get(self.path.partition("?")[0], (404, {}, b""))))

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def do_POST(self) -> None:
        status, body = self.server.reply(self.rfile.read(int(self.headers["content-length"])))
        if status:
            self.send(status, {"content-length": str(len(body))}, body)
        else:
            self.wfile.write(body)

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.before_answer(self.path, self.client_address[1])
        with suppress(OSError):  # the client has had enough
            self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Site]:
    """A site that answers until the end of the block."""
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
