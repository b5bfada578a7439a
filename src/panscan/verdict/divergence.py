"""Compare next-token distributions with the reference: divergences and margins at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import fmean
from typing import NamedTuple

import torch

from panscan.model.checkpoint import Loaded
from panscan.model.observation import TOP_LOGPROBS, Observation
from panscan.records.verdict_records import Divergence, Top1, VerdictRecord
from panscan.verdict.float32 import head_logits
from panscan.verdict.judgement import LEAST_REST, clear_margin, judge


@dataclass(frozen=True, slots=True)
class Noise:
    """Deviation of eager attention at a lower precision from the reference.

    Args:
        answer: divergences in nats, by request and token.
        image: mean divergence over image positions; None without images.
        margin: largest change of the margin between the reference's first and second choice, in nats.
        reported: the same deviation if only the most probable tokens are reported
            (:meth:`panscan.model.observation.Observation.reported`), which runners that report no others are compared
            with; None in files of older versions.
        image_requests: mean divergence over the image positions of each request; None in files of older versions.
    """

    answer: list[list[float]]
    image: float | None
    margin: float
    reported: Noise | None = None
    image_requests: list[float] | None = None

    def answer_mean(self, steps: int) -> float:
        """Return the mean over the first ``steps`` tokens per request: cells may generate fewer than the reference."""
        return fmean(value for request in self.answer for value in request[:steps])

    def request_maximum(self, kind: str, steps: int) -> float | None:
        """Return the largest mean of a request over its image positions, or over its first ``steps`` tokens."""
        if kind == "image":
            return max(self.image_requests, default=None) if self.image_requests is not None else None
        return max(fmean(request[:steps]) for request in self.answer if request)


_NO_NOISE = "the reference lacks the noise of the reported tokens; leave --reference out, or compute it again"
_BLOCK = 16  # positions per step: two float64 rows of 262,208 logits take 4 MB


class PositionComparison(NamedTuple):
    """Comparison with the reference at each position, as float64 ``[positions]`` on the CPU.

    Args:
        kl: Kullback-Leibler divergence from the reference, in nats; inf unless all observed logits are finite.
        margin: log-probability margin between the reference's first and second choice, in nats.
        moved: absolute difference of that margin in the observed logits, in nats.
        agree: whether the most probable token is the reference's.
    """

    kl: torch.Tensor
    margin: torch.Tensor
    moved: torch.Tensor
    agree: torch.Tensor


def compare_logits(
    reference: torch.Tensor, seen: torch.Tensor, never: list[int], device: torch.device, *, partial: bool = False
) -> PositionComparison:
    """Compare logits ``[positions, vocabulary]`` with the reference's. Log-softmax is in float64.

    Args:
        reference: float32 logits of the reference.
        seen: observed logits, float32.
        never: ids of suppressed tokens.
        device: device to compute on; must support float64.
        partial: ``seen`` holds log-probabilities, NaN where unknown. The comparison then covers the known tokens and
            "any other", which gives a lower bound of the full divergence (data processing inequality).
    """
    blocks = [
        _compare(expected.to(device).double(), observed.to(device).double(), never, partial=partial)
        for expected, observed in zip(torch.split(reference, _BLOCK), torch.split(seen, _BLOCK), strict=True)
    ]
    return PositionComparison(*(part.cpu() for part in _joined(blocks)))


def _compare(reference: torch.Tensor, seen: torch.Tensor, never: list[int], *, partial: bool) -> PositionComparison:
    p = reference.log_softmax(-1)
    known = ~seen.isnan() if partial else torch.ones_like(seen, dtype=torch.bool)
    if partial:  # unknown tokens share the rest in the reference's proportions; a row without a known one stays NaN
        rest = (1 - seen.nan_to_num(nan=-inf).exp().sum(-1, keepdim=True)).clamp_min(LEAST_REST).log()
        unknown_share = p.masked_fill(known, -inf).logsumexp(-1, keepdim=True)
        seen = torch.where(known | ~known.any(-1, keepdim=True), seen, p - unknown_share + rest)
    q = seen.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    kl = torch.where(seen.isfinite().all(-1), kl, inf)
    p[:, never] = q[:, never] = -inf
    best = p.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]
    pair = q.gather(1, best.indices)
    moved = (pair[:, 0] - pair[:, 1] - margin).abs().nan_to_num(nan=inf)
    chosen = q.masked_fill(~known, -inf).argmax(-1)  # known tokens are the most probable ones
    return PositionComparison(kl, margin, moved, chosen == best.indices[:, 0])


@dataclass(slots=True)
class DivergenceTally:
    """Comparisons of a cell, one per request.

    Args:
        answer: comparisons at answer positions.
        image: comparisons at image positions.
        top_logprobs: number of known log-probabilities per position, if not all.
    """

    answer: list[PositionComparison] = field(default_factory=list)
    image: list[PositionComparison] = field(default_factory=list)
    top_logprobs: int | None = None

    def add(self, loaded: Loaded, answer: torch.Tensor, image: torch.Tensor, seen: Observation) -> None:
        """Compare an observation with the reference's hidden states.

        Args:
            loaded: model with the reference's output matrix.
            answer: final hidden states before each observed token, float32 ``[tokens, hidden]``.
            image: final hidden states at the image positions, float32 ``[positions, hidden]``.
            seen: the observation.
        """
        never = list(loaded.model.generation_config.suppress_tokens or [])
        device = loaded.device if loaded.device.type == "cuda" else torch.device("cpu")
        self.top_logprobs, partial = seen.top_logprobs, seen.top_logprobs is not None
        for parts, hidden, logits in ((self.answer, answer, seen.answer), (self.image, image, seen.image)):
            if logits is not None:
                reference = head_logits(loaded.model, hidden)
                parts.append(compare_logits(reference, logits, never, device, partial=partial))

    def noise(self) -> Noise:
        """Return the compared divergences as the noise for other comparisons."""
        image = float(_joined(self.image).kl.mean()) if self.image else None
        margin, images = float(_joined(self.answer).moved.max()), [float(part.kl.mean()) for part in self.image]
        return Noise([part.kl.tolist() for part in self.answer], image, margin, image_requests=images)

    def verdict(self, cell: str, noise: Noise, steps: int, *, float32: bool) -> VerdictRecord:
        """Return the verdict of a cell, for comparisons of the first ``steps`` tokens of each request.

        Of a runner that reports its most probable tokens only, both the divergence and the noise cover those tokens and
        "any other". Without such a noise, its cell is unverified.
        """
        if self.top_logprobs is not None:
            if noise.reported is None or self.top_logprobs != TOP_LOGPROBS:
                return VerdictRecord.without_figures(cell, "unverified", _NO_NOISE)
            noise = noise.reported
        figures: dict[str, Divergence] = {}
        for kind, parts, level in (
            ("answer", self.answer, noise.answer_mean(steps)),
            ("image", self.image, noise.image),
        ):
            if not parts or level is None:
                continue
            kl = _joined(parts).kl
            broken = int((~kl.isfinite()).sum())
            if broken or not isfinite(level):
                reason = f"{broken} of {len(kl)} positions overflow"
                if not isfinite(level):
                    reason = "eager attention itself overflows at this precision"
                return VerdictRecord.without_figures(cell, "different", reason)
            figures[kind] = Divergence(
                len(kl),
                float(kl.mean()),
                float(kl.max()),
                level,
                max(float(part.kl.mean()) for part in parts if len(part.kl)),
                noise.request_maximum(kind, steps),
            )
        answer = _joined(self.answer)
        clear = answer.margin > clear_margin(noise.margin)
        top1 = Top1(int(clear.sum()), int((answer.agree & clear).sum()))
        equal = bool(answer.agree.all())
        word = judge(figures["answer"], figures.get("image"), top1, equal_tokens=equal, float32=float32)
        return VerdictRecord(
            cell=cell,
            verdict=word,
            reason=None if self.top_logprobs is None else f"over the {self.top_logprobs} most probable tokens",
            truth=None,
            answer=figures["answer"],
            image=figures.get("image"),
            top1=top1,
            equal_tokens=equal,
            seconds=0.0,
        )


def _joined(parts: Sequence[PositionComparison]) -> PositionComparison:
    """Return the comparison of all positions of several ones."""
    return PositionComparison(*map(torch.cat, zip(*parts, strict=True)))
