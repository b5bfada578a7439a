"""Records of how a cell's answers compare with the reference: truths, divergences, tokens, verdicts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from panscan.records.fields import AXES, FLOOR, VERDICTS, Count, Number, one_of


class Departure(Struct, frozen=True):
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
    position: Count
    token: Count | None
    expected: Count | None
    found: str
    wanted: str
    margin: Number | None
    clear: bool | None

    @property
    def text(self) -> str:
        """Where, which tokens, and the margin."""
        unknown = ", margin unknown" if self.clear is None else ""
        margin = unknown if self.margin is None else f", margin {self.margin:.3g} nats"
        return (
            f"request {self.request}, output token {self.position + 1}: {self.found} instead of {self.wanted}{margin}"
        )


class TokenCheck(Struct, frozen=True):
    """Comparison of measured tokens with the reference.

    Args:
        requests: number of compared answers, counted in each repeat and replica.
        tokens: number of compared positions.
        departed: number of answers that depart at a clear position.
        equal: whether no answer departs at any position.
        first: first clear departure.
        note: reason why nothing or not everything was compared.
        answers: of a replay: number of different measured answers, of which ``requests`` were compared.
        seconds: of a replay: time that it took.
        measured_seconds: of a replay: measuring time of its cell.
    """

    requests: Count
    tokens: Count
    departed: Count
    equal: bool
    first: Departure | None
    note: str
    answers: Count = 0
    seconds: Number = 0.0
    measured_seconds: Number = 0.0

    @classmethod
    def of(
        cls,
        requests: int = 0,
        tokens: int = 0,
        departed: int = 0,
        *,
        equal: bool = True,
        first: Departure | None = None,
        note: str = "",
        answers: int = 0,
    ) -> TokenCheck:
        """Return a comparison; of nothing, by default. In a record, a missing field is no equality."""
        return cls(requests, tokens, departed, equal, first, note, answers)

    def __add__(self, other: TokenCheck) -> TokenCheck:
        return TokenCheck(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.departed + other.departed,
            self.equal and other.equal,
            self.first or other.first,
            self.note or other.note,
            self.answers + other.answers,
            self.seconds + other.seconds,
            self.measured_seconds + other.measured_seconds,
        )


class AxisCheck(Struct, frozen=True):
    """The same greedy requests under other conditions of one axis (a key of :data:`AXES`).

    Args:
        axis: the name of what was varied.
        requests: pairs of answers compared.
        differ: pairs whose tokens differ, noise included.
        first: the first difference that noise does not explain, else the first one.
        own: whether the cell's own tokens are what the reference does not choose.
        note: description of the variation, or the reason for none.
    """

    axis: Annotated[str, one_of(tuple(AXES))]
    requests: Count
    differ: Count
    first: Departure | None
    own: bool
    note: str

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


class InputCheck(Struct, frozen=True):
    """The comparison of inputs with those of Transformers' own processor."""

    requests: Count
    views: Count
    difference: str | None
    note: str


class TruthRecord(Struct, tag_field="type", tag="truth", omit_defaults=True, kw_only=True):
    """A reference that answers are compared with.

    Args:
        truth: its id.
        source: computed, or reference (``--reference`` supplied it).
        file: its file.
        model: name of the model.
        requests: number of requests.
        tokens: answer tokens.
        image_positions: positions of image tokens.
        seconds: time to compute or load it.
        inputs: comparison of its inputs.
    """

    truth: str
    source: str
    file: str
    model: str
    requests: Count
    tokens: Count
    image_positions: Count
    seconds: Number
    inputs: InputCheck | None = None


class Divergence(Struct, frozen=True):
    """Divergence from the reference at one kind of position, in nats.

    Args:
        positions: number of compared positions.
        kl: mean over the positions.
        kl_max: maximum over the positions.
        noise: mean for eager attention at the cell's precision.
        request_kl: largest mean over the positions of one request; None in older records.
        request_noise: the same for eager attention at the cell's precision.
    """

    positions: Count
    kl: Number
    kl_max: Number
    noise: Number
    request_kl: Number | None = None
    request_noise: Number | None = None

    @property
    def ratio(self) -> float:
        """How many times the unavoidable noise; both have :data:`FLOOR` as their floor."""
        return max(self.kl, FLOOR) / max(self.noise, FLOOR)

    @property
    def request_ratio(self) -> float:
        """How many times the noise of the noisiest request the most different request has; 0 in older records."""
        if self.request_kl is None or self.request_noise is None:
            return 0.0
        return max(self.request_kl, FLOOR) / max(self.request_noise, FLOOR)

    @property
    def negligible(self) -> bool:
        """Whether both are at most :data:`FLOOR`, as in float32: their ratio is 1 by definition."""
        return max(self.kl, self.noise) <= FLOOR


class Top1(Struct, frozen=True):
    """Agreement of the most probable tokens at clear positions.

    Args:
        clear: positions where the reference's margin exceeds the noise.
        agree: clear positions where the cell's most probable token is the reference's.
    """

    clear: Count
    agree: Count

    @property
    def share(self) -> float:
        return self.agree / self.clear if self.clear else 1.0


class VerdictRecord(Struct, tag_field="type", tag="verdict", kw_only=True):
    """The comparison of a cell's answers with the reference.

    Args:
        cell: id of the cell.
        verdict: one of :data:`VERDICTS`, of the distributions alone.
        reason: why the cell is unverified, or what makes it different beside the figures.
        truth: id of the reference.
        answer: divergence at answer positions.
        image: the same at image positions; None without images.
        top1: agreement of the most probable tokens along the reference's tokens.
        equal_tokens: whether all of those agree.
        seconds: time of the comparison.
        concluded: False in a first line, which another one replaces.
        beyond: comparison of the measured tokens beyond the reference with its choices.
        invariance: comparisons of answers under other conditions.
    """

    cell: str
    verdict: Annotated[str, one_of(VERDICTS)]
    reason: str | None
    truth: str | None
    answer: Divergence | None
    image: Divergence | None
    top1: Top1 | None
    equal_tokens: bool | None
    seconds: Number
    concluded: bool = True
    beyond: TokenCheck | None = None
    invariance: list[AxisCheck] | None = None

    @classmethod
    def without_figures(cls, cell: str, verdict: str, reason: str | None = None) -> VerdictRecord:
        """Return a verdict that no comparison of distributions supports."""
        return cls(
            cell=cell,
            verdict=verdict,
            reason=reason,
            truth=None,
            answer=None,
            image=None,
            top1=None,
            equal_tokens=None,
            seconds=0.0,
        )
