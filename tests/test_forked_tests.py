"""``pytest --processes``: every test runs once, and one that kills its process fails alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.forked_workers import program

TESTS = """
import os
def test_fails(): assert False, "what it says"
def test_kills_its_process(): os.kill(os.getpid(), 9)
def test_after_it(capfd, tmp_path):
    print("shown")
    assert capfd.readouterr().out == "shown\\n" and list(tmp_path.iterdir()) == []
"""
MAIN = """
import sys, pytest
from tests.forked_tests import ForkedTests
options = ["-c", "/dev/null", "--rootdir=.", "-q", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[1:]], [ForkedTests(2)]))
"""


def test_every_test_runs_once_and_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / name).write_text(TESTS)
    done = subprocess.run(program(MAIN, "."), capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 1
    assert "6 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("AssertionError: what it says") >= 3
    assert done.stdout.count("its process was ended by signal 9") >= 3
    first = subprocess.run(program(MAIN, "-x", "test_a.py"), capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert "1 failed" in first.stdout and "passed" not in first.stdout, first.stdout
