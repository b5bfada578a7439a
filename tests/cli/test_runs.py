"""Verbs that read runs: ``panscan recommend``, ``report`` and ``compare``."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.analysis.noisy_runs import noisy_records
from tests.conftest import Panscan, documented, noise, only_run
from tests.records import synthetic
from tests.records.synthetic import batches_of, header, outcome, verdict, write_run

from panscan.bench.grid import build_cells
from panscan.cli.main import run
from panscan.records.store import FILE_NAME, read_run
from panscan.report import to_markdown
from panscan.settings import Settings

pytestmark = pytest.mark.usefixtures("without_charts")

CELLS: dict[str, dict[str, Any]] = {
    "c0": {"attention": "eager"},
    "c1": {"attention": "sdpa", "batch_size": 4, "device": "cuda:1", "ignore_eos": True, "max_new_tokens": 32},
    "c2": {"attention": "flash_attention_2"},
    "c3": {"attention": "flex_attention"},
}


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with a finished run: c1 is the fastest that may be taken."""
    records = [header(CELLS), *batches_of("c0", [1.0, 1.01, 1.02] * 4), verdict("c0", "exact", 1.0)]
    records += [*batches_of("c1", [0.5, 0.51, 0.52] * 4), verdict("c1", "close", 3.1)]
    records += [*batches_of("c2", [0.1] * 12), verdict("c2", "different", 37.0), outcome("c3", "oom", "no\nroom")]
    write_run(folder / "run", records)
    return folder


def recommended(panscan: Panscan, *arguments: str) -> str:
    return panscan("recommend run", *arguments).out


def test_the_choice_is_shown_with_its_reason_and_the_others(folder: Path, panscan: Panscan) -> None:
    lines = recommended(panscan, "--max-p95-ms", "2000").splitlines()
    settings = "sdpa attention, batch size 4, device cuda:1, fixed output length, up to 32 new tokens"
    speeds = "1.96 requests/s; with flash_attention_2 attention (which changes the answers), 10.0 requests/s."
    assert lines[0] == f"Use {settings}: {speeds}"
    assert lines[1].startswith("Reason: 1.96 requests/s, ")
    assert "p95 E2E 520 ms, within 2000 ms; close (KL 3.10x" in lines[1]
    assert lines[2] == "Runner-up: eager attention"
    assert any(line.startswith("Faster but rejected: flash_attention_2 attention, 10.0 req") for line in lines)
    assert "Rejected: flex_attention attention (c3): oom: no room" in lines
    assert lines[-2:] == ["Cell: c1", "Preset: preset.yaml"]


def test_the_preset_holds_what_is_not_default_and_its_source(folder: Path, panscan: Panscan) -> None:
    recommended(panscan)
    text = (folder / "preset.yaml").read_text("ascii")
    assert yaml.safe_load(text) == {"batch_size": 4, "max_new_tokens": 32}
    comments = [
        "decision: Use sdpa attention, batch size 4",
        "cell: c1",
        "run: r, 2026-01-02T03:04:05+00:00, run/records.jsonl",
        "command: panscan bench",
        "verdict: close",
        "reason: 1.96 requests/s",
        "left out: device=cuda:1, ignore_eos=yes",
    ]
    for comment in comments:
        assert f"\n# {comment}" in text


def test_presets_omit_removed_and_machine_settings_of_a_run(folder: Path, panscan: Panscan) -> None:
    engine = {"runner": "engine", "fast_start": True, "tensor_parallel_size": 2, "gpu_memory_gb": 40.0}
    write_run(folder / "run", [header({"c0": engine}), *batches_of("c0", [1.0] * 12), verdict("c0", "exact", 1.0)])
    recommended(panscan)
    text = (folder / "preset.yaml").read_text("ascii")
    assert yaml.safe_load(text) == {"runner": "engine"}
    assert "# left out: tensor_parallel_size=2, gpu_memory_gb=40" in text


def test_json_is_one_object(folder: Path, panscan: Panscan) -> None:
    choice = documented("recommend", recommended(panscan, "--json", "--allow-different", "c2", "-o", "fast.yaml"))
    assert (choice["cell"], choice["runner_up"], choice["preset"]) == ("c2", "c1", "fast.yaml")
    fields = ("cell", "name", "decision", "reason", "runner_up", "alternative", "cost", "rejected", "preset")
    assert tuple(choice) == fields
    assert yaml.safe_load((folder / "fast.yaml").read_text()) == {"attention": "flash_attention_2"}


