"""``panscan report`` on the real command line."""

import json
from pathlib import Path

import pytest
from tests.records import synthetic

from panscan.cli.main import run
from panscan.records.store import read_run
from panscan.report import to_markdown


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run directory with two measured cells."""
    cells = {"a": {"model": "tiny", "batch_size": 1}, "b": {"model": "tiny", "batch_size": 2}}
    records = [synthetic.header(cells), *synthetic.batches_of("a", [1.0, 1.2]), *synthetic.batches_of("b", [1.5, 1.6])]
    synthetic.write_run(tmp_path / "run", records)
    return tmp_path / "run"


def test_a_page_in_the_run_s_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(home)]) == 0
    assert capsys.readouterr() == (f"{home / 'report.html'}\n", "")
    assert "<h1>Use " in (home / "report.html").read_text("utf-8")
    before = (home / "report.html").read_bytes()
    assert run(["report", str(home / "records.jsonl"), "-o", str(home / "other.html")]) == 0
    assert (home / "other.html").read_bytes() == before


def test_markdown_to_standard_output_or_a_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(home), "--format", "md"]) == 0
    assert capsys.readouterr().out == to_markdown(read_run(home))
    assert run(["report", str(home), "--format", "md", "-o", str(home / "issue.md")]) == 0
    assert capsys.readouterr().out == f"{home / 'issue.md'}\n"
    assert (home / "issue.md").read_text("utf-8") == to_markdown(read_run(home))


def test_json_has_the_decision_and_the_rows_of_the_summary(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(home), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["best"]) == (str(home), "a")
    assert found["decision"].startswith("Use ")
    rows = [(row["cell"], row["batch_size"], row["outcome"]) for row in found["cells"]]
    assert rows == [("a", 1, "done"), ("b", 2, "done")]
    low, mean, high = (found["cells"][0][f"request_throughput{bound}"] for bound in ("_low", "", "_high"))
    assert (low, high) == (None, None) and mean > 0
    assert found["cells"][0]["uncertified"]


def test_pictures_in_a_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(home), "--format", "png", "-o", str(home / "new" / "figures")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == [
        "report-decision-throughput.png",
        "report-decision-e2e-latency-p95.png",
        "report-throughput-batch-size.png",
        "report-e2e-latency-p95-batch-size.png",
    ]
    assert all(path.parent == home / "new" / "figures" and path.stat().st_size > 1000 for path in written)


def test_a_run_without_a_finished_cell_still_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.write_run(tmp_path, [synthetic.header({"c": {}}), synthetic.request("c", "q", 0.0, [1.0])])
    assert run(["report", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'report.html'}\n", "no cell is finished yet\n")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "Nothing was measured." in text
    assert "1 requests of repeats that were in flight when the run was stopped are left out" in text
