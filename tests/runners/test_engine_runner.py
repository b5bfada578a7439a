"""Runner ``engine`` in a sweep beside ``generate``, and what it refuses; every logit that runners observe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import needs_images_in_chunks, noise, printed
from tests.engine.driving import TINY_ENGINE
from tests.verdict.test_cells import STEPS as VERDICT_STEPS
from tests.verdict.test_cells import Bench as VerdictBench

from panscan import GenerateRunner, PanAndScan, Request, Sampling
from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.sweep import run_sweep
from panscan.core import ImageError, UnsupportedError
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.observation import IMAGE_POSITIONS, ForcedTokens, Observation, sample_image_positions
from panscan.model.support import unsupported_reason
from panscan.records.request_records import RequestRecord
from panscan.records.verdict_records import VerdictRecord
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import open_runner, ready_runner
from panscan.runners.observe import observe
from panscan.settings import ENGINE_AXES, ENGINE_LIMITS, Settings, axes, settings_from
from panscan.verdict.cells import Verifier
from panscan.verdict.references import References

STEPS = 6
SMALL = {**TINY_ENGINE, "max_new_tokens": STEPS, "kv_cache_gb": 0.02}


BATCH = [
    Request(prompt="What is it?", images=[noise(300, 900)], pan_and_scan=PanAndScan(max_num_crops=2), id="a"),
    Request(prompt="And this, the second one?", images=[noise(200, 200, 1)], id="b"),
    Request(prompt="No picture at all.", id="c"),
]


def batch() -> list[Request]:
    return [replace(request, sampling=settings_from(SMALL).sampling) for request in BATCH]


def test_a_sweep_of_both_runners(tmp_path: Path) -> None:
    """Both are exact; the engine has one cell however many batch sizes there are, with all requests in one call."""
    bench = VerdictBench(tmp_path)
    fixed = {"model": "tiny", "dtype": "fp32", "device": "cpu", "max_new_tokens": "6", "kv_cache_gb": "0.02"}
    flags = {"runner": ["generate", "engine"], "batch_size": ["1", "3"], "max_num_seqs": ["2"]}
    flags |= {name: [value] for name, value in fixed.items()}
    cells = build_cells(flags)
    assert [(cell.settings.runner, cell.settings.batch_size, cell.settings.max_num_seqs) for cell in cells] == [
        ("generate", 1, Settings().max_num_seqs),
        ("generate", 3, Settings().max_num_seqs),
        ("engine", 1, 2),
    ]
    plan = SweepPlan(cells=cells, items=bench.items, source=bench.source, include_content=True)
    lines = RecordingWriter()
    verifier = Verifier(References(bench.items, bench.source, STEPS, None, [], lines.write, lambda _: None))
    run_sweep(plan, lines, set(), RecordingObserver(), verifier)
    verdicts = {line.cell: line for line in lines.records if isinstance(line, VerdictRecord)}
    assert [verdicts[cell.id].verdict for cell in cells] == ["exact"] * 3
    assert all(verdict.equal_tokens for verdict in verdicts.values())
    answers: dict[str, list[str]] = {cell.id: [] for cell in cells}
    for line in lines.records:
        if isinstance(line, RequestRecord):
            answers[line.cell].append(line.content.answer)
            assert (line.stamps.scheduled is not None) == (line.cell == cells[2].id)
            assert line.cell != cells[2].id or line.batch == 0
    assert answers[cells[0].id] == answers[cells[1].id] == answers[cells[2].id]


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_size": 100}, {"max_num_seqs": 2}], ids=str)
def test_its_verdict_in_bf16_is_exact(tmp_path: Path, changes: dict[str, int]) -> None:
    settings = settings_from({**SMALL, "dtype": "bf16", "max_new_tokens": VERDICT_STEPS, **changes})
    runner = ready_runner(settings)
    verdict = VerdictBench(tmp_path).verifier().verdict(runner, settings)
    assert (verdict.verdict, verdict.reason) == ("exact", None)
    assert verdict.image is not None and verdict.image.positions > 0
    runner.close()


def test_each_call_begins_with_empty_caches(tiny: GenerateRunner) -> None:
    runner = EngineRunner(tiny.loaded, settings_from(SMALL))
    first, second = runner.run(batch()), runner.run(batch())
    assert runner.engine.generate(batch())[0].cached_tokens > 20
    runner.drop()
    assert [result.token_ids for result in first] == [result.token_ids for result in second]
    assert max(result.cached_tokens for result in [*first, *second]) < 20, "no more than how all turns begin"


def test_a_request_that_fails_is_raised(tiny: GenerateRunner, tmp_path: Path) -> None:
    runner = EngineRunner(tiny.loaded, settings_from(SMALL))
    with pytest.raises(ImageError, match="none"):
        runner.run([*batch(), Request(prompt="What?", images=[tmp_path / "none.png"])])
    assert len(runner.run(batch())) == 3
    runner.drop()


def test_what_only_one_of_them_has_is_refused() -> None:
    other = {"attention": "eager", "cache": "static", "compile": "default", "batch_size": 2, "equal_views": True}
    assert other.keys() == ENGINE_LIMITS.keys()
    for name, value in other.items():
        reason = unsupported_reason(replace(settings_from(SMALL), **{name: value}))
        assert reason is not None and f"--{name.replace('_', '-')} must " in reason
    changed = {"max_concurrency": 3, "max_num_seqs": 3, "kv_cache_gb": 0.5, "prefix_caching": False}
    changed |= {"vision_cache_gb": 0.5, "vision_batch_size": 3, "attention_backend": "sdpa", "image_memory_gb": 0.5}
    changed |= {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "gpu_memory_gb": 8.0, "kv_cache_dtype": "fp8"}
    changed |= {"tpot_target_ms": 40.0}
    assert changed.keys() == set(ENGINE_AXES) and changed.keys() <= axes().keys()
    for name, value in changed.items():
        reason = unsupported_reason(replace(Settings(device="cpu"), **{name: value}))
        assert reason is not None and f"--{name.replace('_', '-')} is for --runner engine" in reason
    with pytest.raises(UnsupportedError, match="--cache"):
        ready_runner(settings_from({**SMALL, "cache": "static"}))


def test_the_engine_is_made_anew_for_other_sizes_only(tiny: GenerateRunner) -> None:
    """A cell's settings reach the engine; requests' settings need no other engine."""
    settings = settings_from(SMALL)
    runner = open_runner(settings)
    runner.configure(settings)
    runner.run(batch())
    first = runner.engine
    runner.configure(replace(settings, max_new_tokens=3, pan_and_scan_max_num_crops=1))
    runner.run(batch())
    assert runner.engine is first
    runner.configure(replace(settings, prefill_chunk_size=64))
    runner.run(batch())
    assert runner.engine is not first
    assert runner.engine.options.prefill_chunk_size == 64
    runner.close()


def prompts(runner: GenerateRunner, asked: list[Request] = BATCH) -> list[list[int]]:
    reader, device = runner.loaded.reader, torch.device("cpu")
    return [prepare(read_images(item), reader, device, torch.float32, on_device=False).prompt.ids for item in asked]


def image_places(runner: GenerateRunner, asked: list[Request] = BATCH) -> list[list[int]]:
    return [sample_image_positions(ids, runner.loaded.reader.prompts.soft_id) for ids in prompts(runner, asked)]


@torch.no_grad()
def teacher(runner: GenerateRunner, request: Request, tokens: list[int]) -> torch.Tensor:
    """Logits ``[prompt + tokens, vocabulary]`` of one forward pass."""
    loaded = runner.loaded
    ready = prepare(read_images(request), loaded.reader, loaded.device, loaded.dtype, on_device=False)
    ready.prompt.ids.extend(tokens)
    return loaded.model(**collate([ready], loaded)).logits[0]


def observed(runner: GenerateRunner, forced: list[ForcedTokens] | None) -> list[Observation]:
    return observe(runner.loaded, runner.settings, BATCH, forced, steps=STEPS)


SETTINGS: list[Any] = [
    {},
    {"cache": "static"},
    {"attention": "eager"},
    {"max_new_tokens": STEPS},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    pytest.param({"prefill_chunk_size": 4096}, marks=needs_images_in_chunks, id="one chunk"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_forced_logits_are_those_of_one_forward_pass(runner: GenerateRunner, settings: dict[str, Any]) -> None:
    runner.configure(replace(runner.settings, **settings))
    ids, positions = prompts(runner), image_places(runner)
    tokens = [[30 + row, 40, 41, 42, 43, 44][: STEPS - row] for row in range(len(BATCH))]
    forced = [ForcedTokens(row_tokens, position, STEPS) for row_tokens, position in zip(tokens, positions, strict=True)]
    for row, seen in enumerate(runner.observe(BATCH, forced)):
        full = teacher(runner, BATCH[row], tokens[row])
        assert seen.tokens == tokens[row]
        expected = full[len(ids[row]) - 1 : -1]
        torch.testing.assert_close(seen.answer, expected, rtol=1e-4, atol=2e-3)
        assert (seen.image is None) == (not positions[row])
        if seen.image is not None:
            torch.testing.assert_close(seen.image, full[positions[row]], rtol=1e-4, atol=2e-3)


def test_a_prompt_in_several_passes_is_seen_whole(runner: GenerateRunner) -> None:
    """Passes that cut image blocks give other logits (the tiny's blocks are 64 tokens), but at the same positions."""
    full = observed(runner, None)
    forced = [ForcedTokens(seen.tokens, seen.positions, STEPS) for seen in full]
    runner.configure(replace(runner.settings, prefill_chunk_size=70))
    for before, seen in zip(full, runner.observe(BATCH, forced), strict=True):
        if before.image is not None:
            assert seen.image.shape == before.image.shape
            assert not torch.allclose(seen.image, before.image, atol=0.1)


def test_without_a_script_the_tokens_are_generates(runner: GenerateRunner) -> None:
    unforced = observed(runner, None)
    sampling = Sampling(max_new_tokens=STEPS)
    for request, seen in zip(BATCH, unforced, strict=True):
        [result] = runner.generate([replace(request, sampling=sampling)])
        assert seen.tokens == result.token_ids
        assert seen.answer_hidden.shape == (len(seen.tokens), runner.loaded.model.config.text_config.hidden_size)


def test_the_models_own_settings_come_back(runner: GenerateRunner) -> None:
    before = runner.loaded.model.generation_config
    observed(runner, None)
    assert runner.loaded.model.generation_config is before
    assert not runner.loaded.model.model._forward_hooks


def test_image_places_are_a_fixed_draw_of_image_tokens() -> None:
    ids = [1, 2] + [9] * 64 + [3] + [9] * 64 + [4]
    positions = sample_image_positions(ids, 9)
    assert len(positions) == IMAGE_POSITIONS == len(set(positions))
    assert positions == sorted(positions)
    assert all(ids[position] == 9 for position in positions)
    assert sample_image_positions([5, *ids], 9) == [position + 1 for position in positions]
    assert sample_image_positions([1, 9, 9], 9) == [1, 2]
    assert sample_image_positions([1, 2], 9) == []


def check_engine(runner: GenerateRunner, asked: list[Request], forced: list[ForcedTokens], **changes: Any) -> None:
    """Check that an engine observes what ``generate()`` with eager attention does, request by request.

    Either differs from float64 by up to 1e-5 of the largest value.
    """
    longest = max(forced_tokens.steps for forced_tokens in forced)
    runner.configure(replace(runner.settings, attention="eager", max_new_tokens=longest))
    pairs = zip([*zip(asked)], [*zip(forced)], strict=True)
    due = [observe(runner.loaded, runner.settings, *pair)[0] for pair in pairs]
    results = runner.generate([replace(request, sampling=Sampling(STEPS)) for request in asked])
    free = [result.token_ids for result in results]
    engine = EngineRunner(
        runner.loaded, settings_from({**TINY_ENGINE, "max_new_tokens": STEPS, "kv_cache_gb": 0.02, **changes})
    )
    seen = engine.observe(asked, forced)
    unforced = engine.observe(asked, [ForcedTokens(None, [], STEPS)] * len(asked))
    engine.drop()
    assert [observation.tokens for observation in unforced] == free
    for observation, reference, asked_tokens in zip(seen, due, forced, strict=True):
        assert observation.tokens == reference.tokens == asked_tokens.tokens[: asked_tokens.steps]
        for name in ("answer", "image"):
            actual, expected = getattr(observation, name), getattr(reference, name)
            assert (actual is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("chunk", [1, 70, None])
def test_the_engine_observes_what_eager_attention_does(runner: GenerateRunner, chunk: int | None) -> None:
    forced = [
        ForcedTokens([5 + row, 9, 30, 7, 11, 200], places, STEPS - row)
        for row, places in enumerate(image_places(runner))
    ]
    check_engine(runner, BATCH, forced, prefill_chunk_size=chunk)


@pytest.mark.parametrize("chunk", [145, None])
def test_so_it_does_of_the_trained_model(trained: GenerateRunner, chunk: int | None) -> None:
    """Where it is sure of the next character, and where it is not: along an answer that is partly wrong."""
    page = printed("receipt", 220, 660)
    views = PanAndScan(min_crop_size=50, max_num_crops=2)
    asked = [Request(page.questions[0].question, [page.image], pan_and_scan=views)]
    tokenizer = trained.loaded.reader.tokenizer
    answer = tokenizer(page.questions[0].answers[0] + " zebra", add_special_tokens=False)["input_ids"]
    forced = [ForcedTokens(answer, places, len(answer)) for places in image_places(trained, asked)]
    check_engine(trained, asked, forced, model="mini", prefill_chunk_size=chunk)
