"""From evidence to a verdict, and to the hypothesis that explains it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Literal

from panscan.records.fields import FLOOR
from panscan.records.verdict_records import Divergence, Top1
from panscan.verdict.evidence import Fit
from panscan.verdict.judgement import CLOSE_TOP1, EXACT_RATIO, clear_margin, judge
from panscan.verify.hypotheses import CHANGES, Hypothesis

VerdictWord = Literal["exact", "close", "different", "unknown"]
Strength = Literal["matches", "consistent", "closest", "none"]

_SAME_SIZE = 3.0
"""Quantised weights of two servers deviate from the reference by amounts that differ by at most this factor."""
_LEAST_GAIN = 0.5
"""Of the divergence: a hypothesis that leaves more than this unexplained is not named."""


@dataclass(frozen=True, slots=True)
class NoiseLevel:
    """What rounding explains.

    Args:
        kl: mean coarse divergence of the reference in bfloat16 from the reference, nats; None without
            log-probabilities.
        margin: the largest change of a margin between its first and second choice, nats.
    """

    kl: float | None
    margin: float

    @property
    def clear_margin(self) -> float:
        """Margin in nats above which rounding does not explain another token."""
        return clear_margin(self.margin)

    def ratio(self, fit: Fit) -> float | None:
        """Return a divergence as a multiple of the noise; None without log-probabilities."""
        if fit.kl is None or self.kl is None:
            return None
        return max(fit.kl, FLOOR) / max(self.kl, FLOOR)

    def explains(self, fit: Fit) -> bool:
        """Return whether rounding explains the rest of the deviation, in distributions and in tokens.

        Without log-probabilities, at least one clear token is needed.
        """
        ratio = self.ratio(fit)
        if ratio is None:
            return fit.agree == fit.clear > 0
        return ratio <= EXACT_RATIO and _tokens_agree(fit)


@dataclass(frozen=True, slots=True)
class HypothesisFit:
    """A hypothesis and how well it explains the answers.

    Args:
        hypothesis: the computation.
        fit: over all answers.
        text_fit: over the answers to prompts without images; None if there are none.
        base_score: score of the same hypothesis without its approximate changes, nats; None if it has none.
        image_fit: over the answers to prompts with images; None if there are none.
    """

    hypothesis: Hypothesis
    fit: Fit
    text_fit: Fit | None = None
    base_score: float | None = None
    image_fit: Fit | None = None

    @property
    def counts_fit(self) -> bool:
        """Whether all known prompt token counts are those of the hypothesis."""
        return self.fit.prompts_agree == self.fit.prompts

    @property
    def plain_changes(self) -> int:
        """Number of changes that a correct implementation would not make."""
        return sum(not CHANGES[name].equivalent for name in self.hypothesis.changes)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The hypothesis that explains an endpoint's answers best.

    Args:
        candidate: the hypothesis; None if none explains them better than the reference.
        strength: ``matches``: within the noise. ``consistent``: quantised weights that deviate as much. ``closest``:
            explains a part. ``none``.
        rivals: other hypotheses that the answers do not rule out.
    """

    candidate: HypothesisFit | None
    strength: Strength
    rivals: tuple[Hypothesis, ...] = ()


def judge_fit(fit: Fit, noise: NoiseLevel) -> VerdictWord:
    """Return the verdict on a computation, from its divergence and its clear tokens.

    Tokens alone never show that an endpoint is exact, and clear tokens that disagree make it different at any
    divergence: an endpoint may report the right log-probabilities and choose other tokens.
    """
    if not fit.positions:
        return "unknown"
    if fit.kl is None or noise.kl is None or fit.kl_max is None:
        if not fit.clear:
            return "unknown"
        return "close" if _tokens_agree(fit) else "different"
    if not _tokens_agree(fit):
        return "different"
    divergence = Divergence(fit.positions, fit.kl, fit.kl_max, noise.kl)
    word = judge(divergence, None, Top1(fit.clear, fit.agree), equal_tokens=True, float32=False)
    return "exact" if word == "exact" else "close" if word == "close" else "different"


def _tokens_agree(fit: Fit) -> bool:
    return fit.agree >= CLOSE_TOP1 * fit.clear


def judge_candidate(candidate: HypothesisFit, noise: NoiseLevel, *, images: bool) -> VerdictWord:
    """Return the verdict on a hypothesis, limited by what the answers about images show.

    Args:
        candidate: the hypothesis.
        noise: divergence that rounding explains.
        images: whether the checkpoint reads images. If so, ``exact`` and ``close`` need evidence from answers about
            images, and ``exact`` needs their log-probabilities.
    """
    word = judge_fit(candidate.fit, noise)
    if not images or word not in ("exact", "close"):
        return word
    pictured = candidate.image_fit
    if pictured is None or judge_fit(pictured, noise) == "unknown":
        return "unknown"
    return "close" if pictured.kl is None else word


