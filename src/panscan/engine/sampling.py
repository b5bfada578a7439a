"""Sampling as in Transformers' ``generate()``, with random draws that depend only on seed and position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from panscan.core import Sampling, TokenLogprobs
from panscan.engine.scheduling.batch import SamplingRow
from panscan.engine.weights import BLOCK, Cutoff, VocabularyWeights, block_of, in_blocks, keys_of
from panscan.images.transfer import upload
from panscan.model.machine import Readback

_BITS = 31  # bits of a draw: its product with the low half of a sum of weights fits into int64
DRAWS = 2**_BITS
"""Number of different draws; ``draw / DRAWS`` is a point in the cumulative distribution over ids."""
_FEW = 128  # a ``top_k`` whose candidates take less memory than the scores: 0.4 MB per row of 1 MB
_MASKED_AT_ONCE = 128  # rows: a mask takes 1 MB when it is unpacked
_AT_ONCE = 32  # rows with more: each takes about 10 MB
_COLDEST = 1e-30  # temperature: lower ones overflow the scores, and the top id has all of the mass long before
_ALL64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that a device is still computing.

    Args:
        tokens: int64 ``[rows]``, on the device; the next pass may read them without waiting.
        readback: copies the tokens and the inputs of log-probabilities to the host.
        counts: number of log-probabilities requested, by row, in the order of ``readback``'s rows.
    """

    tokens: torch.Tensor
    readback: Readback
    counts: dict[int, int]

    def wait(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait for the device; return the token of each row, and log-probabilities by row."""
        tokens, *logprobs = (part.tolist() for part in self.readback.wait())
        rows = zip(self.counts.items(), *logprobs, strict=True) if logprobs else ()
        return tokens, {
            row: TokenLogprobs(value, (*zip(ids[:count], values, strict=False),))
            for (row, count), value, ids, values in rows
        }


class Sampler:
    """Chooses next tokens for many requests at once; no row's token depends on other rows.

    Args:
        suppressed: ids that are never chosen; ids beyond the vocabulary are ignored.
        device: device of the logits.
    """

    def __init__(self, suppressed: Sequence[int], device: torch.device | str) -> None:
        self._ids = torch.tensor(sorted(set(suppressed)), dtype=torch.long, device=device)
        self._mask: torch.Tensor | None = None

    @torch.no_grad()
    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        """Choose one token per row on the device, without waiting for it.

        The order is that of vLLM and ``generate()``: biases, penalties, suppressed ids, the row's mask, then either the
        first id of the highest score, or temperature, ``top_k``, ``top_p``, ``min_p`` and a draw. Log-probabilities are
        those of the unchanged ``logits``.

        Args:
            logits: float32 ``[rows, vocabulary]``; not changed.
            rows: one per row of ``logits``.
        """
        scores = self.scores(logits, rows)
        tokens = scores.argmax(-1)
        without, few, many = list[int](), list[int](), list[int]()
        for index, row in enumerate(rows):
            if not row.sampling.greedy:
                top_k = row.sampling.top_k
                (without if top_k is None else few if top_k <= _FEW else many).append(index)
        for part in filter(None, (without, few, *(many[at : at + _AT_ONCE] for at in range(0, len(many), _AT_ONCE)))):
            if len(part) == len(rows):
                tokens = _sample(scores, rows)
            else:
                at = _on_device_of(scores, part, np.int64)
                tokens.index_copy_(0, at, _sample(scores.index_select(0, at), [rows[index] for index in part]))
        counts = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
        return PendingTokens(tokens, Readback.of(tokens, *_logprobs(logits, tokens, counts)), counts)

    def scores(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Return scores ``[rows, vocabulary]`` after biases and penalties, with forbidden ids at minus infinity."""
        scores = _penalise(logits, rows)
        if len(self._ids):
            if self._mask is None or len(self._mask) != scores.shape[-1]:
                self._mask = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self._ids)
            scores = scores.masked_fill(self._mask, float("-inf"))
        if any(row.allowed is not None for row in rows):
            scores = scores.clone() if scores is logits else scores
            _constrain(scores, rows)
        return scores


def draw(seed: int, position: int) -> int:
    """Return a uniform integer in [0, 2^31) for one token, the same on every machine.

    It is output ``position`` of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), whose initial state is the mixed seed.
    """
    golden = 0x9E3779B97F4A7C15
    return _mix(_mix(seed + golden) + (position + 1) * golden) >> (64 - _BITS)


def _mix(value: int) -> int:
    value &= _ALL64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _ALL64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _ALL64
    return value ^ (value >> 31)


def vocabulary_weights(scores: torch.Tensor, samplings: Sequence[Sampling]) -> VocabularyWeights:
    """Return the weights of a vocabulary at each row's temperature."""
    if any(item.temperature != 1 for item in samplings):
        heat = [[max(item.temperature, _COLDEST)] for item in samplings]
        scores = scores / _on_device_of(scores, heat, np.float32)
    if not scores.is_cuda or find_spec("triton") is None:
        return VocabularyWeights(scores)
    from panscan.engine.sampling_kernels import TritonVocabulary

    return TritonVocabulary(scores)


