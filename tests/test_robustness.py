"""The robustness job itself, at a tiny scale: it finds failures, and every part of it runs."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from benchmarks.robustness.commands import command_line
from benchmarks.robustness.mutate import MUTATIONS, mutated
from benchmarks.robustness.seeds import SEEDS
from tests.forked_workers import program

from panscan.cli.main import VERBS

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, pidfds and /proc are Linux's")

CHILDREN = """
import os, sys, time
from pathlib import Path
from benchmarks.robustness.children import panscan, run_child
from benchmarks.robustness.commands import outcome_of
here = Path(sys.argv[1])
endless = lambda: os.read(os.pipe()[0], 1)
for work, limits in [
    (panscan(["--version"]), {}), (panscan(["ask", "none.png", "-p", "x"]), {}), (panscan(["crops"]), {}),
    (lambda: 1 / 0, {}), (lambda: os.abort(), {}), (lambda: sys.exit(1), {}), (lambda: sys.exit(3), {}),
    (endless, {"deadline": 0.2}), (endless, {"kill_after": 0.2}),
]:
    ended = run_child(work, here, **{"deadline": 60, **limits})
    print(outcome_of(ended), ended.code, ended.killed)
"""


def job(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """Run parts of the job; returns its exit code and the parts of the record."""
    files = ["--output", str(tmp_path / "record.json"), "--keep", str(tmp_path / "keep")]
    code = "import sys; from benchmarks.robustness.__main__ import main; sys.exit(main())"
    done = subprocess.run(program(code, *arguments, *files), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads((tmp_path / "record.json").read_text())["parts"]


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    code, parts = job(tmp_path, "files", "--scale", str(len(SEEDS) * len(MUTATIONS) / 10_000))
    assert (code, parts["files"]["failures"]) == (0, [])
    assert (len(parts["files"]["groups"]), len(parts["files"]["ways"])) == (len(SEEDS), len(MUTATIONS))


def test_a_killed_job_is_resumed(tmp_path: Path) -> None:
    code, parts = job(tmp_path, "kills", "--scale", "0")
    assert (code, parts["kills"]["failures"], parts["kills"]["groups"]) == (0, [], {"batch, in order": {"kept": 1}})


def test_every_end_of_a_child_is_told_from_the_others(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILDREN, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "answered 0 False",
        "refused 3 False",
        "refused 2 False",
        "traceback 1 False",
        "crash None False",
        "wrong code 1 False",
        "silent 3 False",
        "hang None False",
        "crash None True",
    ], done.stderr


def test_command_lines_cover_every_verb() -> None:
    assert {command_line(0, index)[0] for index in range(1000)} == set(VERBS)


@pytest.mark.parametrize("kind", SEEDS)
def test_damage_is_the_same_again_and_leaves_no_seed_whole(kind: str) -> None:
    data = SEEDS[kind]()
    assert data == SEEDS[kind]()
    for name in MUTATIONS:
        damaged = [mutated(data, name, Random(turn)) for turn in range(4)]
        assert damaged == [mutated(data, name, Random(turn)) for turn in range(4)]
        assert any(content != data for content in damaged)
