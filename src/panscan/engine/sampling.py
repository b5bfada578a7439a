"""Sampling as in Transformers' ``generate()``, with random draws that depend only on seed and position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from panscan.core import Sampling, TokenLogprobs
from panscan.engine.scheduling.batch import SampledToken, SamplingRow
from panscan.images.transfer import upload
from panscan.model.machine import Readback

_BITS = 31  # bits of a draw: its product with the low half of a sum of weights fits into int64
DRAWS = 2**_BITS
"""Number of different draws; ``draw / DRAWS`` is a point in the cumulative distribution over ids."""
_ONE = 2.0**52  # weight of probability 1: float32 probabilities times it are exact, and sums stay below 2^53
_LARGEST = 2.0**34  # weight of the top id among candidates: sums of a vocabulary's weights are exact in float64
_BLOCK = 64  # ids whose weights are added up first; divides Gemma 3's vocabulary
_AT_ONCE = 32  # rows sorted at once: a row of Gemma 3's vocabulary takes about 10 MB
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

    def wait(self) -> list[SampledToken]:
        """Wait for the device and return one token per row."""
        tokens, *logprobs = self.readback.wait()
        found: dict[int, TokenLogprobs] = {}
        if logprobs:
            own, ids, values = (part.tolist() for part in logprobs)
            for index, (row, count) in enumerate(self.counts.items()):
                best = zip(ids[index], values[index], strict=True)
                found[row] = TokenLogprobs(own[index], tuple(best)[:count])
        return [SampledToken(token, found.get(row)) for row, token in enumerate(tokens.tolist())]


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
        sampled = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        sorting, others = (
            [index for index in sampled if _sorts(rows[index].sampling) is sorts] for sorts in (True, False)
        )
        for part in (*_index_parts(sorting), *([others] if others else [])):
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
        return _constrain(scores, rows)


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


def filter_scores(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Apply temperature, ``top_k``, ``top_p`` and ``min_p``; scores of removed ids become minus infinity.

    Rules and rounding are those of Transformers' logits warpers of the same names. The vocabulary is sorted only for a
    ``top_p`` without ``top_k``.

    Args:
        scores: float32 ``[rows, vocabulary]``; not changed.
        samplings: one per row, none greedy.
    """
    if any(item.temperature != 1 for item in samplings):
        heat = [[max(item.temperature, _COLDEST)] for item in samplings]
        scores = scores / _on_device_of(scores, heat, np.float32)
    best = scores[:, :0]
    if any(map(_sorts, samplings)):
        best = scores.sort(descending=True).values
    elif any(item.top_k is not None for item in samplings):
        best = scores.topk(min(max(item.top_k or 1 for item in samplings), scores.shape[-1])).values
    if any(item.top_k is not None for item in samplings):
        most = best.shape[1]
        kth = _on_device_of(scores, [[min(item.top_k or most, most) - 1] for item in samplings], np.int64)
        least = best.gather(1, kth)
        chosen = _on_device_of(scores, [[item.top_k is not None] for item in samplings], np.bool_)
        best, scores = (part.masked_fill(chosen & (part < least), float("-inf")) for part in (best, scores))
    if any(_has_top_p(item) for item in samplings):
        scores = scores.masked_fill(_outside_top_p(scores, samplings, best), float("-inf"))
    if any(item.min_p is not None for item in samplings):
        scores = scores.masked_fill(_outside_min_p(scores, samplings), float("-inf"))
    return scores


def _has_top_p(sampling: Sampling) -> bool:
    return sampling.top_p is not None and sampling.top_p < 1


def _sorts(sampling: Sampling) -> bool:
    """Return whether a row's vocabulary must be sorted: without ``top_k``, any number of ids may hold the mass."""
    return _has_top_p(sampling) and sampling.top_k is None


