"""Load levels against endpoints with known answers, with faults, and with answers that have no end."""

import gc
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.robustness.hostile_server import ENDPOINTS, HostileServer
from tests.conftest import until
from tests.load.fake_server import fake_server

from panscan.core import EndpointError, Request, SettingError, from_perf_counter
from panscan.load import connection, generator
from panscan.load.chat import ChatRequest, Endpoint, RequestOutcome, chat_body, data_url, fetch_json, served_models
from panscan.load.generator import run_level
from panscan.load.probe import find_model
from panscan.verify.endpoint import EndpointClient

TTFT, ITL, TOKENS = 0.030, 0.004, 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_ms=1e3 * TTFT, itl_ms=1e3 * ITL) as url:
        yield url


def requests(count: int, model: str = "fake", image: bytes | None = None) -> list[ChatRequest]:
    content: Any = "Hello there"
    if image is not None:
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": content}]
    body = chat_body(model, [{"role": "user", "content": content}], TOKENS)
    return [ChatRequest(f"r{number}", body, TOKENS) for number in range(count)]


def counts(url: str) -> dict[str, int]:
    counters: dict[str, int] = fetch_json(Endpoint(url, "fake"), "GET", "/counts")
    return counters


@pytest.mark.parametrize("processes", [1, 2])
def test_every_figure_is_that_of_the_server(url: str, processes: int) -> None:
    """A busy machine may delay a request, but not all of them: the smallest error is the load generator's own."""
    arrivals = [number / 50 for number in range(40)]
    result = run_level(Endpoint(url, "fake"), requests(40), arrivals, processes=processes)
    errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for number, exchange in enumerate(result.exchanges):
        assert (exchange.error, exchange.error_kind, exchange.id) == (None, None, f"r{number}")
        assert exchange.due == result.started + arrivals[number]
        assert exchange.queued == 0 and exchange.accepted >= exchange.due
        assert (exchange.output_tokens, len(exchange.tokens)) == (TOKENS, TOKENS)
        received, *sent = [from_perf_counter(float(stamp)) for stamp in exchange.text.split()]
        tokens = exchange.tokens
        slack = 1e-5  # the server prints microseconds
        assert exchange.accepted <= received + slack
        assert all(at >= left - slack for at, left in zip(tokens, sent, strict=True))
        assert tokens[-1] <= exchange.end <= result.ended
        pairs = {
            "ttft": (tokens[0] - exchange.accepted, sent[0] - received),
            "tpot": ((tokens[-1] - tokens[0]) / (TOKENS - 1), (sent[-1] - sent[0]) / (TOKENS - 1)),
            "itl": (max(b - a for a, b in pairwise(tokens)), max(b - a for a, b in pairwise(sent))),
            "e2e": (tokens[-1] - exchange.accepted, sent[-1] - received),
        }
        for name, (measured, known) in pairs.items():
            errors[name].append(abs(measured - known))
        assert pairs["ttft"][1] >= TTFT - slack  # the server keeps its own times
    assert {name: min(values) for name, values in errors.items() if min(values) >= 2e-3} == {}
    assert result.client.processes == processes and 0 < result.client.cpu_share <= 1


def test_a_closed_loop_keeps_its_concurrency_and_its_connections() -> None:
    with fake_server(ttft_ms=5) as url:
        result = run_level(Endpoint(url, "fake"), requests(30), None, max_concurrency=4)
        counters = counts(url)
    assert [exchange.id for exchange in result.exchanges] == [f"r{number}" for number in range(30)]
    assert all(exchange.queued == 0 and exchange.lag >= 0 for exchange in result.exchanges)
    assert counters == {"connections": 5, "requests": 30, "most_at_once": 4}  # the fifth asks for the counts


