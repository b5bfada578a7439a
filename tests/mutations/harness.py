"""Runs a broken engine through a sweep as ``panscan bench`` does, and reads from the records what caught it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.observing import RecordingObserver
from tests.conftest import noise, refuse
from tests.engine.driving import TINY_ENGINE
from tests.mutations.broken import ANSWER, BEYOND, IMAGE, INPUTS, TOKENS, Mutation

from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.run import start
from panscan.records.verdict_records import Divergence
from panscan.settings import settings_from
from panscan.verdict.judgement import EXACT_RATIO, REQUEST_FACTOR, Verdict, verdict_of
from panscan.workload.requests import Source, load_workload

BASE = {**TINY_ENGINE, "max_new_tokens": 40, "kv_cache_gb": 0.05, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Found:
    """The verdict on a broken engine, and the parts of it that differ from those of an intact one."""

    verdict: Verdict
    caught_by: frozenset[str]


def documents(folder: Path) -> list[Path]:
    """Small pictures, each of its own noise, with and without crops."""
    places = []
    for seed in range(18):
        places.append(folder / f"page{seed:02}.png")
        noise(*((256, 640), (600, 256), (256, 256))[seed % 3], seed).save(places[-1])
    return places


def verdict_under(
    mutation: Mutation, pages: list[Path], directory: Path, dtype: str, reference: Path | None = None
) -> Found:
    """Measure and verify one cell with a broken engine.

    Args:
        mutation: what is broken.
        pages: pictures, of which the workload has the first.
        directory: of the run.
        dtype: precision of the cell.
        reference: run of the intact engine, whose reference saves time where the mutation keeps its views.
    """
    source = Source(images=tuple(map(str, pages[: mutation.pages])), prompt="What is it?")
    items = load_workload(source, on_problem=refuse).items
    cell = Cell.of(settings_from({**BASE, "dtype": dtype, **mutation.settings}))
    shared = str(reference) if reference is not None and mutation.same_reference else None
    fixed: dict[str, Any] = {"verify_requests": 6, "verify_budget": 10_000, "warmup": 0, "reference": shared}
    plan = SweepPlan(cells=[cell], items=items, source=source, **{**fixed, **mutation.plan})
    observer = RecordingObserver()
    with mutation.active():
        run = start(plan, directory, ["panscan", "bench"], observer)
    assert observer.problems == []
    verdict = verdict_of(run, cell.id)
    parts = {
        TOKENS: verdict.measured is not None and verdict.measured.first is not None,
        BEYOND: verdict.beyond is not None and verdict.beyond.first is not None,
        ANSWER: _beyond_noise(verdict.answer),
        IMAGE: _beyond_noise(verdict.image),
        INPUTS: any(truth.inputs is not None and truth.inputs.difference for truth in run.truths.values()),
        **{f"invariance: {axis.axis}": axis.broken for axis in verdict.axes},
    }
    caught = frozenset(name for name, caught in parts.items() if caught)
    assert bool(caught) == (verdict.word != "exact"), f"{mutation.name}: {verdict}"
    return Found(verdict, caught)


def _beyond_noise(kind: Divergence | None) -> bool:
    """Return whether a kind of position alone makes a verdict worse than exact."""
    return kind is not None and max(kind.ratio, kind.request_ratio / REQUEST_FACTOR) > EXACT_RATIO
