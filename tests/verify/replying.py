"""An OpenAI-compatible endpoint whose replies a test writes."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Reply = Callable[[int, Body], tuple[int, object]]
"""From the number of a request, from 0, and its body to a status and a body, or to bytes instead of HTTP."""


@contextmanager
def replying(reply: Reply) -> Iterator[str]:
    """Serve one model, ``served``, whose answers ``reply`` gives; the value is the URL."""
    count = iter(range(100))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "served", "owned_by": "test"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*reply(next(count), body))

        def _send(self, status: int, value: object) -> None:
            if isinstance(value, bytes):  # in the place of HTTP
                self.wfile.write(value)
                return
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
