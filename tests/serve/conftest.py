"""Fixtures for the server tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.serve.serving import DEADLINE, Server, launch


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server with the mini model and default limits. Tests leave it idle."""
    started = launch()
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    import openai  # not at the top: GPU machines need not have it

    return openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0, timeout=DEADLINE)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Server]]:
    """Start servers with other options; they stop after the module. Each takes about 8 s, so share them."""
    started: list[Server] = []

    def begin(*options: str, environment: dict[str, str] | None = None) -> Server:
        started.append(launch(*options, environment=environment))
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()
        server.process.wait()
