"""What quantisation changes: distributions against the unquantised reference, and answers against accepted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import fmean
from typing import NamedTuple

import torch

from panscan.analysis.accuracy import Accuracy, decide_accuracy, paired_difference
from panscan.core import ModelError, UnsupportedError
from panscan.core.activity import activity, track
from panscan.core.errors import error_line
from panscan.model.checkpoint import Loaded, drop_weights
from panscan.model.machine import is_out_of_memory, release_memory
from panscan.model.runtime import reference_computation
from panscan.records.scores import scores_of
from panscan.records.verdict_records import Divergence, VerdictRecord
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings
from panscan.verdict.divergence import Noise
from panscan.verdict.reference import Reference, compare_answers, compute_noise, compute_reference, eager_settings
from panscan.workload.requests import Item, Source, Workload, request_of

VERDICT_REQUESTS, VERDICT_TOKENS = 8, 32
"""Requests of the verdict and tokens of each."""
_LEAST_TOKENS = 12  # of an answer that may be repetition
_REPEATED = 0.6  # of an answer's end, from which it counts as repetition
_LONGEST_PERIOD = 8  # tokens


@dataclass(frozen=True, slots=True)
class WeightsToMeasure:
    """Weights to measure.

    Args:
        name: name in tables, such as ``int4 (GPTQ)``.
        load: loads the model.
        required: whether to raise the error if the model cannot be loaded.
    """

    name: str
    load: Callable[[], Loaded]
    required: bool = False


@dataclass(slots=True)
class MeasuredWeights:
    """Measurement of one set of weights.

    Args:
        name: name of the weights.
        figures: comparison with the reference; None for the reference, and without one.
        scores: score of each answer, in the workload's order; None without accepted answers.
        contains: share of answers that contain an accepted one.
        repetitive: share of answers that end in repetition.
        answers: number of answers.
        standing: what the rule for accuracy says of the answers against the reference's.
        problem: why something was not measured; empty if everything was.
    """

    name: str
    figures: VerdictRecord | None = None
    scores: list[float] | None = None
    contains: float | None = None
    repetitive: float = 0.0
    answers: int = 0
    standing: Accuracy | None = None
    problem: str = ""

    @property
    def accuracy(self) -> float | None:
        """Mean score."""
        return fmean(self.scores) if self.scores else None

    @property
    def verdict(self) -> str:
        """The verdict in one word."""
        if self.name == "dense":
            return "reference"
        return "unverified" if self.figures is None else self.figures.verdict

    @property
    def top1(self) -> float | None:
        """Share of clear positions with the reference's most probable token."""
        return None if self.figures is None or self.figures.top1 is None else self.figures.top1.share

    def kl(self, kind: str) -> float | None:
        """Mean divergence from the reference in nats at ``answer`` or ``image`` positions."""
        divergence: Divergence | None = getattr(self.figures, kind, None)
        return None if divergence is None else divergence.kl


@dataclass(slots=True)
class Measurement:
    """Measurements of all weights.

    Args:
        metric: accuracy metric; None without accepted answers.
        questions: number of questions with accepted answers.
        rows: one per set of weights; the reference first, if there is one.
    """

    metric: str | None
    questions: int
    rows: list[MeasuredWeights] = field(default_factory=list)


def measure(
    reference: WeightsToMeasure | None,
    candidates: Sequence[WeightsToMeasure],
    settings: Settings,
    workload: Workload,
    source: Source,
) -> Measurement:
    """Measure one set of weights at a time, so that only one model is in memory.

    If something cannot be measured, for example for lack of memory, the row's ``problem`` holds the reason.

    Args:
        reference: the unquantised weights; None: answers only.
        candidates: quantised weights.
        settings: how requests are prepared and answered.
        workload: documents and questions; the first few are those of the verdict.
        source: origin of the workload.

    Raises:
        ModelError: required weights are not available.
        UnsupportedError: their format is not supported.
    """
    asked = [item for item in workload.items if item.answers]
    metric = workload.quality_metric(None)
    measurement = Measurement(metric, len(asked))
    session = _Session(settings, workload.items[:VERDICT_REQUESTS], asked, metric, source)
    if reference is not None:
        measurement.rows.append(session.measured(reference, is_reference=True))
    measurement.rows += map(session.measured, candidates)
    dense = measurement.rows[0].scores if reference is not None else None
    compared = {row.name: row for row in measurement.rows[1:] if row.scores and dense}
    differences = {
        name: paired_difference([score - base for score, base in zip(row.scores or (), dense or (), strict=True)])
        for name, row in compared.items()
    }
    for name, standing in decide_accuracy(differences).items():
        compared[name].standing = standing
    return measurement


