"""URLs on the command line: private addresses need the option, and credentials reach no output."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import noise
from tests.images.site import Site, serving

from panscan.cli.main import run
from panscan.core.lru import LruCache
from panscan.images import fetch

pytestmark = pytest.mark.usefixtures("without_charts")

QUICK = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "2"]
SECRETS = ("annika7", "hunter2", "s1gned")


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fetch._CACHE = LruCache(fetch.CACHE_BYTES, len)
    picture = io.BytesIO()
    noise(90, 60).save(picture, "PNG")
    with serving() as server:
        server.put("/scan.png?sig=s1gned", picture.getvalue())
        yield server
    fetch._CACHE = LruCache(fetch.CACHE_BYTES, len)


def url_of(site: Site) -> str:
    return site.url("/scan.png?sig=s1gned", "annika7:hunter2@127.0.0.1")


@pytest.mark.parametrize(
    "words",
    [
        ["ask", "URL", "-p", "What?", *QUICK],
        ["batch", "URL", "-p", "What?", "-o", "answers.jsonl", *QUICK],
        ["bench", "--repeats", "1", "URL", "-p", "What?", "--warmup", "0", "--no-verify", *QUICK],
        ["crops", "URL", "-o", "views.png"],
    ],
    ids=lambda words: words[0],
)
def test_private_addresses(site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]) -> None:
    words = [url_of(site) if word == "URL" else word for word in words]
    assert run(words) == 3
    refused = capsys.readouterr()
    written = Path("answers.jsonl").read_text() if words[0] == "batch" else ""
    assert "127.0.0.1, not a public address: allow it with --allow-private-urls" in refused.err + written
    assert not site.asked
    Path("answers.jsonl").unlink(missing_ok=True)
    assert run([*words, "--allow-private-urls"]) == 0
    printed = capsys.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for text in (refused.out + refused.err + printed.out + printed.err).encode(), *written:
        assert not any(secret.encode() in text for secret in SECRETS)


def test_a_run_is_not_resumed_without_credentials(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"bench --repeats 1 {url_of(site)} -p What? --warmup 0 --no-verify --allow-private-urls"
    assert run([*words.split(), *QUICK]) == 0
    [directory] = Path("runs").iterdir()
    capsys.readouterr()
    assert run(["bench", "--resume", str(directory), "--allow-private-urls"]) == 3
    assert "credentials are not stored in records: pass the full URL again" in capsys.readouterr().err


def test_answers_about_urls_with_credentials_are_resumed(site: Site) -> None:
    words = ["batch", url_of(site), "-p", "What?", "-o", "answers.jsonl", "--allow-private-urls", *QUICK]
    assert run(words) == 0
    before = Path("answers.jsonl").read_bytes()
    [line] = before.splitlines()
    assert json.loads(line)["id"].startswith("http://***@127.0.0.1:")
    assert run([*words, "--resume"]) == 0
    assert Path("answers.jsonl").read_bytes() == before
