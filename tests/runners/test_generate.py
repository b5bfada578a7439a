"""Runner ``generate`` against Transformers called by hand; the other runners of Transformers against it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import noise, printed

from panscan import GenerateRunner, PanAndScan, Request, Sampling
from panscan.core import ImageError, PanscanWarning, Result, SettingError, UnsupportedError
from panscan.model.observation import ForcedTokens
from panscan.runners.factory import open_runner
from panscan.runners.generate_batch import GenerateBatchRunner
from panscan.runners.observe import prefill_states
from panscan.runners.pipeline import PipelineRunner
from panscan.settings import Settings, settings_from

TOKENS = 12


def by_hand(runner: GenerateRunner, prompt: str, images: list[Image.Image], views: PanAndScan) -> list[int]:
    """New token ids of one request, with Transformers alone."""
    processor, model = runner.loaded.reader.processor, runner.loaded.model
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    pictures = {"images": images, **views.processor_kwargs()} if images else {}
    inputs = processor(text=text, add_special_tokens=False, return_tensors="pt", **pictures)
    inputs = {name: value for name, value in inputs.items() if name != "num_crops"}
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


REQUESTS = st.lists(
    st.tuples(
        st.text("abc what total? ", min_size=1, max_size=30),
        st.lists(st.tuples(st.integers(200, 700), st.integers(200, 700)), max_size=2),
        st.builds(PanAndScan, st.booleans(), st.just(100), st.integers(1, 4), st.just(1.2)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS, st.integers(1, 4), st.booleans())
def test_batched_tokens_equal_single_requests_by_hand(
    runner: GenerateRunner, asked: list[tuple[str, list[tuple[int, int]], PanAndScan]], batch_size: int, equal: bool
) -> None:
    chosen = replace(runner.settings, batch_size=batch_size, equal_views=equal)
    runner.configure(chosen)
    pictures = [[noise(*size, seed) for seed, size in enumerate(sizes)] for _, sizes, _ in asked]
    requests = [
        Request(prompt=text, images=images, pan_and_scan=views, sampling=Sampling(TOKENS), id=str(number))
        for number, ((text, _, views), images) in enumerate(zip(asked, pictures, strict=True))
    ]
    results = runner.generate(requests)
    assert [result.id for result in results] == [request.id for request in requests]
    for result, (text, _, views), images in zip(results, asked, pictures, strict=True):
        assert result.token_ids == by_hand(runner, text, images, views)


def test_the_trained_models_answers_equal_those_by_hand(trained: GenerateRunner) -> None:
    """Text on paper, in one batch that is padded on the left: pages of other sizes, views and questions."""
    trained.configure(replace(trained.settings, batch_size=3, max_new_tokens=TOKENS))
    pages = [printed("receipt", 220, 660), printed("sign", 300, 300), printed("board", 640, 220)]
    views = PanAndScan(min_crop_size=100, max_num_crops=2)
    asked = [(page.questions[-1].question, [page.image]) for page in pages]
    requests = [trained.request(question, images, pan_and_scan=views) for question, images in asked]
    token_ids = [result.token_ids for result in trained.generate(requests)]
    assert token_ids == [by_hand(trained, question, images, views) for question, images in asked]


def test_states_along_answers_are_those_of_generate_without_those_of_the_prompts(runner: GenerateRunner) -> None:
    asked = [runner.request("What is it?", [noise(300, 900)]), runner.request("And without an image?")]
    answers = [[7, 8, 9], [10]]
    seen = runner.observe(asked, [ForcedTokens(tokens, [], 3) for tokens in answers])
    states = prefill_states(runner.loaded, runner.settings, asked, answers)
    for rows, observation in zip(states, seen, strict=True):
        torch.testing.assert_close(runner.loaded.model.lm_head(rows), observation.answer, rtol=0, atol=1e-4)
        assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("changes", [{"attention": "eager"}, {"cache": "static"}])
@pytest.mark.parametrize("model", ["runner", "trained"])
def test_settings_that_are_exact_give_the_same_tokens(
    request: pytest.FixtureRequest, model: str, changes: dict[str, Any]
) -> None:
    runner: GenerateRunner = request.getfixturevalue(model)
    pages = [printed("sign", 300, 300).image, printed("receipt", 200, 500).image]
    requests = [runner.request("What is it?", [page]) for page in pages]
    expected = [result.token_ids for result in runner.generate(requests)]
    runner.configure(replace(runner.settings, batch_size=2, **changes))
    assert [result.token_ids for result in runner.generate(requests)] == expected


def test_flex_attention_answers_at_several_lengths(runner: GenerateRunner) -> None:
    """Compiled for one length (PyTorch's default limit is eight, and each takes seconds), unfused for the others."""
    sampling = Sampling(4)  # unfused, each layer is traced for each token
    requests = [runner.request("What is it?", [noise(300, height)], sampling=sampling) for height in (300, 900)]
    expected = [result.token_ids for result in runner.generate(requests)]
    with pytest.warns(PanscanWarning, match="do not apply to GPUs"):
        runner.configure(replace(runner.settings, attention="flex_attention"))
    # PyTorch would compile three programs to see whether the compiler knows the CPU's vectors.
    vectors = torch._inductor.config.patch({"cpp.vec_isa_ok": True})
    with torch._dynamo.config.patch(recompile_limit=1), vectors:
        assert [result.token_ids for result in runner.generate(requests)] == expected


def check_stamps(result: Result) -> None:
    stamps = result.stamps
    points = [stamps.accepted, stamps.loaded, stamps.preprocessed, stamps.vision_start, stamps.vision, *stamps.tokens]
    known = [point for point in points if point is not None]
    assert known == sorted(known)
    assert stamps.tokens[-1] <= stamps.end
    assert stamps.e2e == pytest.approx(sum(seconds for seconds in stamps.stages().values() if seconds is not None))


def test_stamps_are_in_order_and_stages_add_up(runner: GenerateRunner) -> None:
    runner.configure(replace(runner.settings, batch_size=2))
    requests = [runner.request("What is it?", [noise(300, 900)]), runner.request("And without an image?")]
    for result in runner.generate(requests):
        check_stamps(result)
        assert result.stamps.vision is not None  # stages of a batch are shared
    [text_only] = runner.generate(requests[1:])
    check_stamps(text_only)
    assert text_only.stamps.vision is None


def test_end_marks_end_unless_they_are_ignored_also_beside_stop_ids(runner: GenerateRunner) -> None:
    ends = runner.loaded.eos_ids
    stopped = None
    for number in range(40):  # find a prompt whose answer ends by itself
        [stopped] = runner.generate([runner.request(f"Question {number}?", sampling=Sampling(64))])
        if stopped.finish_reason == "stop":
            break
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] in ends
    assert not ends & set(stopped.token_ids[:-1])
    [full] = runner.generate([runner.request(f"Question {number}?", sampling=Sampling(64, ignore_eos=True))])
    assert full.token_ids[: stopped.output_tokens] == stopped.token_ids
    assert (full.output_tokens, full.finish_reason) == (64, "length")
    unused = next(token for token in range(20, 1000) if token not in stopped.token_ids)
    beside = runner.request(f"Question {number}?", sampling=Sampling(64, stop_token_ids=(unused,)))
    [result] = runner.generate([beside])
    assert (result.token_ids, result.finish_reason) == (stopped.token_ids, "stop")