class _Truth(NamedTuple):
    """What distributions are compared with. ``head``: the model, of which the output matrix is left."""

    reference: Reference
    noise: Noise
    head: Loaded


@dataclass(slots=True)
class _Session:
    settings: Settings
    verdict_items: Sequence[Item]
    asked: Sequence[Item]
    metric: str | None
    source: Source
    _truth: _Truth | None = None

    def measured(self, weights: WeightsToMeasure, *, is_reference: bool = False) -> MeasuredWeights:
        """Answer with weights, and compare their distributions with the reference, or compute it from them."""
        row, loaded = MeasuredWeights(weights.name), None
        try:
            with activity(f"loading {weights.name}", total=1):
                loaded = weights.load()
            self._answer_questions(loaded, row)
            if is_reference:
                with reference_computation(loaded.model):
                    truth = self._computed_truth(loaded)
                drop_weights(loaded)
                self._truth = truth
            elif self._truth is not None:
                row.figures = self._compare(loaded, self._truth)
        except Exception as error:  # whatever fails here, the finished checkpoint is published
            if loaded is None and weights.required and isinstance(error, ModelError | UnsupportedError):
                raise
            row.problem = "out of memory" if is_out_of_memory(error) else error_line(error)
        release_memory()
        return row

    def _answer_questions(self, loaded: Loaded, row: MeasuredWeights) -> None:
        items = list(self.asked or self.verdict_items)
        runner = GenerateRunner(loaded, self.settings)
        results = []
        for item in track(f"answering with {row.name}", items):
            results += runner.run([request_of(item, self.settings, self.source)])
        row.answers = len(results)
        row.repetitive = fmean(_is_repetitive(result.token_ids) for result in results)
        if self.metric is not None and self.asked:
            scores = [scores_of(result.text, item.answers) for result, item in zip(results, items, strict=True)]
            row.contains = fmean(score["contains_answer"] for score in scores)
            row.scores = [score.get(self.metric, 0.0) for score in scores]

    def _computed_truth(self, loaded: Loaded) -> _Truth:
        plain = eager_settings(self.settings, self.settings.preprocess, VERDICT_TOKENS)
        requests = [request_of(item, plain, self.source) for item in self.verdict_items]
        names = ("", "", self.settings.model_name)
        with activity("computing the reference", total=1) as step:
            reference = compute_reference(loaded, plain, requests, names, VERDICT_TOKENS, step.rename)
            return _Truth(reference, compute_noise(loaded, plain, requests, reference, step.rename), loaded)

    def _compare(self, loaded: Loaded, truth: _Truth) -> VerdictRecord:
        settings = replace(self.settings, max_new_tokens=VERDICT_TOKENS)
        runner = GenerateRunner(loaded, settings)
        requests = [request_of(item, settings, self.source) for item in self.verdict_items]
        batches = [[index] for index in range(len(requests))]
        with activity("comparing distributions", total=len(requests)) as step:
            tally = compare_answers(runner, truth.head, truth.reference, requests, batches, step.update)
        return tally.verdict("", truth.noise, VERDICT_TOKENS, float32=loaded.dtype == torch.float32)


def _is_repetitive(tokens: Sequence[int]) -> bool:
    """Return whether most of an answer's end repeats a few tokens again and again."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_LEAST_TOKENS, 3 * period, ceil(_REPEATED * len(tokens)))
        end = tokens[-length:]
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False
