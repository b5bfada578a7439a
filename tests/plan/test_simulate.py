"""The simulation computes the same passes as the real engine on the same requests."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plan_simulation import FIGURES, RECORD, TARGET, factors_digest
from tests.engine.driving import TOKENS, requests

from panscan import GenerateRunner
from panscan.core import Stamps, now
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import WaitForPass
from panscan.engine.request_state import RequestState
from panscan.engine.scheduling.batch import FlatBatch
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.engine.worker import ahead_of_need
from panscan.model.shapes import SHAPES
from panscan.plan.gpus import gpu_named
from panscan.plan.layouts import ClockTimes, PlanInputs, layout_of
from panscan.plan.mix import PageShare, RequestSketch, WorkloadMix
from panscan.plan.simulate import EngineSizes, SimulatedEngine, SimulatedRequest

Row = tuple[int, int, int]
"""Decode rows, prefill rows and encoded views of a pass."""


class RecordingRunner:
    """A model runner that notes the size of each pass before it computes it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.facts, self.pixels, self.sample = runner, runner.facts, runner.pixels, runner.sample
        self.rows: list[Row] = []

    def execute(self, batch: FlatBatch) -> WaitForPass:
        sampled_alone = {int(row) for row in batch.offsets[:-1][np.diff(batch.offsets) == 1]}
        decode = sum(row in sampled_alone and bool(batch.sampling[at].position) for at, row in enumerate(batch.sampled))
        self.rows.append((decode, batch.rows - decode, len(batch.encode)))
        return self._runner.execute(batch)

    def stop(self) -> None:
        self._runner.stop()


class Steady:
    """Pass times that depend on rows and views alone."""

    def pass_seconds(
        self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        rows = sum(end - start for start, end in prefill)
        return 0.010 + 0.0001 * len(decode_contexts) + 0.0001 * rows + 0.01 * views

    def prepare_seconds(self, views: int, known: int) -> float:
        return 0.0


@pytest.mark.parametrize(
    "sizes",
    [
        {"overlap": False},
        {"overlap": True, "prefill_chunk_size": 64},
        {"overlap": True, "prefill_chunk_size": 100, "max_num_seqs": 3, "prefix_caching": False},
        {"overlap": True, "kv_cache_gb": 0.004, "vision_cache_gb": 0.0002, "block_size": 4},
    ],
)
@torch.no_grad()
def test_passes_are_those_of_the_real_engine(tiny: GenerateRunner, sizes: dict[str, Any]) -> None:
    options = EngineOptions(**{"prefill_chunk_size": 256, **sizes})
    runner = RecordingRunner(ModelRunner(tiny.loaded, options))
    loop = Loop(tiny.loaded, options, runner)
    done: list[Any] = []
    common: dict[str, Any] = {"on_event": lambda _: None, "on_end": done.append, "seed": 0}
    states = [
        RequestState(number, request=request, stamps=Stamps(accepted=now()), **common)
        for number, request in enumerate(requests())
    ]
    sketches = []
    for state in states:
        loop.preparer.prepare(state)
        sketches.append((list(state.ids), state.layout))
        loop.add(state)
    while loop.step():
        pass
    results = sorted(done, key=lambda result: int(result.id))
    answers = [
        RequestSketch(*each, len(result.token_ids), TOKENS) for each, result in zip(sketches, results, strict=True)
    ]
    engine = SimulatedEngine(
        EngineSizes(
            kv_shape=runner.facts.kv_shape,
            slabs=runner.facts.slabs,
            window=runner.facts.window,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            vision_slots=loop.vision.count,
            prefix_caching=options.prefix_caching,
            overlap=bool(sizes["overlap"]),
            ahead=None,
        ),
        Steady(),
    )
    for sketch in answers:
        engine.submit(SimulatedRequest(sketch, 0.0))
    engine.run()
    simulated = [(each.decode_rows, each.prefill_rows, each.views) for each in engine.passes]
    assert simulated == runner.rows
    assert engine.preemptions == loop.stats().preemptions
    loop.close()


@pytest.mark.parametrize(("prefix_caching", "shared_from"), [(True, 11), (True, 12), (True, None), (False, 2)])
def test_requests_about_the_same_page_read_it_together(prefix_caching: bool, shared_from: int | None) -> None:
    """In groups of up to eight: of ten, two read all of their tokens, the others those behind the page."""
    reads: list[list[int]] = []

    class Recording(Steady):
        def pass_seconds(
            self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], views: int, *, graph: bool
        ) -> float:
            reads.append(sorted(decode_contexts))
            return super().pass_seconds(decode_contexts, prefill, views, graph=graph)

    sizes = EngineSizes(kv_shape=KVShape(1, 1, 0), slabs=9_000, window=None, ahead=None)
    sizes = replace(sizes, prefix_caching=prefix_caching, shared_from=shared_from)
    engine = SimulatedEngine(sizes, Recording())
    mix = WorkloadMix((PageShare(2, 1.0),), 1, (20, 20))
    asked = [mix.sketch(0, number, 2, 20) for number in range(10)] + [mix.sketch(1, 10, 2, 20)]
    for sketch in asked:
        engine.submit(SimulatedRequest(sketch, 0.0))
    engine.run()
    together = max(reads, key=len)
    tokens, page = len(asked[0].ids), asked[0].layout.spans[-1].end
    assert len(together) == 11
    few = sum(length < page for length in together)
    assert few == (8 if prefix_caching and shared_from == 11 else 0)
    assert all(tokens - page < length <= tokens - page + 20 for length in together[:few])
    assert all(tokens < length <= tokens + 20 for length in together[few:])


