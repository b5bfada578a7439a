"""The search for the hypothesis that explains an endpoint's answers, with as few local computations as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from panscan.core import Request, SettingError
from panscan.records.fields import FLOOR
from panscan.verdict.evidence import (
    AnswerEvidence,
    Fit,
    MappedAnswer,
    coarse_kl,
    compare_answer,
    local_reports,
    merged_fit,
    moved_margin,
)
from panscan.verdict.judgement import EXACT_RATIO
from panscan.verify.diagnosis import Explanation, HypothesisFit, NoiseLevel, best_candidates, explain
from panscan.verify.hypotheses import CHANGES, REFERENCE, Hypothesis, combine, hypothesis
from panscan.verify.local import LocalModel

_SCREENED = 2  # answers with images, those that deviate most, on which all hypotheses are compared
_FINALISTS = 4  # hypotheses that are then compared on all answers
_ROUNDS = 2  # further changes that are combined with the best hypothesis
_SENSITIVE = 4  # answers that distinguish changes from the reference


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
        on_progress: called with what is computed next.
    """

    def __init__(self, local: LocalModel, probes: Sequence[ProbeAnswer], on_progress: Callable[[str], None]) -> None:
        self.local, self.probes, self._on_progress = local, list(probes), on_progress
        self._known: dict[tuple[str, int], tuple[AnswerEvidence, list[float]]] = {}
        self.noise = self._noise_level()

    @property
    def tested(self) -> int:
        """Number of hypotheses that were compared with at least one answer."""
        return len({name for name, _ in self._known} - {REFERENCE.name})

    def hypotheses(self) -> list[Hypothesis]:
        """Return all hypotheses that change a question."""
        found = [each for probe in self.probes for each in self.local.hypotheses(probe.request)]
        return list({each.name: each for each in found}.values())

    def candidate(self, tried: Hypothesis, probes: Sequence[ProbeAnswer] | None = None) -> HypothesisFit:
        """Return how well a hypothesis explains some answers, by default all of them."""
        chosen = self.probes if probes is None else probes
        text = [probe for probe in chosen if not probe.request.images]
        pictured = [probe for probe in chosen if probe.request.images]
        base = _without_approximate(tried)
        return HypothesisFit(
            tried,
            self._fit(tried, chosen),
            self._fit(tried, text) if text else None,
            self._fit(base, chosen).kl if base != tried else None,
            self._fit(tried, pictured) if pictured else None,
        )

    def counts_fit(self, tried: Hypothesis) -> bool:
        """Return whether all reported prompt token counts are those of a hypothesis."""
        return all(self._counts(tried, self.probes))

    def evidence(self, tried: Hypothesis, probe: ProbeAnswer) -> AnswerEvidence:
        """Return the comparison of one answer with a hypothesis."""
        return self._compared(tried, probe)[0]

    def _fit(self, tried: Hypothesis, probes: Sequence[ProbeAnswer]) -> Fit:
        compared = [self._compared(tried, probe) for probe in probes]
        return merged_fit(
            [each for each, _ in compared],
            self.noise.clear_margin,
            prompts=self._counts(tried, probes),
            deviations=[value for _, values in compared for value in values],
        )

    def _counts(self, tried: Hypothesis, probes: Iterable[ProbeAnswer]) -> list[bool]:
        counted = [probe for probe in probes if probe.prompt_tokens is not None]
        return [self.local.prompt_tokens(probe.request, tried) == probe.prompt_tokens for probe in counted]

    def _compared(self, tried: Hypothesis, probe: ProbeAnswer) -> tuple[AnswerEvidence, list[float]]:
        """Return the comparison of an answer, and the hypothesis's distance from the one that it changes."""
        key = tried.name, id(probe)
        if key not in self._known:
            self._on_progress(f"{probe.request.id}: {tried.title}")
            rows = self.local.log_probabilities(probe.request, probe.tokens, tried)
            deviations: list[float] = []
            if tried != REFERENCE:
                base = self.local.log_probabilities(probe.request, probe.tokens, _without_approximate(tried, REFERENCE))
                reports = local_reports(probe.mapped, rows)
                deviations = [coarse_kl(row, report) for row, report in zip(base, reports, strict=True) if report]
            self._known[key] = compare_answer(probe.mapped, rows), deviations
        return self._known[key]

    def _noise_level(self) -> NoiseLevel:
        kl: list[float] = []
        margin = 0.0
        for probe in self.probes:
            self._on_progress(f"{probe.request.id}: rounding noise")
            truth = self.local.log_probabilities(probe.request, probe.tokens, REFERENCE)
            noisy = self.local.noise(probe.request, probe.tokens)
            reports = local_reports(probe.mapped, noisy)
            kl += [coarse_kl(row, report) for row, report in zip(truth, reports, strict=True) if report]
            margin = max(margin, moved_margin(truth, noisy))
        return NoiseLevel(fmean(kl) if kl else None, margin)


