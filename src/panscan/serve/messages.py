"""Messages between the HTTP server's process and the engine's. Plain data, pickled over a socket pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from panscan.core import PanscanError, Request, Result, TokenEvent
from panscan.serve.backend import ModelInfo
from panscan.settings import Settings

__all__ = [
    "AskQuery",
    "Cancel",
    "CountTokens",
    "Ended",
    "EngineReady",
    "Events",
    "LoadFailed",
    "Open",
    "Query",
    "QueryAnswer",
    "ReadStats",
    "Submit",
    "TokenTexts",
]


@dataclass(frozen=True, slots=True)
class Open:
    """To the engine, as first message: load a model. ``time_line``: see :func:`panscan.core.process.join_time_line`."""

    settings: Settings
    time_line: float


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: answer a request. ``stream``: whether its events are sent, or only its result."""

    request: Request
    stream: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine: cancel a request; it keeps the tokens so far. Ignored if the request has ended."""

    id: str


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Query: the tokens of a prompt; answered with :class:`panscan.serve.backend.TokenCounts`."""

    request: Request


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Query: the bytes of each token; answered with a list of bytes."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Query: current statistics; answered with :class:`panscan.core.Stats` between two steps."""


Query = CountTokens | TokenTexts | ReadStats


@dataclass(frozen=True, slots=True)
class AskQuery:
    """To the engine: answer a query. ``number``: identifies the answer."""

    number: int
    query: Query


@dataclass(frozen=True, slots=True)
class EngineReady:
    """From the engine: the model is loaded and warmed up."""

    info: ModelInfo
    pid: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """From the engine: the model cannot be loaded."""

    error: PanscanError


@dataclass(frozen=True, slots=True)
class Events:
    """From the engine: events of requests, by id, in order."""

    events: list[tuple[str, TokenEvent]]


@dataclass(frozen=True, slots=True)
class Ended:
    """From the engine: a request has ended; its events have been sent."""

    id: str
    result: Result


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """From the engine: the answer to a query, or the error that it raised."""

    number: int
    answer: Any | PanscanError
