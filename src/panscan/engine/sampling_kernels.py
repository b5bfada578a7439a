"""Triton kernels of the sampler: sums of weights that are never stored. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from panscan.core.jit import kernel
from panscan.engine.weights import BLOCK, LARGEST_WEIGHT, WEIGHTLESS, Cutoff, VocabularyWeights

_LARGEST, _WEIGHTLESS = tl.constexpr(LARGEST_WEIGHT), tl.constexpr(WEIGHTLESS)
_BLOCKS, _IDS = 32, 4096  # of a program


class TritonVocabulary(VocabularyWeights):
    """Weights of a vocabulary on a GPU, computed again for each sum. Stored, they take twice the memory of scores."""

    def of(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weights of some scores of each row."""
        cutoff = Cutoff(torch.full_like(self.top, float("-inf")), torch.full_like(self.top, 0, dtype=torch.long))
        return self.sums(scores, cutoff, cutoff.last, 1)

    def search(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least score of each row whose higher scores weigh at most ``room`` in sum, and that sum."""
        least, before = torch.empty_like(self.top), torch.empty_like(room)
        rows, vocabulary = self.scores.shape
        _search[(rows,)](self.scores, self.top, room, least, before, vocabulary, ids_at_once=_IDS, num_warps=16)
        return least, before

    def ties(self, score: torch.Tensor) -> torch.Tensor:
        """Return how many ids of each block have a score ``[rows, 1]``, int64 ``[rows, blocks]``."""
        cutoff = Cutoff(score, torch.full_like(score, self.scores.shape[1], dtype=torch.long))
        return self.sums(self.scores, cutoff, torch.zeros_like(cutoff.last), BLOCK, ties=True)

    def sums(
        self, scores: torch.Tensor, cutoff: Cutoff, first: torch.Tensor, size: int, *, ties: bool = False
    ) -> torch.Tensor:
        """Return sums of the weights of scores within a cutoff, or how many scores equal its least."""
        rows, count = scores.shape
        sums = torch.empty(rows, triton.cdiv(count, size), dtype=torch.int64, device=scores.device)
        together = _BLOCKS * BLOCK // size
        _by_block[(triton.cdiv(sums.shape[1], together), rows)](
            scores.contiguous(),
            self.top,
            cutoff.least,
            cutoff.last,
            first,
            sums,
            count,
            sums.shape[1],
            size=size,
            together=together,
            ties=ties,
        )
        return sums


@kernel()
def _search(
    scores: tl.tensor,
    tops: tl.tensor,
    rooms: tl.tensor,
    leasts: tl.tensor,
    befores: tl.tensor,
    vocabulary: int,
    ids_at_once: tl.constexpr,
) -> None:
    """Search one row, as :meth:`panscan.engine.weights.VocabularyWeights.search` does."""
    row = tl.program_id(0)
    top, room = tl.load(tops + row), tl.load(rooms + row)
    low, high, before = _key(top - _WEIGHTLESS), _key(top), tl.zeros((), tl.int64)
    for _ in range(16):  # two bits at once
        quarter = (high - low + 3) // 4
        first, second = low + quarter, tl.minimum(low + 2 * quarter, high)
        third = tl.minimum(low + 3 * quarter, high)
        sums1 = tl.zeros((ids_at_once,), tl.int64)
        sums2 = tl.zeros((ids_at_once,), tl.int64)
        sums3 = tl.zeros((ids_at_once,), tl.int64)
        for start in range(0, vocabulary, ids_at_once):
            ids = start + tl.arange(0, ids_at_once)
            values = tl.load(scores + row.to(tl.int64) * vocabulary + ids, ids < vocabulary, float("-inf"))
            weights = _weights(values, top)
            sums1 += tl.where(values > _value(first), weights, 0)
            sums2 += tl.where(values > _value(second), weights, 0)
            sums3 += tl.where(values > _value(third), weights, 0)
        sum1, sum2, sum3 = tl.sum(sums1), tl.sum(sums2), tl.sum(sums3)
        before = tl.where(sum1 <= room, sum1, tl.where(sum2 <= room, sum2, tl.where(sum3 <= room, sum3, before)))
        high, low = (
            tl.where(sum1 <= room, first, tl.where(sum2 <= room, second, tl.where(sum3 <= room, third, high))),
            tl.where(sum1 <= room, low, tl.where(sum2 <= room, first, tl.where(sum3 <= room, second, third))),
        )
    tl.store(leasts + row, _value(high))
    tl.store(befores + row, before)


@kernel()
def _key(value: tl.tensor) -> tl.tensor:
    """Return an integer in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@kernel()
def _value(key: tl.tensor) -> tl.tensor:
    """Return the float32 value of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@kernel()
def _by_block(
    scores: tl.tensor,
    tops: tl.tensor,
    leasts: tl.tensor,
    lasts: tl.tensor,
    firsts: tl.tensor,
    sums: tl.tensor,
    count: int,
    blocks: int,
    size: tl.constexpr,
    together: tl.constexpr,
    ties: tl.constexpr,
) -> None:
    """Add up the weights within a cutoff of some blocks of one row, or count the scores that equal the least."""
    row = tl.program_id(1)
    block = tl.program_id(0) * together + tl.arange(0, together)
    ids = block[:, None] * size + tl.arange(0, size)[None, :]
    values = tl.load(scores + row.to(tl.int64) * count + ids, ids < count, float("-inf"))
    least = tl.load(leasts + row)
    if ties:
        added = (values == least).to(tl.int64)
    else:
        kept = (values > least) | ((values == least) & (tl.load(firsts + row) + ids <= tl.load(lasts + row)))
        added = tl.where(kept, _weights(values, tl.load(tops + row)), 0)
    tl.store(sums + row * blocks + block, tl.sum(added, 1), block < blocks)


@kernel()
def _weights(scores: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return probabilities as integers."""
    return (tl.exp(scores - top) * _LARGEST).to(tl.int64)
