"""Servers under pressure: full queues, deadlines, dead engines, signals. Each server is shared by several tests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.footprint import run_measured
from tests.serve.serving import DEADLINE, Server, chat, engines_of, post, refused, user, wait_for

from panscan.core import Request, Sampling
from panscan.model.bundled import mini_directory
from panscan.serve.client import RequestWork
from panscan.serve.engine_process import EngineProcess
from panscan.settings import Settings

PATH = "/v1/chat/completions"


def long(tokens: int = 2000, **fields: Any) -> dict[str, Any]:
    """Return a request that computes for a while."""
    return {"messages": user("Hi"), "max_tokens": tokens, "ignore_eos": True, **fields}


def test_no_collection_visits_what_was_there_before_the_first_request() -> None:
    """A full collection stops all threads."""
    code = """
import gc
from panscan.serve.loaded_model import open_model
from panscan.settings import Settings
model = open_model(Settings(model="tiny", runner="engine", dtype="fp32", device="cpu", kv_cache_gb=0.02))
print(gc.get_freeze_count(), len(gc.get_objects()))
model.engine.close()
"""
    frozen, visited = map(int, run_measured(code))
    assert frozen > 100_000 > visited


class Reader:
    """A thread that reads a stream.

    Args:
        server: server to ask.
        body: request body.
    """

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.begun = threading.Event()
        self.text = ""
        self._args = server, {**body, "stream": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        server, body = self._args
        with httpx.stream("POST", f"{server}{PATH}", json=body, timeout=DEADLINE) as response:
            for piece in response.iter_text():
                self.text += piece
                if '"content":"' in piece:
                    self.begun.set()

    def events(self) -> list[str]:
        """Return all events, once the stream has ended."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return [event.removeprefix("data: ") for event in self.text.split("\n\n") if event]


@pytest.fixture(scope="module")
def small(start: Callable[..., Server]) -> Server:
    """A server for one running and one waiting request."""
    return start("--max-num-seqs", "1", "--max-queued-requests", "1", "--kv-cache-gb", "0.05", "--drain-timeout", "50")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as opened:
        yield opened


def sent(pool: ThreadPoolExecutor, server: Server, body: dict[str, Any], **options: Any) -> Future[httpx.Response]:
    """Send a request in a thread."""
    return pool.submit(post, server, PATH, body, **options)


