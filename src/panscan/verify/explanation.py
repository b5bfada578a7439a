"""What explains an endpoint's answers: the search for a hypothesis with as few local computations as possible.

All hypotheses are compared on the answers that deviate most, the best of them on all answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log
from statistics import fmean
from typing import Literal

import numpy as np

from panscan.core import Request, SettingError
from panscan.core.activity import activity
from panscan.records.fields import FLOOR
from panscan.verdict.evidence import (
    AnswerEvidence,
    Fit,
    MappedAnswer,
    NoiseLevel,
    VerdictWord,
    compare_answer,
    judge_fit,
    local_divergences,
    merged_fit,
    moved_margin,
)
from panscan.verdict.judgement import CLOSE_RATIO, EXACT_RATIO, REQUEST_FACTOR
from panscan.verify.hypotheses import CHANGES, REFERENCE, Hypothesis, combine, hypothesis
from panscan.verify.local import LocalModel

Strength = Literal["matches", "consistent", "closest", "none"]

_SAME_SIZE = 3.0
"""Quantised weights of two servers deviate from the reference by amounts that differ by at most this factor."""
_LEAST_GAIN = 0.5
"""Of the divergence: a hypothesis that leaves more than this unexplained is not named."""
_SCREENED = 2  # answers with images, those that deviate most, on which all hypotheses are compared
_FINALISTS = 4  # hypotheses that are then compared on all answers
_ROUNDS = 2  # further changes that are combined with the best hypothesis
_SENSITIVE = 4  # answers that distinguish changes from the reference


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

    candidate: HypothesisFit | None = None
    strength: Strength = "none"
    rivals: tuple[Hypothesis, ...] = ()


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
    counted = any(candidate.counts_fit for candidate in candidates)

    def order(candidate: HypothesisFit) -> tuple[bool, bool, float, int]:
        explained = noise.explains(candidate.fit)
        size = 0.0 if explained else _unexplained(candidate)
        return counted and not candidate.counts_fit, not explained, size, candidate.plain_changes

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
    if any(candidate.counts_fit for candidate in (*candidates, reference)):
        candidates = [candidate for candidate in candidates if candidate.counts_fit]
    ranked = best_candidates([candidate for candidate in candidates if not candidate.hypothesis.approximate], noise)
    within = [candidate for candidate in ranked if noise.explains(candidate.fit)]
    if within:
        rivals = [rival.hypothesis for rival in within[1:] if rival.plain_changes <= within[0].plain_changes]
        return Explanation(within[0], "matches", tuple(rivals))
    closer = [fit for fit in ranked[:1] if _unexplained(fit) <= _LEAST_GAIN * _unexplained(reference)]
    similar = [candidate for candidate in candidates if _is_as_far_from_reference(candidate, noise)]
    if similar:
        first, *others = sorted(similar, key=lambda candidate: (candidate.plain_changes, _size_gap(candidate)))
        # A hypothesis that leaves at most half of what the similar one starts from explains more.
        if not any(_unexplained(fit) <= _LEAST_GAIN * (first.base_score or inf) for fit in closer):
            return Explanation(first, "consistent", tuple(other.hypothesis for other in others))
    return Explanation(closer[0], "closest") if closer else Explanation()


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
    best = explanation.candidate
    if best is None or explanation.strength != "matches":
        return word
    if not best.plain_changes:
        return word if noise.explains(reference.fit) else judge_candidate(best, noise, images=images)
    if best.counts_fit and not reference.counts_fit:
        return "different"
    deviates = noise.kl is not None and not noise.explains(reference.fit)
    halved = _unexplained(best) <= _LEAST_GAIN * _unexplained(reference)
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
    best = explanation.candidate
    if word == "exact":
        return f"exact: {reason}"
    if best is None:
        return f"{word}: {reason or 'no known fault explains the answers'}"
    changes = [CHANGES[name] for name in best.hypothesis.changes]
    named = [change for change in changes if not change.equivalent] or changes
    titles, causes = " and ".join(change.title for change in named), " ".join(change.cause for change in named)
    match explanation.strength:
        case "matches":
            return f"{word}: {titles}. {causes}"
        case "consistent":
            others = "; ".join(other.title for other in explanation.rivals[:2])
            return (
                f"{word}: the answers deviate as much as with {titles}{f' (or {others})' if others else ''}. {causes}"
            )
    return f"{word}: no known fault explains the answers; the closest is: {titles}. {causes}"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A probe's request and its answer in token ids.

    Args:
        request: the question.
        tokens: the answer; the last one is never read.
        mapped: reported tokens and log-probabilities.
        prompt_tokens: count that the endpoint reported; None if it did not.
    """

    request: Request
    tokens: list[int]
    mapped: MappedAnswer
    prompt_tokens: int | None


