"""A small S3 server over HTTP, whose faults a test controls."""

import contextlib
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY = "test-key"


class S3Server(ThreadingHTTPServer):
    """S3 with path-style URLs: list (paged), HEAD, GET with ranges, PUT and DELETE.

    Requests that are not signed with :data:`ACCESS_KEY` are refused. Attributes: ``buckets`` (objects by key of each
    bucket), ``page_size`` of listings, ``requests`` (method and target of each request), ``refuse_puts``,
    ``refused`` (keys that may not be read), ``endless`` (listings never end: of no names, or of the same ones again),
    ``broken`` (number of the next objects in whose middle the connection ends).
    """

    daemon_threads = True

    def __init__(self, *buckets: str, page_size: int = 1000) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.page_size = page_size
        self.requests: list[tuple[str, str]] = []
        self.refuse_puts = False
        self.endless = False
        self.broken = 0.0
        self.refused: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def _route(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, self.key = unquote(url.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId")
        elif bucket not in self.server.buckets:
            self._error(404, "NoSuchBucket")
        else:
            self.objects = self.server.buckets[bucket]
            getattr(self, f"_{self.command.lower()}")(body)

    do_GET = do_HEAD = do_PUT = do_DELETE = _route  # noqa: N815 - the names that http.server calls

    def _get(self, _body: bytes) -> None:
        if "list-type" in self.query:
            self._list()
        elif self.key in self.server.refused:
            self._error(403, "AccessDenied")
        elif self.key not in self.objects:
            self._error(404, "NoSuchKey")
        else:
            content, status, headers = self.objects[self.key], 200, {}
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start = int(first) if first else len(content) - int(last)
                end = int(last) + 1 if first and last else len(content)
                headers["Content-Range"] = f"bytes {start}-{min(end, len(content)) - 1}/{len(content)}"
                content, status = content[start:end], 206
            self.close_connection = self.command == "GET" and self.server.broken > 0
            self.server.broken -= self.close_connection
            self._send(content, status, ETag=_etag(self.objects[self.key]), **headers)

    _head = _get

    def _list(self) -> None:
        prefix = self.query.get("prefix", "")
        after = "" if self.server.endless else self.query.get("continuation-token", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page = keys[: self.server.page_size]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{_etag(self.objects[key])}</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            for key in page
        )
        more = self.server.endless or len(page) < len(keys)
        token = f"<NextContinuationToken>{escape(page[-1] if page else '')}-</NextContinuationToken>" if more else ""
        self._xml("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}")

    def _put(self, body: bytes) -> None:
        if self.server.refuse_puts:
            self._error(403, "AccessDenied")
        else:
            self.objects[self.key] = body
            self._send(b"", ETag=_etag(body))

    def _delete(self, _body: bytes) -> None:
        self.objects.pop(self.key, None)
        self._send(b"", 204)

    def _error(self, status: int, code: str) -> None:
        self._send(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), status)

    def _xml(self, name: str, content: str) -> None:
        self._send(f'<?xml version="1.0"?><{name}>{content}</{name}>'.encode())

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        fixed = {"Content-Length": str(len(content)), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        for name, value in {**fixed, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(content[: len(content) // 2] if self.close_connection else content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