def _outside_top_p(scores: torch.Tensor, samplings: Sequence[Sampling], best: torch.Tensor) -> torch.Tensor:
    """Return a mask of the least likely ids whose probabilities sum up to at most 1 - p; never of the top id.

    Of equally likely ids, higher ones are removed first; Transformers leaves their order to the device's sort. Sums are
    those of integers, so they depend neither on the order of addition nor on other rows.

    Args:
        scores: ``[rows, vocabulary]``; minus infinity outside of ``top_k``.
        samplings: one per row.
        best: the highest scores in descending order. For a row with ``top_p``, further ones are minus infinity, or
            equal the last of ``best`` that is not.
    """
    weights = ((best - best[:, :1]).exp() * _LARGEST).long()
    count = (best > float("-inf")).sum(-1, keepdim=True)
    further = (scores > float("-inf")).sum(-1, keepdim=True) - count  # scores equal to the last of `best`
    weight = weights.gather(1, (count - 1).clamp(min=0))
    total = weights.sum(-1, keepdim=True) + further * weight
    limits = np.array([[1 - item.top_p if item.top_p and _has_top_p(item) else -1] for item in samplings], np.float32)
    middle = (limits.astype(np.float64) + np.nextafter(limits, np.float32(1))) / 2  # Transformers' sums are float32
    removable = upload(middle, scores.device) * total
    rest = total - weights.cumsum(-1) + weights  # of an id and all less likely ones
    outside = rest <= removable
    outside[:, 0] = False
    kept = (~outside).sum(-1, keepdim=True).minimum(count)
    least = best.gather(1, (kept - 1).clamp(min=0))
    equal = (best == least).logical_and(~outside).sum(-1, keepdim=True)
    more = further - (removable.clamp(min=0) / weight.clamp(min=1)).long()
    equal = torch.where(kept == count, equal + more.clamp(min=0), equal)
    last = _first_beyond((scores == least).long(), equal - 1)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return (removable >= 0) & ((scores < least) | ((scores == least) & (ids > last)))


