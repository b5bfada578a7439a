"""Compare next-token distributions with the reference: divergences and margins at each position."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import fmean
from typing import Any

import torch

from panscan.model.checkpoint import Loaded
from panscan.model.reference import head_logits
from panscan.records.schema import Divergence, Top1, VerdictRecord
from panscan.records.verdict import MARGIN_FLOOR, judge


@dataclass(frozen=True, slots=True)
class Noise:
    """Deviation of eager attention at a lower precision from the reference.

    Args:
        answer: divergences in nats, by request and token.
        image: mean divergence over image positions; None without images.
        margin: largest change of the margin between the reference's first and second choice, in nats.
    """

    answer: list[list[float]]
    image: float | None
    margin: float

    def answer_mean(self, steps: int) -> float:
        """Return the mean over the first ``steps`` tokens per request: cells may generate fewer than the reference."""
        return fmean(value for request in self.answer for value in request[:steps])


_LEAST_REST = 1e-6
"""Least probability of all unknown tokens together: smaller values are lost in the rounding of the known ones."""
_BLOCK = 16  # positions per step: two float64 rows of 262,208 logits take 4 MB


@dataclass(slots=True)
class PositionComparison:
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
        _compare(ours.to(device).double(), theirs.to(device).double(), never, partial=partial)
        for ours, theirs in zip(torch.split(reference, _BLOCK), torch.split(seen, _BLOCK), strict=True)
    ]
    parts = [torch.cat(each).cpu() for each in zip(*blocks, strict=True)]
    return PositionComparison(*parts)


def _compare(
    reference: torch.Tensor, seen: torch.Tensor, never: list[int], *, partial: bool
) -> tuple[torch.Tensor, ...]:
    p = reference.log_softmax(-1)
    known = ~seen.isnan() if partial else torch.ones_like(seen, dtype=torch.bool)
    if partial:
        seen = _completed(p, seen, known)
    q = seen.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    kl = torch.where(seen.isfinite().all(-1), kl, inf)
    p[:, never] = q[:, never] = -inf
    best = p.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]
    pair = q.gather(1, best.indices)
    moved = (pair[:, 0] - pair[:, 1] - margin).abs().nan_to_num(nan=inf)
    chosen = q.masked_fill(~known, -inf).argmax(-1)  # known tokens are the most probable ones
    return kl, margin, moved, chosen == best.indices[:, 0]


def _completed(p: torch.Tensor, seen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of all tokens, with the remaining probability spread over unknown ones.

    It is spread in the proportions of the reference. A row without a known token stays NaN.
    """
    rest = (1 - seen.nan_to_num(nan=-inf).exp().sum(-1, keepdim=True)).clamp_min(_LEAST_REST).log()
    theirs = p.masked_fill(known, -inf).logsumexp(-1, keepdim=True)
    return torch.where(known | ~known.any(-1, keepdim=True), seen, p - theirs + rest)


@dataclass(slots=True)
class DivergenceTally:
    """Comparisons of a cell, one per request."""

    answer: list[PositionComparison] = field(default_factory=list)
    image: list[PositionComparison] = field(default_factory=list)

    def add(
        self,
        loaded: Loaded,
        answer: torch.Tensor,
        seen: torch.Tensor,
        image: torch.Tensor,
        image_seen: Any,
        *,
        partial: bool = False,
    ) -> None:
        """Compare observed logits with the reference's hidden states; ``partial`` as in :func:`compare_logits`."""
        never = list(loaded.model.generation_config.suppress_tokens or [])
        device = loaded.device if loaded.device.type == "cuda" else torch.device("cpu")
        self.answer.append(compare_logits(head_logits(loaded.model, answer), seen, never, device, partial=partial))
        if image_seen is not None:
            logits = head_logits(loaded.model, image)
            self.image.append(compare_logits(logits, image_seen, never, device, partial=partial))

    def joined(self, kind: str) -> PositionComparison:
        """Return the comparison of all positions of one kind, ``answer`` or ``image``."""
        parts: list[PositionComparison] = getattr(self, kind)
        names = ("kl", "margin", "moved", "agree")
        return PositionComparison(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def noise(self) -> Noise:
        """Return the compared divergences as the noise for other comparisons."""
        answer = self.joined("answer")
        image = float(self.joined("image").kl.mean()) if self.image else None
        return Noise([each.kl.tolist() for each in self.answer], image, float(answer.moved.max()))

    def verdict(self, cell: str, noise: Noise, steps: int, *, float32: bool) -> VerdictRecord:
        """Return the verdict of a cell, for comparisons of the first ``steps`` tokens of each request."""
        answer = self.joined("answer")
        kinds = {"answer": (answer, noise.answer_mean(steps))}
        if self.image and noise.image is not None:
            kinds["image"] = self.joined("image"), noise.image
        for each, level in kinds.values():
            if not isfinite(level):
                reason = "eager attention itself overflows at this precision"
                return VerdictRecord.without_figures(cell, "different", reason)
            if not each.kl.isfinite().all():
                broken = int((~each.kl.isfinite()).sum())
                reason = f"{broken} of {len(each.kl)} positions overflow"
                return VerdictRecord.without_figures(cell, "different", reason)
        clear = answer.margin > max(noise.margin, MARGIN_FLOOR)
        top1 = Top1(int(clear.sum()), int((answer.agree & clear).sum()))
        found = {
            kind: Divergence(len(each.kl), float(each.kl.mean()), float(each.kl.max()), level)
            for kind, (each, level) in kinds.items()
        }
        equal = bool(answer.agree.all())
        word = judge(found["answer"], found.get("image"), top1, equal_tokens=equal, float32=float32)
        return VerdictRecord(
            cell=cell,
            verdict=word,
            reason=None,
            truth=None,
            answer=found["answer"],
            image=found.get("image"),
            top1=top1,
            equal_tokens=equal,
            seconds=0.0,
        )
