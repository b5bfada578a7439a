"""Servers under pressure: full queues, deadlines, dead engines, signals, hostile requests."""

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from benchmarks.fuzz_server import GROUPS, Fuzzer, attack, problem_of
from tests.conftest import until
from tests.footprint import run_measured
from tests.forked_workers import runs
from tests.serve.serving import DEADLINE, Server, chat, get, open_request, post, received, refused, user

from panscan.model.bundled import tiny_directory

PATH = "/v1/chat/completions"


def long(tokens: int = 2000, **fields: Any) -> dict[str, Any]:
    """Return a request that computes for a while."""
    return {"messages": user("Hi"), "max_tokens": tokens, "ignore_eos": True, **fields}


def test_no_collection_visits_what_was_there_before_the_first_request() -> None:
    """A full collection stops all threads."""
    code = """
import gc
gc.unfreeze()  # what the fork froze
from panscan.serve.loaded_model import open_model
from panscan.settings import Settings
model = open_model(Settings(model="tiny", runner="engine", dtype="fp32", device="cpu", kv_cache_gb=0.02))
print(gc.get_freeze_count(), len(gc.get_objects()))
model.engine.close()
"""
    frozen, visited = map(int, run_measured(code, forked=True))
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model, which a test can hide."""
    return Path(shutil.copytree(tiny_directory(), tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def small(start: Callable[..., Server], model: Path) -> Server:
    """A server for one running and two waiting requests, whose engine has two ranks."""
    limits = ["--max-num-seqs", "1", "--max-queued-requests", "2", "--kv-cache-gb", "0.05", "--drain-timeout", "50"]
    return start("--model", str(model), "--tensor-parallel-size", "2", *limits)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as opened:
        yield opened


def test_a_full_queue_returns_429(small: Server) -> None:
    accepted = [open_request(small, PATH, json.dumps(long(16_000)).encode()) for _ in range(3)]
    until(lambda: small.metric("vllm:num_requests_waiting") == 2 and small.metric("vllm:num_requests_running") == 1)
    response = post(small, PATH, long(1))
    assert "at capacity" in refused(response, 429)
    assert response.json()["error"]["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
    for path in ("/health", "/ready", "/v1/models"):
        assert get(small, path).status_code == 200
    for connection in accepted:
        connection.close()
    until(small.idle)


def test_a_deadline_returns_504_or_ends_the_stream(small: Server) -> None:
    headers = {"X-Request-Timeout": "0.5"}
    refused(post(small, PATH, long(16_000), headers=headers), 504)
    *_, last = post(small, PATH, long(16_000, stream=True), headers=headers).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
    refused(post(small, PATH, long(1), headers={"X-Request-Timeout": "soon"}), 400)
    until(small.idle)


def test_slow_bodies_hold_no_slot_and_end_with_their_deadline(small: Server) -> None:
    slow = [open_request(small, PATH, b"{", length=500) for _ in range(8)]
    assert post(small, PATH, long(1)).status_code == 200
    for connection in slow:
        connection.close()
    late = [open_request(small, PATH, b"{", f"X-Request-Timeout: 0.3{index}", length=500) for index in range(100)]
    assert {received(connection).split(maxsplit=2)[1] for connection in late} == {b"504"}
    until(small.idle)


def test_an_engine_that_dies_is_replaced_once_it_can_load(small: Server, pool: ThreadPoolExecutor, model: Path) -> None:
    """A stream ends with an error; other requests are retried, unless their clients leave.

    The memory of a GPU may be free only some time after its process has died.
    """
    expected = chat(small, user("Hi"), max_tokens=100, ignore_eos=True).json()["choices"]
    reader = Reader(small, long(16_000))
    assert reader.begun.wait(DEADLINE)
    unstreamed = pool.submit(post, small, PATH, long(100))
    until(lambda: small.metric("panscan:http_requests_active") == 2)
    before, hidden = small.engine, model.with_name("hidden")
    model.rename(hidden)
    rank = next(child for child in before.children() if runs(child, "panscan.engine.rank_worker"))
    rank.kill()
    *_, last = reader.events()
    assert "exited with code 1" in json.loads(last)["error"]["message"]
    assert get(small, "/ready").status_code == 503
    abandoned = open_request(small, PATH, json.dumps(long(100)).encode())
    until(lambda: small.metric("panscan:http_requests_active") == 2)
    abandoned.close()
    until(lambda: small.metric("panscan:http_requests_active") == 1)
    until(lambda: any("could not be restarted" in line for line in small.log))
    hidden.rename(model)
    assert unstreamed.result().json()["choices"] == expected
    assert small.metric("panscan:requests_retried") >= 1
    assert small.engine != before
    until(small.idle)


def test_signals_finish_what_runs_refuse_the_rest_and_then_end_it(small: Server, pool: ThreadPoolExecutor) -> None:
    """Runs last, because it stops the server."""
    reader = Reader(small, long(100))
    assert reader.begun.wait(DEADLINE)
    idle = httpx.Client(base_url=str(small), timeout=DEADLINE)
    assert idle.get("/ready").status_code == 200
    late = Reader(small, long(16_000))
    until(lambda: small.metric("panscan:http_requests_active") == 2)
    cut = pool.submit(post, small, PATH, long(16_000))
    until(lambda: small.metric("panscan:http_requests_active") == 3)
    small.process.send_signal(signal.SIGHUP)
    until(lambda: idle.get("/ready").status_code == 503)
    response = idle.post(PATH, json=long(1))
    assert "shutting down" in refused(response, 503) and response.headers["retry-after"]
    assert reader.events()[-1] == "[DONE]"
    assert late.begun.wait(DEADLINE)
    small.process.send_signal(signal.SIGTERM)
    assert "shutting down" in json.loads(late.events()[-1])["error"]["message"]
    assert "shutting down" in refused(cut.result(), 503)
    assert small.process.wait(DEADLINE) == 0
    assert not any("Traceback" in line for line in small.log)
    idle.close()


CASES = 250
MOST_GROWTH = 400 * 2**20


def test_hostile_requests_are_refused_and_leave_nothing_behind(server: Server) -> None:
    until(server.idle)
    fuzzer, processes = Fuzzer(str(server)), (psutil.Process(server.pid), server.engine)
    expected = fuzzer.question()
    before = [process.memory_info().rss for process in processes]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: fuzzer.send(index, attack(1, index)), range(CASES)))
    assert fuzzer.failures == []
    sent = {group: sum(counts.values()) for group, counts in fuzzer.statuses.items()}
    assert sent == dict.fromkeys(GROUPS, CASES // len(GROUPS))
    assert fuzzer.question() == expected
    until(server.idle)
    grown = [process.memory_info().rss - old for process, old in zip(processes, before, strict=True)]
    assert max(grown) < MOST_GROWTH


def test_the_fuzzer_detects_failures() -> None:
    error = b'{"error": {"message": "a", "type": "b", "param": null, "code": null}}'
    assert not problem_of(200, b"") and not problem_of(503, error) and not problem_of(400, error)
    for status, content in ((500, error), (400, b"Not Found"), (404, b'{"error": "a"}'), (422, b'{"detail": []}')):
        assert problem_of(status, content)