def best_candidates(candidates: Sequence[HypothesisFit], noise: NoiseLevel) -> list[HypothesisFit]:
    """Return candidates, best first.

    Prompt token counts come first, if any candidate has them all right. Candidates within the noise are equal; the one
    with the fewest changes comes first.
    """
    counted = any(each.counts_fit for each in candidates)

    def order(each: HypothesisFit) -> tuple[bool, bool, float, int]:
        explained = noise.explains(each.fit)
        size = 0.0 if explained else _unexplained(each)
        return counted and not each.counts_fit, not explained, size, each.plain_changes

    return sorted(candidates, key=order)


def _unexplained(candidate: HypothesisFit) -> float:
    fit = candidate.fit
    return fit.clear - fit.agree + fit.regret if fit.kl is None else max(fit.kl, FLOOR)


def explain(reference: HypothesisFit, candidates: Sequence[HypothesisFit], noise: NoiseLevel) -> Explanation:
    """Return what explains answers that the reference does not.

    Args:
        reference: the reference's fit.
        candidates: hypotheses, without the reference.
        noise: divergence that rounding explains.
    """
    ranked = best_candidates([each for each in candidates if not each.hypothesis.approximate], noise)
    counts = any(each.counts_fit for each in (*candidates, reference))
    within = [each for each in ranked if noise.explains(each.fit) and (each.counts_fit or not counts)]
    if within:
        rivals = [each.hypothesis for each in within[1:] if each.plain_changes <= within[0].plain_changes]
        return Explanation(within[0], "matches", tuple(rivals))
    similar = sorted(
        (each for each in candidates if _is_as_far_from_reference(each, noise) and (each.counts_fit or not counts)),
        key=lambda each: (each.plain_changes, _size_gap(each)),
    )
    closest = next((each for each in ranked if each.counts_fit or not counts), None)
    gain = closest is not None and _unexplained(closest) <= _LEAST_GAIN * _unexplained(reference)
    if similar and not (closest is not None and gain and _halves(closest, similar[0])):
        return Explanation(similar[0], "consistent", tuple(each.hypothesis for each in similar[1:]))
    return Explanation(closest, "closest") if gain else Explanation(None, "none")


def _halves(closest: HypothesisFit, similar: HypothesisFit) -> bool:
    """Return whether a hypothesis leaves at most half of the divergence that the other one starts from."""
    start = similar.base_score if similar.base_score is not None else inf
    return _unexplained(closest) <= _LEAST_GAIN * start


def _is_as_far_from_reference(candidate: HypothesisFit, noise: NoiseLevel) -> bool:
    """Return whether answers deviate as much as under approximate changes, with images and without."""
    fit, text = candidate.fit, candidate.text_fit
    if not candidate.hypothesis.approximate or not fit.deviation or noise.kl is None:
        return False
    limit = EXACT_RATIO * max(noise.kl, FLOOR)
    text_too = text is None or text.deviation is None or text.deviation <= limit or (text.kl or 0) > FLOOR
    return fit.deviation > limit and text_too and _size_gap(candidate) <= log(_SAME_SIZE)


def _size_gap(candidate: HypothesisFit) -> float:
    deviation, base = candidate.fit.deviation, candidate.base_score
    if not deviation or not base:
        return inf
    return abs(log(max(base, FLOOR) / max(deviation, FLOOR)))


def explained_word(
    word: VerdictWord, reference: HypothesisFit, explanation: Explanation, noise: NoiseLevel, *, images: bool
) -> VerdictWord:
    """Return the verdict after the search for an explanation.

    An endpoint with a known fault is different, however small its effect, if the fault explains the answers within the
    noise and the prompt token counts or at least half of the divergence show it.

    Args:
        word: the verdict on the reference.
        reference: the reference's fit.
        explanation: the result of the search.
        noise: divergence that rounding explains.
        images: see :func:`judge_candidate`.
    """
    found = explanation.candidate
    if found is None or explanation.strength != "matches":
        return word
    if not found.plain_changes:
        return word if noise.explains(reference.fit) else judge_candidate(found, noise, images=images)
    if found.counts_fit and not reference.counts_fit:
        return "different"
    deviates = noise.kl is not None and not noise.explains(reference.fit)
    halved = _unexplained(found) <= _LEAST_GAIN * _unexplained(reference)
    return "different" if deviates and halved else word


def summary(word: VerdictWord, explanation: Explanation, reason: str = "") -> str:
    """Return the verdict in a sentence, with the cause and the fix.

    Args:
        word: the verdict.
        explanation: hypothesis that explains it.
        reason: why there is no verdict, or what else decided it.
    """
    if word == "unknown":
        return f"no verdict: {reason}"
    found = explanation.candidate
    if word == "exact":
        return f"exact: {reason}"
    if found is None:
        return f"{word}: {reason or 'no known fault explains the answers'}"
    changes = [CHANGES[name] for name in found.hypothesis.changes]
    named = [change for change in changes if not change.equivalent] or changes
    titles, causes = " and ".join(each.title for each in named), " ".join(each.cause for each in named)
    match explanation.strength:
        case "matches":
            return f"{word}: {titles}. {causes}"
        case "consistent":
            others = "; ".join(other.title for other in explanation.rivals[:2])
            return (
                f"{word}: the answers deviate as much as with {titles}{f' (or {others})' if others else ''}. {causes}"
            )
    return f"{word}: no known fault explains the answers; the closest is: {titles}. {causes}"
