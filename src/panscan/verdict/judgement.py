"""The verdict: whether a cell computes what the reference computes, by figures and fixed limits. No tensors.

It has two parts. In a separate pass, the cell's next-token distributions are compared with the reference (float32,
eager, the same weights and views). All figures are Kullback-Leibler divergences from the reference, in nats, averaged
separately over answer positions and image positions, and divided by the rounding noise of eager attention at the
cell's precision. In addition, the tokens of the measured repeats are compared with the reference's tokens, with its
choices beyond them, and with each other; one token that noise cannot explain makes the cell different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from panscan.records.fields import AXES, FLOOR, VERDICTS
from panscan.records.store import Run
from panscan.records.verdict_records import AxisCheck, Divergence, TokenCheck, Top1

MARGIN_FLOOR: float = (8 * FLOOR) ** 0.5
"""Nats; the same floor for margins. Between two tokens that share all probability evenly, a margin that moves by m
diverges by ln cosh(m / 2), about m^2 / 8: less than this is less than :data:`FLOOR`."""
_NOT_CONCLUDED = TokenCheck.of(note="tokens beyond the reference: the run stopped before this check; --resume runs it")
_UNEQUAL_TOKENS = "from top "
"""The reason of older verdicts whose divergence covers fewer tokens than its noise."""
EXACT_RATIO, CLOSE_RATIO = 2.0, 10.0
"""The limits of the verdicts (see :func:`judge`). The documentation quotes them from here; a test compares."""
REQUEST_FACTOR = 2.0
"""How much farther than the mean over all requests one request may be, relative to the noise of the noisiest one."""
RARE = 0.01
"""Share of requests with a fault for which a replay's probability of detection is printed."""
LEAST_REST = 1e-6
"""Least probability of all unreported tokens together: less cannot be told from the rounding of the reported ones."""
Word = Literal["exact", "close", "different"]


def clear_margin(noise: float) -> float:
    """Return the margin in nats above which rounding does not explain a different token.

    Args:
        noise: the largest change of a margin that eager attention at the cell's precision shows, in nats.
    """
    return EXACT_RATIO * max(noise, MARGIN_FLOOR)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a cell's answers.

    Args:
        word: exact, close, different or unverified.
        reason: why the cell is unverified, or what makes it different beside the figures.
        answer: divergence of the distributions at answer positions.
        image: the same at image positions; None without images.
        top1: agreement of the most probable tokens along the reference's tokens.
        equal_tokens: whether all of those agree.
        truth: id of the reference.
        measured: comparison of the measured tokens; None in runs that predate it.
        beyond: comparison of the measured tokens beyond the reference with its choices.
        axes: invariance checks.
    """

    word: str
    reason: str = ""
    answer: Divergence | None = None
    image: Divergence | None = None
    top1: Top1 | None = None
    equal_tokens: bool | None = None
    truth: str | None = None
    measured: TokenCheck | None = None
    beyond: TokenCheck | None = None
    axes: tuple[AxisCheck, ...] = ()

    @property
    def ratio(self) -> float | None:
        """The larger of both kinds' ratios; None if unverified."""
        return max((kind.ratio for kind in (self.answer, self.image) if kind is not None), default=None)

    @property
    def negligible(self) -> bool:
        """Whether the figures of both kinds are; False if unverified."""
        kinds = [kind for kind in (self.answer, self.image) if kind is not None]
        return bool(kinds) and all(kind.negligible for kind in kinds)


def judge(answer: Divergence, image: Divergence | None, top1: Top1, *, equal_tokens: bool, float32: bool) -> Word:
    """Return exact, close or different.

    exact: at most ``EXACT_RATIO`` times the noise at both kinds of position, and no request beyond ``REQUEST_FACTOR``
    times that; in float32 the greedy tokens must be equal, too. close: the same with ``CLOSE_RATIO``. different: the
    rest, and every computation that clearly prefers another token at a single position.
    """
    ratio = max(max(kind.ratio, kind.request_ratio / REQUEST_FACTOR) for kind in (answer, image) if kind is not None)
    if top1.agree < top1.clear or ratio > CLOSE_RATIO:
        return "different"
    return "exact" if ratio <= EXACT_RATIO and (equal_tokens or not float32) else "close"


def detection_probability(requests: int) -> float:
    """Return the probability that a sample has a request with a fault that occurs in :data:`RARE` of all requests."""
    return 1.0 - (1.0 - RARE) ** requests


def verdict_of(run: Run, cell: str) -> Verdict:
    """Return the verdict of a cell from its run's records; unverified with the reason if there is none.

    The word of the ``verdict`` record is that of the distributions; measured tokens and the inputs can only make it
    worse.
    """
    record = run.verdicts.get(cell)
    processes = [process for repeat, _ in run.repeats_of(cell) for process in (*repeat.replicas,) or (repeat,)]
    checks = [process.tokens for process in processes if process.tokens is not None]
    measured = sum(checks[1:], checks[0]) if checks else None
    if record is None:
        return _with_tokens(Verdict("unverified", _why_none(run, cell), measured=measured), float32=False, inputs=None)
    if (record.reason or "").startswith(_UNEQUAL_TOKENS):
        return Verdict("unverified", "compared over the reported tokens with the noise of all; compare it again")
    verdict = Verdict(
        record.verdict,
        record.reason or "",
        record.answer,
        record.image,
        record.top1,
        record.equal_tokens,
        record.truth,
        measured,
        record.beyond if record.concluded else _NOT_CONCLUDED,
        tuple(record.invariance or ()),
    )
    float32 = any(repeat.dtype == "float32" for repeat, _ in run.repeats_of(cell))
    truth = run.truths.get(record.truth or "")
    inputs = None if truth is None or truth.inputs is None else truth.inputs.difference
    return _with_tokens(verdict, float32=float32, inputs=inputs)


