"""The verdict: whether a cell computes what the reference computes, by figures and fixed limits. No tensors.

It has two parts. In a separate pass, the cell's next-token distributions are compared with the reference (float32,
eager, the same weights and views). All figures are Kullback-Leibler divergences from the reference, in nats, averaged
separately over answer positions and image positions, and divided by the rounding noise of eager attention at the
cell's precision. In addition, the tokens of the measured repeats are compared with the reference's tokens, with its
choices beyond them, and with each other; one token that noise cannot explain makes the cell different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from panscan.records.schema import VERDICTS
from panscan.records.store import Run

__all__ = [
    "AXES",
    "CLOSE_RATIO",
    "CLOSE_TOP1",
    "EXACT_RATIO",
    "FLOOR",
    "MARGIN_FLOOR",
    "AxisCheck",
    "Departure",
    "Divergence",
    "TokenCheck",
    "Top1",
    "Verdict",
    "axis_checks",
    "clear_margin",
    "judge",
    "merged_axes",
    "token_lines",
    "verdict_lines",
    "verdict_of",
]

FLOOR = 1e-6
"""Nats; noise below this counts as this."""
MARGIN_FLOOR: float = (8 * FLOOR) ** 0.5
"""Nats; the same floor for margins. Between two tokens that share all probability evenly, a margin that moves by m
diverges by ln cosh(m / 2), about m^2 / 8: less than this is less than :data:`FLOOR`."""
EXACT_RATIO, CLOSE_RATIO, CLOSE_TOP1 = 2.0, 10.0, 0.99
AXES = {
    "repeats": "repeats of the same measurement",
    "batch": "batch size and company",
    "order": "arrival order",
    "cache": "cold or warm caches",
    "chunk": "prefill chunk size",
    "gpus": "number of GPUs",
}
"""What a greedy request's tokens must not depend on, by the name in the records."""


def clear_margin(noise: float) -> float:
    """Return the margin in nats above which rounding does not explain a different token.

    Args:
        noise: the largest change of a margin that eager attention at the cell's precision shows, in nats.
    """
    return EXACT_RATIO * max(noise, MARGIN_FLOOR)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence from the reference at one kind of position, in nats.

    Args:
        positions: number of compared positions.
        kl: mean over the positions.
        kl_max: maximum over the positions.
        noise: mean for eager attention at the cell's precision.
    """

    positions: int
    kl: float
    kl_max: float
    noise: float

    @property
    def ratio(self) -> float:
        """How many times the unavoidable noise; both have :data:`FLOOR` as their floor."""
        return max(self.kl, FLOOR) / max(self.noise, FLOOR)

    @property
    def negligible(self) -> bool:
        """Whether both are at most :data:`FLOOR`, as in float32: their ratio is 1 by definition."""
        return max(self.kl, self.noise) <= FLOOR


@dataclass(frozen=True, slots=True)
class Top1:
    """Agreement of the most probable tokens at clear positions.

    Args:
        clear: positions where the reference's margin exceeds the noise.
        agree: clear positions where the cell's most probable token is the reference's.
    """

    clear: int
    agree: int

    @property
    def share(self) -> float:
        return self.agree / self.clear if self.clear else 1.0


@dataclass(frozen=True, slots=True)
class Departure:
    """The first output token of a request that is not the expected one.

    Args:
        request: id of the request.
        position: position of the token in the answer, starting at 0.
        token: the token found; None if the answer ended instead.
        expected: the token expected; None if the answer should have ended.
        found: the token found, as text.
        wanted: the token expected, as text.
        margin: margin by which the reference prefers the expected token, in nats; None where no margin can explain the
            other one (an end that is missing or too early, a suppressed token).
        clear: whether the margin exceeds the noise; None if no reference was at hand to tell the margin.
    """

    request: str
    position: int
    token: int | None
    expected: int | None
    found: str
    wanted: str
    margin: float | None
    clear: bool | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        return cls(**{each.name: record[each.name] for each in fields(cls)})

    @property
    def text(self) -> str:
        """Where, which tokens, and the margin."""
        unknown = ", margin unknown" if self.clear is None else ""
        margin = unknown if self.margin is None else f", margin {self.margin:.3g} nats"
        return (
            f"request {self.request}, output token {self.position + 1}: {self.found} instead of {self.wanted}{margin}"
        )


def _with_departure(record: Mapping[str, Any], kind: type[TokenCheck | AxisCheck]) -> dict[str, Any]:
    """Return the fields of a check from its record."""
    first = None if record["first"] is None else Departure.of(record["first"])
    return {each.name: record[each.name] for each in fields(kind)} | {"first": first}


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Comparison of measured tokens with the reference.

    Args:
        requests: number of compared answers, counted in each repeat and replica.
        tokens: number of compared positions.
        departed: number of answers that depart at a clear position.
        equal: whether no answer departs at any position.
        first: first clear departure.
        note: reason why nothing or not everything was compared.
    """

    requests: int = 0
    tokens: int = 0
    departed: int = 0
    equal: bool = True
    first: Departure | None = None
    note: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        return cls(**_with_departure(record, cls))

    def __add__(self, other: TokenCheck) -> TokenCheck:
        return TokenCheck(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.departed + other.departed,
            self.equal and other.equal,
            self.first or other.first,
            self.note or other.note,
        )


