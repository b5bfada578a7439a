"""Server options: limits, API keys and allowed sources. Plain data, which Ray can send to replicas."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from panscan.core import SettingError
from panscan.core.ranges import Range, shorten
from panscan.images.decode import MAX_PIXELS
from panscan.settings import Settings

__all__ = ["ROUTING", "SERVE_RANGES", "ApiKeys", "ServeOptions", "read_api_keys"]

SERVE_RANGES = {
    "port": Range(integer=True, ge=0, le=65_535, note="0 takes a free port"),
    "max_body_mb": Range(gt=0, le=4096),
    "max_images": Range(integer=True, ge=0, le=10_000),
    "max_pages": Range(integer=True, ge=1, le=1_000_000),
    "max_pixels": Range(integer=True, ge=1, le=MAX_PIXELS),
    "max_output_tokens": Range(integer=True, ge=1, le=2**20),
    "max_choices": Range(integer=True, ge=1, le=128),
    "max_queued_requests": Range(integer=True, ge=0, le=1_000_000),
    "request_timeout": Range(gt=0, le=86_400, note="seconds"),
    "drain_timeout": Range(ge=0, le=86_400, note="seconds"),
}
"""The range of each numeric option."""

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")

ROUTING = ("affinity", "work", "random")
"""Routing policies: least predicted work with a preference for cached images, without it, or random."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The API keys of a server, stored as SHA-256 digests only."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> ApiKeys:
        """Return the keys, without surrounding spaces.

        Raises:
            SettingError: a key is empty, or contains spaces, control characters or characters other than ASCII, which
                clients cannot send in a header.
        """
        found = [key.strip() for key in keys]
        if not all(key and key.isprintable() and " " not in key for key in found):
            raise SettingError("--api-key: a key is empty, or contains spaces or control characters")
        if not all(map(str.isascii, found)):
            raise SettingError("--api-key: a key contains characters other than ASCII, which no HTTP header can carry")
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in found))

    def accept(self, key: str) -> bool:
        """Return whether this is one of the keys, in a time that does not depend on the key."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self.digests]
        return any(matches)

    def __bool__(self) -> bool:
        return bool(self.digests)


def read_api_keys(path: Path) -> list[str]:
    """Return the keys of a file: one per line; empty lines and lines that start with # are ignored.

    Raises:
        SettingError: the file cannot be read, or has no key.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--api-key-file {path}: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise SettingError(f"--api-key-file {path}: contains no key; write one per line")
    return found


def _host_name(flag: str, given: str) -> str:
    """Return a host name in lower-case ASCII, with international names in Punycode.

    Raises:
        SettingError: it is no host name, such as a URL or a name with a port, and would never match.
    """
    name = given.strip().lower().rstrip(".")
    with suppress(UnicodeError):
        name = name if name.isascii() else name.encode("idna").decode()
    address = name.removeprefix("[").removesuffix("]")
    with suppress(ValueError):
        ipaddress.ip_address(address)
        return address
    if not _HOST.fullmatch(name):
        raise SettingError(f"{flag}: expected a host name without scheme, port or path, got {shorten(given)}")
    return name


def _in_header(name: str) -> str:
    """Return a host name as the Host header has it."""
    return f"[{name}]" if ":" in name else name


def _in_url(name: str) -> str:
    """Return a host name as :mod:`panscan.images.fetch` compares it: international names are decoded."""
    with suppress(UnicodeError):
        return name.encode().decode("idna")
    return name


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of a server: what it runs and what it allows.

    Args:
        settings: settings of the model and its runner, and the defaults of requests.
        host: address to bind.
        port: TCP port; 0 for a free one.
        served_model_name: the model's name in the API; None: the name of the checkpoint.
        api_keys: accepted API keys; empty: no authentication.
        allowed_hosts: host names that are accepted besides the bound address.
        allowed_media_domains: domains from which images may be fetched; empty: no remote images.
        allowed_local_media_path: directory below which ``file:`` URLs may lie; None: no local files.
        max_body_mb: maximum size of a request body, in MB (10^6 bytes).
        max_images: maximum number of images and documents per request.
        max_pages: maximum number of pages per document.
        max_pixels: maximum number of pixels per image or page, checked before decoding.
        max_output_tokens: maximum number of output tokens per answer.
        max_choices: maximum number of answers per request (``n``).
        max_queued_requests: maximum number of waiting requests; further ones get status 429.
        request_timeout: seconds from acceptance to the end of an answer.
        drain_timeout: seconds that running requests have to finish after SIGTERM.
        routing: routing policy, one of :data:`ROUTING`.
        otlp_traces_endpoint: URL that receives OpenTelemetry traces; None: no traces.

    Raises:
        SettingError: a number is out of range, the routing policy is unknown, or a host name is none.
    """

    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_hosts: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    max_body_mb: float = 64.0
    max_images: int = 16
    max_pages: int = 50
    max_pixels: int = MAX_PIXELS
    max_output_tokens: int = 16_384
    max_choices: int = 16
    max_queued_requests: int = 256
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    routing: str = "affinity"
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTING:
            raise SettingError(f"--routing: expected {', '.join(ROUTING)}, got {self.routing!r}")
        for item in fields(self):
            if item.name in SERVE_RANGES:
                SERVE_RANGES[item.name].check(f"--{item.name.replace('_', '-')}", getattr(self, item.name))
        hosts = (_in_header(_host_name("--allowed-hosts", name)) for name in self.allowed_hosts)
        domains = (_in_url(_host_name("--allowed-media-domains", name)) for name in self.allowed_media_domains)
        object.__setattr__(self, "allowed_hosts", tuple(hosts))
        object.__setattr__(self, "allowed_media_domains", tuple(domains))

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.settings.model_name