def test_sampling_follows_its_seed_and_its_limits(runner: GenerateRunner) -> None:
    def tokens(**sampling: Any) -> list[int]:
        request = runner.request("Say something", sampling=Sampling(TOKENS, **sampling))
        return runner.generate([request])[0].token_ids

    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert tokens(**drawn, seed=1) == tokens(**drawn, seed=1)
    assert len({tuple(tokens(**drawn, seed=seed)) for seed in range(4)}) > 1
    assert tokens(temperature=1.0, top_k=1, seed=0) == tokens()


def test_a_batch_of_two_samplings_is_refused(runner: GenerateRunner) -> None:
    with pytest.raises(SettingError, match="one set of sampling settings"):
        runner.run([runner.request("a"), runner.request("b", sampling=Sampling(3))])


def test_an_unreadable_image_is_an_image_error(runner: GenerateRunner, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    with pytest.raises(ImageError, match=r"bad\.png"):
        runner.generate([runner.request("What?", [tmp_path / "bad.png"])])


def test_what_this_machine_cannot_do_is_unsupported() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may be able to")
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        with pytest.raises(UnsupportedError, match="NVIDIA GPU"):
            GenerateRunner.from_pretrained("tiny", attention=name)
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU"):
        GenerateRunner.from_pretrained("tiny", device="cuda")


def test_flash_attention_is_warned_about(runner: GenerateRunner) -> None:
    from panscan.model.runtime import apply_attention

    with pytest.warns(PanscanWarning, match="ignore Gemma 3's image blocks"), pytest.raises(UnsupportedError):
        apply_attention(runner.loaded.model, "flash_attention_2")


def test_other_weights_need_another_runner(runner: GenerateRunner) -> None:
    with pytest.raises(SettingError, match="another runner"):
        runner.configure(Settings(model="elsewhere"))


PROMPTS = ["What is the total?", "Say something", "List the items, please, all of them"]
LONG = 16  # tokens of answers with stops


def answers(runner: GenerateRunner, **sampling: Any) -> list[Result]:
    """One batch: prompts of different lengths, one with an image."""
    how = Sampling(LONG, **sampling)
    images = [[noise(300, 300)], [], []]
    return runner.run([runner.request(text, pages, sampling=how) for text, pages in zip(PROMPTS, images, strict=True)])


def test_a_stop_text_ends_the_row_that_says_it(runner: GenerateRunner) -> None:
    """Each row of a batch in its turn; the others go on, and padding gives no request a token."""
    full = answers(runner, ignore_eos=True)
    for row, result in enumerate(full):
        middle = len(runner.loaded.reader.tokenizer.decode(result.token_ids[: LONG // 2], skip_special_tokens=True))
        stop = result.text[middle - 2 : middle + 2]
        stopped = answers(runner, ignore_eos=True, stop=(stop, "never that"))
        for index, (before, after) in enumerate(zip(full, stopped, strict=True)):
            assert after.token_ids == before.token_ids[: after.output_tokens]
            assert len(after.stamps.tokens) == after.output_tokens
            assert (after.finish_reason == "stop") == (stop in before.text)
            assert after.text == before.text.partition(stop)[0]
            assert (after.output_tokens < LONG) == (index == row or stop in before.text)


@pytest.mark.parametrize("start", [3, 7, 12])
def test_a_stop_text_ends_at_the_token_of_generates_stop_strings(runner: GenerateRunner, start: int) -> None:
    loaded, how = runner.loaded, Sampling(LONG, ignore_eos=True)
    [full] = runner.run([runner.request(PROMPTS[0], sampling=how)])
    stop = full.text[start : start + 3]
    prompt = loaded.reader.prompts.write(runner.request(PROMPTS[0]), []).ids
    output = loaded.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LONG,
        do_sample=False,
        eos_token_id=1024,
        stop_strings=[stop],
        tokenizer=loaded.reader.tokenizer,
    )
    passes: list[int] = []
    hook = loaded.model.register_forward_hook(lambda *_: passes.append(1))
    [stopped] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(LONG, ignore_eos=True, stop=(stop,)))])
    hook.remove()
    assert stopped.token_ids == output[0, len(prompt) :].tolist()
    assert stopped.output_tokens == len(passes) < LONG


