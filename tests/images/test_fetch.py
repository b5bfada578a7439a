from __future__ import annotations

import hashlib
import io
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from panscan.core import ImageError
from panscan.images import fetch
from panscan.images.files import Page, expand_images, find_pages, load_page, open_image, page_digest


class Site(ThreadingHTTPServer):
    """Serves ``answers`` (path to status, Location and body) on this machine, and counts what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: dict[str, tuple[int, str, bytes]] = {}
        self.asked: Counter[str] = Counter()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def put(self, path: str, body: bytes = b"", status: int = 200, location: str = "") -> str:
        self.answers[path] = status, location, body
        return self.url(path)


class Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        status, location, body = self.server.answers.get(self.path, (404, "", b""))
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.end_headers()
        with suppress(OSError):  # the client has had enough
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fetch._CACHE.clear()
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    fetch._CACHE.clear()


def tiff(*sides: int) -> bytes:
    stream = io.BytesIO()
    first, *rest = (Image.new("L", (side, side)) for side in sides)
    first.save(stream, "TIFF", save_all=True, append_images=rest)
    return stream.getvalue()


def test_a_url_is_fetched_once_for_finding_and_loading(site):
    content = tiff(5, 6)
    url = site.put("/scan", content)
    pages = find_pages([f"{url}#page=2", url], on_problem=pytest.fail)
    assert pages == [Page(url, 2), Page(url, 1)]
    assert load_page(pages[0]).size == (6, 6)
    assert open_image(f"{url}#page=1").size == (5, 5)
    assert expand_images([url]) == [Page(url, 1), Page(url, 2)]
    assert page_digest(pages[0]) == hashlib.sha256(content).hexdigest() + "#page=2"
    assert site.asked["/scan"] == 1
    assert expand_images([url.replace("http", "HTTP") + "#page=1"])[0].page == 1


def test_redirects_are_followed_and_end(site):
    site.put("/there", tiff(7))
    assert open_image(site.put("/here", status=302, location="/there")).size == (7, 7)
    with pytest.raises(ImageError, match=r"/round: could not be fetched \("):
        open_image(site.put("/round", status=302, location="/round"))


@pytest.mark.parametrize(("status", "words"), [(404, "404 Not Found"), (500, "500"), (204, "204")])
def test_any_other_status_is_told(site, status, words):
    url = site.put("/x", tiff(5) if status != 204 else b"", status)
    problems: list[str] = []
    assert find_pages([url, url], on_problem=lambda error: problems.append(str(error))) == []
    assert len(problems) == 1
    assert problems[0].startswith(f"{url}: HTTP status {words}")


def test_a_long_answer_is_refused(site, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 5000)
    assert open_image(site.put("/fits", tiff(60))).size == (60, 60)
    with pytest.raises(ImageError, match=r"/long: more than 5000 bytes"):
        open_image(site.put("/long", b"x" * 5001))


def test_the_cache_keeps_what_was_used_last_within_its_bounds(site, monkeypatch):
    a, b, c = (site.put(f"/{name}", name.encode() * 40) for name in "abc")
    monkeypatch.setattr(fetch, "CACHE_BYTES", 100)
    for url in (a, b, a, c, a, b):  # c pushes out b, not a, which was used since
        assert fetch.fetch(url) == url[-1].encode() * 40
        assert sum(map(len, fetch._CACHE.values())) <= 100
    assert site.asked == {"/a": 1, "/b": 2, "/c": 1}


def test_a_failed_answer_is_asked_for_again(site):
    url = site.put("/late", status=503)
    with pytest.raises(ImageError, match="503"):
        fetch.fetch(url)
    site.put("/late", b"now")
    assert fetch.fetch(url) == b"now"


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "https://127.0.0.1:99999/", "http://a\nb/", "http://127.0.0.1:1/b\udcff"]
)
def test_malformed_urls_are_one_line(url):
    with pytest.raises(ImageError, match=r": could not be fetched \(") as caught:
        open_image(url)
    assert str(caught.value).isprintable()


def test_an_absent_or_silent_server_is_told(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(ImageError, match=r"/x: could not be fetched \(timed out\)$"):
            open_image(url)
    with pytest.raises(ImageError, match=r"/x: could not be fetched \("):
        open_image(url)
