"""Download images from http(s) URLs: bounded, from public addresses only, and cached in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import math
import re
import socket
from collections.abc import Callable, Collection, Iterable
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from panscan.core import ImageError, now
from panscan.core.access import ALLOW_PRIVATE, remote_access
from panscan.core.lru import LruCache
from panscan.images.headers import image_error

MAX_BYTES = 128 * 2**20
"""Maximum size of a response, enforced while it arrives, whatever its headers claim."""

CACHE_BYTES = 512 * 2**20
"""Size of the cache of downloads, which evicts the least recently used; at least :data:`MAX_BYTES`."""

TIMEOUT_S = 30.0
"""Timeout for connecting, and between two chunks of a response, in seconds."""

TRANSFER_S = 60.0
"""Timeout for the whole transfer with all redirects, in seconds."""

MAX_REDIRECTS = 20

_HIDDEN = "***"
_LOGIN = re.compile(r"(?i)(\bhttps?://)[^\s/?#]*@")
_PASSWORD = re.compile(r"(?i)(?:password|passwd|pwd)=$")
_SECRET = re.compile(
    r"(?i)([?&;](?:[^=&#;\s]*(?:password|passwd|signature|token|secret|credentials?|authorization|api-?key|accesskey(?:id)?)"
    r"|(?:[^=&#;\s]*[-_.])?(?:pwd|sig|key|auth|jwt|sas|policy))=)(?!\*\*\*)[^&#;\s]+"
)


_CACHE: LruCache[tuple[str, bool], bytes] = LruCache(CACHE_BYTES, len)
"""A document is opened several times: to count its pages, to plan its views, and for the pixels of each page."""


class ConcealedUrl(str):
    """A URL with concealed credentials, for messages and records. ``full`` is the URL to fetch. Pickling keeps both."""

    full: str


def conceal(text: str) -> str:
    """Replace logins, passwords, tokens and signatures in http(s) URLs by ``***``.

    The first digits of a hash follow for tokens and signatures, which may be the only difference between two URLs.
    """
    if "://" not in text:
        return text

    def hidden(match: re.Match[str]) -> str:
        value = match[0][len(match[1]) :].encode(errors="replace")
        digest = "" if _PASSWORD.search(match[1]) else hashlib.sha256(value).hexdigest()[:8]  # passwords can be guessed
        return match[1] + _HIDDEN + digest

    return _SECRET.sub(hidden, _LOGIN.sub(rf"\g<1>{_HIDDEN}@", text))


def named_url(url: str) -> str:
    """Return the URL, as a :class:`ConcealedUrl` if it contains credentials."""
    if isinstance(url, ConcealedUrl) or (name := conceal(url)) == url:
        return url
    concealed = ConcealedUrl(name)
    concealed.full = url
    return concealed


def rewritten(url: str, change: Callable[[str], str]) -> str:
    """Return ``change(url)``; concealed credentials stay concealed."""
    if not isinstance(url, ConcealedUrl):
        return change(url)
    concealed = ConcealedUrl(change(str(url)))
    concealed.full = change(url.full)
    return concealed


def fetch(url: str) -> bytes:
    """Return the content of a URL, from the cache or the network; follow redirects.

    Non-public addresses are refused, unless :func:`panscan.core.access.remote_access` allows them. Only then are the
    proxies in the environment used: a proxy resolves names itself, so their addresses cannot be checked.

    Raises:
        ImageError: the URL is malformed or leads to a non-public address, the server does not respond in time,
            responds with a status other than 200, or sends more than :data:`MAX_BYTES`.
    """
    download = _Download(url, max_bytes=MAX_BYTES)
    if f"{_HIDDEN}@" in download.url or f"={_HIDDEN}" in download.url:
        raise image_error(download.name, "its credentials are not stored in records: pass the full URL again")
    return _CACHE.computed((download.url, download.private), download.run)


def fetch_from(url: str, domains: Collection[str], *, max_bytes: int = MAX_BYTES, deadline: float = math.inf) -> bytes:
    """Return the content of a URL if it and every redirect lead to one of ``domains``; bypass the cache.

    Args:
        url: an http(s) URL.
        domains: lower-case host names that are allowed; their subdomains are not.
        max_bytes: maximum size of the response.
        deadline: end of the transfer, in seconds of :func:`panscan.core.now`; at the latest after
            :data:`TRANSFER_S`.

    Raises:
        ImageError: see :func:`fetch`; also for another host.
    """
    return _Download(url, domains, max_bytes, deadline).run()


class _Download:
    """One transfer and its deadline.

    Args:
        url: the URL, perhaps with concealed credentials.
        domains: allowed hosts; None: all.
        max_bytes: maximum size of the response.
        deadline: seconds of :func:`panscan.core.now`.

    Attributes:
        name: the URL's name in messages.
        url: the URL to fetch.
        private: whether non-public addresses are allowed.
    """

    def __init__(
        self,
        url: str,
        domains: Collection[str] | None = None,
        max_bytes: int = MAX_BYTES,
        deadline: float = math.inf,
    ) -> None:
        self.name = named_url(url)
        self.url = self.name.full if isinstance(self.name, ConcealedUrl) else url
        self.private = remote_access().private_urls
        self._domains, self._max_bytes = domains, max_bytes
        self._end = min(now() + TRANSFER_S, deadline)

    def run(self) -> bytes:
        try:
            return self._follow(httpx.URL(self.url))
        except httpcore.TimeoutException as error:
            late = f"it took longer than {TRANSFER_S:g} s" if now() >= self._end else f"{TIMEOUT_S:g} s without data"
            raise self.failed(late) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError) as error:
            raise self.failed(str(error) or type(error).__name__) from error
        except (httpx.InvalidURL, ValueError, OverflowError) as error:
            raise self.failed(str(error)) from error

    def failed(self, why: str) -> ImageError:
        return image_error(self.name, conceal(f"could not be fetched ({why})"))

    def left(self) -> float:
        """Return the timeout of the next wait, in seconds."""
        left = min(TIMEOUT_S, self._end - now())
        if left <= 0:
            raise httpcore.ReadTimeout
        return left

    def _follow(self, url: httpx.URL) -> bytes:
        login = (url.username, url.password)
        for _ in range(MAX_REDIRECTS + 1):
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx.InvalidURL("a URL needs http:// or https:// and a host")
            if self._domains is not None and url.host.lower().rstrip(".") not in self._domains:
                raise self.failed(f"{url.host} is not an allowed domain")
            response = self._get(url, login)
            if isinstance(response, bytes):
                return response
            target = url.join(response)
            if target.userinfo or (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
                login = (target.username, target.password)  # a password is for the server that it was given for
            url = target
        raise self.failed(f"more than {MAX_REDIRECTS} redirects")

    def _get(self, url: httpx.URL, login: tuple[str, str]) -> bytes | str:
        """Return the content, or the URL of a redirect."""
        # Images are compressed already, and without further encoding a small answer cannot unfold into a large one.
        headers = {"Host": url.netloc, "Accept-Encoding": b"identity", "User-Agent": b"panscan"}
        if any(login):
            headers["Authorization"] = b"Basic " + base64.b64encode(":".join(login).encode())
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        with self._pool(url) as pool, pool.stream("GET", target, headers=list(headers.items())) as response:
            location = {name.lower(): value for name, value in response.headers}.get(b"location")
            if location and response.status in (301, 302, 303, 307, 308):
                return location.decode()
            if response.status != httpx.codes.OK:
                reason = response.extensions.get("reason_phrase", b"").decode("ascii", "replace")
                raise image_error(self.name, f"HTTP status {response.status} {reason}".rstrip())
            content = bytearray()
            for piece in response.iter_stream():
                content += piece
                if len(content) > self._max_bytes:
                    raise image_error(self.name, f"more than {self._max_bytes} bytes")
        return bytes(content)

    def _pool(self, url: httpx.URL) -> httpcore.ConnectionPool:
        tls, backend = httpx.create_ssl_context(), _Backend(self)
        proxies = getproxies() if self.private and not proxy_bypass(url.host) else {}
        if not (given := proxies.get(url.scheme) or proxies.get("all")):
            return httpcore.ConnectionPool(tls, network_backend=backend)
        proxy = httpx.Proxy(given if "://" in given else f"http://{given}")
        if proxy.url.scheme not in ("http", "https"):
            raise ValueError(f"the proxy {proxy.url.scheme}://{proxy.url.host} is not an http or https proxy")
        return httpcore.HTTPProxy(str(proxy.url), proxy.raw_auth, ssl_context=tls, network_backend=backend)


class _Backend(httpcore.NetworkBackend):
    """Connects to checked addresses. A name is resolved once, so that it cannot change between check and connection."""

    def __init__(self, download: _Download) -> None:
        self._download = download

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error.strerror}") from error
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in entries))
        allowed = addresses if self._download.private else list(filter(is_public, addresses))
        if not allowed:
            named = addresses[0] if host == addresses[0] else f"{host} is {addresses[0]}"
            raise self._download.failed(
                f"{named}, not a public address: allow it with --allow-private-urls or {ALLOW_PRIVATE}=1"
            )
        for address in allowed[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return self._connected(address, port)
        return self._connected(allowed[-1], port)

    def _connected(self, address: str, port: int) -> _Stream:
        return _Stream(httpcore.SyncBackend().connect_tcp(address, port, self._download.left()), self._download)


class _Stream(httpcore.NetworkStream):
    """A connection whose waits all end at the transfer's deadline, however slowly the server sends."""

    def __init__(self, stream: httpcore.NetworkStream, download: _Download) -> None:
        self._stream, self._download = stream, download

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._download.left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._download.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> _Stream:
        inner = self._stream.start_tls(ssl_context, server_hostname, self._download.left())
        return _Stream(inner, self._download)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that IANA has assigned (RFC 4291, RFC 3587)