def test_only_a_file_of_its_own_is_replaced(folder: Path, panscan: Panscan) -> None:
    recommended(panscan)
    first = (folder / "preset.yaml").read_text()
    recommended(panscan)
    assert (folder / "preset.yaml").read_text() == first
    (folder / "preset.yaml").write_text("batch_size: 8\n")
    assert "preset.yaml is there and was not written by panscan recommend" in panscan("recommend run", code=2).err
    assert (folder / "preset.yaml").read_text() == "batch_size: 8\n"
    recommended(panscan, "--force")
    assert (folder / "preset.yaml").read_text() == first


@pytest.mark.parametrize("value", [{"experts": 8}, {"batch_size": 0}])
def test_other_versions_are_refused(tmp_path: Path, panscan: Panscan, value: dict[str, Any]) -> None:
    write_run(tmp_path, [header({"c0": value}), *batches_of("c0", [1.0]), verdict("c0", "exact", 1.0)])
    refused = panscan("recommend", str(tmp_path), "-o", str(tmp_path / "preset.yaml"), code=3).err
    assert "cell c0 has another version's settings" in refused


@pytest.mark.parametrize("name", ["a 'b'\n# c: [1, 2]", "no", "007", "x\udce9"])
def test_names_of_any_kind_come_back_from_a_preset(folder: Path, name: str) -> None:
    write_run(folder / "run", [header({"c0": {"model": name}}), *batches_of("c0", [1.0]), verdict("c0", "exact", 1.0)])
    assert run(["recommend", "run"]) == 0
    assert yaml.safe_load((folder / "preset.yaml").read_text("ascii")) == {"model": name}


def test_every_command_takes_the_preset_of_a_real_sweep(folder: Path, panscan: Panscan) -> None:
    noise(260, 800).save("tall.png")
    noise(300, 300).save("square.png")
    asking = ["tall.png", "-p", "What is the total?"]
    axes = ["--attention", "eager", "--grid-max-crops", "2", "--max-new-tokens", "2"]
    axes += ["--model", "tiny", "--device", "cpu"]
    answer = json.loads(panscan("ask --json", *asking, *axes).out)["text"]
    rows = [{"image": f"{name}.png", "question": asking[-1], "answers": [answer]} for name in ("tall", "square")]
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["bench", "--repeats", "1", "--dataset", "q.jsonl", "--batch-size", "1,2", *axes]) == 0
    measured = only_run(folder)
    alone = next(cell for cell, recorded in measured.cells.items() if recorded.settings["batch_size"] == 1)
    scores = {record.image[0]: record.scores for record in measured.requests[alone, 0]}
    assert set(scores["tall.png"].values()) == {1.0}, "asked alone, it answers what it answered before"

    choice = json.loads(panscan("recommend --min-quality 0 --json", str(measured.path.parent)).out)
    assert {choice["cell"], choice["runner_up"]} == set(measured.cells)
    [cell] = build_cells({"device": ["cpu"]}, presets=["preset.yaml"])
    assert (cell.id, cell.settings) == (choice["cell"], Settings(**measured.cells[choice["cell"]].settings))
    assert f"# command: panscan {shlex.join(measured.header.command[1:])}\n" in Path("preset.yaml").read_text()

    answered = json.loads(panscan("ask --preset preset.yaml --json", *asking).out)
    assert (answered["crops"], answered["output_tokens"], answered["text"]) == (2, 2, answer)
    captured = panscan("crops tall.png --preset preset.yaml --json")
    assert json.loads(captured.out)[0]["crops"] == 2
    preset = Path("preset.yaml").read_text()  # either batch size may have been the faster one
    ignored = [name for name in ("attention", "batch_size", "max_new_tokens") if f"\n{name}: " in preset]
    assert {"attention", "max_new_tokens"} <= set(ignored)
    assert f"--preset preset.yaml: ignoring {', '.join(ignored)}: not supported by panscan crops" in captured.err
    assert run(["bench", *asking, "--preset", "preset.yaml", "--dry-run"]) == 0


# ``panscan report`` on the real command line.


def test_a_report_is_a_page_in_the_run_s_folder_or_markdown(folder: Path, panscan: Panscan) -> None:
    assert panscan("report run") == ("run/report.html\n", "")
    page = (folder / "run" / "report.html").read_text("utf-8")
    assert "<h1>Use " in page
    assert run(["report", "run/records.jsonl", "-o", "other.html"]) == 0
    assert (folder / "other.html").read_text("utf-8") == page
    markdown = to_markdown(read_run(Path("run")))
    assert panscan("report run --format md").out == markdown
    assert panscan("report run --format md -o issue.md").out == "issue.md\n"
    assert (folder / "issue.md").read_text("utf-8") == markdown