class Evaluator:
    """Comparisons of answers with local computations.

    Args:
        local: the reference's weights.
        probes: answers with at least one token.
    """

    def __init__(self, local: LocalModel, probes: Sequence[ProbeAnswer]) -> None:
        self.local, self.probes = local, list(probes)
        self._known: dict[tuple[str, int], AnswerEvidence] = {}
        kl: list[float] = []
        margin = 0.0
        self._noisiest: float | None = None
        self._regret = 0.0  # largest sum over an answer, of the choices of the noisy computation
        for probe in self.probes:
            with activity(f"{probe.request.id}: rounding noise"):
                truth = local.log_probabilities(probe.request, probe.tokens, REFERENCE)
                noisy = local.noise(probe.request, probe.tokens)
            levels = local_divergences(probe.mapped, truth, noisy)
            if levels:
                self._noisiest = max(self._noisiest or 0.0, fmean(levels))
            kl += levels
            margin = max(margin, moved_margin(truth, noisy))
            chosen = np.take_along_axis(truth, noisy.argmax(-1)[:, None], axis=-1)[:, 0]
            self._regret = max(self._regret, float((truth.max(-1) - chosen).sum()))
        self.noise = NoiseLevel(fmean(kl) if kl else None, margin)

    @cached_property
    def reference(self) -> HypothesisFit:
        """How well the reference explains all answers, of which there is at least one."""
        return self.candidate(REFERENCE)

    @property
    def tested(self) -> int:
        """Number of hypotheses that were compared with at least one answer."""
        return len({name for name, _ in self._known} - {REFERENCE.name})

    def wrong_answers(self) -> list[str]:
        """Return the ids of answers with a clearly wrong token, or far beyond the noise."""
        wrong = []
        for probe in self.probes:
            fit = self._fit(REFERENCE, [probe])
            noise = NoiseLevel(self._noisiest, self.noise.margin)
            ratio = noise.ratio(fit)
            regret = fit.regret * fit.positions  # many tokens that are each a little worse add up
            astray = regret > max(self.noise.clear_margin, CLOSE_RATIO * self._regret)
            if fit.agree < fit.clear or astray or (ratio is not None and ratio > CLOSE_RATIO * REQUEST_FACTOR):
                wrong.append(probe.request.id)
        return wrong

    def hypotheses(self) -> list[Hypothesis]:
        """Return all hypotheses that change a question."""
        relevant = [tried for probe in self.probes for tried in self.local.hypotheses(probe.request)]
        return list({tried.name: tried for tried in relevant}.values())

    def candidate(self, tried: Hypothesis, probes: Sequence[ProbeAnswer] | None = None) -> HypothesisFit:
        """Return how well a hypothesis explains some answers, by default all of them."""
        chosen = self.probes if probes is None else probes
        text = [probe for probe in chosen if not probe.request.images]
        pictured = [probe for probe in chosen if probe.request.images]
        return HypothesisFit(
            tried,
            self._fit(tried, chosen),
            self._fit(tried, text) if text else None,
            self._fit(_without_approximate(tried), chosen).kl if tried.approximate else None,
            self._fit(tried, pictured) if pictured else None,
        )

    def counts_fit(self, tried: Hypothesis) -> bool:
        """Return whether all reported prompt token counts are those of a hypothesis."""
        return all(self._counts(tried, self.probes))

    def _fit(self, tried: Hypothesis, probes: Sequence[ProbeAnswer]) -> Fit:
        answers = [self.evidence(tried, probe) for probe in probes]
        return merged_fit(answers, self.noise.clear_margin, self._counts(tried, probes))

    def _counts(self, tried: Hypothesis, probes: Iterable[ProbeAnswer]) -> list[bool]:
        counted = [probe for probe in probes if probe.prompt_tokens is not None]
        return [self.local.prompt_tokens(probe.request, tried) == probe.prompt_tokens for probe in counted]

    def evidence(self, tried: Hypothesis, probe: ProbeAnswer) -> AnswerEvidence:
        """Return the comparison of one answer with a hypothesis."""
        key = tried.name, id(probe)
        if key not in self._known:
            with activity(f"{probe.request.id}: {tried.title}"):
                self._known[key] = self._compared(tried, probe)
        return self._known[key]

    def _compared(self, tried: Hypothesis, probe: ProbeAnswer) -> AnswerEvidence:
        rows = self.local.log_probabilities(probe.request, probe.tokens, tried)
        compared = compare_answer(probe.mapped, rows)
        if tried == REFERENCE:
            return compared
        exact = _without_approximate(tried) if tried.approximate else REFERENCE
        base = self.local.log_probabilities(probe.request, probe.tokens, exact)
        return replace(compared, deviations=tuple(local_divergences(probe.mapped, base, rows)))


