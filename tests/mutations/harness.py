"""Runs a broken engine through a sweep as ``panscan bench`` does, and reads from the records what caught it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.conftest import noise
from tests.mutations.broken import ANSWER, BEYOND, IMAGE, INPUTS, TOKENS, Mutation

from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.run import start
from panscan.core import InputError
from panscan.settings import Settings, settings_from
from panscan.verdict.judgement import Verdict, verdict_of
from panscan.workload.requests import Source, build_workload

BASE = {
    "model": "tiny",
    "runner": "engine",
    "dtype": "fp32",
    "device": "cpu",
    "max_new_tokens": 40,
    "kv_cache_gb": 0.05,
    "ignore_eos": True,
}


@dataclass(frozen=True, slots=True)
class Found:
    """The verdict on a broken engine, and the parts of it that differ from those of an intact one."""

    verdict: Verdict
    caught_by: frozenset[str]


class _NullObserver:
    """An observer that ignores the progress of a sweep."""

    def loading(self, settings: Settings) -> None: ...
    def ready(self, cell: Cell, repeat: int) -> None: ...
    def batch_done(self) -> None: ...
    def stage(self, what: str) -> None: ...
    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        raise AssertionError(f"{outcome}: {reason}")


def documents(folder: Path) -> list[Path]:
    """Small pictures, each of its own noise, with and without crops."""
    places = []
    for seed in range(18):
        places.append(folder / f"page{seed:02}.png")
        noise(*((256, 640), (600, 256), (256, 256))[seed % 3], seed).save(places[-1])
    return places


def verdict_under(mutation: Mutation, pages: list[Path], directory: Path) -> Found:
    """Measure and verify one cell with a broken engine.

    Args:
        mutation: what is broken.
        pages: pictures, of which the workload has the first.
        directory: of the run.
    """
    source = Source(images=tuple(map(str, pages[: mutation.pages])), prompt="What is it?")
    items = build_workload(source, on_problem=_refuse)
    cell = Cell.of(settings_from({**BASE, **mutation.settings}))
    plan = SweepPlan(cells=[cell], items=items, source=source, verify_requests=6, **mutation.plan)
    with mutation.active():
        run = start(plan, directory, ["panscan", "bench"], _NullObserver())
    verdict = verdict_of(run, cell.id)
    parts = {
        TOKENS: verdict.measured is not None and verdict.measured.first is not None,
        BEYOND: verdict.beyond is not None and verdict.beyond.first is not None,
        ANSWER: verdict.answer is not None and verdict.answer.ratio > 2,
        IMAGE: verdict.image is not None and verdict.image.ratio > 2,
        INPUTS: any(truth.inputs is not None and truth.inputs.difference for truth in run.truths.values()),
        **{f"invariance: {axis.axis}": axis.broken for axis in verdict.axes},
    }
    caught = frozenset(name for name, caught in parts.items() if caught)
    assert bool(caught) == (verdict.word == "different"), f"{mutation.name}: {verdict}"
    return Found(verdict, caught)


def _refuse(problem: InputError) -> None:
    raise problem
