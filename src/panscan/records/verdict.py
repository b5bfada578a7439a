"""The verdict: whether a cell's next-token distributions are the reference's, by figures and fixed limits. No tensors.

The yardstick is the rounding noise that nobody can avoid at the cell's precision: how far plain eager attention at that
precision is from the truth (float32, eager, the same weights and views). All figures are Kullback-Leibler divergences
from the truth, in nats, averaged over positions, apart for answer positions and image positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from panscan.records.schema import VERDICTS
from panscan.records.store import Run

__all__ = [
    "CLOSE_RATIO",
    "CLOSE_TOP1",
    "EXACT_RATIO",
    "FLOOR",
    "MARGIN_FLOOR",
    "Divergence",
    "Top1",
    "Verdict",
    "judge",
    "verdict_lines",
    "verdict_of",
]

FLOOR = 1e-6
"""Nats; noise below this counts as this."""
MARGIN_FLOOR = (8 * FLOOR) ** 0.5
"""Nats; the same floor for margins. Between two tokens that share all probability evenly, a margin that moves by m
diverges by ln cosh(m / 2), about m^2 / 8: less than this is less than :data:`FLOOR`."""
EXACT_RATIO, CLOSE_RATIO, CLOSE_TOP1 = 2.0, 10.0, 0.99


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence from the truth at one kind of position, in nats.

    Args:
        positions: compared.
        kl: the mean over them.
        kl_max: the largest of them.
        noise: the mean for eager attention at the cell's precision.
    """

    positions: int
    kl: float
    kl_max: float
    noise: float

    @property
    def ratio(self) -> float:
        """How many times the unavoidable noise; both have :data:`FLOOR` as their floor."""
        return max(self.kl, FLOOR) / max(self.noise, FLOOR)


@dataclass(frozen=True, slots=True)
class Top1:
    """Positions where the truth's margin is larger than the noise moves it (``clear``), and those of them where the
    cell's likeliest token is the truth's (``agree``)."""

    clear: int
    agree: int

    @property
    def share(self) -> float:
        return self.agree / self.clear if self.clear else 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a cell's answers. ``word`` is exact, close, different or unverified; ``reason`` says why not."""

    word: str
    reason: str = ""
    answer: Divergence | None = None
    image: Divergence | None = None
    top1: Top1 | None = None
    equal_tokens: bool | None = None
    truth: str | None = None

    @property
    def ratio(self) -> float | None:
        """The larger of both kinds' ratios; None if unverified."""
        return max((each.ratio for each in (self.answer, self.image) if each is not None), default=None)


def judge(answer: Divergence, image: Divergence | None, top1: Top1, *, equal_tokens: bool, float32: bool) -> str:
    """exact, close or different.

    exact: at most 2x the noise at both kinds of position; in float32 the greedy tokens must be equal, too. close: at
    most 10x, and the same likeliest token at 99% or more of the clear positions. different: the rest.
    """
    ratio = max(each.ratio for each in (answer, image) if each is not None)
    if ratio <= EXACT_RATIO and (equal_tokens or not float32):
        return "exact"
    return "close" if ratio <= CLOSE_RATIO and top1.share >= CLOSE_TOP1 else "different"


def verdict_of(run: Run, cell: str) -> Verdict:
    """The verdict of a cell, from its run's records; unverified with the reason if there is none."""
    record = run.verdicts.get(cell)
    if record is None:
        return Verdict("unverified", _why_none(run, cell))
    return Verdict(
        record["verdict"],
        record["reason"] or "",
        _divergence(record["answer"]),
        _divergence(record["image"]),
        None if record["top1"] is None else Top1(record["top1"]["clear"], record["top1"]["agree"]),
        record["equal_tokens"],
        record["truth"],
    )


def verdict_lines(run: Run, cells: Iterable[str]) -> list[str]:
    """What to say of the verdicts of these cells as a whole: how many of each, why none, what the truth took."""
    verdicts = [verdict_of(run, cell) for cell in cells]
    words = Counter(verdict.word for verdict in verdicts)
    lines = []
    if words.keys() - {"unverified"}:
        counts = ", ".join(f"{words[word]} {word}" for word in VERDICTS if words[word])
        seconds = sum(truth["seconds"] for truth in run.truths.values())
        brought = all(truth["source"] == "reference" for truth in run.truths.values())
        origin = (
            "The truth was brought by --reference" if brought else f"The truth took {seconds:,.1f} s, in no figure here"
        )
        lines.append(
            f"Answers against float32 eager attention on the same weights and views: {counts}"
            f" (exact: within {EXACT_RATIO:g}x the rounding noise). {origin}."
        )
    reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.word == "unverified")
    return lines + [f"Unverified: {reason}." for reason in reasons]


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
