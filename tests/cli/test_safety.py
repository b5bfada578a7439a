"""Who may read what is written, which addresses are fetched, where credentials go, and options that mean billions."""

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import Panscan, noise, only_run
from tests.footprint import run_measured
from tests.forked_workers import program
from tests.images.site import Site

from panscan.cli.main import run
from panscan.core import SettingError
from panscan.core.files import fallback_directory
from panscan.images import fetch
from panscan.workload.requests import Source, load_workload

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="umask and owners are POSIX's")]
pytestmark += [pytest.mark.usefixtures("without_charts")]

TINY = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "2", "-p", "What?"]


BATCH = ["batch", "a.png", "-o", "out/a.jsonl", *TINY]
BENCH = ["bench", "--repeats", "1", "a.png", "--warmup", "0", *TINY]

# Each command as a user starts it, under umasks of its own, in one process: importing PyTorch takes seconds.
COMMANDS = """
import json, os, sys
from panscan.cli.main import main

for umask, words in json.loads(sys.argv[1]):
    os.umask(umask)
    try:
        main(words)
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_the_umask_is_honoured_and_nothing_is_world_writable(tmp_path: Path) -> None:
    noise(90, 60).save(tmp_path / "a.png")
    before = {tmp_path, *tmp_path.iterdir()}
    commands = json.dumps([(0, BENCH), (0o077, BATCH)])
    variables = {**os.environ, "PANSCAN_CACHE": str(tmp_path / "cache")}
    line = program(COMMANDS, commands)
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=variables)
    assert done.returncode == 0, done.stderr
    created = set(tmp_path.rglob("*")) - before
    private = {path for path in created if path.is_relative_to(tmp_path / "out")}
    assert {"out", "a.jsonl", "a.jsonl.run.json"} <= {path.name for path in private}
    assert {"records.jsonl", "report.html", "summary.csv", "truth"} <= {path.name for path in created - private}
    assert [path for path in created if path.stat().st_mode & stat.S_IWOTH] == []
    assert [path for path in private if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)] == []


def test_the_fallback_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = fallback_directory()
    assert path.stat().st_mode & 0o777 == 0o700
    assert fallback_directory() == path
    path.chmod(0o755)
    with pytest.raises(SettingError, match=r"is not a private directory that you own: remove it, or set PANSCAN_CACHE"):
        fallback_directory()
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="not a private directory"):
        fallback_directory()
    path.unlink()
    path.write_text("")
    with pytest.raises(SettingError, match="not a private directory"):
        fallback_directory()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a directory away")
def test_the_fallback_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.chown(fallback_directory(), 12345, 12345)
    with pytest.raises(SettingError, match="not a private directory"):
        fallback_directory()


# URLs on the command line: private addresses need the option, and credentials reach no output.


SECRETS = ("annika7", "hunter2", "s1gned")


@pytest.fixture
def site(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """With a picture, and not allowed."""
    monkeypatch.delenv(fetch.ALLOW_PRIVATE)
    picture = io.BytesIO()
    noise(90, 60).save(picture, "PNG")
    site.put("/scan.png?sig=s1gned", picture.getvalue())
    return site


def url_of(site: Site) -> str:
    return site.url("/scan.png?sig=s1gned", "annika7:hunter2@127.0.0.1")


COMMANDS_WITH_URLS = [
    ["ask", "URL", *TINY],
    ["batch", "URL", "-o", "answers.jsonl", *TINY],
    ["bench", "--repeats", "1", "URL", "--warmup", "0", "--no-verify", *TINY],
    ["crops", "URL", "-o", "views.png"],
]


@pytest.mark.parametrize("words", COMMANDS_WITH_URLS, ids=lambda words: words[0])
def test_private_addresses(site: Site, panscan: Panscan, tmp_path: Path, words: list[str]) -> None:
    words = [url_of(site) if word == "URL" else word for word in words]
    refused = panscan(*words, code=3)
    written = Path("answers.jsonl").read_text() if words[0] == "batch" else ""
    assert "127.0.0.1, not a public address: allow it with --allow-private-urls" in refused.err + written
    assert not site.asked
    Path("answers.jsonl").unlink(missing_ok=True)
    printed = panscan(*words, "--allow-private-urls")
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for text in (refused.out + refused.err + printed.out + printed.err).encode(), *written:
        assert not any(secret.encode() in text for secret in SECRETS)


def test_a_run_is_not_resumed_without_credentials(site: Site, panscan: Panscan) -> None:
    panscan(f"bench --repeats 1 {url_of(site)} --warmup 0 --no-verify --allow-private-urls", *TINY)
    refused = panscan("bench --allow-private-urls --resume", str(only_run(Path()).path.parent), code=3).err
    assert "credentials are not stored in records: pass the full URL again" in refused


def test_answers_about_urls_with_credentials_are_resumed(site: Site) -> None:
    words = ["batch", url_of(site), "-o", "answers.jsonl", "--allow-private-urls", *TINY]
    assert run(words) == 0
    before = Path("answers.jsonl").read_bytes()
    [line] = before.splitlines()
    assert json.loads(line)["id"].startswith("http://***@127.0.0.1:")
    assert run([*words, "--resume"]) == 0
    assert Path("answers.jsonl").read_bytes() == before


# Options that mean billions are refused by name, before anything of that size is made.


# All in one process: its peak never falls, so what any of them took shows in the growth.
CODE = """
import contextlib, io, json
from panscan.cli.main import run

