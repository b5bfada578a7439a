"""What a server refuses to read, fetch, reveal or obey, unless its options allow it."""

import asyncio
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.robustness.bombs import _png
from PIL import Image
from tests.conftest import noise, until
from tests.images.site import Site, serving
from tests.serve import serving as servers
from tests.serve.serving import DEADLINE, Server, chat, data_url, get, image_part, post, refused, saved, user

from panscan.cli.main import run
from panscan.core import ImageError, SettingError
from panscan.core.access import ALLOW_PRIVATE
from panscan.core.deadline import Deadline
from panscan.serve.app import create_app
from panscan.serve.engine_process import EngineProcess
from panscan.serve.media import read_media
from panscan.serve.options import ApiKeys, ServeOptions
from panscan.settings import Settings

PATH = "/v1/chat/completions"
KEYS = ("key-of-the-option", "key-of-the-file", "key-of-the-environment")
PNG = saved(noise(60, 60))


@dataclass
class Guarded:
    """A server with keys, small limits, one allowed domain and one allowed folder."""

    server: Server
    folder: Path
    site: Site

    def ask(self, url: str, **options: Any) -> httpx.Response:
        """Ask about the image behind a URL."""
        headers = {**self.server.headers, **options.pop("headers", {})}
        body = {"messages": user(image_part(url), "Hi"), "max_tokens": 1, **options}
        return post(self.server, PATH, body, headers=headers)

    def refuses(self, url: str) -> str:
        """Check that an image is refused, and return the message."""
        return refused(self.ask(url), 400)