def choose_cutoff(weights: VocabularyWeights, samplings: Sequence[Sampling]) -> Cutoff:
    """Return which ids ``top_k``, ``top_p`` and ``min_p`` leave, by the rules of Transformers' logits warpers.

    Args:
        weights: of the scores at each row's temperature.
        samplings: one per row, none greedy; all with ``top_k``, or none.
    """
    scores, top = weights.scores, weights.top
    cutoff = Cutoff(torch.full_like(top, float("-inf")), torch.full_like(top, scores.shape[1], dtype=torch.long))
    best = None
    if most := max(item.top_k or 0 for item in samplings):
        best = _largest(scores, most, weights.maxima).values
        kth = _on_device_of(scores, [[min(item.top_k or 1, best.shape[1]) - 1] for item in samplings], np.int64)
        cutoff = replace(cutoff, least=best.gather(1, kth))
    if any(_has_top_p(item) for item in samplings):
        tops = np.array([[1 - item.top_p if item.top_p and _has_top_p(item) else -1] for item in samplings], np.float32)
        middle = (tops.astype(np.float64) + np.nextafter(tops, np.float32(1))) / 2  # Transformers' sums are float32
        cutoff = _with_top_p(cutoff, weights, upload(middle, scores.device), best)
    if any(item.min_p is not None for item in samplings):
        shares = _on_device_of(scores, [[item.min_p or 0.0] for item in samplings], np.float32)
        least = (top + shares.log()).maximum(cutoff.least)
        cutoff = Cutoff(least, cutoff.last.masked_fill(least > cutoff.least, scores.shape[1]))
    return cutoff


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
        earlier = sums.cumsum(-1) - sums
        count = ((earlier <= room) & kept).sum(-1, keepdim=True)
        least = best.gather(1, (count - 1).clamp_(min=0))  # NaN logits keep none
        before = sums.where(best > least, 0).sum(-1, keepdim=True)
    equal = (room - before) // weights.of(least).clamp(min=1)  # further ids of the same score that are kept
    ties_of = partial(block_of, weights.scores, padding=float("-inf"))
    last = _first_beyond(weights.ties(least), lambda block: (ties_of(block) == least).long(), equal)
    some = removable >= 0
    return Cutoff(torch.where(some, least, cutoff.least), torch.where(some, last, cutoff.last))


def _room(total: torch.Tensor, removable: torch.Tensor) -> torch.Tensor:
    """Return the most that likelier ids of a kept one may sum up to; at least 0, where 1 - p is rounded to 1."""
    return (total - (removable * total).floor().long() - 1).clamp_(min=0)


