"""Options that mean billions are refused by name, before anything of that size is made."""

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import noise
from tests.footprint import run_measured

from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.core import SettingError
from panscan.workload.requests import Source, load_workload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")

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
]


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


def test_cells_times_repeats_are_bounded() -> None:
    cells = build_cells({"batch_size": [1, 2, 3]})
    source = Source(no_images=True, prompt="x")
    SweepPlan(cells=cells, items=[], source=source, repeats=33_333)
    with pytest.raises(SettingError, match=r"--repeats 33334 of 3 cells are 100,002 measurements, the limit"):
        SweepPlan(cells=cells, items=[], source=source, repeats=33_334)