def test_json_has_the_decision_and_the_rows_of_the_summary(folder: Path, panscan: Panscan) -> None:
    document = json.loads(panscan("report run --format json").out)
    assert (document["run"], document["best"]) == ("run", "c1") and document["decision"].startswith("Use ")
    rows = [(row["cell"], row["attention"], row["outcome"]) for row in document["cells"]]
    outcomes = ["done", "done", "done", "oom"]
    assert rows == [(cell, CELLS[cell]["attention"], word) for cell, word in zip(CELLS, outcomes, strict=True)]
    low, mean, high = (document["cells"][0][f"request_throughput{bound}"] for bound in ("_low", "", "_high"))
    assert (low, high) == (None, None) and mean > 0
    assert document["cells"][0]["uncertified"]


PICTURES = ("decision-throughput", "decision-e2e-latency-p95", "throughput-attention", "e2e-latency-p95-attention")
PICTURES += ("front",)


def test_pictures_in_a_folder(folder: Path, panscan: Panscan) -> None:
    written = [Path(line) for line in panscan("report --format png run -o new/figures").out.splitlines()]
    assert [path.name for path in written] == [f"report-{name}.png" for name in PICTURES]
    assert all(path.parent == Path("new/figures") and path.stat().st_size > 1000 for path in written)


def test_a_run_without_a_finished_cell_still_has_a_page(tmp_path: Path, panscan: Panscan) -> None:
    synthetic.write_run(tmp_path, [synthetic.header({"c": {}}), synthetic.request("c", "q", 0.0, [1.0])])
    assert panscan("report", str(tmp_path)) == (f"{tmp_path / 'report.html'}\n", "no cell is finished yet\n")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "Nothing was measured." in text
    assert "1 requests of repeats that were in flight when the run was stopped are left out" in text


# ``panscan compare`` from the command line to its exit code.


GATE = ["--fail-on", "p95_e2el>5%"]


@pytest.fixture
def runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: ``a``, ``b`` like it, and ``slow``, a tenth slower; and ``few``, which tells nothing."""
    monkeypatch.setenv("COLUMNS", "80")
    write_run(folder / "a", noisy_records(1))
    write_run(folder / "b", noisy_records(2))
    write_run(folder / "slow", noisy_records(3, factor=1.1))
    write_run(folder / "few", noisy_records(4, batches=2, repeats=1))
    return folder


def test_the_exit_code_says_whether_a_condition_holds(runs: Path, panscan: Panscan) -> None:
    assert run(["compare", "a", "a", *GATE, "--strict"]) == 0
    assert "--fail-on p95_e2el>5% does not hold" in panscan("compare a b", *GATE, "--strict").err
    said = panscan("compare a slow", *GATE, code=5)
    assert "--fail-on p95_e2el>5% holds: sdpa attention, batch size 1 (c0): " in said.err
    assert "slower" in said.out
    assert run(["compare", "a", "slow"]) == 0
    assert run(["compare", "a", "b", "slow", *GATE]) == 5


def test_what_cannot_be_told_is_said_and_fails_only_if_strict(runs: Path, panscan: Panscan) -> None:
    said = panscan("compare a few", *GATE).err
    assert "cannot be evaluated: sdpa attention, batch size 1 (c0): 2 batches are too few to tell" in said
    assert run(["compare", "a", "few", *GATE, "--strict"]) == 5
    assert "unverified in A, unverified in B" in panscan("compare a a --fail-on verdict").err


def test_formats_are_clean_on_stdout(runs: Path, panscan: Panscan) -> None:
    shown, markdown = (panscan("compare a slow --format", form, *GATE, code=5).out for form in ("json", "md"))
    assert documented("compare", shown)["comparisons"][0]["b"] == "B"
    assert markdown.startswith("### Comparison\n\n- A: a\n- B: slow\n")


def test_half_a_line_is_noted_and_left_out(runs: Path, panscan: Panscan) -> None:
    with (runs / "b" / FILE_NAME).open("a") as file:
        file.write('{"type": "requ')
    assert "Note on B: the last line is torn and left out (14 bytes)" in panscan("compare a b").out
