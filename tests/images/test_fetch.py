import base64
import copy
import hashlib
import json
import pickle
import re
import socket
import ssl
import threading
from contextlib import suppress

import pytest
from PIL import Image
from tests.images.encoding import encode

from panscan.core import ImageError
from panscan.core.lru import LruCache
from panscan.images import fetch
from panscan.images.files import Page, expand_images, find_files, find_pages, open_image, page_digest


def tiff(*sides: int) -> bytes:
    first, *rest = (Image.new("L", (side, side)) for side in sides)
    return encode(first, "TIFF", more=rest)


def test_a_url_is_fetched_once_for_finding_and_loading(site):
    content = tiff(5, 6)
    url = site.put("/scan", content)
    pages = find_pages([f"{url}#page=2", url], on_problem=pytest.fail)
    assert pages == [Page(url, 2), Page(url, 1)]
    assert open_image(pages[0]).size == (6, 6)
    assert open_image(f"{url}#page=1").size == (5, 5)
    assert expand_images([url]) == [Page(url, 1), Page(url, 2)]
    assert page_digest(pages[0]) == hashlib.sha256(content).hexdigest() + "#page=2"
    assert site.asked["/scan"] == 1
    assert expand_images([url.replace("http", "HTTP") + "#page=1"])[0].page == 1


def test_redirects_are_followed_and_end(site):
    site.put("/there", tiff(7))
    for status in (301, 302, 303, 307, 308):
        assert open_image(site.put(f"/{status}", status=status, location="/there")).size == (7, 7)
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
    monkeypatch.setattr(fetch, "_CACHE", LruCache(100, len))
    for url in (a, b, a, c, a, b):  # c pushes out b, not a, which was used since
        assert fetch.fetch(url) == url[-1].encode() * 40
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


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.usefixtures("site")
def test_an_absent_or_silent_server_is_an_error(monkeypatch, scheme):
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(ImageError, match=r"/x: could not be fetched \(0.05 s without data\)$"):
            open_image(url)
    with pytest.raises(ImageError, match=r"/x: could not be fetched \("):
        open_image(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1"])
def test_local_addresses_are_refused_unless_allowed_in_words(site, monkeypatch, host):
    site.put("/x", tiff(5))
    for value in ("", "0", "no", "off", "false"):
        monkeypatch.setenv("PANSCAN_ALLOW_PRIVATE_URLS", value)
        with pytest.raises(ImageError, match=r"not a public address: allow it with --allow-private-urls or PANSCAN_"):
            open_image(site.url("/x", host))
    assert not site.asked
    if host in ("127.0.0.1", "localhost"):
        monkeypatch.setenv(fetch.ALLOW_PRIVATE, "1")
        assert open_image(site.url("/x", host)).size == (5, 5)


PUBLIC = (
    "93.184.215.14 2606:2800:21f:cb07:6820:80da:af6b:8b2c 64:ff9b::5db8:d70e 168.63.129.15 192.0.1.1 198.20.0.1"
    " 3fff:1000::1 2001:200::1"
)
PRIVATE = (
    "10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 127.0.0.1 0.0.0.0 169.254.169.254 224.0.0.1 239.255.255.250"
    " 255.255.255.255 240.0.0.1 ::1 :: fe80::1%eth0 fc00::1 fec0::1 ff0e::1 ::ffff:93.184.215.14 ::ffff:10.0.0.1"
    " ::7f00:1 64:ff9b::a00:1 64:ff9b:1::a00:1 2002:a00:1:: 2001::1 168.63.129.16 64:ff9b::a83f:8110"
    " 100.100.100.200 192.0.0.192 192.0.0.9 192.88.99.1 198.19.0.1 203.0.113.9 3fff::1 3fff:0fff::1 2001:1::1"
    " 2001:db8::1 2620:4f:8000::1 5f00::1 100::1 fd00:ec2::254 ::808:808 4000::1"
)


@pytest.mark.parametrize(("addresses", "public"), [(PUBLIC, True), (PRIVATE, False)])
def test_public_addresses(addresses, public):
    assert [address for address in addresses.split() if fetch.is_public(address) is not public] == []


def test_a_name_is_looked_up_once_and_that_address_is_connected_to(site, monkeypatch):
    """DNS rebinding: the second answer is another address than the one that was checked."""
    lookup, asked = socket.getaddrinfo, []

    def rebinding(host: str, *others: object, **named: object) -> list[tuple[object, ...]]:
        if not host.replace(".", "").isdigit():
            asked.append(host)
            host = f"127.0.0.{len(asked)}"
        return lookup(host, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(fetch, "is_public", "127.0.0.1".__eq__)
    monkeypatch.delenv(fetch.ALLOW_PRIVATE)
    site.put("/x", tiff(5))
    assert open_image(site.url("/x", "rebinding.test")).size == (5, 5)
    assert asked == ["rebinding.test"]
    assert site.headers["/x"]["Host"] == f"rebinding.test:{site.server_port}"


def test_a_redirect_to_a_private_address_is_refused(site, monkeypatch):
    monkeypatch.delenv(fetch.ALLOW_PRIVATE)
    monkeypatch.setattr(fetch, "is_public", "127.0.0.1".__eq__)  # this one counts as public, other local ones do not
    site.put("/secret", tiff(7))
    for host in ("127.0.0.2", "[::ffff:127.0.0.1]"):
        url = site.put("/here", status=302, location=site.url("/secret", host))
        with pytest.raises(ImageError, match="not a public address"):
            open_image(url)
    with pytest.raises(ImageError, match="needs http:// or https://"):
        open_image(site.put("/file", status=302, location="file:///etc/passwd"))
    assert site.asked["/secret"] == 0
    site.put("/here", status=302, location="/secret")
    assert open_image(site.url("/here")).size == (7, 7)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["headers", "body"])
@pytest.mark.usefixtures("site")
def test_a_server_that_drips_is_left_at_the_deadline(monkeypatch, start):
    """One byte at a time, never silent for long enough to count as silent."""
    monkeypatch.setattr(fetch, "TRANSFER_S", 0.3)
    gone = threading.Event()

    def drip(server: socket.socket) -> None:
        with suppress(OSError), server.accept()[0] as client:
            client.sendall(start)
            while not gone.wait(0.01):
                client.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)  # on a busy machine the deadline may pass before the client connects
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        with pytest.raises(ImageError, match=r"could not be fetched \(it took longer than 0.3 s\)$"):
            open_image(f"http://127.0.0.1:{server.getsockname()[1]}/x")
        gone.set()
        thread.join()


