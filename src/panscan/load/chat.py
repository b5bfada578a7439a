"""Chat completions as a client: endpoints, encoded requests, and the outcome of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ERROR_KINDS",
    "ChatRequest",
    "Endpoint",
    "ErrorKind",
    "Exchange",
    "chat_body",
    "fetch_json",
]

ErrorKind = Literal["connect", "timeout", "http", "protocol", "stream", "usage", "client"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    id: str
    body: tuple[bytes, ...]
    max_tokens: int


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    *,
    stream: bool = True,
    ignore_eos: bool = False,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[bytes, ...]: ...


@dataclass(slots=True)
class Exchange:
    id: str
    due: float
    queued: float
    accepted: float
    tokens: list[float]
    end: float
    text: str
    finish_reason: str | None
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    image_tokens: int | None
    views: int | None
    status: int | None
    error: str | None
    error_kind: ErrorKind | None


def fetch_json(endpoint: Endpoint, method: str, path: str, body: Any = None, deadline: float = 30.0) -> Any: ...