@pytest.mark.parametrize("processes", [1, 2])
def test_requests_beyond_the_concurrency_wait_in_a_queue(processes: int) -> None:
    with fake_server(ttft_ms=40) as url:
        result = run_level(Endpoint(url, "fake"), requests(8), [0.0] * 8, max_concurrency=4, processes=processes)
        assert counts(url)["most_at_once"] <= 4
    assert [exchange.queued > 0 for exchange in result.exchanges] == [False] * 4 + [True] * 4
    for exchange in result.exchanges[4:]:
        assert exchange.queued >= 0.040
        assert exchange.lag >= -1e-6
    assert not result.client.reason.startswith("requests were sent late")  # a burst cannot be sent at once


FAULTS = {
    "html": ("protocol", "the response is an HTML page: check the URL"),
    "early-close": ("stream", "the connection was closed during the response"),
    "malformed": ("stream", "malformed event: not JSON"),
    "no-usage": ("usage", None),
    "refuse-images": ("http", "HTTP 400: this model does not support image inputs"),
    "500": ("http", "HTTP 500: CUDA out of memory"),
    "no-end": (None, None),
    "not-http": ("protocol", "the response is not HTTP"),
    "close": ("protocol", "the endpoint closed the connection without a response"),
    "no-stream": ("protocol", "the response is not a stream (application/json)"),
}


def test_endpoint_faults_are_outcomes(url: str) -> None:
    image = data_url("image/png", b"x" * 100)
    sent = [requests(1, f"fake:{fault}", image)[0] for fault in FAULTS]
    result = run_level(Endpoint(url, "fake"), sent, [0.0] * len(sent))
    errors = [(exchange.error_kind, exchange.error) for exchange in result.exchanges]
    assert dict(zip(FAULTS, errors, strict=True)) == FAULTS
    partial = result.exchanges[list(FAULTS).index("early-close")]
    assert len(partial.tokens) == 1 and partial.end >= partial.tokens[0]


@pytest.mark.parametrize("fault", ["silent", "slow"])
def test_an_endpoint_that_does_not_answer_costs_the_timeout(url: str, fault: str) -> None:
    result = run_level(Endpoint(url, "fake", timeout=1.0), requests(2, f"fake:{fault}"), None, max_concurrency=2)
    assert {exchange.error_kind for exchange in result.exchanges} == {"timeout"}
    assert all(exchange.end - exchange.accepted >= 1.0 for exchange in result.exchanges)


def test_an_endpoint_that_pauses_between_events_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace period limits only what follows a complete answer."""
    monkeypatch.setattr(connection, "_GRACE_SECONDS", 0.05)
    with fake_server(itl_ms=150) as url:
        [outcome] = run_level(Endpoint(url, "fake"), requests(1), [0.0]).exchanges
    assert (outcome.error, len(outcome.tokens), outcome.finish_reason) == (None, TOKENS, "length")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_endpoint_that_is_down_is_an_outcome(processes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run_level(Endpoint(f"http://localhost:{port}", "m"), requests(4), [0.0] * 4, processes=processes)
    errors = [(exchange.error_kind, exchange.error) for exchange in result.exchanges]
    assert errors == [("connect", "connection refused")] * 4
    assert not any(exchange.tokens or exchange.status for exchange in result.exchanges)


def test_a_host_without_an_address_is_an_outcome() -> None:
    for host, error in (
        ("no-such-host.invalid", "the host name no-such-host.invalid cannot be resolved"),
        ("a..b", "a..b is not a host name"),
    ):
        assert run_level(Endpoint(f"http://{host}", "m"), requests(1), [0.0]).exchanges[0].error == error


@pytest.mark.parametrize("processes", [1, 2])
def test_large_bodies_arrive_whole(url: str, processes: int) -> None:
    image = data_url("image/png", bytes(3_000_000))
    result = run_level(Endpoint(url, "fake"), requests(6, image=image), None, max_concurrency=3, processes=processes)
    facts = ("error", "prompt_tokens", "image_tokens", "views")
    assert [[getattr(exchange, fact) for fact in facts] for exchange in result.exchanges] == [[None, 262, 256, 1]] * 6


PROBLEMS = [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "was silent for 5 s")]


@pytest.mark.parametrize(("sent", "problem"), PROBLEMS)
def test_the_requests_of_a_killed_or_stalled_process_are_failures(
    sent: signal.Signals, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose requests take longer than the limit is not silent."""

    def hit_one(exchange: RequestOutcome) -> None:
        if hit:
            return
        children = psutil.Process().children()
        workers = [child for child in children if "panscan.load.workers" in " ".join(child.cmdline())]
        hit.append(workers[0].pid)
        workers[0].send_signal(sent)

    monkeypatch.setattr(generator, "_SILENCE_SECONDS", 4.0)
    hit: list[int] = []
    asked = [*requests(38), *requests(2, "fake:slow")]
    with fake_server(ttft_ms=20) as url:
        endpoint = Endpoint(url, "fake", timeout=6.0)
        result = run_level(endpoint, asked, None, max_concurrency=2, processes=2, on_done=hit_one)
    lost = [exchange for exchange in result.exchanges if exchange.error_kind == "client"]
    assert len(result.exchanges) == 40 and 0 < len(lost) <= 20
    [reason] = {exchange.error for exchange in lost}
    assert str(reason).startswith(f"a load process {problem}")
    assert {exchange.error_kind for exchange in result.exchanges[:38]} <= {None, "client"}
    assert {exchange.error_kind for exchange in result.exchanges[38:]} == {"client", "timeout"}
    assert (result.client.limited, result.client.reason) == (True, reason)