@pytest.fixture
def secure(site, certificate, monkeypatch):
    """The site, which also serves HTTPS on its port with a certificate that is trusted for 127.0.0.1."""
    site.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    site.tls.load_cert_chain(*certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return site


def test_https_needs_a_trusted_certificate_of_the_host(secure, monkeypatch):
    url = secure.put("/x", tiff(5)).replace("http", "https")
    with pytest.raises(ImageError, match=r"could not be fetched \(.*Hostname mismatch"):
        open_image(url.replace("127.0.0.1", "localhost"))
    assert open_image(url).size == (5, 5)
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ImageError, match=r"could not be fetched \(.*self-signed certificate"):
        open_image(f"{url}?again")
    assert secure.asked == {"/x": 1}


def test_a_server_that_falls_silent_over_tls_is_left_at_the_deadline(secure, monkeypatch):
    monkeypatch.setattr(fetch, "TRANSFER_S", 0.3)
    gone = threading.Event()
    secure.before_answer = lambda *_: gone.wait(10.0)
    with pytest.raises(ImageError, match=r"could not be fetched \(it took longer than 0.3 s\)$"):
        open_image(secure.put("/x", tiff(5)).replace("http", "https"))
    gone.set()


def test_proxies_of_the_environment_need_the_allowance(site, monkeypatch):
    proxied = "http://printer.internal.test/scan"
    site.put(proxied, tiff(9))
    monkeypatch.setenv("http_proxy", site.url(""))
    assert open_image(proxied).size == (9, 9)
    monkeypatch.delenv(fetch.ALLOW_PRIVATE)
    with pytest.raises(ImageError, match="could not be fetched"):
        open_image(proxied)
    assert site.asked == {proxied: 1}


