"""Well-formed but expensive input: what a stranger sends costs work in proportion to its size, or is refused."""

import asyncio
import base64
import gc
import json
import logging
import socket
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request

from panscan.core import SettingError, Stats
from panscan.core.deadline import Deadline
from panscan.core.sampling import REST_OF_CONTEXT
from panscan.images.views import PUBLISHED_COST
from panscan.serve import server as server_module
from panscan.serve.admission import AdmissionControl, AdmissionSlot, body_limit, parse_form
from panscan.serve.body import _MOST_VALUES, _STRING, DataUrl, FieldError, Parsed, _parse_json, parse
from panscan.serve.engine_process import EngineProcess
from panscan.serve.metrics import ServerMetrics
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from panscan.serve.replies import error_body
from panscan.serve.request_builder import RequestBuilder, media_pool, message_urls
from panscan.settings import Settings

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(20)).decode()
PDF = base64.b64encode(b"%PDF-1.7\n" + bytes(20)).decode()


class Body(bytes):
    """A multipart body that counts the bytes that are searched and copied."""

    work = 0

    def find(self, part: Any, start: Any = 0, end: Any = None) -> int:
        index = super().find(part, start, end)
        stop = len(self) if end is None else min(end, len(self))
        Body.work += (stop if index < 0 else index + len(part)) - start
        return index

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        Body.work += len(piece) if isinstance(key, slice) else 1
        return piece


HEAD = b'Content-Disposition: form-data; name="%s"; filename="a"\r\n\r\n'


UNITS = [b"x" * 50, b"\r\n--limi", b"\r\n\r\n--", b"\r\n--limit", b"\r\n--limit\r\n" + HEAD % b"a"]


@pytest.mark.parametrize("unit", UNITS, ids=repr)
def test_multipart_bodies_are_split_in_linear_work(unit: bytes) -> None:
    costs = []
    for count in (1000, 10_000):
        Body.work = 0
        body = Body(b"--limit\r\n" + HEAD % b"page" + unit * count + b"\r\n--limit--\r\n")
        with pytest.raises(FieldError):  # it has no field with the JSON
            parse_form(body, b"limit", 16)
        costs.append(Body.work)
    assert costs[1] <= 15 * costs[0]


def form(**files: Any) -> tuple[bytes, bytes]:
    """Return a multipart body as a client writes it, and its boundary."""
    request = httpx.Request("POST", "http://a", files=files)
    return request.read(), request.headers["content-type"].partition("boundary=")[2].encode()


def test_multipart_bodies_are_read_as_clients_write_them() -> None:
    content = bytes(range(256)) + b"\r\n--\r\n\r\n"
    body, boundary = form(page=("a.png", content), request=(None, "{}"), **{'größe "x"': ("b", b"")})
    assert parse_form(body, boundary, 2) == (b"{}", {"page": content, 'größe "x"'.replace('"', "%22"): b""})
    assert parse_form(b"preamble\r\n" + body + b"epilogue", boundary, 2)[0] == b"{}"
    with pytest.raises(FieldError, match="more than 1 files"):
        parse_form(body, boundary, 1)
    for damaged in (b"", body[:-60], body.replace(b"name=", b"nome="), body.replace(b"Content-D", b"Content-T")):
        with pytest.raises(FieldError, match="malformed"):
            parse_form(damaged, boundary, 2)
    for wrong in (b"", b"x" * 71, b"other"):
        with pytest.raises(FieldError, match="boundary"):
            parse_form(body, wrong, 2)
    long = b"--a\r\nX: " + b"y" * 5000 + b"\r\n\r\n\r\n--a--"
    with pytest.raises(FieldError, match="4096 bytes"):
        parse_form(long, b"a", 2)


def parsed(kind: type[Parsed], body: dict[str, Any]) -> Parsed:
    return parse(kind, json.dumps(body).encode("utf-8-sig"))


