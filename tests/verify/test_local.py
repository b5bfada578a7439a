"""Local distributions under hypotheses: the reference is Transformers', and each change makes a clear difference."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.conftest import noise
from tests.verify.faulty_server import FAULTS

from panscan import Engine, Sampling
from panscan.core import PanAndScan, Request, SettingError, UnsupportedError
from panscan.engine.loop import Loop
from panscan.engine.options import EngineOptions
from panscan.engine.views import ViewFeatures
from panscan.images.encode import encoded_image
from panscan.load.chat import ChatRequest, RequestOutcome, chat_body, data_url
from panscan.load.content import LoadRequest
from panscan.load.options import LoadLevel
from panscan.model.bundled.random_weights import random_model
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.shapes import SHAPES, Shape
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings, settings_from
from panscan.verify.changes import final_states
from panscan.verify.hypotheses import CHANGES, HYPOTHESES, REFERENCE, combine, hypothesis
from panscan.verify.local import LocalModel, open_local
from panscan.verify.run import Verification
from panscan.verify.traffic import TrafficSample, check_plain_answers, verify_traffic
from panscan.workload.documents import draw_document
from panscan.workload.probes import sample_probes
from panscan.workload.request_sets import chat_parts

TOKENS = 3
FLOOR = 1e-5  # nat: a clear difference even where rounding makes none
CLEAR = 5  # times the rounding error of bfloat16


@pytest.fixture(scope="module")
def local(mini: GenerateRunner) -> Iterator[LocalModel]:
    with open_local(mini.settings, mini.loaded) as model:
        yield model


@cache
def page(width: int, height: int, index: int = 3) -> Image.Image:
    """A document in print that is hard to read, so that many answers are possible and small changes show."""
    return draw_document(5, index, columns=60).image.resize((width, height), Image.Resampling.BICUBIC)


SQUARE = Request("What is the total?", [page(448, 448)])
CROPPED = Request("What is the total?", [page(560, 256, 1)])
PLAIN = replace(CROPPED, pan_and_scan=PanAndScan(enabled=False))
TWO = Request("Compare the two images.", [page(192, 192), page(192, 192, 7)])
TEXT = Request("What is the name?")
_ANSWERS: dict[int, list[int]] = {}
"""The reference's answers to this module's requests, by identity."""


def divergence(local: LocalModel, request: Request, name: str) -> tuple[float, float]:
    """The mean KL divergence of a hypothesis from the reference, in nat, and that of rounding to bfloat16."""
    if id(request) not in _ANSWERS:
        _ANSWERS[id(request)] = local.greedy(request, TOKENS)
    tokens = _ANSWERS[id(request)]
    reference = local.log_probabilities(request, tokens, REFERENCE)
    assert reference.argmax(-1).tolist() == tokens
    changed = local.log_probabilities(request, tokens, hypothesis(name))
    return _kl(reference, changed), _kl(reference, local.noise(request, tokens))


def _kl(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    return float((np.exp(p, dtype=np.float64) * (p - q)).sum(-1).mean())


def test_the_reference_is_the_distribution_of_generate(local: LocalModel, mini: GenerateRunner) -> None:
    request = replace(TWO, prompt="What is the date?")
    tokens = local.greedy(request, TOKENS)
    ours = local.log_probabilities(request, tokens, REFERENCE)
    loaded = mini.loaded
    prepared = prepare(read_images(request), loaded.reader, loaded.device, torch.float32, on_device=False)
    inputs = collate([prepared], loaded)
    generated = loaded.model.generate(**inputs, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True)
    assert generated.sequences[0, inputs["input_ids"].shape[1] :].tolist() == tokens
    expected = torch.cat(generated.logits).float().log_softmax(-1).numpy()
    assert ours.dtype == np.float32 and ours.shape == (len(tokens), local.vocabulary)
    np.testing.assert_allclose(ours, expected, atol=1e-3)


CONCERNED = (
    (SQUARE, "causal-image-tokens images-ignored zero-image-features clip-normalisation bgr-channels image-after-text"),
    (SQUARE, "resize-no-antialias resize-bicubic resize-lanczos resize-nearest int4-weights fp8-weights"),
    (SQUARE, "split-line-breaks no-image-line-breaks"),
    (TWO, "joined-image-blocks first-image-only last-image-only"),
    (CROPPED, "no-pan-and-scan causal-image-tokens+no-pan-and-scan no-pan-and-scan+int4-weights"),
    (PLAIN, "pan-and-scan resize-letterbox"),
    (TEXT, "double-bos no-bos no-template chatml-template no-model-turn system-prompt"),
)
CASES = {name: request for request, names in CONCERNED for name in names.split()}


@pytest.mark.parametrize("name", CASES)
def test_a_hypothesis_differs_from_the_reference_by_more_than_rounding(local: LocalModel, name: str) -> None:
    assert name in {candidate.name for candidate in local.hypotheses(CASES[name])}
    changed, noise = divergence(local, CASES[name], name)
    assert changed > max(CLEAR * noise, FLOOR)


@pytest.mark.parametrize("name", ["int8-weights", "resize-torchvision"])
def test_a_small_change_still_changes_the_distributions(local: LocalModel, name: str) -> None:
    assert 0 < divergence(local, SQUARE, name)[0] < 0.01


def test_every_change_has_a_case() -> None:
    elsewhere = {"no-sliding-window", "no-rope-factor", "exact-embedding-scale", "int8-weights", "resize-torchvision"}
    assert set(CHANGES) == elsewhere | {name for name in CASES if "+" not in name}


def test_only_changes_that_concern_a_request_are_listed(local: LocalModel) -> None:
    aspects = {CHANGES[change].aspect for candidate in local.hypotheses(TEXT) for change in candidate.changes}
    assert aspects == {"bos", "template", "generation", "system", "weights"}
    listed = {candidate.name for candidate in local.hypotheses(SQUARE)}
    assert not {"no-pan-and-scan", "pan-and-scan", "first-image-only", "joined-image-blocks"} & listed
    assert "no-pan-and-scan+joined-image-blocks" not in {candidate.name for candidate in local.hypotheses(CROPPED)}


def test_a_change_that_does_not_concern_a_request_has_no_effect(local: LocalModel) -> None:
    tokens = local.greedy(TEXT, TOKENS)
    reference = local.log_probabilities(TEXT, tokens, REFERENCE)
    for name in ("causal-image-tokens+no-pan-and-scan", "first-image-only", "resize-letterbox", "no-sliding-window"):
        assert np.array_equal(local.log_probabilities(TEXT, tokens, hypothesis(name)), reference)


def test_weights_and_buffers_are_bit_identical_afterwards(mini: GenerateRunner) -> None:
    model = mini.loaded.model
    originals = {name: (value, value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    attention = model.config._attn_implementation
    with open_local(mini.settings, mini.loaded) as local:
        for name in ("int4-weights", "int8-weights", "fp8-weights", "exact-embedding-scale"):
            local.log_probabilities(TEXT, [275], hypothesis(name))
        local.noise(TEXT, [275])
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value is originals[name][0] and torch.equal(value, originals[name][1])
    assert model.config._attn_implementation == attention


def test_the_truth_does_not_depend_on_the_precision_of_the_loaded_weights(local: LocalModel) -> None:
    """The mini model's weights are stored in bfloat16, and its embedding scale is a power of two."""
    with open_local(Settings(model="mini", device="cpu", dtype="bf16")) as in_bf16:
        log_probabilities = [model.log_probabilities(SQUARE, [275, 305], REFERENCE) for model in (local, in_bf16)]
        noise = [model.noise(SQUARE, [275, 305]) for model in (local, in_bf16)]
    assert np.array_equal(*log_probabilities)
    assert np.array_equal(*noise) and not np.array_equal(log_probabilities[0], noise[0])