def test_processes_that_do_not_start_in_time_fail_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "_START_SECONDS", 0.0)
    result = run_level(Endpoint("http://127.0.0.1:1", "m"), requests(4), None, max_concurrency=2, processes=2)
    assert {exchange.error for exchange in result.exchanges} == {"a load process was silent for 0 s"}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_cancelled_level_keeps_what_has_ended(url: str, processes: int) -> None:
    cancelled, done = threading.Event(), []

    def count(exchange: RequestOutcome) -> None:
        done.append(exchange)
        if len(done) == 3:
            cancelled.set()

    limits = {"max_concurrency": 2, "processes": processes}
    result = run_level(Endpoint(url, "fake"), requests(10_000), None, on_done=count, cancelled=cancelled, **limits)
    assert sorted(outcome.id for outcome in done) == sorted(outcome.id for outcome in result.exchanges)
    assert 3 <= len(done) < 10_000 and all(outcome.error is None for outcome in done)


def test_a_cancellation_during_the_transfer_of_requests_ends_the_processes(capfd: pytest.CaptureFixture[str]) -> None:
    def cancel() -> None:
        until(lambda: len(psutil.Process().children()) == before + 2)
        cancelled.set()

    cancelled, before = threading.Event(), len(psutil.Process().children())
    # Images between short segments: sockets are full before a process reads, so the cancellation falls in between.
    parts = [bytes(63 * 1024), *(bytes(64 * 1024 + index) for index in range(16))]
    sent = [ChatRequest(f"r{n}", tuple(bytes(bytearray(part)) for part in parts), 1) for n in range(40)]
    canceller = threading.Thread(target=cancel)
    canceller.start()
    limits = {"max_concurrency": 2, "processes": 2}
    result = run_level(Endpoint("http://127.0.0.1:1", "m"), sent, None, cancelled=cancelled, **limits)
    canceller.join()
    assert result.exchanges == [] and len(psutil.Process().children()) == before
    assert capfd.readouterr().err == ""


