"""Checks before a request is handled: host, origin, API key and body size."""

from __future__ import annotations

import ipaddress
import re
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from panscan.serve.admission import RefusedError
from panscan.serve.options import ServeOptions
from panscan.serve.replies import error_body, json_response

_OPEN = ("/", "/health", "/ready")  # no key required: they reveal nothing private
_OPEN_PREFIX = "/playground/"
_PROBES = ("/health", "/ready")  # accepted with any host name: orchestrators use the container's address
_SINGLE = (b"host", b"origin", b"authorization", b"content-type", b"content-length", b"transfer-encoding")
_PORT = re.compile(r":\d+$", re.ASCII)  # of a Host header
_ABSOLUTE = re.compile(r"https?://(?P<authority>[^/]*)(?P<path>/.*)?", re.IGNORECASE | re.DOTALL)
_LENGTH_DIGITS = 20  # of a content length
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """Return an application that gives every response the header ``X-Request-Id``: the client's own, or a new one.

    It is also ``scope["state"]["request_id"]``.

    Args:
        app: application that answers requests, errors included.
    """

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await app(scope, receive, send_identified)

    return identified


class Guard:
    """ASGI middleware that refuses requests with 400, 401, 403, 413 or 415 before any handler sees them.

    - Headers: repeated or encoded headers that servers interpret differently are refused.
    - Key: if the server has API keys, ``Authorization: Bearer KEY`` is required except for the
      playground's static files and the health checks.
    - Host: a server on a loopback address answers only to local names, so DNS rebinding cannot reach it.
    - Origin: cross-origin requests of browsers are refused, except from ``--allowed-origins``.

    Args:
        app: application that handles accepted requests.
        options: the server's keys, hosts and limits.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._keys = app, options.api_keys
        self._limit = round(options.max_body_mb * 1e6)
        self._origins = {*options.allowed_origins}
        try:
            loopback = options.host == "localhost" or ipaddress.ip_address(options.host).is_loopback
        except ValueError:
            loopback = False
        bound = f"[{options.host}]" if ":" in options.host else options.host
        named = {name.lower() for name in options.allowed_hosts}
        self._hosts = named | _LOOPBACK | {bound.lower()} if loopback or named else None  # None: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or forward it to the application."""
        refusal = None
        if scope["type"] == "http":
            # Clients send absolute URLs to proxies, and RFC 9112 (section 3.2.2) requires every server to accept them.
            if absolute := _ABSOLUTE.fullmatch(scope["path"]):
                scope = {**scope, "path": absolute["path"] or "/"}
            refusal = _malformed(scope, absolute) or self._refusal(scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, _limited(receive, self._limit), send)
            return
        status, reason = refusal
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        if status in (400, 413, 415):  # the body is not read, so the connection cannot be reused
            headers["connection"] = "close"
        await json_response(error_body(reason, status), status, headers)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and reason of a refusal; None if the request is accepted."""
        host = headers.get("host", "").lower()
        if self._hosts is not None and path not in _PROBES and _PORT.sub("", host) not in self._hosts:
            return 403, "this host name is not allowed; add it with --allowed-hosts"
        if "origin" in headers:
            try:
                authority = urlsplit(headers["origin"]).netloc.lower()
            except ValueError:
                authority = ""
            same = authority and authority == host  # "null" has none
            if not same and self._origins.isdisjoint(("*", headers["origin"].lower())):
                return 403, "cross-origin requests are not allowed; allow the page's origin with --allowed-origins"
        if self._keys and path not in _OPEN and not path.startswith(_OPEN_PREFIX):
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._keys.accept(key.strip()):
                return 401, "a valid API key is required: Authorization: Bearer KEY"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > _LENGTH_DIGITS or int(length) > self._limit:
            return 413, f"the body may have at most {self._limit} bytes (--max-body-mb)"
        return None


def _malformed(scope: Scope, absolute: re.Match[str] | None) -> tuple[int, str] | None:
    """Return status and reason of a refusal if servers could interpret the headers differently, otherwise None."""
    names = [name.lower() for name, _ in scope["headers"]]
    repeated = next((name for name in _SINGLE if names.count(name) > 1), None)
    if repeated is not None:
        return 400, f"the header {repeated.decode()} must not be repeated"
    headers = Headers(scope=scope)
    if absolute and absolute["authority"].lower() != headers.get("host", "").lower():
        return 400, "the request's URL and its header Host name different hosts"
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        return 400, "the transfer encoding must be chunked"
    if "transfer-encoding" in headers and "content-length" in headers:
        return 400, "Content-Length and Transfer-Encoding exclude each other"
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return 415, "the body must not be compressed (Content-Encoding)"
    return None


def _limited(receive: Receive, limit: int) -> Receive:
    """Return a ``receive`` that counts the bytes of the body: Content-Length may be wrong or absent."""
    total = 0

    async def counted() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise RefusedError(413, f"the body exceeds {limit} bytes (--max-body-mb)", close=True)
        return message

    return counted
