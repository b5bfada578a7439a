"""Sampling on the device: temperature, top_k, top_p, min_p and the draw, for many rows at once, without a sort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import Sampling
from panscan.engine.weights import BLOCK, Cutoff, VocabularyWeights, block_of, in_blocks, keys_of, least_within

_BITS = 31  # bits of a draw: its product with the low half of a sum of weights fits into int64
DRAWS = 2**_BITS
"""Number of different draws; ``draw / DRAWS`` is a point in the cumulative distribution over ids."""
PARAMETERS = 5
"""Numbers of a row in :func:`parameters_of`."""
_COLDEST = 1e-30  # temperature: lower ones overflow the scores, and the top id has all of the mass long before
_ALL64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Path(NamedTuple):
    """Steps that a batch of rows takes: those that any of them needs.

    Args:
        candidates: the highest ``top_k``; 0: no row has one. All rows have a ``top_k``, or none.
        top_p: whether a row has ``top_p`` below 1.
    """

    candidates: int
    top_p: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Path:
        """Return the path of rows of which all have ``top_k``, or none."""
        return cls(max(item.top_k or 0 for item in samplings), any(map(_has_top_p, samplings)))


def parameters_of(samplings: Sequence[Sampling], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the parameters of sampled rows in one array ``[rows, 5]``, so that one copy takes them to the device:
    temperature, index of the last candidate, 1 - ``top_p`` (-1: none), ``min_p`` and draw. float64 holds them exactly.

    Args:
        samplings: of the rows.
        draws: of the rows, from :func:`draws`.
    """
    table = np.array([(s.temperature, s.top_k or 1, s.top_p if _has_top_p(s) else 2, s.min_p or 0) for s in samplings])
    table[:, 0] = np.maximum(table[:, 0], _COLDEST)
    table[:, 1] -= 1
    removable = (1 - table[:, 2]).astype(np.float32)
    # Transformers compares float32 sums.
    table[:, 2] = (removable.astype(np.float64) + np.nextafter(removable, np.float32(1))) / 2
    return np.column_stack([table, draws])


def draws(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return a uniform integer in [0, 2^31) for each token, the same on every machine.

    It is output ``position`` of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), whose initial state is the mixed seed.
    """
    states = np.array([(seed + _GOLDEN) & _ALL64 for seed in seeds], np.uint64)
    steps = (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mixed(_mixed(states) + steps) >> np.uint64(64 - _BITS)).astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def heated(scores: torch.Tensor, parameters: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return scores at each row's temperature, float32 ``[rows, vocabulary]``."""
    return torch.div(scores, parameters[:, :1].float(), out=out)


def sample(scores: torch.Tensor, parameters: torch.Tensor, path: Path) -> torch.Tensor:
    """Sample one id per row, int64 ``[rows]``: the first whose cumulative probability exceeds the draw.

    No step waits for the device, and shapes depend on the arguments' shapes and the path alone, so it can be recorded.

    Args:
        scores: at each row's temperature, float32 ``[rows, vocabulary]``.
        parameters: of :func:`parameters_of`, on the same device.
        path: steps to take.
    """
    weights, draw = vocabulary_weights(scores), parameters[:, 4:].long()
    cutoff = choose_cutoff(weights, parameters, path)
    sums = weights.by_block(cutoff)
    total, low = sums.sum(-1, keepdim=True), 2**_BITS - 1
    target = (total >> _BITS) * draw + ((total & low) * draw >> _BITS)  # total * draw / 2^31, rounded down
    # NaN logits must not yield an id beyond the vocabulary.
    last = scores.shape[1] - 1
    return _first_beyond(sums, partial(weights.of_block, cutoff), target).clamp_(max=last).squeeze(1)


def vocabulary_weights(scores: torch.Tensor) -> VocabularyWeights:
    """Return the weights of a vocabulary, computed by kernels where there are some."""
    if not scores.is_cuda or find_spec("triton") is None:
        return VocabularyWeights(scores)
    from panscan.engine.sampling_kernels import TritonVocabulary

    return TritonVocabulary(scores)


def choose_cutoff(weights: VocabularyWeights, parameters: torch.Tensor, path: Path) -> Cutoff:
    """Return which ids ``top_k``, ``top_p`` and ``min_p`` leave, by the rules of Transformers' logits warpers.

    Args:
        weights: of the scores at each row's temperature.
        parameters: of the rows, from :func:`parameters_of`, on the same device.
        path: steps to take.
    """
    scores, top = weights.scores, weights.top
    kth, removable, min_p = parameters[:, 1:4, None].unbind(1)
    cutoff = Cutoff(torch.full_like(top, float("-inf")), torch.full_like(top, scores.shape[1], dtype=torch.long))
    best = None
    if path.candidates:
        best = largest(scores, path.candidates, weights.maxima).values
        cutoff = replace(cutoff, least=best.gather(1, kth.long().clamp(max=best.shape[1] - 1)))
    if path.top_p:
        cutoff = _with_top_p(cutoff, weights, removable, best)
    least = (top + min_p.float().log()).maximum(cutoff.least)
    return Cutoff(least, cutoff.last.masked_fill(least > cutoff.least, scores.shape[1]))


