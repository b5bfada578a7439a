"""Next-token distributions against the truth's: divergences and margins, position by position."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from statistics import fmean
from typing import Any

import torch

from panscan.model.checkpoint import Loaded
from panscan.model.reference import head_logits
from panscan.records.verdict import MARGIN_FLOOR, Divergence, Top1, judge

__all__ = ["DivergenceTally", "Noise", "PositionComparison", "compare_logits"]


@dataclass(frozen=True, slots=True)
class Noise:
    """What eager attention at some precision makes of the truth.

    Args:
        answer: divergences in nats, by request and token.
        image: the mean over image positions; None without images.
        margin: the largest change of a margin between the truth's first and second choice, in nats.
    """

    answer: list[list[float]]
    image: float | None
    margin: float

    def answer_mean(self, steps: int) -> float:
        """The mean over the first ``steps`` tokens of each request: a cell may be allowed fewer than the truth has."""
        return fmean(value for request in self.answer for value in request[:steps])


_LEAST_REST = 1e-6
"""Of a row's probability: less than this cannot be told from the rounding of the known ones."""
_TOGETHER = 16  # positions: two float64 rows of a vocabulary of 262,208 are 4 MB


@dataclass(slots=True)
class PositionComparison:
    """Position by position, float64 ``[positions]`` on the CPU.

    Args:
        kl: Kullback-Leibler divergence from the truth, in nats; inf where the logits seen are not all finite.
        margin: by how much more the truth likes its first choice than its second, in nats.
        moved: by how much what was seen changes that margin, in nats.
        agree: whether the most probable token is the truth's.
    """

    kl: torch.Tensor
    margin: torch.Tensor
    moved: torch.Tensor
    agree: torch.Tensor


def compare_logits(
    truth: torch.Tensor, seen: torch.Tensor, never: list[int], device: torch.device, *, partial: bool = False
) -> PositionComparison:
    """Compare logits ``[positions, vocabulary]`` with the truth's. Log-softmax is in float64.

    Args:
        truth: float32.
        seen: float32.
        never: suppressed ids, which are never chosen.
        device: where to compute; one with float64.
        partial: seen are log-probabilities, NaN where they are not known. What is compared then is the distribution
            over the known tokens and "any other", which is at most as far away as the whole (data processing
            inequality).
    """
    blocks = [
        _compare(ours.to(device).double(), theirs.to(device).double(), never, partial=partial)
        for ours, theirs in zip(torch.split(truth, _TOGETHER), torch.split(seen, _TOGETHER), strict=True)
    ]
    parts = [torch.cat(each).cpu() for each in zip(*blocks, strict=True)]
    return PositionComparison(*parts)


def _compare(truth: torch.Tensor, seen: torch.Tensor, never: list[int], *, partial: bool) -> tuple[torch.Tensor, ...]:
    p = truth.log_softmax(-1)
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
    chosen = q.masked_fill(~known, -inf).argmax(-1)  # no unknown token is likelier than a known one
    return kl, margin, moved, chosen == best.indices[:, 0]


def _completed(p: torch.Tensor, seen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens: the rest of the probability spread over the unknown ones as the truth does.

    A row without a known token stays NaN.
    """
    rest = (1 - seen.nan_to_num(nan=-inf).exp().sum(-1, keepdim=True)).clamp_min(_LEAST_REST).log()
    theirs = p.masked_fill(known, -inf).logsumexp(-1, keepdim=True)
    return torch.where(known | ~known.any(-1, keepdim=True), seen, p - theirs + rest)


@dataclass(slots=True)
class DivergenceTally:
    """Comparisons of a cell, request by request."""

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
        """Compare logits seen with the truth's hidden states; ``partial`` as in :func:`compare_logits`."""
        never = list(loaded.model.generation_config.suppress_tokens or [])
        device = loaded.device if loaded.device.type == "cuda" else torch.device("cpu")
        self.answer.append(compare_logits(head_logits(loaded.model, answer), seen, never, device, partial=partial))
        if image_seen is not None:
            logits = head_logits(loaded.model, image)
            self.image.append(compare_logits(logits, image_seen, never, device, partial=partial))

    def joined(self, kind: str) -> PositionComparison:
        """All positions of one kind."""
        parts: list[PositionComparison] = getattr(self, kind)
        names = ("kl", "margin", "moved", "agree")
        return PositionComparison(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def noise(self) -> Noise:
        """What was compared, as a yardstick for others."""
        answer = self.joined("answer")
        image = float(self.joined("image").kl.mean()) if self.image else None
        return Noise([each.kl.tolist() for each in self.answer], image, float(answer.moved.max()))

    def verdict(self, noise: Noise, steps: int, *, float32: bool) -> dict[str, Any]:
        """The figures of a verdict record, of comparisons of the first ``steps`` tokens of each request."""
        answer = self.joined("answer")
        kinds = {"answer": (answer, noise.answer_mean(steps))}
        if self.image and noise.image is not None:
            kinds["image"] = self.joined("image"), noise.image
        for each, level in kinds.values():
            if not isfinite(level):
                return {"verdict": "different", "reason": "eager attention itself overflows at this precision"}
            if not each.kl.isfinite().all():
                broken = int((~each.kl.isfinite()).sum())
                return {"verdict": "different", "reason": f"{broken} of {len(each.kl)} positions overflow"}
        clear = answer.margin > max(noise.margin, MARGIN_FLOOR)
        top1 = Top1(int(clear.sum()), int((answer.agree & clear).sum()))
        found = {
            kind: Divergence(len(each.kl), float(each.kl.mean()), float(each.kl.max()), level)
            for kind, (each, level) in kinds.items()
        }
        equal = bool(answer.agree.all())
        word = judge(found["answer"], found.get("image"), top1, equal_tokens=equal, float32=float32)
        figures = {kind: asdict(divergence) for kind, divergence in found.items()}
        return {"verdict": word, **figures, "top1": asdict(top1), "equal_tokens": equal}
