"""Who may read and write what panscan creates: the user's umask says so, but never everybody."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from tests.conftest import noise
from tests.forked_workers import program

from panscan.core import SettingError
from panscan.core.files import fallback_directory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="umask and owners are POSIX's")

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
