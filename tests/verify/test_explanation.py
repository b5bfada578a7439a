"""Verdicts on endpoints follow panscan's limits; what a session learns from refusals and odd replies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image
from tests.verify.replying import Body, Reply, replying

from panscan.core import EndpointError, Request
from panscan.images.encode import encoded_image
from panscan.load.chat import Endpoint
from panscan.verdict.evidence import Fit, NoiseLevel, judge_fit
from panscan.verify.consistency import REQUESTS, Consistency, check_consistency
from panscan.verify.endpoint import EndpointClient
from panscan.verify.explanation import (
    Explanation,
    HypothesisFit,
    best_candidates,
    explain,
    explained_word,
    judge_candidate,
    summary,
)
from panscan.verify.hypotheses import REFERENCE, hypothesis

NOISE = NoiseLevel(1e-4, 0.1)
TOKENS_ONLY = NoiseLevel(None, 0.1)


def fit(kl: float | None, agree: int = 50, deviation: float | None = None, prompts_agree: int = 5) -> Fit:
    return Fit(kl, kl, 60, 0.0 if agree == 50 else 1.0, 50, agree, deviation, 5, prompts_agree)


def candidate(name: str, kl: float | None, text: float | None = None, **others: float) -> HypothesisFit:
    figures = {key: int(value) if key == "agree" else value for key, value in others.items() if key != "base_score"}
    text_fit = None if text is None else fit(text, deviation=figures.get("deviation"))
    return HypothesisFit(hypothesis(name), fit(kl, **figures), text_fit, others.get("base_score"))


FITS = [
    (2e-4, 50, "exact"),
    (9e-4, 50, "close"),
    (9e-4, 49, "different"),
    (2e-3, 50, "different"),
    (1e-4, 31, "different"),  # the right distributions, but sampled tokens
]


@pytest.mark.parametrize(("kl", "agree", "word"), FITS)
def test_the_limits_are_those_of_every_verdict(kl: float, agree: int, word: str) -> None:
    assert judge_fit(fit(kl, agree), NOISE) == word


def test_tokens_alone_never_show_that_an_endpoint_is_exact() -> None:
    assert judge_fit(fit(None), TOKENS_ONLY) == "close"
    assert judge_fit(fit(None, agree=40), TOKENS_ONLY) == "different"
    assert judge_fit(Fit(None, None, 3, 0.0, 0, 0), TOKENS_ONLY) == "unknown"


def test_a_hypothesis_within_the_noise_explains_the_answers() -> None:
    causal, crops = candidate("causal-image-tokens", 1e-4), candidate("no-pan-and-scan", 0.2)
    both = candidate("causal-image-tokens+no-pan-and-scan", 5e-5)
    explanation = explain(HypothesisFit(REFERENCE, fit(0.5)), [both, crops, causal], NOISE)
    assert (explanation.candidate, explanation.strength, explanation.rivals) == (causal, "matches", ())
    assert [one.hypothesis.name for one in best_candidates([crops, both, causal], NOISE)][:1] == ["causal-image-tokens"]
    text = summary("different", explanation)
    assert text.startswith("different: image tokens are causal.")
    assert "choose a backend" in text


def test_prompt_token_counts_outweigh_distributions() -> None:
    right = HypothesisFit(hypothesis("no-pan-and-scan"), fit(0.1))
    wrong = HypothesisFit(hypothesis("resize-bicubic"), fit(0.05, prompts_agree=2))
    assert best_candidates([wrong, right], NOISE) == [right, wrong]
    assert explain(HypothesisFit(REFERENCE, fit(0.5, prompts_agree=2)), [wrong, right], NOISE).candidate == right


def test_quantised_weights_are_recognised_by_the_size_of_the_deviation() -> None:
    reference = HypothesisFit(REFERENCE, fit(0.01), fit(0.01))
    four = candidate("int4-weights", 0.02, 0.02, deviation=0.012, base_score=0.01)
    eight = candidate("int8-weights", 0.01, 0.01, deviation=3e-4, base_score=0.01)
    explanation = explain(reference, [eight, four, candidate("bgr-channels", 0.011)], NOISE)
    assert (explanation.candidate, explanation.strength) == (four, "consistent")
    assert "deviate as much as with 4-bit weights" in summary("different", explanation)


def test_what_explains_a_part_only_is_called_the_closest() -> None:
    explanation = explain(HypothesisFit(REFERENCE, fit(0.5)), [candidate("resize-nearest", 0.1)], NOISE)
    assert explanation.strength == "closest"
    assert "no known fault explains the answers; the closest is: images resized" in summary("different", explanation)
    assert explain(HypothesisFit(REFERENCE, fit(0.5)), [candidate("resize-nearest", 0.45)], NOISE).strength == "none"


IMAGE_FITS = [
    (fit(1e-4), "exact"),
    (fit(None), "close"),  # answers about images without log-probabilities
    (Fit(None, None, 3, 0.0, 0, 0), "unknown"),
    (None, "unknown"),
]


@pytest.mark.parametrize(("image_fit", "word"), IMAGE_FITS)
def test_a_checkpoint_that_reads_images_needs_answers_about_images(image_fit: Fit | None, word: str) -> None:
    candidate = HypothesisFit(REFERENCE, fit(1e-4), fit(1e-4), image_fit=image_fit)
    assert judge_candidate(candidate, NOISE, images=True) == word
    assert judge_candidate(candidate, NOISE, images=False) == "exact"
    wrong = HypothesisFit(REFERENCE, fit(0.5), fit(0.5), image_fit=image_fit)
    assert judge_candidate(wrong, NOISE, images=True) == "different"


def test_sampled_tokens_are_not_explained_by_an_equivalent_computation() -> None:
    sampled = candidate("resize-torchvision", 1e-4, agree=31)
    assert explain(HypothesisFit(REFERENCE, fit(1e-4, agree=31)), [sampled], NOISE).strength == "none"


def test_tokens_alone_explain_nothing_without_a_clear_one() -> None:
    unclear = Fit(None, None, 3, 0.0, 0, 0)
    swapped = HypothesisFit(hypothesis("bgr-channels"), unclear)
    explanation = explain(HypothesisFit(REFERENCE, unclear), [swapped], TOKENS_ONLY)
    assert explanation.strength != "matches"


@pytest.mark.parametrize(("kl", "noise", "word"), [(1e-4, NOISE, "exact"), (None, TOKENS_ONLY, "close")])
def test_an_equivalent_computation_is_judged_like_the_reference(kl: float | None, noise: NoiseLevel, word: str) -> None:
    reference = HypothesisFit(REFERENCE, fit(None if kl is None else 0.5, agree=40))
    explanation = Explanation(HypothesisFit(hypothesis("resize-torchvision"), fit(kl), image_fit=fit(kl)), "matches")
    assert explained_word("different", reference, explanation, noise, images=True) == word


@pytest.mark.parametrize(
    ("kl", "found_kl", "prompts_agree", "word"),
    [(9e-4, 1e-5, 5, "different"), (3e-4, 2e-4, 5, "close"), (3e-4, 2e-4, 2, "different"), (2e-4, 1e-5, 5, "exact")],
)
def test_a_small_fault_is_different_if_proven(kl: float, found_kl: float, prompts_agree: int, word: str) -> None:
    reference = HypothesisFit(REFERENCE, fit(kl, prompts_agree=prompts_agree))
    explanation = Explanation(candidate("causal-image-tokens", found_kl), "matches")
    before = judge_fit(reference.fit, NOISE)
    assert explained_word(before, reference, explanation, NOISE, images=True) == word


# What a session learns from refusals, passing errors and odd replies, and whether an endpoint is consistent.


IMAGE = Request("What is this?", [encoded_image(Image.new("RGB", (8, 8)))])
TEXT = Request("Count.")


def completion(text: str = "a", logprob: float = -0.1) -> Body:
    content = [{"token": text, "logprob": logprob, "top_logprobs": []}] if text else []
    choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [choice]}


def failure(status: int, message: str) -> tuple[int, Body]:
    return status, {"error": {"message": message}}


@contextmanager
def session(reply: Reply, max_tokens: int = 4, top_logprobs: int = 20) -> Iterator[EndpointClient]:
    """A session with an endpoint that calls ``reply`` with the number of each request, from 0, and its body."""
    with replying(reply) as url:
        endpoint = Endpoint(url, "served", None, timeout=20.0)
        yield EndpointClient(endpoint, max_requests=32, max_tokens=max_tokens, top_logprobs=top_logprobs)


def test_a_passing_server_error_drops_no_field() -> None:
    with session(lambda number, _: failure(500, "oops") if number == 0 else (200, completion())) as asked:
        asked.answer(IMAGE)
    assert asked.requests == 2
    assert asked.capabilities.mm_processor_kwargs
    assert asked.capabilities.top_logprobs == 20


def test_a_field_that_an_unnamed_error_concerns_is_omitted() -> None:
    def reply(_: int, body: Body) -> tuple[int, object]:
        return failure(400, "bad request") if "mm_processor_kwargs" in body else (200, completion())

    with session(reply) as asked:
        asked.answer(IMAGE)
        asked.answer(IMAGE)
    assert asked.requests == 3
    assert not asked.capabilities.mm_processor_kwargs
    assert asked.capabilities.top_logprobs == 20


def test_an_error_that_no_field_causes_drops_none() -> None:
    def reply(_: int, body: Body) -> tuple[int, object]:
        pictures = not isinstance(body["messages"][-1]["content"], str)
        return failure(400, "bad request") if pictures else (200, completion())

    with session(reply) as asked:
        with pytest.raises(EndpointError, match="bad request"):
            asked.answer(IMAGE)
        sent = asked.requests
        with pytest.raises(EndpointError, match="bad request"):
            asked.answer(IMAGE)
        assert asked.requests == sent + 1
        assert len(asked.answer(TEXT).steps) == 1
    assert asked.capabilities.mm_processor_kwargs
    assert not asked.capabilities.refusals


def test_an_empty_answer_does_not_switch_log_probabilities_off() -> None:
    with session(lambda number, _: (200, completion("" if number == 0 else "a"))) as asked:
        assert asked.answer(TEXT).steps == ()
        assert len(asked.answer(TEXT).steps) == 1
    assert asked.capabilities.top_logprobs == 20


NO_NUMBERS = (-(10**400), float("nan"), float("-inf"), "-1", True)


@pytest.mark.parametrize(
    ("reported", "read"), [*((value, None) for value in NO_NUMBERS), (1e-7, 0.0), (-2, -2.0)], ids=str
)
def test_what_is_no_log_probability_is_ignored(reported: Any, read: float | None) -> None:
    with session(lambda *_: (200, completion("a", reported))) as asked:
        [step] = asked.answer(TEXT).steps
    assert step.chosen.log_probability == read


WORDS = ["The", " total", " is", " twelve", " dollars"]
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5]


def engine(number: int, body: Body, fault: str) -> tuple[int, Any]:
    """Answer with :data:`WORDS` as a right engine does, but for one fault."""
    if "prompt_logprobs" in body and fault == "unknown field":
        return 400, {"error": {"message": "prompt_logprobs: extra fields not permitted"}}
    sampled = body["temperature"] > 0
    words = [*WORDS[:2], f" {number}"] if sampled and fault == "seed" else WORDS
    limit = 4 if fault == "max_tokens" else body["max_tokens"]
    generated, reason = words[:limit], "length" if limit < len(words) else "stop"
    text = "".join(generated)
    for stop in body.get("stop", []) if fault != "stop" else []:
        text = text.partition(stop)[0]
    content = [{"token": word, "logprob": value} for word, value in zip(generated, LOGPROBS, strict=False)]
    reply: Body = {
        "choices": [{"message": {"content": text}, "finish_reason": reason, "logprobs": {"content": content}}],
        "usage": {"completion_tokens": len(generated)},
    }
    if "prompt_logprobs" in body:
        written = [("<bos>", None), ("?", -3.0), *zip(WORDS, LOGPROBS, strict=True), ("<end_of_turn>", -1.0)]
        moved = 0.7 if fault == "prefill" else 0.01
        entries = [{"7": {"logprob": value and value - moved, "decoded_token": word}} for word, value in written]
        reply["prompt_logprobs"] = [None, *entries[1:]]
    return 200, reply


def checked(fault: str) -> tuple[Consistency, int]:
    question = Request("How much?")
    with session(lambda number, body: engine(number, body, fault), max_tokens=8, top_logprobs=0) as asked:
        check = check_consistency(asked, question, asked.answer(question))
    return check, asked.requests - 1


@pytest.mark.parametrize("fault", ["none", "max_tokens", "stop", "seed"])
def test_each_parameter_must_do_what_it_says(fault: str) -> None:
    check, requests = checked(fault)
    assert [line.partition(":")[0] for line in check.faults] == ([] if fault == "none" else [fault])
    assert (requests, check.notes) == (REQUESTS, [])


@pytest.mark.parametrize(("fault", "moved"), [("none", 0.01), ("prefill", 0.7)])
def test_an_answer_has_the_same_log_probabilities_in_a_prompt(fault: str, moved: float) -> None:
    assert checked(fault)[0].moved == pytest.approx(moved)


def test_an_endpoint_without_prompt_log_probabilities_is_a_note() -> None:
    check, _ = checked("unknown field")
    assert (check.moved, check.faults) == (None, [])
    assert "prompt_logprobs: not checked" in check.notes[0]