def test_credentials_reach_the_server_and_no_name(site):
    content = tiff(5, 6)
    path = "/scan?X-Amz-Signature=abc&page=1&token=t0p"
    site.put(path, content)
    url = site.url(path, "ann:pa%20ss@127.0.0.1")
    pages = find_pages([url], on_problem=pytest.fail)
    assert [open_image(page).size for page in pages] == [(5, 5), (6, 6)]
    assert base64.b64decode(site.headers[path]["Authorization"].removeprefix("Basic ")) == b"ann:pa ss"
    name = pages[1].name
    assert re.fullmatch(
        r"http://\*\*\*@127.0.0.1:\d+/scan\?X-Amz-Signature=\*\*\*\w{8}&page=1&token=\*\*\*\w{8}#page=2", name
    )
    for again in (name, pickle.loads(pickle.dumps(name)), copy.deepcopy(name)):
        assert open_image(again).size == (6, 6)
    with pytest.raises(ImageError, match="credentials are not stored in records"):
        open_image(json.loads(json.dumps(name)))
    site.put(path, status=500)
    fetch._CACHE = LruCache(fetch.CACHE_BYTES, len)
    with pytest.raises(ImageError) as caught:
        open_image(url)
    assert not any(secret in str(caught.value) for secret in ("ann", "pa%20ss", "abc", "t0p"))


def test_a_password_does_not_follow_a_redirect_to_another_server(site):
    site.put("/there", tiff(5))
    for host, sent in (("127.0.0.1", True), ("localhost", False)):
        site.put("/here", status=302, location=site.url("/there", host))
        fetch._CACHE = LruCache(fetch.CACHE_BYTES, len)
        open_image(site.url("/here", "ann:secret@127.0.0.1"))
        assert ("Authorization" in site.headers["/there"]) is sent


def test_a_password_does_not_follow_a_redirect_from_https_to_http(secure):
    secure.put("/there", tiff(5))
    secure.put("/here", status=302, location=secure.url("/there"))
    open_image(secure.url("/here", "ann:secret@127.0.0.1").replace("http", "https"))
    assert [path for path, headers in secure.headers.items() if "Authorization" in headers] == ["/here"]


def test_urls_that_differ_in_a_token_alone_stay_apart(site):
    urls = [site.put(f"/get?token={side}", tiff(side)) for side in (5, 6)]
    pages = find_pages(urls, on_problem=pytest.fail)
    assert [open_image(page).size for page in pages] == [(5, 5), (6, 6)]


SECRET = (
    "X-Amz-Signature X-Amz-Credential X-Amz-Security-Token sig AWSAccessKeyId api_key apiKey key x-functions-key"
    " authToken access_token client_secret Password pwd Policy"
)
PLAIN = "page design author X-Amz-Date keyword monkey"


@pytest.mark.parametrize("parameter", f"{SECRET} {PLAIN}".split())
def test_which_parameters_are_secret(parameter):
    for before in ("?", "?a=b&"):
        url = f"https://example.test/x{before}{parameter}=s3cret&page=2"
        assert ("s3cret" not in fetch.conceal(url)) is (parameter in SECRET.split())
        assert fetch.conceal(url).endswith("&page=2")
        assert fetch.conceal(fetch.conceal(url)) == fetch.conceal(url)
    text = f"panscan ask https://ann:pw@example.test/x?{parameter}=s3cret -p mail@example.test"
    assert fetch.conceal(text).startswith("panscan ask https://***@example.test/x?")
    assert fetch.conceal(text).endswith(" -p mail@example.test")


def test_urls_that_differ_in_their_login_only_are_not_one() -> None:
    problems: list[str] = []
    given = ["http://alice:a@x.test/p.png", "http://bob:b@x.test/p.png"]
    assert len(find_files(given, on_problem=lambda error: problems.append(str(error)))) == 1
    assert "login" in problems[0]
    assert "bob" not in problems[0]
    assert len(find_files(given[:1] * 2, on_problem=lambda error: problems.append(str(error)))) == 1
    assert len(problems) == 1