@pytest.fixture(scope="module")
def guarded(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("media")
    keys = folder / "keys.txt"
    keys.write_text(f"\ufeff{KEYS[1]}  \n\n# comment\n", "utf-8")
    (folder / "open").mkdir()
    environment = {"PANSCAN_API_KEYS": f"{KEYS[2]} another", ALLOW_PRIVATE: "1", "NO_PROXY": "*"}
    environment["PYTHONHASHSEED"] = "0"  # not forked: a fork's command line and environment would not be its own
    with serving() as site:
        limits = {"body-mb": "0.5", "images": "2", "pages": "2", "pixels": "1000000"}
        options = [text for name, limit in limits.items() for text in (f"--max-{name}", limit)]
        options += ["--api-key", KEYS[0], "--api-key-file", str(keys), "--kv-cache-gb", "0.05"]
        options += ["--allowed-media-domains", "localhost", "--allowed-local-media-path", str(folder / "open")]
        server = start(*options, environment=environment)
        server.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield Guarded(server, folder, site)


def test_keys_are_required_and_never_shown(guarded: Guarded) -> None:
    server = guarded.server
    for path in ("/", "/health", "/ready"):
        assert get(server, path).status_code == 200
    bearers = ["", " wrong", f" {KEYS[0]}x", f" {KEYS[0][:-1]}"]
    wrong = (None, f"Basic {KEYS[0]}", KEYS[0], *(f"Bearer{key}" for key in bearers))
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
        for given in wrong:
            response = get(server, path, headers={} if given is None else {"Authorization": given})
            assert "API key" in refused(response, 401) and not any(key in response.text for key in KEYS)
    for key in (*KEYS, "another"):
        for scheme in ("Bearer", "bearer"):
            assert get(server, "/v1/models", headers={"Authorization": f"{scheme} {key}"}).status_code == 200
    repeated = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {KEYS[0]}")]
    refused(get(server, "/v1/models", headers=repeated), 400)
    guarded.ask("attachment:none")
    engine = server.engine
    shown = "".join((*server.log, *engine.cmdline(), *map(str, engine.environ().items())))
    assert not any(key in shown for key in KEYS)


def test_only_digests_of_keys_are_kept() -> None:
    keys = ApiKeys.of(["one", " two "])
    assert keys.accept("one") and keys.accept("two")
    assert not any(map(keys.accept, ("", "tw", "two2", "\udcff", "One")))
    assert "two" not in repr(keys) and not ApiKeys()
    with pytest.raises(SettingError, match="--api-key"):
        ApiKeys.of(["a\n\x00"])


def test_print_config_does_not_reveal_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PANSCAN_API_KEYS", KEYS[2])
    assert run(["serve", "--device", "cpu", "--print-config", "--api-key", KEYS[0]]) == 0
    shown = "".join(capsys.readouterr())
    assert "api_keys: env:PANSCAN_API_KEYS" in shown
    assert KEYS[0] not in shown and KEYS[2] not in shown


CHECKED_HEADERS = [
    ({"Host": "evil.example"}, 403),
    ({"Host": "localhost.evil.example"}, 403),
    ({"Host": ""}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://[::1"}, 403),
    ({"Host": "localhost:1"}, 200),
    ({"Host": "[::1]"}, 200),
    ({"Content-Encoding": "gzip"}, 415),
]


@pytest.mark.parametrize(("headers", "status"), CHECKED_HEADERS)
def test_hosts_and_origins_are_checked(server: Server, headers: dict[str, str], status: int) -> None:
    response = get(server, "/v1/models", headers=headers)
    assert response.status_code == status
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_playground_loads_nothing_from_other_origins(server: Server) -> None:
    same = get(server, "/", headers={"Origin": str(server)})
    assert same.status_code == 200
    policy = same.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert same.headers["x-content-type-options"] == "nosniff"
    for name in ("..%2fapp.py", "%2e%2e/app.py", "__init__.py", "%00", "index.html%00.js"):
        refused(get(server, f"/playground/{name}"), 404)
    assert httpx.options(f"{server}{PATH}", headers={"Access-Control-Request-Method": "POST"}).status_code == 405


def raw(server: Server, *pieces: bytes) -> bytes:
    """Return all that the server answers to bytes on one connection."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return servers.received(connection)


REQUEST = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"


AMBIGUOUS = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: gzip\r\n\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"Host: evil.example\r\n\r\n",
    b"Content-Type: text/plain\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: 1e3\r\n\r\n",
    b"X: " + b"a" * 200_000,
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("rest", AMBIGUOUS, ids=lambda rest: rest[:30].decode())
def test_ambiguous_requests_are_refused(server: Server, rest: bytes) -> None:
    """A proxy in front of the server could interpret them differently."""
    try:
        assert raw(server, REQUEST + rest).startswith(b"HTTP/1.1 400 ")
    except ConnectionError:  # closed while bytes were in transit
        assert len(rest) > 65_536


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bodies = [json.dumps({"prompt": "Hi" * count}).encode() for count in (1, 2, 3)]
    pieces = [b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies]
    keep = REQUEST.replace(b"Connection: close\r\n", b"")
    answers = raw(server, keep + pieces[0] + keep + pieces[1] + REQUEST + pieces[2])
    counts = [json.loads(part.partition(b"HTTP/1.1")[0])["count"] for part in answers.split(b"\r\n\r\n")[1:]]
    assert counts == [post(server, "/tokenize", json.loads(body)).json()["count"] for body in bodies]


def test_an_offer_of_http_2_changes_nothing(server: Server) -> None:
    """Java's client sends it with each request."""
    body = b'{"prompt": "Hi"}'
    offer = (
        REQUEST.replace(b"close", b"Upgrade, HTTP2-Settings, close") + b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    )
    assert b'"count":' in raw(server, offer + b"Content-Length: %d\r\n\r\n" % len(body), body)
    assert "pgrade" not in "".join(server.log)


@pytest.mark.parametrize(("host", "status"), [(b"127.0.0.1", b"200"), (b"evil.example", b"400")])
def test_an_absolute_url_is_read_if_it_names_this_host(server: Server, host: bytes, status: bytes) -> None:
    answer = raw(server, REQUEST.replace(b"POST /tokenize", b"GET http://%s/v1/models" % host) + b"\r\n")
    assert answer.split()[1] == status


def test_bodies_are_limited(guarded: Guarded) -> None:
    server, large = guarded.server, b"x" * 600_000
    headers = {**server.headers, "Content-Type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for _ in range(60):
            yield large[:10_000]

    for content in (large, chunks()):
        try:
            refused(httpx.post(f"{server}{PATH}", content=content, headers=headers), 413)
        except httpx.WriteError:  # the server closed the connection while the body was sent
            continue
    form = REQUEST.replace(b"application/json", b"multipart/form-data; boundary=a").replace(b"/tokenize", PATH.encode())
    form += f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: 600000\r\n\r\n".encode()
    assert raw(server, form).startswith(b"HTTP/1.1 413 ")
    until(lambda: get(server, "/health").status_code == 200)


def test_images_pages_and_pixels_are_limited(guarded: Guarded) -> None:
    pages = [noise(30, 30, page) for page in range(3)]
    document = saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert "2 pages" in guarded.refuses(data_url(document))
    assert "pixels" in guarded.refuses(data_url(_png(100_000, 100_000, data=zlib.compress(bytes(99)))))
    assert "1200x1000 pixels" in guarded.refuses(data_url(saved(Image.new("1", (1200, 1000)))))
    three = user(*[image_part(data_url(PNG))] * 3)
    assert "at most 2" in refused(guarded.ask("", messages=three), 400, "messages")
    assert "parts" in refused(guarded.ask("", messages=user(*["a"] * 2500) * 2), 400, "messages")
    assert guarded.ask(data_url(PNG)).status_code == 200


def test_remote_and_local_images_are_off_by_default(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    for url in ("http://127.0.0.1:1/a.png", "https://example.com/a.png", f"file://{tmp_path}/a.png"):
        for path, body in ((PATH, {"messages": user(image_part(url))}), ("/v1/views", {"image": url})):
            assert "disabled" in refused(post(server, path, body), 400)
    for name in ("path", "url", "image", "base64"):
        both = image_part(data_url(PNG)) | {name: str(tmp_path / "a.png")}
        assert f"remove '{name}'" in refused(post(server, PATH, {"messages": user(both)}), 400, "messages")


def test_images_are_fetched_from_allowed_domains_only(guarded: Guarded) -> None:
    site = guarded.site
    site.put("/page.png", PNG)
    site.put("/large.png", PNG + bytes(600_000))
    site.put("/inside", status=302, location="/page.png")
    site.put("/outside", status=302, location=site.url("/page.png", "127.0.0.1"))
    site.put("/scheme", status=302, location="file:///etc/passwd")
    here = f"http://localhost:{site.server_port}"
    for path in ("/page.png", "/inside"):
        assert guarded.ask(here + path).status_code == 200
    asked = site.asked["/page.png"]
    for host in ("127.0.0.1", "localhost@127.0.0.1", "sub.localhost"):
        guarded.refuses(f"http://{host}:{site.server_port}/page.png")
    for path in ("/outside", "/scheme", "/absent.png"):
        guarded.refuses(here + path)
    assert site.asked["/page.png"] == asked
    assert "more than 500000 bytes" in guarded.refuses(f"{here}/large.png")


def test_a_silent_site_outlasts_neither_the_deadline_nor_the_client(guarded: Guarded) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://localhost:{silent.getsockname()[1]}/a.png"
        refused(guarded.ask(url, headers={"X-Request-Timeout": "0.3"}), 504)
        body = json.dumps({"messages": user(image_part(url))}).encode()
        with servers.open_request(guarded.server, PATH, body, f"Authorization: Bearer {KEYS[0]}"):
            until(lambda: guarded.server.metric("panscan:http_requests_active") == 1)
        until(lambda: guarded.server.metric("panscan:http_requests_active") == 0)  # the client has left


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]"])
def test_an_allowed_domain_must_not_resolve_to_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv(ALLOW_PRIVATE, raising=False)
    options = ServeOptions(settings=Settings(), allowed_media_domains=(host.strip("[]"),))
    with serving() as site:
        site.put("/page.png", PNG)
        with pytest.raises(ImageError, match="not a public address"):
            read_media(site.url("/page.png", host), "image 1", options, {}, Deadline())
        assert not site.asked


def test_files_outside_the_allowed_folder_are_not_read(guarded: Guarded) -> None:
    inside, outside = guarded.folder / "open", guarded.folder
    (inside / "a b.png").write_bytes(PNG)
    (outside / "secret.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(outside / "secret.png")
    (inside / "folder").symlink_to(outside)
    (inside / "good.png").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "fifo")
    for url in (f"file://{inside}/a%20b.png", f"file://localhost{inside}/good.png"):
        assert guarded.ask(url).status_code == 200
    names = "../secret.png %2e%2e/secret.png ..%2fsecret.png link.png folder/secret.png fifo absent a%00.png %ff"
    paths = [str(inside), f"{outside}/secret.png", *(f"{inside}/{name}" for name in names.split())]
    paths += ["/dev/zero", "/etc/passwd", "/proc/self/environ"]
    refusals = {guarded.refuses(f"file://{path}") for path in paths}
    assert len(refusals) == 1  # absent and forbidden files cannot be told apart
    guarded.refuses(f"file://evil.example{inside}/good.png")


@pytest.mark.parametrize("role", ["function", "model", "user\n", "user<end_of_turn>", "", "USER"])
def test_roles_are_a_closed_list(server: Server, role: str) -> None:
    refused(chat(server, [{"role": role, "content": "Hi"}]), 400, "messages.0.role")


ODD_JSON = [
    (b'{"prompt": "a", "prompt": "b"}', "prompt"),
    (b'{"prompt": "a", "model": "x", "model": "mini"}', "model"),
    (b"", None),
    (b"[]", None),
    (b'{"prompt": "\\ud800 \\u2020"}', None),
    (b'{"prompt": "\xff"}', None),
    (b'{"prompt": "a", "mm_processor_kwargs": ' + b"[" * 10_000, None),
    (b'{"prompt": NaN}', None),
    (b'{"prompt": "a", "mm_processor_kwargs": {}}', "mm_processor_kwargs"),
    ("{}".encode("utf-16"), None),
]


@pytest.mark.parametrize(("body", "param"), ODD_JSON, ids=lambda value: str(value)[:40])
def test_odd_json_is_refused(server: Server, body: bytes, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server}/tokenize", content=body, headers=headers, timeout=DEADLINE)
    assert ("surrogate" in refused(response, 400, param)) == (b"ud800" in body)


def test_a_multipart_body_has_each_field_once_and_each_file_is_used(server: Server) -> None:
    views = ({"width": 5, "height": 5}, {"image": data_url(PNG)})
    bodies = [(PATH, {"messages": user("Hi")}), *(("/v1/views", body) for body in views)]
    bodies += [(path, {"prompt": "a"}) for path in ("/tokenize", "/v1/completions")]
    for path, body in bodies:
        files = [("request", (None, json.dumps(body))), ("extra", ("a.png", PNG))]
        refused(httpx.post(f"{server}{path}", files=files, timeout=DEADLINE), 400, "extra")
    request = ("request", (None, json.dumps({"image": "attachment:a"})))
    page = ("a", ("a.png", PNG))
    for parts, param in (
        ([request, page, page], "a"),
        ([request, ("request", ("b", b"{}")), page], "request"),
        ([page], "request"),
        ([request, ("model", (None, "x")), page], "model"),
    ):
        refused(httpx.post(f"{server}/v1/views", files=parts, timeout=DEADLINE), 400, param)


@pytest.mark.parametrize("allowed", ["https://app.example.com/", "*"])
def test_pages_of_allowed_origins_may_call(allowed: str) -> None:
    options = ServeOptions(settings=Settings(runner="engine"), allowed_origins=(allowed,), api_keys=ApiKeys.of(["k"]))
    app = create_app(options, EngineProcess(options.settings))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def answers(origin: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            headers = {"Origin": origin, "Authorization": "Bearer k"}
            preflight = await client.options(PATH, headers={"Origin": origin, **asked})
            return [preflight, await client.get("/v1/models", headers=headers), await client.get("/nowhere")]

    preflight, models, refusal = asyncio.run(answers("https://app.example.com"))
    assert (preflight.status_code, models.status_code, refusal.status_code) == (200, 200, 401)
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    allowing = [response.headers["access-control-allow-origin"] for response in (preflight, models)]
    assert {*allowing} <= {"*", "https://app.example.com"}
    preflight, models, _ = asyncio.run(answers("https://evil.example"))
    expected = (200, 200) if allowed == "*" else (400, 403)
    assert (preflight.status_code, models.status_code) == expected


def test_a_server_for_named_hosts_answers_to_them_to_local_names_and_to_probes() -> None:
    options = ServeOptions(settings=Settings(runner="engine"), host="0.0.0.0", allowed_hosts=("api.example.com",))
    app = create_app(options, EngineProcess(options.settings))

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            urls = ("api.example.com/v1/models", "127.0.0.1:8000/v1/models", "10.0.0.7/health", "10.0.0.7/v1/models")
            return [(await client.get(f"http://{url}")).status_code for url in urls]

    assert asyncio.run(statuses()) == [200, 200, 200, 403]