def hostile_bodies() -> Iterator[bytes]:
    """Yield bodies with many values, names or levels, or very long ones."""
    many = _MOST_VALUES + 1
    yield b'{"x":[' + b",".join([b"0"] * many) + b"]}"
    yield b'{"x":' + b"[" * many + b"]" * many + b"}"
    yield b'{"x":' + b"[" * 5000
    yield b'{"x":[' + b"[]," * many
    yield b'{"metadata":{' + b",".join(b'"%d":0' % index for index in range(many)) + b"}}"
    yield b'{"metadata":{"' + b"k" * 1_000_000 + b'":0}}'
    yield b'{"' + b"k" * 1_000_000 + b'":0}'
    yield b'{"\\u0007' + b"k" * 1_000_000 + b'":0}'
    yield b'{"messages":[{"role":"user","content":[{"type":"' + b"t" * 1_000_000 + b'"}]}]}'
    yield b'{"messages":[{"role":"' + b"t" * 1_000_000 + b'","content":"a"}]}'
    yield b'{"response_format":{"type":"json_schema","json_schema":{"' + b"n" * 1_000_000 + b'":0}}}'
    yield b'{"stop":["' + b"s" * 1_000_000 + b'"]}'
    yield b'{"a":0,"' + b"k" * 1_000_000 + b'":0,"' + b"k" * 1_000_000 + b'":0}'


def test_expensive_json_is_refused_in_few_words() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest, TokenizeRequest):
        for body in hostile_bodies():
            with pytest.raises(FieldError) as refused:
                parse(kind, body)
            assert len(f"{refused.value} {refused.value.param}") < 900 and str(refused.value).isprintable(), body[:60]
    assert len(error_body("x" * 10**6, 400)["error"]["message"]) < 1100


def test_values_inside_texts_do_not_count() -> None:
    text = 'a, b [c] {d}\\"' * _MOST_VALUES
    messages = [{"role": "user", "content": text}]
    assert parsed(ChatCompletionRequest, {"messages": messages}).messages[0].content == text


def test_every_quote_belongs_to_a_string() -> None:
    """Otherwise the search would begin again at each quote of a string without an end."""
    for body in (b'"' + b'\\"' * 1000, b'"\\', b'"a\\\\"b"', b'{"a":"' + b"\\" * 999, b'"\n"'):
        assert b'"' not in _STRING.sub(b"", body)


def test_a_body_must_arrive_at_a_minimum_rate() -> None:
    assert body_limit(100.0, 0) == body_limit(100.0, 10) - 10 / 4096 == 110.0  # a byte per second: given up after 10 s
    assert body_limit(100.0, 409_600) == 210.0
    assert body_limit(100.0, 10**9) == 220.0


def test_plain_images_are_read_by_other_threads_than_documents() -> None:
    uploads = {"png": base64.b64decode(PNG), "pdf": base64.b64decode(PDF)}
    plain = f"data:;base64,{PNG}"
    documents = ["attachment:pdf", "attachment:none", "file:///a.png", "data:image/png,a", "data:;base64,ä", ""]
    documents += [f"data:image/png;base64,{PDF}", f"data:{'x' * 1000},a"]
    pools = {f"data:image/png;base64,{PNG}": "read", f"data:;base64,{JPEG}": "read", "attachment:png": "read"}
    for url, pool in {**pools, **dict.fromkeys(documents, "document"), "HTTPS://example.com/a.png": "fetch"}.items():
        for urls in ([url], [plain, url], [url, plain]):
            assert media_pool(urls, uploads) == pool, url


LARGE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 400).decode()  # decoded as the body is parsed


PAYLOADS = [
    (f"data:image/png;base64,{LARGE}", True),
    (f"data:;base64,{LARGE[:-8]}", True),
    (f"data:;base64,{LARGE[:-7]}", False),  # no base64
    (f"data:;base64,{LARGE}-", False),
    (f"data:a,b;base64,{LARGE}", False),  # its payload begins earlier
    (f"data:;base64,;base64,{LARGE}", False),
    (f"data:é;base64,{LARGE}", False),  # JSON may escape it
    (f"data:;base64,{PNG}", False),
]