def _outside_min_p(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return a mask of ids less likely than ``min_p`` times the probability of the top id."""
    probabilities = scores.softmax(-1)
    shares = _on_device_of(scores, [[item.min_p or 0.0] for item in samplings], np.float32)
    return probabilities < shares * probabilities.amax(-1, keepdim=True)


def _weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Return probabilities as integers, whose sums do not depend on the order of addition."""
    return (probabilities * _ONE).long()


def _sample(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample one id per row, int64 ``[rows]``: the first whose cumulative probability exceeds the draw."""
    weights = _weights(filter_scores(scores, [row.sampling for row in rows]).softmax(-1))
    draws = _on_device_of(scores, [[draw(row.seed, row.position)] for row in rows], np.int64)
    total, low = weights.sum(-1, keepdim=True), 2**_BITS - 1
    target = (total >> _BITS) * draws + ((total & low) * draws >> _BITS)  # total * draws / 2^31, rounded down
    return _first_beyond(weights, target).squeeze(1)


def _first_beyond(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first id of each row whose cumulative weight exceeds the target, int64 ``[rows, 1]``.

    Sums of blocks come first: cumulative sums of a vocabulary take longer than all other steps.

    Args:
        weights: int64 ``[rows, vocabulary]``.
        target: int64 ``[rows, 1]``.
    """
    missing = -weights.shape[1] % _BLOCK
    blocks = (pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1).cumsum(-1)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).cumsum(-1)
    before = sums.gather(1, block) - inside[:, -1:]
    found = block * _BLOCK + torch.searchsorted(inside, target - before, right=True)
    # NaN logits must not yield an id beyond the vocabulary.
    return found.clamp_(max=weights.shape[1] - 1)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Add biases, then apply penalties, as vLLM does: the repetition penalty divides positive scores and multiplies
    negative ones of ids of the prompt and answer; the others are subtracted from scores of ids of the answer."""
    biased: list[tuple[float, ...]] = []
    repeated: list[tuple[float, ...]] = []
    counted: list[tuple[float, ...]] = []
    for index, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            biased += [(index, token, bias) for token, bias in sampling.logit_bias.items()]
        if not sampling.penalised:
            continue
        if row.token_ids is None:
            raise ValueError("a penalty needs the ids seen so far")
        if (penalty := sampling.repetition_penalty) is not None:
            repeated += [(index, token, penalty) for token in set(row.token_ids)]
        if row.position and (sampling.frequency_penalty or sampling.presence_penalty):
            both = sampling.frequency_penalty, sampling.presence_penalty
            counts = Counter(row.token_ids[-row.position :])
            counted += [(index, token, count, *both) for token, count in counts.items()]
    scores = _changed(logits, biased, torch.add)
    scores = _changed(scores, repeated, lambda old, penalty: torch.where(old < 0, old * penalty, old / penalty))
    return _changed(scores, counted, lambda old, count, frequency, presence: old - frequency * count - presence)


def _changed(
    scores: torch.Tensor, entries: list[tuple[float, ...]], change: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return scores of which some were changed.

    Args:
        scores: ``[rows, vocabulary]``; not changed.
        entries: row, id and parameters of each change; ids beyond the vocabulary are ignored.
        change: computes the new scores from the old ones and the parameters.
    """
    entries = [entry for entry in entries if entry[1] < scores.shape[-1]]
    if not entries:
        return scores
    places = _on_device_of(scores, [entry[:2] for entry in entries], np.int64).unbind(1)
    parameters = _on_device_of(scores, [entry[2:] for entry in entries], np.float32).unbind(1)
    return scores.index_put(places, change(scores[places], *parameters))


def _constrain(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return the scores with minus infinity for every id outside its row's mask."""
    masks = [row.allowed for row in rows if row.allowed is not None]
    if not masks:
        return scores
    constrained = [index for index, row in enumerate(rows) if row.allowed is not None]
    packed, width = upload(np.stack(masks), scores.device), scores.shape[-1]
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    scores = scores.clone()
    for part in _index_parts(list(range(len(constrained)))):
        at = _on_device_of(scores, [constrained[index] for index in part], np.int64)
        allowed = (packed[part[0] : part[-1] + 1, :, None] >> bits & 1).bool().flatten(1)
        forbidden = ~pad(allowed, (0, width - allowed.shape[1]))  # a negative amount crops
        scores.index_copy_(0, at, scores.index_select(0, at).masked_fill_(forbidden, float("-inf")))
    return scores


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: dict[int, int]) -> list[torch.Tensor]:
    """Return log-probabilities of the rows that request them; equally likely ids are in ascending order.

    Returns:
        Log-probability of the chosen token ``[n]``, top ids ``[n, most]`` and their log-probabilities ``[n, most]``.
    """
    if not counts:
        return []
    most = min(max(counts.values()), logits.shape[-1])
    found = []
    for part in _index_parts(list(counts)):
        at = _on_device_of(logits, part, np.int64)
        values = logits.index_select(0, at).log_softmax(-1)
        # With ``topk`` alone, the order of ties, common in bfloat16, would depend on the device and the batch.
        bits = values.view(torch.int32)
        ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # integers in the order of the float32 values
        keys = (ordered.long() << 32) - torch.arange(values.shape[-1], device=values.device)
        best = keys.topk(most).indices
        own = values.gather(1, tokens.index_select(0, at)[:, None]).squeeze(1)
        found.append((own, best, values.gather(1, best)))
    return [torch.cat(each) for each in zip(*found, strict=True)]


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


def _on_device_of(tensor: torch.Tensor, values: list[Any], dtype: type[np.generic]) -> torch.Tensor:
    """Return values as a tensor on the device of another one; ``torch.tensor`` would wait for the device."""
    return upload(np.array(values, dtype=dtype), tensor.device)


def _index_parts(indices: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(indices), _AT_ONCE):
        yield indices[at : at + _AT_ONCE]