def test_prompt_tokens_follow_the_hypothesis(local: LocalModel) -> None:
    plain = local.prompt_tokens(CROPPED, REFERENCE)
    assert local.prompt_tokens(CROPPED, hypothesis("double-bos")) == plain + 1
    assert local.prompt_tokens(CROPPED, hypothesis("no-pan-and-scan")) == local.prompt_tokens(PLAIN, REFERENCE)
    assert local.prompt_tokens(SQUARE, hypothesis("split-line-breaks")) == local.prompt_tokens(SQUARE, REFERENCE) + 1


def test_marks_of_images_in_a_users_text_are_text_under_every_hypothesis(local: LocalModel) -> None:
    marked = replace(TEXT, prompt="What does <start_of_image> or <image_soft_token> mean?")
    for candidate in local.hypotheses(marked):
        assert local.prompt_tokens(marked, candidate) > 0


def test_the_window_matters_only_to_longer_prompts(tiny: GenerateRunner) -> None:
    window = tiny.loaded.model.config.get_text_config().sliding_window
    long = Request("word " * window)  # more than one token each
    with open_local(tiny.settings, tiny.loaded) as local:
        assert "no-sliding-window" not in {candidate.name for candidate in local.hypotheses(TEXT)}
        assert "no-sliding-window" in {candidate.name for candidate in local.hypotheses(long)}
        assert divergence(local, long, "no-sliding-window")[0] > FLOOR