@dataclass(frozen=True, slots=True)
class AxisCheck:
    """The same greedy requests under other conditions of one axis (a key of :data:`AXES`).

    Args:
        axis: the name of what was varied.
        requests: pairs of answers compared.
        differ: pairs whose tokens differ, noise included.
        first: the first difference that noise does not explain, else the first one.
        own: whether the cell's own tokens are what the reference does not choose.
        note: description of the variation, or the reason for none.
    """

    axis: str
    requests: int = 0
    differ: int = 0
    first: Departure | None = None
    own: bool = True
    note: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        return cls(**_with_departure(record, cls))

    @property
    def broken(self) -> bool:
        """Whether tokens depend on this axis beyond the noise."""
        return self.first is not None and self.first.clear is True

    @property
    def text(self) -> str:
        """One line: what was compared, and the first difference."""
        if not self.requests:
            return f"{AXES[self.axis]}: not compared ({self.note})"
        how = f" ({self.note})" if self.note else ""
        line = f"{AXES[self.axis]}: {self.requests} pairs of answers compared{how}, "
        if self.first is None:
            return line + "all tokens equal"
        if self.broken:
            return line + f"NOT INVARIANT, {self.first.text}"
        why = "not judged without a reference" if self.first.clear is None else "within the noise"
        return line + f"{self.differ} differ, {why}; first: {self.first.text}"


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
        return max((each.ratio for each in (self.answer, self.image) if each is not None), default=None)

    @property
    def negligible(self) -> bool:
        """Whether the figures of both kinds are; False if unverified."""
        found = [each.negligible for each in (self.answer, self.image) if each is not None]
        return bool(found) and all(found)


def judge(answer: Divergence, image: Divergence | None, top1: Top1, *, equal_tokens: bool, float32: bool) -> str:
    """Return exact, close or different.

    exact: at most 2x the noise at both kinds of position; in float32 the greedy tokens must be equal, too. close: at
    most 10x, and the same most probable token at 99% or more of the clear positions. different: the rest.
    """
    ratio = max(each.ratio for each in (answer, image) if each is not None)
    if ratio <= EXACT_RATIO and (equal_tokens or not float32):
        return "exact"
    return "close" if ratio <= CLOSE_RATIO and top1.share >= CLOSE_TOP1 else "different"


def verdict_of(run: Run, cell: str) -> Verdict:
    """Return the verdict of a cell from its run's records; unverified with the reason if there is none.

    The word of the ``verdict`` record is that of the distributions; measured tokens and the inputs can only make it
    worse.
    """
    record = run.verdicts.get(cell)
    measured = _measured_tokens(run, cell)
    if record is None:
        return _with_tokens(Verdict("unverified", _why_none(run, cell), measured=measured), float32=False, inputs=None)
    verdict = Verdict(
        record["verdict"],
        record["reason"] or "",
        _divergence(record["answer"]),
        _divergence(record["image"]),
        None if record["top1"] is None else Top1(record["top1"]["clear"], record["top1"]["agree"]),
        record["equal_tokens"],
        record["truth"],
        measured,
        _beyond(record),
        tuple(AxisCheck.of(each) for each in record.get("invariance") or ()),
    )
    float32 = any(line.get("dtype") == "float32" for (name, _), line in run.repeats.items() if name == cell)
    reference = run.truths.get(record["truth"] or "", {})
    return _with_tokens(verdict, float32=float32, inputs=(reference.get("inputs") or {}).get("difference"))


def _beyond(record: Mapping[str, Any]) -> TokenCheck | None:
    if not record.get("concluded", True):
        return TokenCheck(note="tokens beyond the reference: the run stopped before this check; --resume runs it")
    return TokenCheck.of(record["beyond"]) if record.get("beyond") else None