def test_a_full_queue_returns_429(small: Server) -> None:
    computing = socket_with(small, long(16_000))
    waiting = socket_with(small, long(16_000))
    wait_for(lambda: small.metric("panscan:http_requests_active") == 2)
    wait_for(lambda: small.metric("vllm:num_requests_waiting") == small.metric("vllm:num_requests_running") == 1)
    response = post(small, PATH, long(1))
    assert "at capacity" in refused(response, 429)
    assert response.json()["error"]["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
    for path in ("/health", "/ready", "/v1/models"):
        assert httpx.get(f"{small}{path}").status_code == 200
    computing.close()
    waiting.close()
    wait_for(small.idle)


def socket_with(server: Server, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which a request was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def test_a_deadline_returns_504_or_ends_the_stream(small: Server) -> None:
    headers = {"X-Request-Timeout": "0.5"}
    refused(post(small, PATH, long(16_000), headers=headers), 504)
    *_, last = post(small, PATH, long(16_000, stream=True), headers=headers).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
    refused(post(small, PATH, long(1), headers={"X-Request-Timeout": "soon"}), 400)
    wait_for(small.idle)


def test_slow_bodies_hold_no_slot_and_end_with_their_deadline(small: Server) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    slow = [socket.create_connection(("127.0.0.1", small.port), DEADLINE) for _ in range(8)]
    for connection in slow:
        connection.sendall(head.encode() + b"{")
    assert post(small, PATH, long(1)).status_code == 200
    for connection in slow:
        connection.close()
    with socket.create_connection(("127.0.0.1", small.port), DEADLINE) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX-Request-Timeout: 0.3"
        connection.sendall(head.encode() + b"\r\nContent-Length: 500\r\n\r\n{")
        received = b""
        while piece := connection.recv(65_536):  # the server closes the connection
            received += piece
    assert received.startswith(b"HTTP/1.1 504 ")
    wait_for(small.idle)


def test_a_killed_engine_is_replaced(small: Server, pool: ThreadPoolExecutor) -> None:
    """The stream ends with an error; the non-streaming request is retried."""
    expected = chat(small, user("Hi"), max_tokens=100, ignore_eos=True).json()["choices"]
    reader = Reader(small, long(16_000))
    assert reader.begun.wait(DEADLINE)
    whole = sent(pool, small, long(100))
    wait_for(lambda: small.metric("panscan:http_requests_active") == 2)
    before = small.engine
    before.send_signal(signal.SIGKILL)
    *_, last = reader.events()
    assert "SIGKILL" in json.loads(last)["error"]["message"]
    wait_for(lambda: [child for child in engines_of(small.pid) if child != before])
    assert httpx.get(f"{small}/ready").status_code == 503
    for child in engines_of(small.pid):  # while it loads
        child.kill()
    assert whole.result().json()["choices"] == expected
    assert small.metric("panscan:requests_retried") >= 1
    assert small.engine != before
    wait_for(small.idle)


def test_sigterm_finishes_what_runs_and_refuses_the_rest(small: Server, pool: ThreadPoolExecutor) -> None:
    """Runs last, because it stops the server."""
    reader = Reader(small, long(300))
    assert reader.begun.wait(DEADLINE)
    idle = httpx.Client(base_url=str(small), timeout=DEADLINE)
    assert idle.get("/ready").status_code == 200
    small.process.send_signal(signal.SIGTERM)
    wait_for(lambda: idle.get("/ready").status_code == 503)
    response = idle.post(PATH, json=long(1))
    assert "shutting down" in refused(response, 503) and response.headers["retry-after"]
    assert reader.events()[-1] == "[DONE]"
    assert small.process.wait(DEADLINE) == 0
    idle.close()


def test_a_killed_rank_restarts_the_engine_and_a_second_signal_ends_requests(
    start: Callable[..., Server], pool: ThreadPoolExecutor
) -> None:
    server = start("--model", "tiny", "--tensor-parallel-size", "2", "--kv-cache-gb", "0.05")
    before = server.engine.pid
    whole = sent(pool, server, long(400))
    wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
    ranks = [child for child in server.engine.children() if "rank" in " ".join(child.cmdline())]
    ranks[0].kill()
    assert whole.result().json()["usage"]["completion_tokens"] == 400  # by the engine that was started in its place
    assert server.engine.pid != before
    assert server.metric("panscan:requests_retried") == 1
    reader = Reader(server, long(16_000))
    assert reader.begun.wait(DEADLINE)
    cut = sent(pool, server, long(16_000))
    wait_for(lambda: server.metric("panscan:http_requests_active") == 2)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: httpx.get(f"{server}/ready").status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    assert "shutting down" in json.loads(reader.events()[-1])["error"]["message"]
    assert "shutting down" in refused(cut.result(), 503)
    assert server.process.wait(DEADLINE) == 0
    assert not any("Traceback" in line for line in server.log)


def test_requests_survive_an_engine_that_cannot_load_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory of a GPU may be free only some time after its process has died."""
    model = tmp_path / "model"
    shutil.copytree(mini_directory(), model)

    async def scenario() -> tuple[str, str, int]:
        settings = Settings(runner="engine", model=str(model), device="cpu", kv_cache_gb=0.02)
        backend = EngineProcess(settings)
        await backend.start()
        try:
            sampling = Sampling(max_new_tokens=200, ignore_eos=True)
            abandoned, waiting = (
                backend.submit(Request(prompt="Hi", sampling=sampling, id=id), RequestWork(0, 10, 200), stream=False)
                for id in ("abandoned", "waiting")
            )
            assert backend.pid is not None  # it is ready
            os.kill(backend.pid, signal.SIGSTOP)  # so that the engine cannot end the request itself
            abandoned.cancel()
            model.rename(tmp_path / "gone")
            os.kill(backend.pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
                cancelled = await abandoned.result()
                while not any("could not be restarted" in line for line in caplog.messages):
                    await asyncio.sleep(0.05)
                (tmp_path / "gone").rename(model)
                answered = await waiting.result()
            return cancelled.finish_reason, answered.finish_reason, backend.retried
        finally:
            await backend.close()

    assert asyncio.run(scenario()) == ("cancelled", "length", 1)
