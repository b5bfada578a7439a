"""Reported tokens become token ids, and coarse divergences are lower bounds of whole ones."""

import numpy as np
import pytest
from numpy.typing import NDArray

from panscan.verdict.evidence import (
    MappedAnswer,
    ReportedStep,
    ReportedToken,
    coarse_kl,
    compare_answer,
    forced_tokens,
    map_answer,
    merged_fit,
    moved_margin,
)

SIZE = 50


class Names:
    """A vocabulary in which ``a`` and ``b`` have one id each, ``ambiguous`` has two, and 1 and 2 end answers."""

    eos_ids = frozenset({1, 2})

    def ids(self, text: str | bytes) -> list[int]:
        known = {b"a": [10], b"b": [11], b"ambiguous": [20, 21]}
        return known.get(text.encode() if isinstance(text, str) else text, [])


def log_probabilities(rows: int, seed: int = 0) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).normal(0, 2, (rows, SIZE))
    return (values - np.log(np.exp(values).sum(-1, keepdims=True))).astype(np.float32)


def likely(*ids: int) -> NDArray[np.float32]:
    """A row for each id, which has nearly all probability in it."""
    rows = np.full((len(ids), SIZE), np.log(1e-6 / SIZE), np.float32)
    for row, id in zip(rows, ids, strict=True):
        row[id] = np.log(1 - 1e-6)
    return rows


def step(text: str, value: float | None = -0.1, *top: tuple[str, float]) -> ReportedStep:
    return ReportedStep(ReportedToken(text, None, value), tuple(ReportedToken(name, None, lp) for name, lp in top))


@pytest.mark.parametrize("count", [1, 5, SIZE])
def test_coarse_divergence_is_a_lower_bound(count: int) -> None:
    [ours], [theirs] = log_probabilities(1), log_probabilities(1, seed=1)
    whole = float((np.exp(ours.astype(float)) * (ours.astype(float) - theirs)).sum())
    coarse = coarse_kl(ours, {int(id): float(theirs[id]) for id in np.argsort(theirs)[::-1][:count]})
    assert 0 < coarse <= whole + 1e-5
    assert count < SIZE or coarse == pytest.approx(whole, abs=1e-4)


def test_a_distribution_does_not_diverge_from_itself() -> None:
    [row] = log_probabilities(1)
    assert coarse_kl(row, {3: float(row[3]), 7: float(row[7])}) < 1e-6


def test_probabilities_decide_between_tokens_of_one_text() -> None:
    steps = [step("ambiguous"), step("a"), step("")]
    assert forced_tokens(steps, Names()) == [20, 10, 1]
    assert map_answer(steps, Names(), likely(21, 10, 2)).tokens == [21, 10, 2]
    assert map_answer(steps, Names(), np.full((3, SIZE), np.log(1 / SIZE), np.float32)).tokens == [None, 10, None]


def test_tokens_without_a_certain_id_are_dropped_and_counted() -> None:
    reported = [("a", -0.1), ("unknown", -3.0), ("b", -4.0), ("ambiguous", -5.0)]
    mapped = map_answer([step("a", -0.1, *reported)], Names(), np.full((1, SIZE), np.log(1 / SIZE), np.float32))
    assert mapped.reported == [{10: -0.1, 11: -4.0}]
    assert mapped.dropped == 2


@pytest.mark.parametrize("clamped", [-9999.0, -3.4e38])
def test_clamped_log_probabilities_diverge_by_a_finite_amount(clamped: float) -> None:
    [row] = log_probabilities(1)
    assert 0 < coarse_kl(row, {3: float(row[3]), 7: clamped}) < 30


def test_tokens_without_a_log_probability_are_no_evidence() -> None:
    reported = ReportedStep(ReportedToken("a"), (ReportedToken("b"), ReportedToken("a", None, -0.5)))
    assert map_answer([reported], Names(), likely(10)).reported == [{10: -0.5}]


def test_fit_counts_only_tokens_that_are_clearly_preferred() -> None:
    answer = MappedAnswer([10, 11, 10], [{10: -0.1}, {11: -0.1}, {}])
    local = np.vstack([likely(10), likely(10), np.full((1, SIZE), np.log(1 / SIZE), np.float32)])
    fit = merged_fit([compare_answer(answer, local)], 1.0, prompts=[True, False])
    assert (fit.clear, fit.agree, fit.positions) == (2, 1, 3)
    assert (fit.prompts, fit.prompts_agree) == (2, 1)
    assert fit.kl_max > fit.kl > 1


def test_margins_move_by_what_rounding_changes() -> None:
    reference = np.log(np.array([[0.6, 0.3, 0.1]], np.float32))
    noisy = np.log(np.array([[0.5, 0.4, 0.1]], np.float32))
    assert moved_margin(reference, noisy) == pytest.approx(np.log(2) - np.log(1.25), rel=1e-5)
