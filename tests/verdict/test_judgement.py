"""The limits of the verdict's words, and what is said where there is none."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.records.synthetic import batches_of, header, load, outcome, write_run

from panscan.core import RecordsError
from panscan.records.fields import FLOOR
from panscan.records.verdict_records import Divergence, Top1
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
from panscan.verdict.judgement import (
    CLOSE_RATIO,
    EXACT_RATIO,
    RARE,
    REQUEST_FACTOR,
    detection_probability,
    judge,
    verdict_lines,
    verdict_of,
)

KL = st.floats(0, 10)
ALL = Top1(100, 100)


def at(ratio: float, noise: float = 1e-3) -> Divergence:
    return Divergence(512, ratio * noise, 1.0, noise)


LIMITS_OF_WORDS = [
    (2.0, 2.0, ALL, False, False, "exact"),
    (2.0, None, ALL, False, False, "exact"),
    (2.01, 1.0, ALL, True, False, "close"),
    (1.0, 2.01, ALL, True, False, "close"),
    (10.0, 10.0, ALL, False, False, "close"),
    (10.0, 10.0, Top1(100, 99), False, False, "different"),  # one clearly wrong token
    (10.1, 1.0, ALL, True, False, "different"),
    (1.0, 10.1, ALL, True, False, "different"),
    (1.0, 1.0, ALL, False, True, "close"),  # in float32 exact means equal tokens
    (1.0, 1.0, ALL, True, True, "exact"),
    (1.0, 1.0, Top1(100, 90), False, True, "different"),
    (3.0, 3.0, Top1(0, 0), False, False, "close"),  # no position is clear, none disagrees
]


@pytest.mark.parametrize(("answer", "image", "top1", "equal", "float32", "word"), LIMITS_OF_WORDS)
def test_limits_of_words(answer: float, image: float | None, top1: Top1, equal: bool, float32: bool, word: str) -> None:
    images = None if image is None else at(image)
    assert judge(at(answer), images, top1, equal_tokens=equal, float32=float32) == word


@given(KL, KL, KL)
def test_nearer_is_never_judged_worse(one: float, other: float, noise: float) -> None:
    near, far = sorted((one, other))
    words = [judge(Divergence(1, kl, kl, noise), None, ALL, equal_tokens=True, float32=False) for kl in (near, far)]
    assert words == sorted(words, key=["exact", "close", "different"].index)


QUOTES = [
    ("docs/verdict.md", "distributions within {exact}x the rounding noise"),
    ("docs/verdict.md", "distributions within {close}x the noise, and"),
    (
        "docs/verdict.md",
        "may deviate by {factor} times more than the mean ({far_exact}x for exact, {far_close}x for close)",
    ),
    ("docs/verdict.md", "would notice a fault in {rare}% of requests with a probability of 95%"),
    ("docs/verdict.md", "count as at least {floor} nat"),
    ("docs/verify.md", "*exact* within {exact}x the noise, *close* within {close}x"),
    ("docs/verify.md", "even if its divergence is within {close}x"),
]


@pytest.mark.parametrize(("page", "sentence"), QUOTES)
def test_the_pages_quote_the_limits(page: str, sentence: str) -> None:
    limits = {"exact": EXACT_RATIO, "close": CLOSE_RATIO, "factor": REQUEST_FACTOR, "rare": 100 * RARE}
    limits |= {f"far_{word}": REQUEST_FACTOR * limits[word] for word in ("exact", "close")}
    numbers = {name: f"{limit:g}" for name, limit in limits.items()}
    text = " ".join((Path(__file__).parents[2] / page).read_text("utf-8").split())
    assert sentence.format(**numbers, floor=f"{FLOOR:.0e}".replace("e-06", "e-6")) in text


@pytest.mark.parametrize(("worst", "word"), [(4.0, "exact"), (4.1, "close"), (20.0, "close"), (20.1, "different")])
def test_one_request_among_many_is_judged_beside_the_mean(worst: float, word: str) -> None:
    kind = Divergence(512, 1e-3, 1.0, 1e-3, worst * 3e-3, 3e-3)
    assert judge(at(1.0), kind, ALL, equal_tokens=True, float32=False) == word


def test_the_power_of_a_sample_is_printed(tmp_path: Path) -> None:
    assert detection_probability(299) > 0.95 > detection_probability(298)
    replayed = token_check(requests=299, answers=300, seconds=6.0, measured_seconds=60.0)
    _, said = judged(tmp_path, verdict={"beyond": replayed})
    assert "299 of 300 measured answers" in said
    assert "10% of the measuring time" in said
    assert "a fault in 1% of requests with 95% probability" in said


def test_noise_has_a_floor() -> None:
    assert Divergence(1, 1.9 * FLOOR, 0.0, 0.0).ratio == pytest.approx(1.9)
    assert Divergence(1, 0.0, 0.0, 0.0).ratio == 1.0


def figures(kl: float) -> dict[str, float]:
    return {"positions": 10, "kl": kl, "kl_max": kl, "noise": 1e-3}


def test_a_recorded_verdict_is_read_back(tmp_path: Path) -> None:
    record = EXACT | {"verdict": "close", "answer": figures(3e-3), "image": figures(4e-3)}
    run = write_run(tmp_path, [header({"c": {}, "d": {}}), *batches_of("c", [1.0]), TRUTH, record])
    verdict = verdict_of(run, "c")
    assert (verdict.word, verdict.ratio, verdict.truth) == ("close", pytest.approx(4.0), "t")
    assert verdict.top1 == Top1(8, 8)
    assert verdict_of(run, "d").word == "unverified"
    said = " ".join(verdict_lines(run, ["c"]))
    assert "1 close" in said
    assert "2.5 s" in said


WITHOUT_VERDICT = [
    ({"schema": 1}, [], "did not compare answers yet"),
    ({"settings": {"verify": False}}, [], "--no-verify"),
    ({}, [], "not finished"),
    ({}, [outcome("c", "oom", "no memory")], "oom before"),
]


@pytest.mark.parametrize(("changes", "outcomes", "reason"), WITHOUT_VERDICT)
def test_why_there_is_no_verdict(tmp_path: Path, changes: dict, outcomes: list, reason: str) -> None:
    run = write_run(tmp_path, [header({"c": {}}) | changes, *outcomes])
    verdict = verdict_of(run, "c")
    assert verdict.word == "unverified"
    assert reason in verdict.reason
    assert reason in " ".join(verdict_lines(run, ["c"]))


@pytest.mark.parametrize(
    ("settings", "weights", "quantized"),
    [({}, None, False), ({"quantization": "int8"}, None, True), ({}, "fp8", True)],
    ids=["plain", "quantised on load", "quantised checkpoint"],
)
def test_unquantised_weights_are_named_only_where_a_cell_is_quantised(
    tmp_path: Path, settings: dict, weights: str | None, quantized: bool
) -> None:
    loaded = load(["c"], None, weights=weights)
    run = write_run(tmp_path, [header({"c": settings}), loaded, *batches_of("c", [1.0]), TRUTH, EXACT])
    line, *_ = verdict_lines(run, ["c"])
    words = "on the same weights (unquantised) and views:" if quantized else "on the same weights and views:"
    assert words in line


def token_check(first: dict | None = None, **fields: object) -> dict[str, object]:
    counts = {"requests": 1, "tokens": 4, "departed": int(first is not None)}
    return {**counts, "equal": first is None, "first": first, "note": "", **fields}


TOKENS = {"token": 5, "expected": 6, "found": "'a'", "wanted": "'b'"}
DEPARTURE = {"request": "7", "position": 2, **TOKENS, "margin": 3.25, "clear": True}
FIGURES = {"answer": figures(1e-3), "image": None, "top1": {"clear": 8, "agree": 8}, "equal_tokens": True}
EXACT = {"type": "verdict", "cell": "c", "verdict": "exact", "reason": None, "truth": "t", **FIGURES, "seconds": 1.0}
COUNTS = {"requests": 1, "tokens": 1, "image_positions": 1, "seconds": 2.5}
TRUTH = {"type": "truth", "truth": "t", "source": "computed", "file": "f", "model": "tiny", **COUNTS}
REPLICA = {"replica": 0, "started": 0.0, "ended": 1.0, "device": "cpu", "tokens": token_check()}
AXIS = {"axis": "order", "requests": 3, "differ": 1, "first": DEPARTURE, "own": True, "note": "reversed"}


def judged(tmp_path: Path, *, verdict: dict | None = None, truth: dict | None = None, repeat: dict | None = None):
    lines = [line | (repeat or {}) if line["type"] == "repeat" else line for line in batches_of("c", [1.0])]
    run = write_run(tmp_path, [header({"c": {}}), *lines, TRUTH | (truth or {}), EXACT | (verdict or {})])
    return verdict_of(run, "c"), " ".join(verdict_lines(run, ["c"]))


CHECKS = [
    ({}, "exact"),
    ({"repeat": {"tokens": token_check()}}, "exact"),
    ({"repeat": {"tokens": token_check(DEPARTURE)}}, "different"),
    ({"repeat": {"replicas": [REPLICA, {**REPLICA, "replica": 1, "tokens": token_check(DEPARTURE)}]}}, "different"),
    ({"verdict": {"beyond": token_check(DEPARTURE)}}, "different"),
    ({"verdict": {"invariance": [AXIS]}}, "different"),
    ({"verdict": {"invariance": [AXIS | {"own": False}]}}, "exact"),  # the other cell is wrong
    ({"verdict": {"invariance": [AXIS | {"first": DEPARTURE | {"clear": False}}]}}, "exact"),
    (
        {"verdict": {"verdict": "unverified", "reason": "no place"}, "repeat": {"tokens": token_check(DEPARTURE)}},
        "different",
    ),
    ({"truth": {"inputs": {"requests": 1, "views": 2, "difference": "boxes", "note": ""}}}, "different"),
    ({"truth": {"inputs": {"requests": 1, "views": 2, "difference": None, "note": ""}}}, "exact"),
    ({"repeat": {"dtype": "float32", "tokens": token_check(equal=False)}}, "close"),
    ({"repeat": {"dtype": "bfloat16", "tokens": token_check(equal=False)}}, "exact"),
]


@pytest.mark.parametrize(("fields", "word"), CHECKS)
def test_measured_tokens_and_inputs_can_only_make_a_verdict_worse(tmp_path: Path, fields: dict, word: str) -> None:
    verdict, said = judged(tmp_path, **fields)
    assert verdict.word == word
    if word == "different" and "truth" not in fields:
        for part in ("request 7", "output token 3", "'a' instead of 'b'", "3.25 nats"):
            assert part in verdict.reason
            assert part in said


MALFORMED_CHECKS = [
    {"repeat": {"tokens": [1]}},
    {"repeat": {"tokens": token_check({"request": "7"})}},
    {"repeat": {"tokens": token_check(DEPARTURE | {"found": None})}},
    {"verdict": {"invariance": {}}},
    {"verdict": {"invariance": [7]}},
    {"verdict": {"beyond": token_check(departed="1")}},
    {"truth": {"inputs": {"requests": 1}}},
]


@pytest.mark.parametrize("fields", MALFORMED_CHECKS)
def test_malformed_checks_are_refused_with_their_line(tmp_path: Path, fields: dict) -> None:
    with pytest.raises(RecordsError, match=r"line \d+: "):
        judged(tmp_path, **fields)


# Reported tokens become token ids, and coarse divergences are lower bounds of whole ones.


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
    [log_p], [log_q] = log_probabilities(1), log_probabilities(1, seed=1)
    exact = float((np.exp(log_p.astype(float)) * (log_p.astype(float) - log_q)).sum())
    coarse = coarse_kl(log_p, {int(id): float(log_q[id]) for id in np.argsort(log_q)[::-1][:count]})
    assert 0 < coarse <= exact + 1e-5
    assert count < SIZE or coarse == pytest.approx(exact, abs=1e-4)


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