def test_a_stop_text_is_looked_for_in_the_answer_alone(runner: GenerateRunner) -> None:
    """The prompt ends with a line break; a break and the answer's first text are no stop text."""
    [full] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(4))])
    [stopped] = runner.run([runner.request(PROMPTS[0], sampling=Sampling(4, stop=("\n" + full.text[:1],)))])
    assert stopped.token_ids == full.token_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_an_answer_and_counts(runner: GenerateRunner, ignore_eos: bool) -> None:
    full = answers(runner, ignore_eos=ignore_eos)
    stop = full[1].token_ids[4]
    for before, after in zip(full, answers(runner, ignore_eos=ignore_eos, stop_token_ids=(stop,)), strict=True):
        ids = before.token_ids
        end = ids.index(stop) + 1 if stop in ids else None
        assert after.token_ids == ids[:end]
        assert after.finish_reason == (before.finish_reason if end is None else "stop")
        assert after.text == runner.loaded.reader.tokenizer.decode(ids[:end], skip_special_tokens=True)


def test_the_pipeline_gives_the_tokens_of_generate(tiny: GenerateRunner) -> None:
    pipeline = PipelineRunner(tiny.loaded, tiny.settings)
    requests = [
        tiny.request("What is the total?", [noise(300, 900)], id="one"),
        tiny.request("And here?", [noise(300, 300, 1), noise(900, 300, 2)], system="Be brief.", id="two"),
        tiny.request("No image at all?", id="three"),
    ]
    expected = tiny.generate(requests)
    results = pipeline.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    for result, other in zip(results, expected, strict=True):
        assert (result.id, result.views, result.prompt_tokens) == (other.id, other.views, other.prompt_tokens)
        assert result.text == other.text
        check_stamps(result)


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
    with pytest.raises(UnsupportedError, match="--batch-size must stay at 1"):
        pipeline.configure(replace(pipeline.settings, batch_size=2))


def test_the_pipeline_reads_all_pages_of_a_file(pipeline: PipelineRunner, tiny: GenerateRunner, tmp_path: Path) -> None:
    pages = [noise(300, 300, seed) for seed in range(2)]
    pages[0].save(tmp_path / "scan.tiff", save_all=True, append_images=pages[1:])
    request = tiny.request("What?", [tmp_path / "scan.tiff"])
    [result], [expected] = pipeline.generate([request]), tiny.generate([request])
    assert result.views == 2
    assert result.token_ids == expected.token_ids


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
    results = batched.generate(requests)
    assert [result.token_ids for result in results] == expected
    for result in results:
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


def test_sampling_that_they_would_drop_is_refused(
    runner: GenerateRunner, pipeline: PipelineRunner, text_checkpoint: Path
) -> None:
    plain = GenerateRunner.from_settings(text_settings(text_checkpoint))
    batched = GenerateBatchRunner(plain.loaded, text_settings(text_checkpoint, runner="generate_batch"))
    refused: list[dict[str, Any]] = [{"logprobs": 0}, {"json_schema": "{}"}]
    dropped = [*refused, {"stop": ("a",)}, {"stop_token_ids": (7,)}]
    for other, samplings in ((runner, refused), (pipeline, dropped), (batched, dropped)):
        for sampling in samplings:
            message = f"^runner {other.settings.runner}: {next(iter(sampling))} is not supported; use the runner engine"
            with pytest.raises(SettingError, match=message):
                other.run([Request(prompt="What?", sampling=Sampling(4, **sampling))])
