"""Endpoints that answer without end, with absurd numbers or with megabytes: one failed request each, and no more."""

import threading
from collections.abc import Iterator

import pytest
from benchmarks.robustness.hostile_server import ENDPOINTS, HostileServer

from panscan.core import EndpointError, Request, SettingError
from panscan.load.chat import ChatRequest, Endpoint, chat_body, served_models
from panscan.load.generator import run_level
from panscan.load.probe import find_model
from panscan.verify.endpoint import EndpointClient


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HostileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def endpoint(url: str, name: str, timeout: float = 30.0) -> Endpoint:
    return Endpoint(f"{url}/{ENDPOINTS.index(name)}", "m", timeout=timeout)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
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
    ],
)
def test_a_hostile_answer_is_one_failed_request(url: str, name: str, kind: str, message: str) -> None:
    body = chat_body("m", [{"role": "user", "content": "Hello"}], 8)
    timeout = 0.3 if kind == "timeout" else 30.0
    [outcome] = run_level(endpoint(url, name, timeout), [ChatRequest("r", body, 8)], [0.0]).exchanges
    assert outcome.error_kind == kind and message in (outcome.error or "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a million models", "the response is longer than 16 MiB"),
        ("models without end", "the response is longer than 16 MiB"),
        ("deep list of models", "the response is not JSON"),
    ],
)
def test_a_hostile_list_of_models_is_one_line(url: str, name: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        served_models(endpoint(url, name))


@pytest.mark.parametrize(
    "name", ["model name of 10 MB", "model names that are no texts", "model name of control characters"]
)
def test_names_that_are_none_are_not_served(url: str, name: str) -> None:
    assert served_models(endpoint(url, name)) == {}
    with pytest.raises(SettingError, match="the server lists none"):
        find_model(Endpoint(f"{url}/{ENDPOINTS.index(name)}", ""))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("answer of 10 MB", "10,000,000 characters for max_tokens 4"),
        ("one event without end", "longer than 16 MiB"),
        ("400 digits of tokens", None),
        ("NaN log-probabilities", None),
        ("400 digits of log-probability", None),
        ("tokens of 3 MB", None),
        ("50,000 alternatives", None),
    ],
)
def test_verify_takes_only_plausible_values(url: str, name: str, problem: str | None) -> None:
    session = EndpointClient(endpoint(url, name), max_requests=8, max_tokens=4, top_logprobs=20)
    if problem is not None:
        with pytest.raises(EndpointError, match=problem):
            session.answer(Request("Count."))
        return
    found = session.answer(Request("Count."))
    assert found.output_tokens in (None, 1)
    for step in found.steps:
        assert len(step.top) <= 64
        assert step.chosen.log_probability in (None, -0.1, -1.0)
        assert len(step.chosen.text) <= 4096
