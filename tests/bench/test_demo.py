"""The demo as a library: what it returns, and the commands that it says do the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from panscan.bench import demo as demo_module
from panscan.bench.demo import run_demo
from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.run import plan_of
from panscan.cli import bench
from panscan.cli.verb import parsed_options
from panscan.core import InputError, SettingError
from panscan.records.store import Run, read_run
from panscan.settings import Settings
from panscan.workload.samples import write_samples


@dataclass
class RecordingObserver:
    """Follows a demo and its sweep."""

    said: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    plans: list[SweepPlan] = field(default_factory=list)

    def step(self, command: Sequence[str]) -> None:
        self.said.append(command[1])
        self.commands.append(list(command))

    def documents_drawn(self, questions: Path) -> None:
        assert questions.exists()
        self.said.append("drawn")

    @contextmanager
    def measuring(self, plan: SweepPlan, directory: Path) -> Iterator[RecordingObserver]:
        self.plans.append(plan)
        yield self
        self.said.append("swept")

    def measured(self, run: Run) -> None:
        self.said.append("measured")

    def report_written(self, directory: Path) -> None:
        assert (directory / "report.html").exists()
        self.said.append("written")

    def gallery_written(self, path: Path) -> None:
        assert path.exists()
        self.said.append("gallery")

    def loading(self, settings: Settings) -> None: ...
    def ready(self, cell: Cell, repeat: int) -> None: ...
    def batch_done(self) -> None: ...
    def stage(self, what: str) -> None: ...
    def problem(self, cell: Cell, outcome: str, reason: str) -> None: ...


def refuse(problem: InputError) -> None:
    raise problem


def test_a_demo_returns_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(demo_module._FLAGS, "--max-num-crops", ["2"])  # two cells instead of three
    (tmp_path / "tale" / "runs" / "99991231-235959-mini").mkdir(parents=True)
    with pytest.raises(SettingError, match=r"tale already holds a demo: .* or add --force \(earlier runs are kept\)"):
        run_demo(Path("tale"), count=2, seed=2, again=False, observer=RecordingObserver())
    watch = RecordingObserver()
    demo = run_demo(Path("tale"), count=2, seed=2, again=True, observer=watch)

    assert watch.said == ["samples", "drawn", "bench", "swept", "measured", "written", "report", "gallery", "recommend"]
    assert demo.directory.name != "99991231-235959-mini"
    assert demo.run.header == read_run(demo.directory).header
    for name in ("records.jsonl", "summary.csv", "report.html", "gallery.html"):
        assert (demo.directory / name).stat().st_size > 1000
    assert demo.recommendation.cell in demo.preset.read_text()
    decision = demo.recommendation.decision
    assert decision in (demo.directory / "report.html").read_text("utf-8")
    assert f"# decision: {decision}\n" in demo.preset.read_text("utf-8")
    assert {key[1] for key in demo.run.repeats} == {0, 1, 2}, "three repeats give intervals"

    [plan] = watch.plans
    assert demo.run.header.command == watch.commands[1]
    resumed = plan_of(demo.run, on_problem=refuse)
    assert (resumed.cells, resumed.items, resumed.source) == (plan.cells, plan.items, plan.source)


def test_the_command_of_the_sweep_makes_the_same_plan(tmp_path: Path) -> None:
    questions = write_samples(tmp_path / "documents", count=2)
    command = demo_module._bench_command(questions, tmp_path / "runs")
    options, _ = parsed_options("bench", bench.command.make_context("bench", command[2:]))
    assert bench._sweep_plan(options, ()) == demo_module._plan(questions)
    assert options.output_dir == tmp_path / "runs"
