"""The pipeline and continuous batching against runner ``generate``: the same tokens, or a refusal."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import noise, printed
from tests.runners.test_generate import check_stamps

from panscan import GenerateRunner, PanAndScan, Request, Sampling
from panscan.core import SettingError, UnsupportedError
from panscan.runners.factory import open_runner
from panscan.runners.generate_batch import GenerateBatchRunner
from panscan.runners.pipeline import PipelineRunner
from panscan.settings import Settings, settings_from


def test_the_pipeline_gives_the_tokens_of_generate(tiny: GenerateRunner) -> None:
    pipeline = PipelineRunner(tiny.loaded, tiny.settings)
    requests = [
        tiny.request("What is the total?", [noise(300, 900)], id="one"),
        tiny.request("And here?", [noise(300, 300, 1), noise(900, 300, 2)], system="Be brief.", id="two"),
        tiny.request("No image at all?", id="three"),
    ]
    expected = tiny.generate(requests)
    found = pipeline.generate(requests)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    for result, other in zip(found, expected, strict=True):
        assert (result.id, result.views, result.prompt_tokens) == (other.id, other.views, other.prompt_tokens)
        assert result.text == other.text
        check_stamps(result)


def test_the_pipeline_gives_the_answers_of_the_trained_model(mini: GenerateRunner) -> None:
    page = printed("receipt", 220, 660)
    request = mini.request(page.questions[0].question, [page.image], pan_and_scan=PanAndScan(min_crop_size=100))
    [found], [due] = PipelineRunner(mini.loaded, mini.settings).generate([request]), mini.generate([request])
    assert (found.token_ids, found.text, found.prompt_tokens) == (due.token_ids, due.text, due.prompt_tokens)


@pytest.fixture
def pipeline(tiny: GenerateRunner) -> PipelineRunner:
    return PipelineRunner(tiny.loaded, replace(tiny.settings, runner="pipeline"))


TWO_PLACES = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Same?"}]}]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request(prompt="<start_of_image>", images=[noise(50, 50)], raw=True), "raw"),
        (Request("What <end_of_turn> now?"), "contains <end_of_turn>, which"),
        (Request(messages=TWO_PLACES, images=[noise(50, 50)]), r"2 image placeholder\(s\), but 1 image"),
    ],
)
def test_the_pipeline_refuses_what_it_would_change(pipeline: PipelineRunner, asked: Request, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        pipeline.run([asked])


def test_the_pipeline_refuses_what_it_does_not_offer(pipeline: PipelineRunner) -> None:
    with pytest.raises(UnsupportedError, match="--batch-size must stay at 1"):
        pipeline.configure(replace(pipeline.settings, batch_size=2))


def test_the_pipeline_reads_all_pages_of_a_file(pipeline: PipelineRunner, tiny: GenerateRunner, tmp_path: Path) -> None:
    pages = [noise(300, 300, seed) for seed in range(2)]
    pages[0].save(tmp_path / "scan.tiff", save_all=True, append_images=pages[1:])
    request = tiny.request("What?", [tmp_path / "scan.tiff"])
    [found], [expected] = pipeline.generate([request]), tiny.generate([request])
    assert found.views == 2
    assert found.token_ids == expected.token_ids


def test_generate_batch_refuses_a_checkpoint_that_reads_images() -> None:
    with pytest.raises(UnsupportedError, match="only text-only checkpoints are supported"):
        open_runner(settings_from({"runner": "generate_batch", "dtype": "fp32", "device": "cpu"}))


def text_settings(checkpoint: Path, **changes: Any) -> Settings:
    return settings_from({"model": str(checkpoint), "dtype": "fp32", "device": "cpu", "max_new_tokens": 12, **changes})


def test_a_text_only_model_answers_in_both_runners(text_checkpoint: Path) -> None:
    settings = text_settings(text_checkpoint, batch_size=3)
    plain = GenerateRunner.from_settings(settings)
    batched = GenerateBatchRunner(plain.loaded, settings)
    requests = [plain.request(text) for text in ("What is the date?", "One", "Two words and a few more")]
    expected = [result.token_ids for result in plain.generate(requests)]
    found = batched.generate(requests)
    assert [result.token_ids for result in found] == expected
    for result in found:
        assert len(result.stamps.tokens) == result.output_tokens
        assert result.stamps.tokens == sorted(result.stamps.tokens)
        assert result.stamps.accepted < result.stamps.tokens[0]


def test_a_text_only_model_takes_no_images(text_checkpoint: Path) -> None:
    plain = GenerateRunner.from_settings(text_settings(text_checkpoint))
    with pytest.raises(SettingError, match="reads text only"):
        plain.generate([plain.request("What?", [noise(50, 50)])])
    with pytest.raises(UnsupportedError, match="reads images"):
        PipelineRunner(plain.loaded, plain.settings)


@pytest.mark.parametrize("shape", ["tiny", "mini"])
def test_random_weights_load_into_the_runner(shape: str) -> None:
    settings = settings_from({"random_weights": True, "model_shape": shape, "dtype": "fp32", "device": "cpu"})
    runner = open_runner(settings)
    runner.configure(settings)
    [result] = runner.run([Request(prompt="What?", images=[noise(300, 900)], sampling=Sampling(4))])
    assert result.views == 4
    assert torch.isfinite(torch.tensor(result.stamps.tokens)).all()
    runner.close()


REFUSED = [{"stop": ("a",)}, {"stop_token_ids": (7,)}, {"logprobs": 0}, {"json_schema": "{}"}]


def test_sampling_that_they_would_drop_is_refused(pipeline: PipelineRunner, text_checkpoint: Path) -> None:
    plain = GenerateRunner.from_settings(text_settings(text_checkpoint))
    batched = GenerateBatchRunner(plain.loaded, text_settings(text_checkpoint, runner="generate_batch"))
    for runner, sampling in itertools.product((pipeline, batched), REFUSED):
        message = f"^runner {runner.settings.runner}: {next(iter(sampling))} is not supported; "
        with pytest.raises(SettingError, match=message):
            runner.run([Request(prompt="What?", sampling=Sampling(4, **sampling))])