def _sample(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample one id per row, int64 ``[rows]``: the first whose cumulative probability exceeds the draw."""
    samplings = [row.sampling for row in rows]
    weights = vocabulary_weights(scores, samplings)
    cutoff = choose_cutoff(weights, samplings)
    sums = weights.by_block(cutoff)
    draws = _on_device_of(scores, [[draw(row.seed, row.position)] for row in rows], np.int64)
    total, low = sums.sum(-1, keepdim=True), 2**_BITS - 1
    target = (total >> _BITS) * draws + ((total & low) * draws >> _BITS)  # total * draws / 2^31, rounded down
    # NaN logits must not yield an id beyond the vocabulary.
    last = scores.shape[1] - 1
    return _first_beyond(sums, partial(weights.of_block, cutoff), target).clamp_(max=last).squeeze(1)


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


def _largest(scores: torch.Tensor, count: int, maxima: torch.Tensor) -> LargestScores:
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


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Add biases, then apply penalties, as vLLM does: the repetition penalty divides positive scores and multiplies
    negative ones of ids of the prompt and answer; the others are subtracted from scores of ids of the answer."""
    if any(row.sampling.penalised and row.token_ids is None for row in rows):
        raise ValueError("a penalty needs the ids seen so far")
    biases = [(index, *item) for index, row in enumerate(rows) for item in (row.sampling.logit_bias or {}).items()]
    seen, answers = dict[int, Sequence[int]](), dict[int, Sequence[int]]()
    for index, row in enumerate(rows):
        if row.sampling.repetition_penalty is not None:
            seen[index] = row.token_ids or ()
        if row.position and (row.sampling.frequency_penalty or row.sampling.presence_penalty):
            answers[index] = (row.token_ids or ())[-row.position :]
    scores = logits
    if biases:
        places = np.array([bias[:2] for bias in biases])
        scores = _changed(scores, places, torch.add, np.array([bias[2] for bias in biases]))
    if seen:
        places, _ = _counted(seen)
        penalty = np.array([row.sampling.repetition_penalty or 1 for row in rows])[places[:, 0]]
        scores = _changed(scores, places, lambda old, by: torch.where(old < 0, old * by, old / by), penalty)
    if answers:
        places, counts = _counted(answers)
        frequency = np.array([row.sampling.frequency_penalty for row in rows])[places[:, 0]]
        presence = np.array([row.sampling.presence_penalty for row in rows])[places[:, 0]]
        scores = _changed(scores, places, lambda old, n, f, p: old - f * n - p, counts, frequency, presence)
    return scores


def _counted(ids_of_rows: Mapping[int, Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each different row and id ``[n, 2]``, and how often it comes ``[n]``."""
    keys = np.concatenate([(index << 32) + np.array(ids, np.int64) for index, ids in ids_of_rows.items()])
    keys, counts = np.unique(keys, return_counts=True)
    return np.stack([keys >> 32, keys & 0xFFFFFFFF], 1), counts


def _changed(
    scores: torch.Tensor, places: NDArray[np.int64], change: Callable[..., torch.Tensor], *parameters: NDArray[Any]
) -> torch.Tensor:
    """Return scores of which some were changed.

    Args:
        scores: ``[rows, vocabulary]``; not changed.
        places: row and id of each change, ``[n, 2]``; ids beyond the vocabulary are ignored.
        change: computes the new scores from the old ones and the parameters.
        parameters: each ``[n]``.
    """
    known = places[:, 1] < scores.shape[1]
    if not known.any():
        return scores
    indices = _on_device_of(scores, places[known], np.int64).unbind(1)
    return scores.index_put(
        indices,
        change(scores[indices], *(_on_device_of(scores, parameter[known], np.float32) for parameter in parameters)),
    )


def _constrain(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set the scores of every id outside its row's mask to minus infinity."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    constrained, width = [*masks], scores.shape[-1]
    host = torch.empty((len(masks), len(masks[constrained[0]])), dtype=torch.uint8, pin_memory=scores.is_cuda)
    np.stack([*masks.values()], out=host.numpy())  # no second copy: masks of many rows have megabytes
    packed = host.to(scores.device, non_blocking=True)
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    for start in range(0, len(constrained), _MASKED_AT_ONCE):
        part = constrained[start : start + _MASKED_AT_ONCE]
        forbidden = ((packed[start : start + len(part), :, None] >> bits & 1) == 0).flatten(1)
        forbidden = pad(forbidden, (0, width - forbidden.shape[1]), value=True)  # a negative amount crops
        if len(constrained) == len(rows):
            scores[start : start + len(part)].masked_fill_(forbidden, float("-inf"))
        else:
            at = _on_device_of(scores, part, np.int64)
            scores.index_copy_(0, at, scores.index_select(0, at).masked_fill_(forbidden, float("-inf")))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: dict[int, int]) -> list[torch.Tensor]:
    """Return log-probabilities of the rows that request them; equally likely ids are in ascending order.

    Returns:
        Log-probability of the chosen token ``[n]``, top ids ``[n, most]`` and their log-probabilities ``[n, most]``.
    """
    if not counts:
        return []
    most = min(max(counts.values()), logits.shape[-1])
    found = []
    for part in torch.split(_on_device_of(logits, [*counts], np.int64), _AT_ONCE):
        values = logits.index_select(0, part).log_softmax(-1)
        best = _largest(values, most, in_blocks(values, float("-inf")).amax(-1))
        chosen = values.gather(1, tokens.index_select(0, part)[:, None]).squeeze(1)
        found.append((chosen, best.ids, best.values))
    return [*map(torch.cat, zip(*found, strict=True))]


def score_tokens(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    top: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    rows_at_once: int,
) -> Readback:
    """Compute log-probabilities of given tokens for :func:`read_scores`, in parts: logits of all rows take gigabytes.

    Args:
        hidden: final hidden states ``[rows, hidden]``.
        ids: int64 ``[rows]``: the token of each row.
        top: number of most probable tokens to return for each row.
        logits_of: computes float32 logits ``[rows, vocabulary]``.
        rows_at_once: maximum number of rows of logits.
    """
    parts = []
    size = min(rows_at_once, _AT_ONCE)
    for part, tokens in zip(torch.split(hidden, size), torch.split(ids, size), strict=True):
        logits = logits_of(part)
        ranks = (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1
        parts.append((ranks, *_logprobs(logits, tokens, dict.fromkeys(range(len(tokens)), top))))
    return Readback.of(*map(torch.cat, zip(*parts, strict=True)))


def read_scores(scores: Readback) -> list[TokenLogprobs]:
    """Wait for the results of :func:`score_tokens`, and return the log-probabilities of each row."""
    rows = zip(*(tensor.tolist() for tensor in scores.wait()), strict=True)
    return [TokenLogprobs(value, (*zip(ids, values, strict=True),), rank) for rank, value, ids, values in rows]


def _on_device_of(tensor: torch.Tensor, values: list[Any] | NDArray[Any], dtype: type[np.generic]) -> torch.Tensor:
    """Return values as a tensor on the device of another one; ``torch.tensor`` would wait for the device."""
    return upload(np.array(values, dtype=dtype), tensor.device)