def test_pixels_of_views_that_are_cached_are_not_prepared() -> None:
    prepared: list[tuple[int, int]] = []

    class Preparing(Steady):
        def prepare_seconds(self, views: int, known: int) -> float:
            prepared.append((views, known))
            return 0.0

    engine = SimulatedEngine(EngineSizes(kv_shape=KVShape(1, 1, 0), slabs=9_000, window=None), Preparing())
    mix = WorkloadMix((PageShare(2, 1.0),), 1, (20, 20))
    for number, page in enumerate((0, 0, 1)):
        engine.submit(SimulatedRequest(mix.sketch(page, number, 2, 20), engine.now))
        engine.run()
    assert prepared == [(2, 0), (2, 2), (2, 0)]


def test_known_views_take_less_time_but_their_request_comes_over_http_all_the_same() -> None:
    mix = WorkloadMix((PageShare(4, 1.0),), 1, (20, 20))
    inputs = PlanInputs(shape=SHAPES["27b"], gpu=gpu_named("h200"), count=1, mix=mix, options=EngineOptions())
    layout = layout_of(inputs, None, 1)
    clock = inputs.clock(layout.variant)
    local, served = (ClockTimes(clock, served=served) for served in (False, True))
    assert local.prepare_seconds(4, 0) > local.prepare_seconds(4, 2) > local.prepare_seconds(4, 4) > 0
    for known in (0, 2, 4):
        http = served.prepare_seconds(4, known) - local.prepare_seconds(4, known)
        assert http == pytest.approx(served.prepare_seconds(0) - local.prepare_seconds(0)) and http > 0


def test_the_committed_simulation_has_the_current_factors() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert record["factors_sha256"] == factors_digest(), "run python -m benchmarks.plan_simulation"
    assert all(abs(row["ratios"][name] - 1) <= TARGET for row in record["rows"] for name in FIGURES[:2])


def test_the_simulation_prepares_as_many_requests_in_advance_as_the_engine_on_a_gpu() -> None:
    [ahead] = [field.default for field in fields(EngineSizes) if field.name == "ahead"]
    assert ahead == ahead_of_need("cuda")