def test_a_text_that_is_computed_in_chunks_has_the_same_states(tiny: GenerateRunner) -> None:
    """Longer than the window, with chunks that end before and behind it."""
    with open_local(tiny.settings, tiny.loaded):
        model, ids = tiny.loaded.model, list(range(20, 320))
        assert len(ids) > model.config.get_text_config().sliding_window
        unchunked, *parts = (
            final_states(model, ids, None, None, 5, changes, chunk)
            for changes in ((), ("no-sliding-window",))
            for chunk in (1000, 50, 200)
        )
        same = [torch.allclose(unchunked, part, atol=1e-3) for part in parts]
    assert same == [True, True, False, False, False]


def test_a_text_only_checkpoint_with_scaled_positions_and_a_rounded_embedding_scale(tmp_path: Path) -> None:
    """As the published ones, whose global layers divide positions by 8."""
    text = replace(SHAPES["tiny"].text, layers=6, rope_factor=8.0, hidden=240)
    model, tokenizer = random_model(Shape("small", text, None, 0), dtype=torch.bfloat16, device="cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with open_local(Settings(model=str(tmp_path), device="cpu", dtype="bf16")) as local:
        tokens = local.greedy(TEXT, 2)
        reference = local.log_probabilities(TEXT, tokens, REFERENCE)
        for name in ("no-rope-factor", "exact-embedding-scale"):
            assert name in {candidate.name for candidate in local.hypotheses(TEXT)}
            assert not np.array_equal(local.log_probabilities(TEXT, tokens, hypothesis(name)), reference)


def test_token_texts_lead_back_to_their_ids(local: LocalModel) -> None:
    for token in (2, 6, 10, 12, 275, 305):
        assert token in local.tokens.ids(local.tokens.text(token))
    assert local.tokens.text(6) == b"<end_of_turn>"
    assert local.tokens.ids("\n") == local.tokens.ids(b"\n") == [10, 24]  # the line break, and its byte
    assert local.tokens.ids("▁") == [271] and 271 in local.tokens.ids(" ")
    assert local.tokens.ids("token_id:305") == [305] and local.tokens.ids("token_id:99999") == []
    assert len(local.tokens.ids("\ufffd")) == 128  # the bytes that begin no character
    assert local.tokens.ids("no such token") == []
    assert local.tokens.text(local.vocabulary - 1) == b""


def test_names_of_hypotheses() -> None:
    assert hypothesis("reference") == REFERENCE and combine(REFERENCE, REFERENCE) == REFERENCE
    assert all(hypothesis(candidate.name) == candidate for candidate in HYPOTHESES)
    assert len({candidate.name for candidate in HYPOTHESES}) == len(HYPOTHESES)
    both = combine(hypothesis("no-bos"), hypothesis("int4-weights"))
    assert both.changes == ("no-bos", "int4-weights") and both.approximate and not both.equivalent
    with pytest.raises(SettingError, match="unknown change 'no-bso'"):
        hypothesis("no-bso")
    with pytest.raises(SettingError, match="change the same aspect"):
        combine(hypothesis("no-bos"), hypothesis("double-bos"))


def test_quantised_weights_are_refused(mini: GenerateRunner) -> None:
    settings = Settings(model="mini", device="cpu", quantization="int8")
    with pytest.raises(UnsupportedError, match="quantised"):
        open_local(settings).__enter__()


# The questions about sample documents: few, and each change of the computation concerns one of them.


def test_every_hypothesis_concerns_a_question(mini: GenerateRunner) -> None:
    local = LocalModel(mini.loaded, mini.settings)
    probes = sample_probes(PanAndScan(), view_size=local.view_size)
    listed = {candidate.name for probe in probes for candidate in local.hypotheses(probe)}
    longest = max(local.prompt_tokens(probe, REFERENCE) for probe in probes)
    of_other_checkpoints = {"no-rope-factor", "exact-embedding-scale"}  # the mini model has neither
    assert {candidate.name for candidate in HYPOTHESES} - listed == of_other_checkpoints
    assert len(probes) <= 12 and longest < 2000
    assert len({probe.id for probe in probes}) == len(probes)


def test_questions_keep_the_settings_of_a_user_who_wants_no_crops() -> None:
    off = PanAndScan(enabled=False)
    assert all(probe.pan_and_scan == off for probe in sample_probes(off, view_size=192) if probe.images)


def test_a_text_only_checkpoint_is_asked_about_text() -> None:
    assert not any(probe.images for probe in sample_probes(PanAndScan(), view_size=None))


# The verdict on measured traffic: right answers, swapped images, texts of other tokens, and too little evidence.


COUNT, ANSWER_TOKENS = 4, 10
VIEWS = PanAndScan(enabled=False)
SETTINGS = settings_from({"model": "tiny", "dtype": "fp32", "device": "cpu", "do_pan_and_scan": False})
PAGES = [encoded_image(noise(64, 64, seed)) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def answers(tiny: GenerateRunner) -> list[str]:
    """What a right server answers about each page."""
    settings = Settings(model="tiny", dtype="fp32", device="cpu", max_new_tokens=ANSWER_TOKENS, do_pan_and_scan=False)
    before = tiny.settings
    tiny.configure(settings)
    try:
        return [result.text for result in tiny.run([Request("What?", [page], pan_and_scan=VIEWS) for page in PAGES])]
    finally:
        tiny.configure(before)  # other files use the same model


def verified(tiny: GenerateRunner, texts: Sequence[str], **options: bool) -> Verification:
    sample, level = TrafficSample(COUNT), LoadLevel(max_concurrency=8)
    requests, outcomes = [], []
    for number, (page, text) in enumerate(zip(PAGES, texts, strict=True)):
        content = chat_parts([data_url("image/png", page)], "What?")
        body = chat_body("served", [{"role": "user", "content": content}], ANSWER_TOKENS)
        requests.append(LoadRequest(ChatRequest(f"{number}", body, ANSWER_TOKENS), None))
        outcomes.append(RequestOutcome(f"{number}", 0.0, 0.0, 0.0, text=text, finish_reason="length"))
    sample.add(level, requests, outcomes[::-1])
    return verify_traffic("http://x", ("served", None), SETTINGS, sample, loaded=tiny.loaded, **options)


def test_right_answers_are_close_and_say_what_a_text_cannot_exclude(tiny: GenerateRunner, answers: list[str]) -> None:
    verdict = verified(tiny, answers)
    assert (verdict.word, verdict.wrong) == ("close", []), verdict.message
    said = " ".join(verdict.not_visible)
    judged = sum(bool(answer["tokens"]) for answer in verdict.answers)  # fewer, where a text begins inside a character
    assert f"{judged} of {COUNT} answers were computed again" in said
    assert f"with {judged}% probability" in said
    assert "without log-probabilities" in said


def test_two_swapped_answers_are_named(tiny: GenerateRunner, answers: list[str]) -> None:
    verdict = verified(tiny, [answers[1], answers[0], *answers[2:]])
    assert verdict.word == "different"
    assert set(verdict.wrong) <= {"0 (concurrency-8)", "1 (concurrency-8)"} and verdict.wrong


def test_a_server_that_swaps_images_under_load_is_different(
    tiny: GenerateRunner, answers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for owner, name in ((Loop, "_launch"), (ViewFeatures, "fill")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the fault replaces them for good
    monkeypatch.setenv("FAULT_LOG", str(tmp_path / "swaps"))
    FAULTS["swapped"][1]()
    others = [encoded_image(noise(64, 64, seed)) for seed in range(COUNT, 2 * COUNT)]
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS)
    with Engine(tiny.loaded, EngineOptions(), SETTINGS) as engine:
        results = engine.generate(
            [Request("What?", [page], sampling=sampling, pan_and_scan=VIEWS) for page in (*PAGES, *others)]
        )
    assert (tmp_path / "swaps").stat().st_size > 0
    verification = verified(tiny, [result.text for result in results[:COUNT]])
    assert verification.word == "different", verification.message


def test_texts_without_a_clear_token_are_no_evidence(tiny: GenerateRunner, answers: list[str]) -> None:
    verdict = verified(tiny, ["", "", "", answers[3][:1]])
    assert verdict.word == "unknown"
    assert "no verdict" in verdict.message


def test_a_text_is_followed_along_the_tokens_of_the_reference(tiny: GenerateRunner, answers: list[str]) -> None:
    """Random models write texts that the tokenizer would write with other tokens: these are no wrong tokens."""
    with open_local(SETTINGS, tiny.loaded) as local:
        texts = [b"".join(local.tokens.text(token) for token in local.tokens.encode(text)) for text in answers]
        assert [text.decode(errors="replace") for text in texts] == answers
        lengths = np.array([len(local.tokens.encode(text)) for text in answers])
        assert (lengths != ANSWER_TOKENS).any(), "no text has another tokenisation: this test says nothing"
        starts = local.tokens.starting(texts[0])
        assert all(texts[0].startswith(local.tokens.text(token)) for token in starts)
        assert len(starts) > 1


@pytest.mark.parametrize("extra", [{"temperature": 1}, {"repetition_penalty": 1.3}, {"guided_regex": "a+"}])
def test_requests_that_change_answers_are_refused(extra: dict[str, Any]) -> None:
    check_plain_answers({"temperature": 0.0, "logprobs": True, "seed": 3})
    with pytest.raises(SettingError, match=f"remove {next(iter(extra))} from --extra-body"):
        check_plain_answers({"temperature": 0.0, **extra})