# Not left to ``ipaddress``, whose tables differ between versions of Python. Sources: IANA's registries
# iana-ipv4-special-registry and iana-ipv6-special-registry, and the documentation of the clouds. Where IANA assigns
# parts of a range for protocols, the whole range counts.
_NOT_PUBLIC = [
    ipaddress.ip_network(range)
    for range in (
        "0.0.0.0/8",  # this network (RFC 791)
        "10.0.0.0/8",  # private (RFC 1918)
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # carrier-grade NAT (RFC 6598), and 100.100.100.200: metadata of Alibaba Cloud
        "127.0.0.0/8",  # loopback (RFC 1122)
        "168.63.129.16/32",  # Azure: DNS, health probes and secrets of the virtual machine
        "169.254.0.0/16",  # link-local (RFC 3927): metadata of AWS, Google Cloud, Azure, DigitalOcean
        "192.0.0.0/24",  # protocol assignments (RFC 6890), and 192.0.0.192: metadata of Oracle Cloud
        "192.0.2.0/24",  # documentation (RFC 5737)
        "198.51.100.0/24",
        "203.0.113.0/24",
        "192.31.196.0/24",  # AS112 (RFC 7535)
        "192.52.193.0/24",  # AMT (RFC 7450)
        "192.175.48.0/24",  # AS112 (RFC 7534)
        "192.88.99.0/24",  # 6to4 relays (RFC 7526)
        "198.18.0.0/15",  # benchmarks (RFC 2544)
        "224.0.0.0/4",  # multicast (RFC 5771)
        "240.0.0.0/4",  # reserved (RFC 1112), with the broadcast address
        "2001::/23",  # protocol assignments (RFC 2928): Teredo, benchmarks, AMT, ORCHID, drones
        "2001:db8::/32",  # documentation (RFC 3849)
        "3fff::/20",  # documentation (RFC 9637)
        "2002::/16",  # 6to4, which contains an IPv4 address (RFC 3056)
        "2620:4f:8000::/48",  # AS112 (RFC 7534)
    )
]


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet.

    NAT64 addresses, through which networks without IPv4 reach IPv4 hosts, count as the IPv4 address that they contain.
    IPv4-mapped, IPv4-compatible, 6to4 and Teredo addresses are refused, as is all that is not global unicast: loopback,
    link-local, site-local, unique local (with fd00:ec2::254, AWS), local NAT64, discard and segment routing addresses.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    assigned = ip.version == 4 or ip in _GLOBAL_UNICAST
    return assigned and not any(ip in network for network in _NOT_PUBLIC)