def _without_approximate(tried: Hypothesis) -> Hypothesis:
    """Return a hypothesis without its approximate changes."""
    return hypothesis("+".join(name for name in tried.changes if not CHANGES[name].approximate) or REFERENCE.name)


def find_explanation(evaluator: Evaluator) -> tuple[Explanation, list[HypothesisFit]]:
    """Return what explains the answers, and the hypotheses that were compared on all of them, best first.

    All hypotheses are compared on the answers that deviate most, the best of them on all answers. What they leave
    unexplained is searched again, in combination with one more change.
    """
    noise = evaluator.noise
    finalists: dict[str, HypothesisFit] = {}
    tried = evaluator.hypotheses()
    explanation = Explanation()
    for _ in range(1 + _ROUNDS):
        for screened in _screened(evaluator, tried):
            explained = any(noise.explains(known.fit) for known in finalists.values())
            finalists.setdefault(screened.name, evaluator.candidate(screened))
            if explained:  # one more was compared, to show the distance
                break
        explanation = explain(evaluator.reference, list(finalists.values()), noise)
        best = explanation.candidate
        if best is None or explanation.strength in ("matches", "consistent"):
            break
        tried = []
        for change in evaluator.hypotheses():
            if len(change.changes) == 1:
                with suppress(SettingError):  # both change the same
                    tried.append(combine(best.hypothesis, change))
        tried = [combined for combined in tried if combined.name not in finalists]
    if explanation.strength == "matches" and explanation.candidate is not None:
        simpler = _pruned(evaluator, explanation.candidate)
        finalists[simpler.hypothesis.name] = simpler
        explanation = Explanation(simpler, "matches", explanation.rivals)
    return explanation, best_candidates(list(finalists.values()), noise)


def _screened(evaluator: Evaluator, tried: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the hypotheses that explain best the answers that deviate most.

    If some hypotheses predict all prompt token counts, the others are not computed. Quantised weights are compared
    only if an answer without images deviates too.
    """
    counted = [candidate for candidate in tried if evaluator.counts_fit(candidate)]
    tried = counted if counted or evaluator.reference.counts_fit else tried
    text = evaluator.reference.text_fit
    if text is not None and evaluator.noise.explains(text):
        tried = [candidate for candidate in tried if not candidate.approximate]
    worst = sorted(evaluator.probes, key=lambda probe: _size(evaluator, probe), reverse=True)
    probes = [probe for probe in worst if probe.request.images][:_SCREENED]
    probes += [probe for probe in worst if not probe.request.images][:1]
    ranked = best_candidates([evaluator.candidate(candidate, probes) for candidate in tried], evaluator.noise)
    exact = [fit.hypothesis for fit in ranked if not fit.hypothesis.approximate]
    return exact[:_FINALISTS] + [fit.hypothesis for fit in ranked if fit.hypothesis.approximate]


def _size(evaluator: Evaluator, probe: ProbeAnswer) -> float:
    """Return the divergence of an answer that the reference does not explain, in nats."""
    evidence = evaluator.evidence(REFERENCE, probe)
    return sum(evidence.kl) if evidence.kl else sum(value for value in evidence.regret if value is not None)


def _pruned(evaluator: Evaluator, explanation: HypothesisFit) -> HypothesisFit:
    """Return an explanation without the changes that it does not need."""
    for name in explanation.hypothesis.changes:
        rest = [change for change in explanation.hypothesis.changes if change != name]
        simpler = evaluator.candidate(hypothesis("+".join(rest) or REFERENCE.name))
        if rest and evaluator.noise.explains(simpler.fit) and simpler.counts_fit >= explanation.counts_fit:
            return _pruned(evaluator, simpler)
    return explanation


def unseen_changes(evaluator: Evaluator) -> list[str]:
    """Return the changes that the answers do not rule out, although they concern the questions."""
    return [
        single.name
        for single in evaluator.hypotheses()
        if len(single.changes) == 1 and not single.equivalent
        if not evaluator.reference.counts_fit or evaluator.counts_fit(single)
        if not _ruled_out(evaluator, single)
    ]


def _ruled_out(evaluator: Evaluator, tried: Hypothesis) -> bool:
    """Return whether answers deviate from a hypothesis by more than the noise, or from its clear choices."""
    noise = evaluator.noise
    positions = sum(len(probe.mapped) for probe in evaluator.probes)
    limit = EXACT_RATIO * max(noise.kl or 0.0, FLOOR) * positions
    total = 0.0
    changed = [probe for probe in evaluator.probes if tried in evaluator.local.hypotheses(probe.request)]
    for probe in changed[:_SENSITIVE]:
        evidence = evaluator.evidence(tried, probe)
        total += sum(evidence.kl)
        pairs = zip(evidence.margin, evidence.regret, strict=True)
        if any(margin > noise.clear_margin and regret for margin, regret in pairs) or (evidence.kl and total > limit):
            return True
    return False
