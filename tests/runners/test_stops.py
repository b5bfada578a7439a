"""Stop texts, stop ids and log-probabilities of the runners on Transformers: honoured, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import noise
from tests.runners.test_other_runners import text_settings

from panscan import GenerateRunner, Request, Sampling
from panscan.core import Result, SettingError
from panscan.runners.generate_batch import GenerateBatchRunner
from panscan.runners.pipeline import PipelineRunner

TOKENS = 16
PROMPTS = ["What is the total?", "Say something", "List the items, please, all of them"]


def answers(runner: GenerateRunner, **sampling: Any) -> list[Result]:
    """One batch: prompts of different lengths, one with an image."""
    how = Sampling(TOKENS, **sampling)
    images = [[noise(300, 300)], [], []]
    return runner.run([runner.request(text, each, sampling=how) for text, each in zip(PROMPTS, images, strict=True)])


def test_a_stop_text_ends_the_row_that_says_it(runner: GenerateRunner) -> None:
    """Each row of a batch in its turn; the others go on, and padding is nobody's token."""
    whole = answers(runner, ignore_eos=True)
    for row, result in enumerate(whole):
        middle = len(runner.loaded.reader.tokenizer.decode(result.token_ids[: TOKENS // 2], skip_special_tokens=True))
        stop = result.text[middle - 2 : middle + 2]
        found = answers(runner, ignore_eos=True, stop=(stop, "never that"))
        for index, (before, after) in enumerate(zip(whole, found, strict=True)):
            assert after.token_ids == before.token_ids[: after.output_tokens]
            assert len(after.stamps.tokens) == after.output_tokens
            assert (after.finish_reason == "stop") == (stop in before.text)
            assert after.text == before.text.partition(stop)[0]
            assert (after.output_tokens < TOKENS) == (index == row or stop in before.text)


@pytest.mark.parametrize("start", [3, 7, 12])
def test_a_stop_text_ends_at_the_token_of_generates_stop_strings(runner: GenerateRunner, start: int) -> None:
    loaded, how = runner.loaded, Sampling(TOKENS, ignore_eos=True)
    [whole] = runner.run([runner.request(PROMPTS[0], sampling=how)])
    stop = whole.text[start : start + 3]
    prompt = loaded.reader.prompts.write(runner.request(PROMPTS[0]), []).ids
    output = loaded.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=1024,
        stop_strings=[stop],
        tokenizer=loaded.reader.tokenizer,
    )
    passes: list[int] = []
    hook = loaded.model.register_forward_hook(lambda *_: passes.append(1))
    [found] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(TOKENS, ignore_eos=True, stop=(stop,)))])
    hook.remove()
    assert found.token_ids == output[0, len(prompt) :].tolist()
    assert found.output_tokens == len(passes) < TOKENS


def test_a_stop_text_is_looked_for_in_the_answer_alone(runner: GenerateRunner) -> None:
    """The prompt ends with a line break; a break and the answer's first text are no stop text."""
    [whole] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(4))])
    [found] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(4, stop=("\n" + whole.text[:1],)))])
    assert found.token_ids == whole.token_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_an_answer_and_counts(runner: GenerateRunner, ignore_eos: bool) -> None:
    whole = answers(runner, ignore_eos=ignore_eos)
    stop = whole[1].token_ids[4]
    for before, after in zip(whole, answers(runner, ignore_eos=ignore_eos, stop_token_ids=(stop,)), strict=True):
        ids = before.token_ids
        end = ids.index(stop) + 1 if stop in ids else None
        assert after.token_ids == ids[:end]
        assert after.finish_reason == (before.finish_reason if end is None else "stop")
        assert after.text == runner.loaded.reader.tokenizer.decode(ids[:end], skip_special_tokens=True)


def test_end_marks_still_end_beside_stop_ids(runner: GenerateRunner) -> None:
    for number in range(40):  # find a prompt whose answer ends by itself
        request = runner.request(f"Question {number}?", sampling=Sampling(64))
        [plain] = runner.run([request])
        if plain.finish_reason == "stop":
            break
    unused = next(token for token in range(20, 1000) if token not in plain.token_ids)
    [found] = runner.run([runner.request(request.prompt, sampling=Sampling(64, stop_token_ids=(unused,)))])
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, "stop")


@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"logprobs": 3}, {"json_schema": "{}"}], ids=str)
def test_runner_generate_refuses_what_it_would_drop(runner: GenerateRunner, sampling: dict[str, Any]) -> None:
    [name] = sampling
    with pytest.raises(SettingError, match=f"^runner generate: {name} is not supported; use the runner engine$"):
        answers(runner, **sampling)


REFUSED = [{"stop": ("a",)}, {"stop_token_ids": (7,)}, {"logprobs": 0}, {"json_schema": "{}"}]


@pytest.mark.parametrize("sampling", REFUSED, ids=str)
def test_other_runners_refuse_what_they_would_drop(tiny: GenerateRunner, sampling: dict[str, Any]) -> None:
    pipeline = PipelineRunner(tiny.loaded, tiny.settings)
    with pytest.raises(SettingError, match=f"^runner pipeline: {next(iter(sampling))} is not supported; "):
        pipeline.run([Request(prompt="What?", sampling=Sampling(4, **sampling))])


def test_continuous_batching_refuses_what_it_would_drop(text_checkpoint: Path) -> None:
    settings = text_settings(text_checkpoint, runner="generate_batch")
    batched = GenerateBatchRunner(GenerateRunner.from_settings(text_settings(text_checkpoint)).loaded, settings)
    for sampling in REFUSED:
        with pytest.raises(SettingError, match=f"^runner generate_batch: {next(iter(sampling))} is not supported; "):
            batched.run([Request(prompt="What?", sampling=Sampling(4, **sampling))])
