"""Server options: limits, API keys and allowed sources. Plain data, which Ray can send to replicas."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from panscan.core import SettingError
from panscan.core.files import read_text
from panscan.core.option import shorten
from panscan.settings import ServerTable, Settings, check_options, default_of

_MOST_KEYS_BYTES = 2**20
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")


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
        stripped = [key.strip() for key in keys]
        if not all(key and key.isprintable() and " " not in key for key in stripped):
            raise SettingError("--api-key: a key is empty, or contains spaces or control characters")
        if not all(map(str.isascii, stripped)):
            raise SettingError("--api-key: a key contains characters other than ASCII, which no HTTP header can carry")
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in stripped))

    def accept(self, key: str) -> bool:
        """Return whether this is one of the keys, in a time that does not depend on the key."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return any(matches)

    def __bool__(self) -> bool:
        return bool(self.digests)


def read_api_keys(path: Path) -> list[str]:
    """Return the keys of a file: one per line; empty lines and lines that start with # are ignored.

    Raises:
        SettingError: the file cannot be read, or has no key.
    """
    lines = read_text(path, _MOST_KEYS_BYTES, f"--api-key-file {path}", SettingError, pipe=True).split("\n")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingError(f"--api-key-file {path}: contains no key; write one per line")
    return keys


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


def _origin(given: str) -> str:
    """Return an origin as browsers send it, or ``*``.

    Raises:
        SettingError: it is neither, and would never match.
    """
    origin = given.strip().lower().removesuffix("/")
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9_.\[\]:-]+", origin):
        raise SettingError(
            f"--allowed-origins: expected an origin such as https://app.example.com, got {shorten(given)}"
        )
    return origin


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerTable):
    """The options of a server: what it runs and what it allows; the rest is in the table of options.

    Args:
        settings: settings of the model and its runner, and the defaults of requests.
        adapters: other models, which are the same with adapters, by their names in the API.
        api_keys: accepted API keys; empty: no authentication.
        max_pages: maximum number of pages per document.

    Raises:
        SettingError: a number is out of range, the routing policy is unknown, or a host name is none.
    """

    settings: Settings
    adapters: Mapping[str, str] = field(default_factory=dict)
    api_keys: ApiKeys = ApiKeys()
    max_pages: int = default_of("max_pages", "serve")

    def __post_init__(self) -> None:
        check_options(self, "serve")
        hosts = [_host_name("--allowed-hosts", name) for name in self.allowed_hosts]
        origins = [_origin(text) for text in self.allowed_origins]
        domains = [_host_name("--allowed-media-domains", name) for name in self.allowed_media_domains]
        for index, name in enumerate(domains):  # as images/fetch compares them: international names are decoded
            with suppress(UnicodeError):
                domains[index] = name.encode().decode("idna")
        in_headers = tuple(f"[{name}]" if ":" in name else name for name in hosts)
        object.__setattr__(self, "allowed_hosts", in_headers)
        object.__setattr__(self, "allowed_media_domains", tuple(domains))
        object.__setattr__(self, "allowed_origins", tuple(origins))

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.settings.model_name

    @property
    def models(self) -> dict[str, str]:
        """The served models, by their names in the API."""
        return {self.model_name: self.settings.model_name, **self.adapters}

    def url(self, port: int) -> str:
        """Return the server's URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host).strip("[]")
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def bound_socket(self) -> socket.socket:
        """Return a TCP socket that is bound to the server's address.

        Raises:
            SettingError: the address is in use, or does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is named; without it, small responses take 40 ms longer
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            reason = error.strerror or str(error)
            raise SettingError(f"--host {self.host} --port {self.port}: cannot be bound ({reason})") from error
        return bound