def _measured_tokens(run: Run, cell: str) -> TokenCheck | None:
    """Return the summed checks of all repeats and replicas of a cell; None if no repeat has one."""
    lines = [line for (name, _), line in run.repeats.items() if name == cell]
    parts = [part for line in lines for part in line.get("replicas") or [line]]
    found = [TokenCheck.of(part["tokens"]) for part in parts if part.get("tokens")]
    return sum(found[1:], found[0]) if found else None


def _with_tokens(verdict: Verdict, *, float32: bool, inputs: str | None) -> Verdict:
    """Return the verdict including tokens and inputs: a deviation beyond the noise makes it different."""
    checks = [check for check in (verdict.measured, verdict.beyond) if check is not None]
    found = [f"measured tokens depart from the reference: {check.first.text}" for check in checks if check.first]
    found += [f"tokens depend on {axis.text}" for axis in verdict.axes if axis.broken and axis.own]
    if inputs is not None:
        found.append(f"the inputs are not those of Transformers' processor: {inputs}")
    if found:
        others = [verdict.reason] if verdict.reason and verdict.word == "different" else []
        return replace(verdict, word="different", reason="; ".join([*others, *found]))
    if verdict.word == "exact" and float32 and not all(check.equal for check in checks):
        return replace(verdict, word="close", reason="measured tokens are not equal in float32")
    return verdict


def axis_checks(verdicts: Iterable[Verdict]) -> list[AxisCheck]:
    """Return one check per axis over several cells, in the order of :data:`AXES`."""
    return merged_axes(check for verdict in verdicts for check in verdict.axes)


def merged_axes(checks: Iterable[AxisCheck]) -> list[AxisCheck]:
    """Return one check per axis: sums, and the first difference, preferably one beyond the noise."""
    found: dict[str, AxisCheck] = {}
    for check in checks:
        known = found.get(check.axis, AxisCheck(check.axis, own=False))
        takes = check.first is not None and (known.first is None or (check.broken and not known.broken))
        notes = dict.fromkeys(each.note for each in (known, check) if each.note and each.requests)
        found[check.axis] = AxisCheck(
            check.axis,
            known.requests + check.requests,
            known.differ + check.differ,
            check.first if takes else known.first,
            check.own if takes else known.own,
            "; ".join(notes) or check.note or known.note,
        )
    return [found[axis] for axis in AXES if axis in found]


def verdict_lines(run: Run, cells: Sequence[str]) -> list[str]:
    """Return a summary of these cells' verdicts: counts, reasons for missing ones, cost of the reference."""
    verdicts = [verdict_of(run, cell) for cell in cells]
    words = Counter(verdict.word for verdict in verdicts)
    lines = []
    if words.keys() - {"unverified"}:
        counts = ", ".join(f"{words[word]} {word}" for word in VERDICTS if words[word])
        loaded = [run.loads.get(cell, {}).get("weights") for cell in cells]
        quantized = any(loaded) or any(run.cells[cell].get("quantization") for cell in cells)
        weights = "weights (unquantised)" if quantized else "weights"
        seconds = sum(each["seconds"] for each in run.truths.values())
        supplied = all(each["source"] == "reference" for each in run.truths.values())
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
    checks = [check for each in verdicts for check in (each.measured, each.beyond) if check is not None]
    lines = []
    if tokens := sum(check.tokens for check in checks):
        departed = sum(check.departed for check in checks)
        result = "all equal" if all(check.equal for check in checks) else "no difference beyond the noise"
        if departed:
            result = f"{departed:,} {'answer differs' if departed == 1 else 'answers differ'} beyond the noise"
        lines.append(f"{tokens:,} measured tokens compared with the reference: {result}.")
    lines += dict.fromkeys(f"Not compared: {check.note}." for check in checks if check.note)
    lines += [f"Different: {verdict.reason}." for verdict in verdicts if verdict.word == "different" and verdict.reason]
    checked = [axis for axis in axis_checks(verdicts) if axis.requests or axis.note.startswith("failed")]
    return lines + [f"Invariance, {axis.text}." for axis in checked]


def _why_none(run: Run, cell: str) -> str:
    if run.header["schema"] == 1:
        return "measured by a panscan that did not compare answers yet"
    if not run.header["settings"].get("verify", True):
        return "--no-verify"
    outcome = run.outcomes.get(cell)
    return "not finished" if outcome is None else f"{outcome['outcome']} before its answers were compared"


def _divergence(figures: Mapping[str, Any] | None) -> Divergence | None:
    if figures is None:
        return None
    return Divergence(figures["positions"], figures["kl"], figures["kl_max"], figures["noise"])