def _without_approximate(tried: Hypothesis, exact: Hypothesis | None = None) -> Hypothesis:
    """Return a hypothesis without its approximate changes; ``exact`` (by default itself) if it has none."""
    if not tried.approximate:
        return tried if exact is None else exact
    return hypothesis("+".join(name for name in tried.changes if not CHANGES[name].approximate) or REFERENCE.name)


def find_explanation(evaluator: Evaluator, reference: HypothesisFit) -> tuple[Explanation, list[HypothesisFit]]:
    """Return what explains the answers, and the hypotheses that were compared on all of them, best first.

    All hypotheses are compared on the answers that deviate most, the best of them on all answers. What they leave
    unexplained is searched again, in combination with one more change.
    """
    noise = evaluator.noise
    finalists: dict[str, HypothesisFit] = {}
    tried = evaluator.hypotheses()
    explanation = Explanation(None, "none")
    for _ in range(1 + _ROUNDS):
        for each in _screened(evaluator, reference, tried):
            explained = any(noise.explains(known.fit) for known in finalists.values())
            finalists.setdefault(each.name, evaluator.candidate(each))
            if explained:  # one more was compared, to show the distance
                break
        explanation = explain(reference, list(finalists.values()), noise)
        best = explanation.candidate
        if best is None or explanation.strength in ("matches", "consistent"):
            break
        tried = [each for each in _extended(best.hypothesis, evaluator) if each.name not in finalists]
    if explanation.strength == "matches" and explanation.candidate is not None:
        simpler = _pruned(evaluator, explanation.candidate)
        finalists[simpler.hypothesis.name] = simpler
        explanation = Explanation(simpler, "matches", explanation.rivals)
    return explanation, best_candidates(list(finalists.values()), noise)


def _screened(evaluator: Evaluator, reference: HypothesisFit, tried: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the hypotheses that explain best the answers that deviate most.

    If some hypotheses predict all prompt token counts, the others are not computed. Quantised weights are compared
    only if an answer without images deviates too.
    """
    counted = [each for each in tried if evaluator.counts_fit(each)]
    tried = counted if counted or reference.counts_fit else tried
    text = reference.text_fit
    if text is not None and evaluator.noise.explains(text):
        tried = [each for each in tried if not each.approximate]
    worst = sorted(evaluator.probes, key=lambda probe: _size(evaluator, probe), reverse=True)
    probes = [probe for probe in worst if probe.request.images][:_SCREENED]
    probes += [probe for probe in worst if not probe.request.images][:1]
    ranked = best_candidates([evaluator.candidate(each, probes) for each in tried], evaluator.noise)
    exact = [each.hypothesis for each in ranked if not each.hypothesis.approximate]
    return exact[:_FINALISTS] + [each.hypothesis for each in ranked if each.hypothesis.approximate]


def _size(evaluator: Evaluator, probe: ProbeAnswer) -> float:
    """Return the divergence of an answer that the reference does not explain, in nats."""
    found = evaluator.evidence(REFERENCE, probe)
    return sum(found.kl) if found.kl else sum(value for value in found.regret if value is not None)


def _extended(best: Hypothesis, evaluator: Evaluator) -> list[Hypothesis]:
    """Return the combinations of a hypothesis with one more change."""
    found = []
    for each in evaluator.hypotheses():
        if len(each.changes) == 1:
            with suppress(SettingError):  # both change the same
                found.append(combine(best, each))
    return found


def _pruned(evaluator: Evaluator, found: HypothesisFit) -> HypothesisFit:
    """Return an explanation without the changes that it does not need."""
    for name in found.hypothesis.changes:
        rest = [each for each in found.hypothesis.changes if each != name]
        simpler = evaluator.candidate(hypothesis("+".join(rest) or REFERENCE.name))
        if rest and evaluator.noise.explains(simpler.fit) and simpler.counts_fit >= found.counts_fit:
            return _pruned(evaluator, simpler)
    return found


def unseen_changes(evaluator: Evaluator, reference: HypothesisFit) -> list[str]:
    """Return the changes that the answers do not rule out, although they concern the questions."""
    singles = [each for each in evaluator.hypotheses() if len(each.changes) == 1 and not each.equivalent]
    counted = reference.fit.prompts > 0 and reference.counts_fit
    open_ones = [each for each in singles if not (counted and not evaluator.counts_fit(each))]
    return [each.changes[0] for each in open_ones if not _ruled_out(evaluator, each)]


def _ruled_out(evaluator: Evaluator, tried: Hypothesis) -> bool:
    """Return whether answers deviate from a hypothesis by more than the noise, or from its clear choices."""
    noise = evaluator.noise
    positions = sum(len(probe.mapped) for probe in evaluator.probes)
    limit = EXACT_RATIO * max(noise.kl or 0.0, FLOOR) * positions
    total = 0.0
    changed = [probe for probe in evaluator.probes if tried in evaluator.local.hypotheses(probe.request)]
    for probe in changed[:_SENSITIVE]:
        found = evaluator.evidence(tried, probe)
        total += sum(found.kl)
        pairs = zip(found.margin, found.regret, strict=True)
        if any(margin > noise.clear_margin and regret for margin, regret in pairs) or (found.kl and total > limit):
            return True
    return False