def _has_top_p(sampling: Sampling) -> bool:
    return sampling.top_p is not None and sampling.top_p < 1


def _with_top_p(
    cutoff: Cutoff, weights: VocabularyWeights, removable: torch.Tensor, best: torch.Tensor | None
) -> Cutoff:
    """Return limits that also remove the least likely ids with probabilities up to 1 - p in sum; never the top id.

    Of equally likely ids, higher ones are removed first; Transformers leaves their order to the device's sort.

    Args:
        cutoff: set by ``top_k``.
        weights: of the vocabulary.
        removable: 1 - p, float64 ``[rows, 1]``; negative of rows without ``top_p``.
        best: the highest scores in descending order, if ``top_k`` is set; all further ones within the cutoff equal the
            last of them.
    """
    if best is None:
        total = weights.by_block(cutoff).sum(-1, keepdim=True)
        room = _room(total, removable)
        least, before = weights.search(room)
    else:
        kept = best >= cutoff.least
        further = weights.ties(cutoff.least).sum(-1, keepdim=True) - (best == cutoff.least).sum(-1, keepdim=True)
        sums = weights.of(best).where(kept, 0)
        total = sums.sum(-1, keepdim=True) + further * weights.of(cutoff.least)
        room = _room(total, removable)
        least, before = least_within(best, sums, room, cutoff.least)
    equal = (room - before) // weights.of(least).clamp(min=1)  # further ids of the same score that are kept
    ties_of = partial(block_of, weights.scores, padding=float("-inf"))
    last = _first_beyond(weights.ties(least), lambda block: (ties_of(block) == least).long(), equal)
    some = removable >= 0
    return Cutoff(torch.where(some, least, cutoff.least), torch.where(some, last, cutoff.last))


def _room(total: torch.Tensor, removable: torch.Tensor) -> torch.Tensor:
    """Return the most that likelier ids of a kept one may sum up to; at least 0, where 1 - p is rounded to 1."""
    return (total - (removable * total).floor().long() - 1).clamp_(min=0)


def _first_beyond(
    sums: torch.Tensor, weights_of: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor
) -> torch.Tensor:
    """Return the first id of each row whose cumulative weight exceeds the target, int64 ``[rows, 1]``.

    Blocks come first: cumulative sums of a vocabulary take longer than all other steps.

    Args:
        sums: weights of blocks, int64 ``[rows, blocks]``.
        weights_of: returns the weights ``[rows, ids of a block]`` of one block of each row, given int64 ``[rows, 1]``.
        target: int64 ``[rows, 1]``. If no sum exceeds it, the result is the last id of the last block or one beyond.
    """
    sums = sums.cumsum(-1)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    inside = weights_of(block).cumsum(-1)
    before = sums.gather(1, block) - inside[:, -1:]
    return block * BLOCK + torch.searchsorted(inside, target - before, right=True)


def largest(scores: torch.Tensor, count: int, maxima: torch.Tensor) -> LargestScores:
    """Return the highest scores of each row in descending order; of equal ones, lower ids come first.

    All of them stand in the ``count`` blocks with the highest maxima: ``topk`` of a vocabulary takes several times as
    long, and leaves the order of equal scores, common in bfloat16, to the device and the batch.

    Args:
        scores: float32 ``[rows, vocabulary]``.
        count: how many; more than the vocabulary are the same as all.
        maxima: of the blocks, ``[rows, blocks]``.
    """
    blocks = in_blocks(scores, float("-inf"))
    _, first = _ordered(maxima, torch.arange(maxima.shape[1], device=scores.device), count)
    chosen = blocks.gather(1, first[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    ids = (first[:, :, None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(1)
    return LargestScores(*_ordered(chosen, ids, min(count, scores.shape[1])))


class LargestScores(NamedTuple):
    """The highest scores of each row, float32 ``[rows, n]``, and their ids, int64 ``[rows, n]``."""

    values: torch.Tensor
    ids: torch.Tensor


def _ordered(values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest values of each row and their ids; lower ids come first among equal values."""
    keys = (keys_of(values) << 32) - ids
    best = keys.topk(min(count, keys.shape[1])).indices
    return values.gather(1, best), ids.expand_as(values).gather(1, best)