def refused(words):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return run(["bench", "doc.png", "-p", "x", *words]), said.getvalue()

refused(["--batch-size", "two"])
plain = peak()
answers = [refused(words) for words in json.load(open("bombs.json"))]
print(peak() - plain, json.dumps(answers))
"""
LISTED = ",".join(map(str, range(1, 1000)))
GRID = "".join(f"{name}: [{LISTED}]\n" for name in ("batch_size", "max_new_tokens", "grid_max_crops"))


BOMBS = [
    (["--num-prompts", "100000000"], "--num-prompts"),
    (["--batch-size", ",".join("1" for _ in range(60_000))], "--batch-size has 60,000 values: give at most 1,000"),
    (["--batch-size", LISTED, "--max-new-tokens", LISTED], "998,001 cells, the limit is 10,000"),
    (["--grid", "grid.yaml"], "997,002,999 cells, the limit is 10,000: give fewer values (batch_size: 999, "),
    (["--preset", ",".join(["balanced"] * 5000)], "--preset names 5,000 presets: give at most 1,000"),
    (["--batch-size", "1-100000000"], "--batch-size takes a whole number"),
    (["--repeats", "100000000"], "--repeats"),
    (["--dry-run", "--batch-size", LISTED[:23], "--repeats", "9091"], "are 100,001 measurements, the limit is 100,000"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_bombs_are_refused_and_take_no_memory(tmp_path: Path) -> None:
    noise(60, 60).save(tmp_path / "doc.png")
    (tmp_path / "grid.yaml").write_text(GRID)
    (tmp_path / "bombs.json").write_text(json.dumps([words for words, _ in BOMBS]))
    growth, *said = run_measured(CODE, cwd=tmp_path, forked=True)
    answers = json.loads(" ".join(said))
    for (_, named), (code, message) in zip(BOMBS, answers, strict=True):
        assert (code, named in " ".join(message.split())) == (2, True), message
    assert int(growth) < 100


def test_prompts_times_documents_are_counted_before_they_are_made(tmp_path: Path) -> None:
    page = noise(8, 8)
    page.save(tmp_path / "pages.tif", save_all=True, append_images=[page] * 99)
    (tmp_path / "prompts.txt").write_text("What?\n" * 10_001)
    source = Source(images=(str(tmp_path / "pages.tif"),), prompts=str(tmp_path / "prompts.txt"))
    with pytest.raises(SettingError, match=r"10,001 prompts for each of 100 documents are 1,000,100 requests"):
        load_workload(source, on_problem=pytest.fail)
