"""One load level: requests sent to an endpoint by one or several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from panscan.load.chat import ChatRequest, Endpoint, Exchange

__all__ = ["ClientLoad", "LevelResult", "run_level"]


@dataclass(frozen=True, slots=True)
class ClientLoad:
    processes: int
    lag_median_ms: float
    lag_p99_ms: float
    cpu_share: float
    limited: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LevelResult:
    exchanges: list[Exchange]
    started: float
    ended: float
    client: ClientLoad


def run_level(
    endpoint: Endpoint,
    requests: Sequence[ChatRequest],
    arrivals: Sequence[float] | None,
    *,
    max_concurrency: int | None = None,
    processes: int = 1,
    on_done: Callable[[Exchange], None] | None = None,
    cancelled: threading.Event | None = None,
) -> LevelResult: ...