@pytest.mark.parametrize(("url", "cut"), PAYLOADS, ids=lambda value: str(value)[:24])
def test_large_payloads_are_decoded_from_the_body(url: str, cut: bool) -> None:
    """Whether or not a payload can be cut from the body, the request and its files are the same."""
    parts = [{"type": "text", "text": url[:100]}, {"type": "file", "file": {"file_data": url, "filename": "a"}}]
    parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": parts}], "user": "a"}
    fast, plain = parsed(ChatCompletionRequest, body), _parse_json(ChatCompletionRequest, json.dumps(body).encode())
    urls = message_urls(fast.messages)
    assert [isinstance(media, DataUrl) for media in urls] == [cut] * 2
    assert media_pool(urls, {}) == media_pool(message_urls(plain.messages), {})
    for media in urls:
        assert media.content == base64.b64decode(url.partition(",")[2]) if isinstance(media, DataUrl) else media == url
    for elsewhere in ({**body, "user": url}, {**body, "messages": [{"role": "user", "content": url}]}):
        request = parsed(ChatCompletionRequest, elsewhere)
        assert url in (request.user, request.messages[0].content)
    with pytest.raises(FieldError, match="this is not supported"):
        parsed(ChatCompletionRequest, {**body, "this": 1})


def builder(deadline: Deadline | None = None) -> RequestBuilder:
    options = ServeOptions(settings=Settings(max_new_tokens=REST_OF_CONTEXT))
    return RequestBuilder(options, PUBLISHED_COST, {}, deadline or Deadline())


def test_log_probabilities_are_limited() -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    for stream in (False, True):
        body = {**ask, "n": 4, "max_tokens": 1191, "top_logprobs": 20, "stream": stream}
        message = r"4 x 1191 x 21 = 100044 .* exceed 100000; lower n, max_tokens"
        with pytest.raises(FieldError, match=message) as refused:
            builder().chat(parsed(ChatCompletionRequest, body))
        assert refused.value.param == "top_logprobs"
    fewer = parsed(ChatCompletionRequest, {**body, "max_tokens": 1190})
    assert len(builder().chat(fewer).requests) == 4
    [*_, open_ended] = builder().chat(parsed(ChatCompletionRequest, {**ask, "n": 4})).requests
    assert open_ended.sampling.max_new_tokens == 100_000 // 4
    prompts = CompletionRequest(prompt=["a"] * 10, logprobs=4, max_tokens=2001)
    with pytest.raises(FieldError, match="10 x 2001 x 5 = 100050"):
        builder().completion(prompts)