def test_tls_endpoints(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(*certificate) as url:
        wrong = [Endpoint(url, "fake"), Endpoint(url.replace("https", "http"), "fake")]
        unverified, plain = (run_level(endpoint, requests(1), [0.0]).exchanges[0] for endpoint in wrong)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        trusted = run_level(Endpoint(url, "fake"), requests(8, image=bytes(1_000_000).hex().encode()), [0.0] * 8)
    assert unverified.error is not None and unverified.error.startswith("the TLS certificate is not valid: ")
    assert plain.error_kind == "protocol"
    assert {exchange.error for exchange in trusted.exchanges} == {None}


def test_a_level_without_requests_ends() -> None:
    result = run_level(Endpoint("http://127.0.0.1:1", "m"), [], [])
    assert (result.exchanges, result.client.limited) == ([], False)


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    """Else each later garbage collection of the program would visit its modules."""
    gc.freeze()
    run_level(Endpoint("http://127.0.0.1:1", "m"), [], [])
    assert gc.get_freeze_count() > 0


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_an_earlier_level_is_not_frozen() -> None:
    gc.freeze()
    garbage = weakref.ref(Cycle())
    run_level(Endpoint("http://127.0.0.1:1", "m"), [], [])
    gc.collect()
    assert garbage() is None


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with HostileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def endpoint(hostile: str, name: str, timeout: float = 30.0) -> Endpoint:
    return Endpoint(f"{hostile}/{ENDPOINTS.index(name)}", "m", timeout=timeout)


HOSTILE_ANSWERS = [
    ("a million tokens", "protocol", "completion_tokens: 1000000 is far more than max_tokens 8"),
    ("deep answer", "stream", "malformed event: not JSON"),
    ("endless chunks", "stream", "more than 65,568 chunks for max_tokens 8"),
    ("one event without end", "stream", "malformed event: too long"),
    ("endless headers", "protocol", "the response is too long"),
    ("one header without end", "protocol", "the response is too long"),
    ("endless interim responses", "protocol", "the response is too long"),
    ("endless chunk extension", "protocol", "the response is too long"),
    ("error of 400 MB", "http", "HTTP 500"),
    ("redirects without end", "http", "HTTP 307 to /again"),
    ("gzip", "protocol", "the response is compressed (gzip)"),
    *((name, "timeout", "") for name in ("one byte at a time", "comments for ever", "a head for ever", "silence")),
]


@pytest.mark.parametrize(("name", "kind", "message"), HOSTILE_ANSWERS)
def test_a_hostile_answer_is_one_failed_request(hostile: str, name: str, kind: str, message: str) -> None:
    body = chat_body("m", [{"role": "user", "content": "Hello"}], 8)
    timeout = 0.3 if kind == "timeout" else 30.0
    [outcome] = run_level(endpoint(hostile, name, timeout), [ChatRequest("r", body, 8)], [0.0]).exchanges
    assert outcome.error_kind == kind and message in (outcome.error or "")


HOSTILE_LISTS = [
    ("a million models", "the response is longer than 16 MiB"),
    ("models without end", "the response is longer than 16 MiB"),
    ("deep list of models", "the response is not JSON"),
]


@pytest.mark.parametrize(("name", "message"), HOSTILE_LISTS)
def test_a_hostile_list_of_models_is_one_line(hostile: str, name: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        served_models(endpoint(hostile, name))


NO_NAMES = ["model name of 10 MB", "model names that are no texts", "model name of control characters"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_are_none_are_not_served(hostile: str, name: str) -> None:
    assert served_models(endpoint(hostile, name)) == {}
    with pytest.raises(SettingError, match="the server lists none"):
        find_model(Endpoint(f"{hostile}/{ENDPOINTS.index(name)}", ""))


HOSTILE_VALUES = [
    ("answer of 10 MB", "10,000,000 characters for max_tokens 4"),
    ("one event without end", "longer than 16 MiB"),
    ("400 digits of tokens", None),
    ("NaN log-probabilities", None),
    ("400 digits of log-probability", None),
    ("tokens of 3 MB", None),
    ("50,000 alternatives", None),
]


@pytest.mark.parametrize(("name", "problem"), HOSTILE_VALUES)
def test_verify_takes_only_plausible_values(hostile: str, name: str, problem: str | None) -> None:
    session = EndpointClient(endpoint(hostile, name), max_requests=8, max_tokens=4, top_logprobs=20)
    if problem is not None:
        with pytest.raises(EndpointError, match=problem):
            session.answer(Request("Count."))
        return
    answer = session.answer(Request("Count."))
    assert answer.output_tokens in (None, 1)
    for step in answer.steps:
        assert len(step.top) <= 64
        assert step.chosen.log_probability in (None, -0.1, -1.0)
        assert len(step.chosen.text) <= 4096
