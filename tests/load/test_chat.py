"""Endpoints, request bodies, and streamed answers in the dialects of several servers."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.load.fake_server import fake_server

from panscan.core import EndpointError, SettingError, now
from panscan.load import chat
from panscan.load.chat import ChatStream, Endpoint, RequestOutcome, chat_body, data_url, fetch_json
from panscan.load.options import LoadOptions

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def content(text: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def stream_of(events: Sequence[Any], done: str = "[DONE]") -> bytes:
    texts = [*(json.dumps(event) for event in events), *([done] if done else [])]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def answer(
    *parts: bytes, step: int | None = None, headers: dict[str, str] | None = None, status: int = 200
) -> RequestOutcome:
    """The outcome of a response whose body arrives in parts, or in pieces of ``step`` bytes, at 1, 2, ... seconds."""
    ended: list[RequestOutcome] = []
    stream = ChatStream(RequestOutcome("r", 0.0, 0.0, 0.0), 64, lambda exchange, at: ended.append(exchange))
    stream.on_head(status, EVENT_STREAM if headers is None else headers)
    if step is not None:
        body = b"".join(parts)
        parts = tuple(body[start : start + step] for start in range(0, len(body), step))
    for number, part in enumerate(filter(None, parts), 1):
        stream.on_data(part, float(number))
    stream.on_end(99.0)
    [outcome] = ended
    return outcome


# Endpoints


@pytest.mark.parametrize(
    ("url", "api", "server", "query"),
    [
        ("http://host:8000", "/v1", "", ""),
        ("http://host:8000/", "/v1", "", ""),
        ("https://host/v1", "/v1", "", ""),
        ("https://host/v1/chat/completions", "/v1", "", ""),
        ("https://host/team/v1/", "/team/v1", "/team", ""),
        ("https://host/openai", "/openai/v1", "/openai", ""),
        ("https://host/api/chat/completions", "/api", "/api", ""),
        ("https://host/v1?version=2", "/v1", "", "?version=2"),
    ],
)
def test_an_endpoint_may_be_given_as_server_prefix_or_full_url(url: str, api: str, server: str, query: str) -> None:
    paths = [Endpoint(url, "m").path(path) for path in ("/v1/chat/completions", "/v1/models", "/tokenize")]
    assert paths == [f"{api}/chat/completions{query}", f"{api}/models{query}", f"{server}/tokenize{query}"]


def test_the_address_has_the_scheme_s_port_unless_one_is_given() -> None:
    assert (Endpoint("http://host", "m").address.port, Endpoint("https://host", "m").address.port) == (80, 443)
    address = Endpoint("https://[::1]:8443/v1", "m").address
    assert (address.host, address.port, address.tls) == ("::1", 8443, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"url": url}, "URL") for url in ("localhost:8000", "htp://user:hush@host/v1", "user:hush@host")),
        *(({"url": f"http://user:{rest}"}, "host") for rest in ("hush@host:x", "hu/hush@host:x", "hush\u2100@host")),
        ({"url": "http://host:x/v1?key=hush"}, "host"),
        ({"url": "ftp://host/v1?key=hush"}, "expected the URL of an endpoint"),
        ({"url": "http://host:99999"}, "not a URL"),
        ({"url": "http://user:hush@host"}, "give an API key instead"),
        ({"url": "http://host/a b\r\nX: y"}, "remove spaces"),
        ({"timeout": 0.0}, "timeout"),
        ({"api_key": "hush\r\nX: y"}, "API key"),
        ({"headers": (("X Y", "hush"),)}, "'X Y'"),
        ({"headers": (("X", "hush\r\nY: 2"),)}, "'X'"),
        ({"headers": (("Content-Length", "1"),)}, "'Content-Length' is set already"),
        ({"headers": (("Authorization", "Basic x"),), "api_key": "hush"}, "either the API key or"),
    ],
)
def test_an_unusable_endpoint_is_refused_without_its_credentials(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        Endpoint(**{"url": "http://host", "model": "m", **given})
    assert "hush" not in str(refused.value)


def test_a_redirect_does_not_show_its_credentials() -> None:
    outcome = answer(b"", headers={"location": "https://user:hush@host/v1?key=hush"}, status=307)
    assert outcome.error == "HTTP 307 to https://***@host/v1"


def test_an_endpoint_sends_its_key_but_does_not_show_it() -> None:
    endpoint = Endpoint("http://host", "m", api_key="secret", headers=(("X-Team", "private"),))
    head = endpoint.head("POST", "/v1/chat/completions")
    assert b"\r\nauthorization: Bearer secret\r\n" in head and b"\r\nX-Team: private\r\n" in head
    assert "secret" not in repr(endpoint) and "private" not in repr(endpoint)


# Bodies


def test_bodies_share_their_images() -> None:
    image = data_url("image/png", b"\x89PNG" * 100)
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": 'What "total"? é'}]
    bodies = [chat_body("m", [{"role": "user", "content": [*parts[:start], *parts]}], 8) for start in (0, 1)]
    assert [sum(segment is image for segment in body) for body in bodies] == [1, 2]
    shown = {"type": "image_url", "image_url": {"url": image.decode()}}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    messages = [{"role": "user", "content": [shown, shown, parts[1]]}]
    assert json.loads(b"".join(bodies[1])) == {"model": "m", "max_tokens": 8, "messages": messages, **streamed}


def test_optional_fields_are_sent_only_if_given() -> None:
    fields = {"stream": False, "mm_processor_kwargs": {"do_pan_and_scan": False}}
    body = chat_body("m", [], 1, temperature=None, logprobs=True, ignore_eos=None, **fields)
    sent = {"model": "m", "messages": [], "max_tokens": 1, "logprobs": True, **fields}
    assert json.loads(b"".join(body)) == sent


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, {}),
        ({"max_tokens_field": "max_completion_tokens"}, {"max_tokens": None, "max_completion_tokens": 8}),
        ({"max_tokens_field": "none"}, {"max_tokens": None}),
        ({"stream_options": False}, {"stream_options": None}),
        ({"extra_body": '{"temperature": null, "top_p": 0.5}'}, {"temperature": None, "top_p": 0.5}),
        ({"extra_body": '{"stream_options": {"a": 1}}'}, {"stream_options": {"include_usage": True, "a": 1}}),
    ],
)
def test_fields_are_those_that_an_endpoint_takes(fields: dict[str, Any], changed: dict[str, Any]) -> None:
    before = json.loads(b"".join(chat_body("m", [], 8)))
    after = json.loads(b"".join(chat_body("m", [], 8, adapt=LoadOptions(**fields).adapted)))
    assert after == {name: value for name, value in {**before, **changed}.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--extra-body: not JSON"),
        ("[]", "--extra-body: expected a JSON object"),
        ('{"messages": []}', "--extra-body: messages differs between requests"),
        ("[" * 10_000, "--extra-body: "),
    ],
)
def test_an_extra_body_is_a_json_object(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LoadOptions(extra_body=text)


# Streams


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def usage(details: Any, **counts: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 520, "completion_tokens": 3, "prompt_tokens_details": details, **counts}}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, None])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_answer_does_not_depend_on_how_it_is_cut_into_packets(step: int | None, line_end: bytes) -> None:
    """An event may have several lines, and the last one no empty line."""
    pretty = "".join(f"data: {line}\n" for line in json.dumps(content("Hé"), indent=1).splitlines())
    body = f": keep-alive\n\nevent: message\n{pretty}\n".encode() + stream_of([content("llo"), END, USAGE])[:-2]
    exchange = answer(body.replace(b"\n", line_end), step=step)
    assert (exchange.error, exchange.error_kind, exchange.text) == (None, None, "Héllo")
    assert (exchange.finish_reason, exchange.output_tokens, exchange.prompt_tokens) == ("stop", 2, 9)
    assert len(exchange.tokens) == 2 and exchange.end >= exchange.tokens[1] >= exchange.tokens[0]


def test_a_chunk_is_stamped_when_its_event_is_complete() -> None:
    head, tail = b'data: {"choices":[{"delta":{"conte', b'nt":"a"}}]}\n\n'
    exchange = answer(head, tail, stream_of([END], done=""), stream_of([USAGE]))
    assert (exchange.tokens, exchange.end) == ([2.0], 3.0)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (  # panscan
            {
                **usage({"cached_tokens": 16, "image_tokens": 512}, views=2),
                "panscan": {"views": 2, "crops": 1, "image_tokens": 512},
            },
            (3, 520, 16, 512, 2),
        ),
        (usage({"cached_tokens": 16}), (3, 520, 16, None, None)),  # vLLM, SGLang
        (usage(None), (3, 520, None, None, None)),  # vLLM without --enable-prompt-tokens-details, TGI, Ollama
        ({"timings": {"cache_n": 20, "prompt_n": 500, "predicted_n": 3}}, (3, 520, 20, None, None)),  # llama.cpp
        (usage({"cached_tokens": True}, prompt_tokens=-1), (3, None, None, None, None)),  # counts that are none
    ],
)
def test_token_counts_are_read_in_every_dialect(last: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    exchange = answer(stream_of([content("a"), END, {"choices": [], **last}]))
    assert exchange.error_kind is None
    counts = ("output_tokens", "prompt_tokens", "cached_tokens", "image_tokens", "views")
    assert tuple(getattr(exchange, count) for count in counts) == expected


@pytest.mark.parametrize("field", ['"usage":{"completion_tokens"', '"timings":{"predicted_n"'])
@pytest.mark.parametrize(
    ("count", "kind", "tokens"),
    [
        ("3000", None, 3000),  # the endpoint ignores max_tokens
        *((count, "usage", 1) for count in ("-1", "1.5", "true", '"2"', "NaN", "1e400", "[2]", "null")),  # not reported
        *((count, "protocol", None) for count in ("9" * 400, "65793", str(2**31))),  # impossible
    ],
)
def test_a_number_of_output_tokens_may_be_missing_or_impossible(
    field: str, count: str, kind: str | None, tokens: int | None
) -> None:
    last = f'data: {{"choices":[],{field}:{count}}}}}\n\n'.encode()
    exchange = answer(stream_of([content("a"), END], done="") + last)
    assert exchange.error_kind == kind and len(exchange.error or "") < 200
    assert exchange.output_tokens == tokens if tokens is not None else exchange.output_tokens <= 2**31


@pytest.mark.parametrize("step", [None, 4099])
def test_an_answer_without_end_is_read_no_further(step: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = answer(stream_of([content("a" * 400_000)] * 3, done=""), step=step)
    message = "more than 1,064,960 characters for max_tokens 64"
    assert (exchange.error_kind, exchange.error) == ("stream", message) and len(exchange.text) < 2_000_000
    monkeypatch.setattr(chat, "_MOST_CHUNKS", (3, 0))
    exchange = answer(stream_of([content("a")] * 9, done=""), step=step)
    assert exchange.error == "more than 3 chunks for max_tokens 64"


@pytest.mark.parametrize("last", [[], [{"usage": {"output_tokens": 2}}], [{"usage": {"completion_tokens": None}}]])
def test_an_answer_without_usage_counts_chunks_and_is_no_failure(last: list[Any]) -> None:
    exchange = answer(stream_of([content("a"), content("b"), END, *last]))
    assert (exchange.error, exchange.error_kind) == (None, "usage")
    assert (exchange.output_tokens, exchange.prompt_tokens) == (2, None)


ROLE, EMPTY = {"role": "assistant", "content": ""}, {"content": ""}


@pytest.mark.parametrize(
    ("deltas", "text", "tokens"),
    [
        ([{"reasoning_content": "hm", "content": None}, {"content": "a"}], "a", [1, 2]),
        ([{"reasoning": "hm", "content": None}, {"content": "a"}], "a", [1, 2]),
        ([ROLE], "", []),
        ([ROLE, EMPTY, EMPTY], "", [2, 3]),  # tokens without a text, such as half a character
        ([ROLE, EMPTY, {"content": "a"}], "a", [2, 3]),
    ],
)
def test_a_token_is_a_chunk_of_content_or_reasoning(deltas: list[Any], text: str, tokens: list[float]) -> None:
    events = [*({"choices": [{"delta": delta}]} for delta in deltas), END, USAGE]
    exchange = answer(*(stream_of([event], done="") for event in events))
    assert (exchange.error, exchange.finish_reason) == (None, "stop")
    assert (exchange.text, exchange.tokens, exchange.end) == (text, tokens, len(deltas) + 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: {nonsense}\n\n" + stream_of([END, USAGE]), "malformed event: not JSON"),
        (b"data: \xff\n\n" + stream_of([END, USAGE]), "malformed event: not JSON"),
        (stream_of([[1], END, USAGE]), "malformed event: not a JSON object"),
        (stream_of([{"choices": [1]}, END, USAGE]), "malformed event: a choice without a delta"),
        (stream_of([{"choices": {"a": 1}}, END, USAGE]), "malformed event: a choice without a delta"),
        (stream_of([{"choices": [{"delta": "a"}]}, END, USAGE]), "malformed event: a choice without a delta"),
        (stream_of([{"object": "ping"}, END, USAGE]), "malformed event: no choices"),
        (stream_of([{"error": {"message": "out\nof memory"}}]), r"out\nof memory"),
        (stream_of([{"error": "x" * 500}]), "x" * 196 + " ..."),
        (stream_of([content("a")], done=""), "the stream ended before the answer was complete"),
        (stream_of([]), "the stream has no tokens"),
        (b"", "the stream ended before the answer was complete"),
    ],
)
def test_a_broken_stream_is_a_failure_with_a_short_message(body: bytes, message: str) -> None:
    exchange = answer(body)
    assert (exchange.error_kind, exchange.error) == ("stream", message)
    assert exchange.end == 99.0


EVENTS = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda text: b"data: " + text + b"\n\n"),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["choices", "delta", "content", "usage", "error", "finish_reason", "timings"]),
                    inner,
                    max_size=3,
                )
            ),
        ).map(lambda event: stream_of([event], done="")),
        st.sampled_from([stream_of([content("a")], done=""), stream_of([END], done=""), stream_of([])]),
    ),
    max_size=6,
)


@given(EVENTS, st.sampled_from([None, 1, 5]))
@settings(max_examples=150)
def test_no_stream_raises(events: list[bytes], step: int | None) -> None:
    exchange = answer(*events, step=step)
    assert (exchange.error is None) == (exchange.error_kind in (None, "usage"))
    assert exchange.output_tokens >= 0 and exchange.tokens == sorted(exchange.tokens)


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected"),
    [
        (429, "application/json", b'{"error": {"message": "slow down"}}', ("http", "HTTP 429: slow down")),
        (422, "application/json", b'{"detail": [{"loc": ["x"]}]}', ("http", 'HTTP 422: [{"loc": ["x"]}]')),
        (400, "application/json", b'{"object": "error", "message": "no images"}', ("http", "HTTP 400: no images")),
        (502, "text/html", b"<html>Bad gateway</html>", ("http", "HTTP 502 (an HTML page)")),
        (500, "text/plain", b"oops", ("http", "HTTP 500")),
        (200, "text/html", b"<html></html>", ("protocol", "the response is an HTML page: check the URL")),
        (200, "application/json", b'{"error": "no such model"}', ("protocol", "no such model")),
        (200, "application/json", b"{}", ("protocol", "the response is not a stream (application/json)")),
        (200, "", b"hello", ("protocol", "the response is not a stream of events")),
        (200, "", b"", ("protocol", "the response is empty")),
    ],
)
def test_a_response_without_a_stream_fails(status: int, kind: str, body: bytes, expected: tuple[str, str]) -> None:
    exchange = answer(body, headers={"content-type": kind}, status=status)
    assert (exchange.error_kind, exchange.error) == expected
    assert exchange.status == status
    assert answer(stream_of([content("a"), END, USAGE]), headers={}).error is None  # a stream of no declared type


# Single requests


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server() as url:
        yield url


def test_fetch_json_returns_the_response(url: str) -> None:
    endpoint = Endpoint(f"{url}/v1", "fake")
    assert fetch_json(endpoint, "GET", "/v1/models")["data"][0]["id"] == "fake"
    messages = [{"role": "user", "content": "Hello there"}]
    assert fetch_json(endpoint, "POST", "/tokenize", (json.dumps({"messages": messages}).encode(),))["count"] == 6
    body = chat_body("fake", messages, 2, stream=False)
    response = fetch_json(endpoint, "POST", "/v1/chat/completions", body, deadline=now() + 60)
    assert response["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("model", "path", "seconds", "kind", "status", "message"),
    [
        ("fake", "/nowhere", 60, "http", 404, "GET /nowhere: HTTP 404: Not Found"),
        ("fake", "/health", 60, "protocol", 200, "GET /health: the response is not JSON: check the URL"),
        ("fake:silent", "/v1/chat/completions", 0.2, "timeout", None, "no response within the timeout"),
        ("fake:500", "/v1/chat/completions", 60, "http", 500, "HTTP 500: CUDA out of memory"),
        ("fake", "/v1/models", -1, "timeout", None, "the deadline has passed"),
    ],
)
def test_fetch_json_names_what_was_wrong(
    url: str, model: str, path: str, seconds: float, kind: str, status: int | None, message: str
) -> None:
    body = () if model == "fake" else (json.dumps({"model": model, "messages": []}).encode(),)
    method = "POST" if body else "GET"
    with pytest.raises(EndpointError) as caught:
        fetch_json(Endpoint(url, model), method, path, body, deadline=now() + seconds)
    assert message in str(caught.value)
    assert (caught.value.kind, caught.value.status) == (kind, status)
