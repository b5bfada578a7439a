"""Probabilities of a vocabulary as integers: sums, and searches in place of sorts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

LARGEST_WEIGHT = 2.0**34
"""Weight of the top id: sums of a vocabulary's weights are exact in float64."""
BLOCK = 64
"""Ids whose weights are added up or compared first; divides Gemma 3's vocabulary."""
WEIGHTLESS = 24.0
"""Scores that much below the top weigh less than 1."""


@dataclass(frozen=True, slots=True)
class Cutoff:
    """Which ids of each row may be chosen: those with higher scores than ``least``, and of equal ones the first ids.

    Args:
        least: float32 ``[rows, 1]``.
        last: the last id whose score may equal ``least``, int64 ``[rows, 1]``.
    """

    least: torch.Tensor
    last: torch.Tensor

    def keep(self, scores: torch.Tensor, first: torch.Tensor | int) -> torch.Tensor:
        """Return a mask of the scores ``[rows, n]`` of n ids from ``first`` on, which is int64 ``[rows, 1]`` or 0."""
        ids = torch.arange(scores.shape[1], device=scores.device)
        return (scores > self.least) | ((scores == self.least) & (ids <= self.last - first))


class VocabularyWeights:
    """Probabilities of a vocabulary as integers, whose sums do not depend on the order of addition or on other rows.

    Args:
        scores: float32 ``[rows, vocabulary]``.
    """

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores
        self.maxima = in_blocks(scores, float("-inf")).amax(-1)
        self.top = self.maxima.amax(-1, keepdim=True)

    def of(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weights of some scores of each row."""
        return ((scores - self.top).exp() * LARGEST_WEIGHT).long()

    def search(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least score of each row whose higher scores weigh at most ``room`` in sum, and that sum.

        Args:
            room: at least 0 and less than the sum of all weights, int64 ``[rows, 1]``.
        """
        best = self.scores.sort(-1, descending=True).values
        return least_within(best, self.of(best), room, best[:, -1:])

    def sums(self, scores: torch.Tensor, cutoff: Cutoff, first: torch.Tensor, size: int) -> torch.Tensor:
        """Return sums of the weights of scores within a cutoff, int64 ``[rows, blocks]``.

        Args:
            scores: of each row, ``[rows, n]``: all of the vocabulary, or one block.
            cutoff: ids that count.
            first: id of the first score of each row, int64 ``[rows, 1]``.
            size: scores of a block, 1 or ``BLOCK``.
        """
        weights = self._all if scores is self.scores else self.of(scores)
        kept = weights.where(cutoff.keep(scores, first), 0)
        return kept if size == 1 else in_blocks(kept, 0).sum(-1)

    def by_block(self, cutoff: Cutoff) -> torch.Tensor:
        """Return sums of the weights of each block of ids within a cutoff, int64 ``[rows, blocks]``."""
        return self.sums(self.scores, cutoff, torch.zeros_like(cutoff.last), BLOCK)

    def of_block(self, cutoff: Cutoff, block: torch.Tensor) -> torch.Tensor:
        """Return the weights of one block of each row, given its index, int64 ``[rows, 1]``; 0 outside the cutoff."""
        return self.sums(block_of(self.scores, block, float("-inf")), cutoff, block * BLOCK, 1)

    def ties(self, score: torch.Tensor) -> torch.Tensor:
        """Return how many ids of each block have a score ``[rows, 1]``, int64 ``[rows, blocks]``."""
        return in_blocks(self.scores == score, 0).sum(-1)

    @cached_property
    def _all(self) -> torch.Tensor:
        return self.of(self.scores)


def keys_of(values: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in the order of float32 values."""
    bits = values.view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()


def least_within(
    best: torch.Tensor, weights: torch.Tensor, room: torch.Tensor, floor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least of some scores of each row whose higher ones weigh at most ``room`` in sum, and that sum.

    Args:
        best: the highest scores in descending order, ``[rows, n]``.
        weights: of these.
        room: at least 0, int64 ``[rows, 1]``.
        floor: the least that may be returned ``[rows, 1]``; lower scores have no weights.
    """
    count = (weights.cumsum(-1) - weights <= room).sum(-1, keepdim=True)
    least = best.gather(1, (count - 1).clamp_(min=0)).maximum(floor)  # NaN logits: none counts
    return least, weights.where(best > least, 0).sum(-1, keepdim=True)


def block_of(values: torch.Tensor, block: torch.Tensor, padding: float) -> torch.Tensor:
    """Return one block of each row ``[rows, ids of a block]``, given int64 ``[rows, 1]``."""
    return in_blocks(values, padding).gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)


def in_blocks(values: torch.Tensor, padding: float) -> torch.Tensor:
    """Return rows ``[rows, n]`` as ``[rows, blocks, ids of a block]``."""
    missing = -values.shape[1] % BLOCK
    return (pad(values, (0, missing), value=padding) if missing else values).view(len(values), -1, BLOCK)