def test_work_for_an_abandoned_request_stops() -> None:
    deadline = Deadline()
    deadline.abandon()
    part = {"type": "image_url", "image_url": {"url": f"data:;base64,{PNG}"}}
    body = parsed(ChatCompletionRequest, {"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(TimeoutError):
        builder(deadline).chat(body)


class Upload(bytearray):
    """A body, to which a weak reference is possible."""


def test_the_body_of_a_request_that_ended_is_not_kept_by_busy_threads() -> None:
    """Two slow documents occupy all threads of their kind; what is queued behind them goes with its client."""

    async def scenario() -> tuple[bool, bool]:
        options = ServeOptions(settings=Settings(runner="engine"))
        backend = EngineProcess(options.settings)
        admission = AdmissionControl(options, backend, ServerMetrics("mini"))
        left, release = asyncio.Event(), threading.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        connected = Request({"type": "http"}, asyncio.Event().wait)
        slots = [AdmissionSlot(admission, connected, 60.0) for _ in range(2)]
        slow = [asyncio.ensure_future(slot.in_thread(release.wait, "decode")) for slot in slots]
        upload = Upload(b"page")
        reference = weakref.ref(upload)
        slot = AdmissionSlot(admission, Request({"type": "http"}, receive), 60.0)
        work = partial(len, upload)
        reading = asyncio.ensure_future(slot.in_thread(work, "decode"))
        del upload, work
        await asyncio.sleep(0)
        alive = reference() is not None
        left.set()
        with pytest.raises(ClientDisconnect):
            await reading
        del reading
        slot.release()
        gc.collect()
        gone = reference() is None
        release.set()
        await asyncio.gather(*slow)
        admission.close()
        return alive, gone

    assert asyncio.run(scenario()) == (True, True)


def stats(running: int, waiting: int) -> Stats:
    counts = {field.name: 0 for field in fields(Stats)}
    return Stats(**counts | {"running": running, "waiting": waiting, "kv_slabs": 1})


WAITING = [
    ({"0": (2, 8)}, 60, {"0": 58}),
    ({"0": (2, 58)}, 60, {"0": 58}),
    ({"0": (2, 8)}, 0, {"0": 8}),
    ({"a": (2, 1), "b": (2, 0)}, 9, {"a": 1, "b": 0, "": 4}),
    ({}, 3, {"": 3}),
    ({}, 0, {}),
]


@pytest.mark.parametrize(("engines", "accepted", "waiting"), WAITING)
def test_every_accepted_request_that_does_not_run_counts_as_waiting(
    engines: dict[str, tuple[int, int]], accepted: int, waiting: dict[str, int]
) -> None:
    metrics = ServerMetrics("mini")
    metrics.expose({"old": stats(0, 0)}, 5)
    text = metrics.expose({name: stats(*counts) for name, counts in engines.items()}, accepted).decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_waiting{")]
    assert {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in lines} == waiting
    assert text.count("vllm:num_requests_running{") == len(engines)


def test_names_of_hosts_are_those_that_clients_send() -> None:
    with pytest.raises(SettingError, match="--allowed-hosts: expected a host name"):
        ServeOptions(settings=Settings(), allowed_hosts=("xn--\udcff",))
    names = ("Bücher.example.", "xn--bcher-kva.example", "::1", "[::1]", "10.0.0.7")
    options = ServeOptions(settings=Settings(), allowed_hosts=names, allowed_media_domains=names)
    assert options.allowed_hosts == ("xn--bcher-kva.example", "xn--bcher-kva.example", "[::1]", "[::1]", "10.0.0.7")
    assert options.allowed_media_domains == ("bücher.example", "bücher.example", "::1", "::1", "10.0.0.7")
    assert httpx.URL("https://BÜCHER.example/a.png").host == options.allowed_media_domains[0]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request after it was read, ``/slow`` only once its client has left, and ``/large`` with 32 MiB."""
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(2**25) if scope["path"] == "/large" else b"{}"})


@asynccontextmanager
async def serving(connections: server_module._Connections) -> AsyncIterator[int]:
    """Serve the application, and yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, ws="none", lifespan="off", log_config=None, access_log=False)
    http = server_module._HttpServer(config, listener, connections)
    running = asyncio.ensure_future(http.serve())
    yield listener.getsockname()[1]
    http.should_exit = True
    await running


def test_a_client_that_stops_reading_is_disconnected_at_the_third_check() -> None:
    async def scenario() -> None:
        connections = server_module._Connections(20)
        async with serving(connections) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            while not any(item.transport.get_write_buffer_size() for item in connections.state.connections):
                await asyncio.sleep(0)
            [connection] = connections.state.connections
            for _ in range(3):
                assert connection.transport.get_write_buffer_size()
                connection._check()
            assert not connection.transport.get_write_buffer_size()
            writer.close()

    asyncio.run(scenario())


def test_a_flood_of_idle_connections_closes_the_longest_idle_ones(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit of descriptors the server answers, logs one line, and pauses while all connections are busy."""
    most = 20

    async def scenario() -> None:
        connections = server_module._Connections(most)
        async with serving(connections) as port:
            await flood(connections, port)

    async def flood(connections: server_module._Connections, port: int) -> None:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * most)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(3):
                assert (await client.get("/")).status_code == 200
        assert len(connections.state.connections) <= most
        for reader, _ in streams[:most]:
            assert await reader.read() == b""  # closed
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(most)]
        for _, writer in busy:
            writer.write(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        while len(connections.state.tasks) < most:
            await asyncio.sleep(0)
        other = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        late = asyncio.ensure_future(other.get("/"))
        while len(caplog.messages) < 1:
            await asyncio.sleep(0)
        assert not late.done()
        busy.pop()[1].close()
        assert (await late).status_code == 200
        await other.aclose()
        for _, writer in (*streams, *busy):
            writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    line = f"the limit of open files is reached (ulimit -n): closing idle connections, {most} are open"
    assert Counter(caplog.messages) == {line: 1}
