"""Verdicts follow panscan's limits, and the simplest hypothesis within the noise is named."""

import pytest

from panscan.verdict.evidence import Fit, NoiseLevel, judge_fit
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
    own = {key: int(value) if key == "agree" else value for key, value in others.items() if key != "base_score"}
    text_fit = None if text is None else fit(text, deviation=own.get("deviation"))
    return HypothesisFit(hypothesis(name), fit(kl, **own), text_fit, others.get("base_score"))


@pytest.mark.parametrize(
    ("kl", "agree", "word"),
    [
        (2e-4, 50, "exact"),
        (9e-4, 50, "close"),
        (9e-4, 49, "different"),
        (2e-3, 50, "different"),
        (1e-4, 31, "different"),  # the right distributions, but sampled tokens
    ],
)
def test_the_limits_are_those_of_every_verdict(kl: float, agree: int, word: str) -> None:
    assert judge_fit(fit(kl, agree), NOISE) == word


def test_tokens_alone_never_show_that_an_endpoint_is_exact() -> None:
    assert judge_fit(fit(None), TOKENS_ONLY) == "close"
    assert judge_fit(fit(None, agree=40), TOKENS_ONLY) == "different"
    assert judge_fit(Fit(None, None, 3, 0.0, 0, 0), TOKENS_ONLY) == "unknown"


def test_a_hypothesis_within_the_noise_explains_the_answers() -> None:
    causal, crops = candidate("causal-image-tokens", 1e-4), candidate("no-pan-and-scan", 0.2)
    both = candidate("causal-image-tokens+no-pan-and-scan", 5e-5)
    found = explain(HypothesisFit(REFERENCE, fit(0.5)), [both, crops, causal], NOISE)
    assert (found.candidate, found.strength, found.rivals) == (causal, "matches", ())
    assert [one.hypothesis.name for one in best_candidates([crops, both, causal], NOISE)][:1] == ["causal-image-tokens"]
    text = summary("different", found)
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
    found = explain(reference, [eight, four, candidate("bgr-channels", 0.011)], NOISE)
    assert (found.candidate, found.strength) == (four, "consistent")
    assert "deviate as much as with 4-bit weights" in summary("different", found)


def test_what_explains_a_part_only_is_called_the_closest() -> None:
    found = explain(HypothesisFit(REFERENCE, fit(0.5)), [candidate("resize-nearest", 0.1)], NOISE)
    assert found.strength == "closest"
    assert "no known fault explains the answers; the closest is: images resized" in summary("different", found)
    assert explain(HypothesisFit(REFERENCE, fit(0.5)), [candidate("resize-nearest", 0.45)], NOISE).strength == "none"


@pytest.mark.parametrize(
    ("image_fit", "word"),
    [
        (fit(1e-4), "exact"),
        (fit(None), "close"),  # answers about images without log-probabilities
        (Fit(None, None, 3, 0.0, 0, 0), "unknown"),
        (None, "unknown"),
    ],
)
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
    found = explain(
        HypothesisFit(REFERENCE, unclear), [HypothesisFit(hypothesis("bgr-channels"), unclear)], TOKENS_ONLY
    )
    assert found.strength != "matches"


@pytest.mark.parametrize(("kl", "noise", "word"), [(1e-4, NOISE, "exact"), (None, TOKENS_ONLY, "close")])
def test_an_equivalent_computation_is_judged_like_the_reference(kl: float | None, noise: NoiseLevel, word: str) -> None:
    reference = HypothesisFit(REFERENCE, fit(None if kl is None else 0.5, agree=40))
    found = Explanation(HypothesisFit(hypothesis("resize-torchvision"), fit(kl), image_fit=fit(kl)), "matches")
    assert explained_word("different", reference, found, noise, images=True) == word


@pytest.mark.parametrize(
    ("kl", "found_kl", "prompts_agree", "word"),
    [(9e-4, 1e-5, 5, "different"), (3e-4, 2e-4, 5, "close"), (3e-4, 2e-4, 2, "different"), (2e-4, 1e-5, 5, "exact")],
)
def test_a_small_fault_is_different_if_proven(kl: float, found_kl: float, prompts_agree: int, word: str) -> None:
    reference = HypothesisFit(REFERENCE, fit(kl, prompts_agree=prompts_agree))
    found = Explanation(candidate("causal-image-tokens", found_kl), "matches")
    before = judge_fit(reference.fit, NOISE)
    assert explained_word(before, reference, found, NOISE, images=True) == word