def _with_tokens(verdict: Verdict, *, float32: bool, inputs: str | None) -> Verdict:
    """Return the verdict including tokens and inputs: a deviation beyond the noise makes it different."""
    checks = [check for check in (verdict.measured, verdict.beyond) if check is not None]
    deviations = [f"measured tokens depart from the reference: {check.first.text}" for check in checks if check.first]
    deviations += [f"tokens depend on {axis.text}" for axis in verdict.axes if axis.broken and axis.own]
    if inputs is not None:
        deviations.append(f"the inputs are not those of Transformers' processor: {inputs}")
    if deviations:
        others = [verdict.reason] if verdict.reason and verdict.word == "different" else []
        return replace(verdict, word="different", reason="; ".join([*others, *deviations]))
    if verdict.word == "exact" and float32 and not all(check.equal for check in checks):
        return replace(verdict, word="close", reason="measured tokens are not equal in float32")
    return verdict


def merged_axes(checks: Iterable[AxisCheck]) -> list[AxisCheck]:
    """Return one check per axis, in the order of :data:`AXES`: sums, and the first difference, preferably one beyond
    the noise."""
    merged: dict[str, AxisCheck] = {}
    for check in checks:
        known = merged.get(check.axis, AxisCheck(check.axis, 0, 0, None, False, ""))
        takes = check.first is not None and (known.first is None or (check.broken and not known.broken))
        notes = dict.fromkeys(
            axis_check.note for axis_check in (known, check) if axis_check.note and axis_check.requests
        )
        chosen = check if takes else known
        merged[check.axis] = AxisCheck(
            check.axis,
            known.requests + check.requests,
            known.differ + check.differ,
            chosen.first,
            chosen.own,
            "; ".join(notes) or check.note or known.note,
        )
    return [merged[axis] for axis in AXES if axis in merged]


def verdict_lines(run: Run, cells: Sequence[str]) -> list[str]:
    """Return a summary of these cells' verdicts: counts, reasons for missing ones, cost of the reference."""
    verdicts = [verdict_of(run, cell) for cell in cells]
    words = Counter(verdict.word for verdict in verdicts)
    lines = []
    if words.keys() - {"unverified"}:
        counts = ", ".join(f"{words[word]} {word}" for word in VERDICTS if words[word])
        quantized = any(is_quantized(run, cell) for cell in cells)
        weights = "weights (unquantised)" if quantized else "weights"
        seconds = sum(truth.seconds for truth in run.truths.values())
        supplied = all(truth.source == "reference" for truth in run.truths.values())
        origin = (
            "--reference supplied the reference"
            if supplied
            else f"Computing the reference took {seconds:,.1f} s, excluded from all timings"
        )
        lines.append(
            f"Answers against float32 eager attention on the same {weights} and views: {counts}"
            f" (exact: within {EXACT_RATIO:g}x the rounding noise). {origin}."
        )
    lines += token_lines(verdicts)
    reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.word == "unverified")
    return lines + [f"Unverified: {reason}." for reason in reasons]


def token_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines on compared tokens: their number, the deviations, and one line per axis."""
    checks = [check for verdict in verdicts for check in (verdict.measured, verdict.beyond) if check is not None]
    lines = []
    if tokens := sum(check.tokens for check in checks):
        departed = sum(check.departed for check in checks)
        result = "all equal" if all(check.equal for check in checks) else "no difference beyond the noise"
        if departed:
            result = f"{departed:,} {'answer differs' if departed == 1 else 'answers differ'} beyond the noise"
        lines.append(f"{tokens:,} measured tokens compared with the reference: {result}.")
    lines += _replay_lines(
        [verdict.beyond for verdict in verdicts if verdict.beyond is not None and verdict.beyond.answers]
    )
    lines += dict.fromkeys(f"Not compared: {check.note}." for check in checks if check.note)
    lines += [f"Different: {verdict.reason}." for verdict in verdicts if verdict.word == "different" and verdict.reason]
    axes = merged_axes(axis for verdict in verdicts for axis in verdict.axes)
    checked = [axis for axis in axes if axis.requests or axis.note.startswith("failed")]
    return lines + [f"Invariance, {axis.text}." for axis in checked]


def _replay_lines(replays: Sequence[TokenCheck]) -> list[str]:
    """Return how many measured answers were replayed at what cost, and how rare a fault this would notice."""
    if not replays:
        return []
    least, total = min(replays, key=lambda check: check.requests), sum(replays[1:], replays[0])
    at_least = "At least " if any(check.requests > least.requests for check in replays) else ""
    share = f", {total.seconds / total.measured_seconds:.0%} of the measuring time" if total.measured_seconds else ""
    return [
        f"{at_least}{least.requests:,} of {least.answers:,} measured answers compared to"
        f" their end ({total.seconds:,.1f} s{share}): would notice a fault in {RARE:.0%} of requests with"
        f" {detection_probability(least.requests):.0%} probability."
    ]


def is_quantized(run: Run, cell: str) -> bool:
    """Return whether a cell ran with quantised weights, according to its settings or load record."""
    load = run.loads.get(cell)
    settings = run.cells[cell].settings
    asked = any(settings.get(name) for name in ("quantization", "quantize_head", "quantize_vision"))
    return asked or bool(load is not None and load.weights)


def _why_none(run: Run, cell: str) -> str:
    if run.header.schema == 1:
        return "measured by a panscan that did not compare answers yet"
    if run.header.settings.verify is False:
        return "--no-verify"
    outcome = run.outcomes.get(cell)
    return "not finished" if outcome is None else f"{outcome.outcome} before its answers were compared"
