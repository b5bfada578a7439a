"""The forcing seam against one forward pass over prompt and answer, and the engine's against it: every logit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.conftest import needs_images_in_chunks, noise, printed
from tests.engine.driving import TINY_ENGINE

from panscan.core import PanAndScan, Request, Sampling
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.observation import IMAGE_POSITIONS, ForcedTokens, Observation, sample_image_positions
from panscan.runners.engine import EngineRunner
from panscan.runners.generate import GenerateRunner
from panscan.runners.observe import observe
from panscan.settings import settings_from

STEPS = 6
BATCH = [
    Request(prompt="What is it?", images=[noise(300, 900)], pan_and_scan=PanAndScan(max_num_crops=2), id="a"),
    Request(prompt="And this, the second one?", images=[noise(200, 200, 1)], id="b"),
    Request(prompt="No picture at all.", id="c"),
]


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
    forced = [ForcedTokens(each, position, STEPS) for each, position in zip(tokens, positions, strict=True)]
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
    whole = observed(runner, None)
    forced = [ForcedTokens(seen.tokens, seen.positions, STEPS) for seen in whole]
    runner.configure(replace(runner.settings, prefill_chunk_size=70))
    for before, seen in zip(whole, runner.observe(BATCH, forced), strict=True):
        if before.image is not None:
            assert seen.image.shape == before.image.shape
            assert not torch.allclose(seen.image, before.image, atol=0.1)


def test_without_a_script_the_tokens_are_generates(runner: GenerateRunner) -> None:
    own = observed(runner, None)
    sampling = Sampling(max_new_tokens=STEPS)
    for request, seen in zip(BATCH, own, strict=True):
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
    runner.configure(replace(runner.settings, attention="eager", max_new_tokens=max(each.steps for each in forced)))
    due = [
        observe(runner.loaded, runner.settings, *pair)[0] for pair in zip([*zip(asked)], [*zip(forced)], strict=True)
    ]
    free = [result.token_ids for result in runner.generate([replace(each, sampling=Sampling(STEPS)) for each in asked])]
    engine = EngineRunner(
        runner.loaded, settings_from({**TINY_ENGINE, "max_new_tokens": STEPS, "kv_cache_gb": 0.02, **changes})
    )
    seen = engine.observe(asked, forced)
    unforced = engine.observe(asked, [ForcedTokens(None, [], STEPS)] * len(asked))
    engine.drop()
    assert [each.tokens for each in unforced] == free
    for ours, theirs, asked_tokens in zip(seen, due, forced, strict=True):
        assert ours.tokens == theirs.tokens == asked_tokens.tokens[: asked_tokens.steps]
        for name in ("answer", "image", "image_hidden"):
            found, expected = getattr(ours, name), getattr(theirs, name)
            assert (found is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


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
