"""Logits become tokens as in Transformers' ``generate()``, with randomness that depends on seed and place alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from panscan.core import Sampling, TokenLogprobs

__all__ = ["Chosen", "Row", "Sampler", "draw", "filter_scores"]

_BITS = 31  # of a draw: its product with the low half of a sum of weights fits into int64
_ONE = 2.0**52  # weight of probability 1: float32 probabilities times it are exact, and sums stay below 2^53
_AT_ONCE = 32  # rows filtered at once: a row of Gemma 3's vocabulary takes about 10 MB meanwhile
_COLDEST = 1e-30  # temperature: scores divided by less overflow, and the likeliest id has all of the mass long before
_ALL64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """How the next token of one request is chosen.

    Args:
        sampling: as the request says.
        seed: of the request's random stream; any whole number.
        position: of the token in the answer, from 0.
        seen: ids of the prompt and the answer so far; needed with a repetition penalty only.
    """

    sampling: Sampling
    seed: int
    position: int
    seen: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token, with log-probabilities if the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses next tokens for many requests at once; no row's token depends on the others.

    Args:
        suppressed: ids that are never chosen; those beyond the vocabulary do not matter.
        device: of the logits.
    """

    def __init__(self, suppressed: Sequence[int], device: torch.device | str) -> None:
        self._ids = torch.tensor(sorted(set(suppressed)), dtype=torch.long, device=device)
        self._mask: torch.Tensor | None = None

    @torch.no_grad()
    def choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Chosen]:
        """One token per row.

        The order is that of ``generate()``: repetition penalty, suppressed ids, then either the first id of the
        highest score, or temperature, ``top_k``, ``top_p``, ``min_p`` and a draw. Log-probabilities are those of
        ``logits`` as they are.

        Args:
            logits: float32 ``[rows, vocabulary]``; not changed.
            rows: one per row of ``logits``.
        """
        if not rows:
            return []
        scores = self.scores(logits, rows)
        tokens = scores.argmax(-1)
        sampled = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        for part in _parts(sampled):
            tokens[part] = _sample(scores[part], [rows[index] for index in part])
        ids = tokens.tolist()
        logprobs = _logprobs(logits, tokens, rows)
        return [Chosen(token, logprobs.get(index)) for index, token in enumerate(ids)]

    def scores(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """What greedy rows take the highest of: ``[rows, vocabulary]``, penalised, suppressed ids at minus infinity."""
        scores = _penalise(logits, rows)
        if not len(self._ids):
            return scores
        if self._mask is None or len(self._mask) != scores.shape[-1]:
            self._mask = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self._ids)
        return scores.masked_fill(self._mask, float("-inf"))


def draw(seed: int, position: int) -> int:
    """A uniform whole number in [0, 2^31) for one token, the same on every machine.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): output ``position`` of
    the generator whose state is the seed, mixed.
    """
    golden = 0x9E3779B97F4A7C15
    return _mix(_mix(seed + golden) + (position + 1) * golden) >> (64 - _BITS)


def _mix(value: int) -> int:
    value &= _ALL64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _ALL64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _ALL64
    return value ^ (value >> 31)


def filter_scores(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Scores after temperature, ``top_k``, ``top_p`` and ``min_p``: what is filtered out is minus infinity.

    The rules and roundings are those of Transformers' logits warpers of these names.

    Args:
        scores: float32 ``[rows, vocabulary]``; not changed.
        samplings: one per row, none greedy.
    """
    heat = [[max(item.temperature, _COLDEST)] for item in samplings]
    scores = scores / torch.tensor(heat, dtype=torch.float32, device=scores.device)
    for given, outside in (("top_k", _outside_top_k), ("top_p", _outside_top_p), ("min_p", _outside_min_p)):
        if any(getattr(item, given) is not None for item in samplings):
            scores = scores.masked_fill(outside(scores, samplings), float("-inf"))
    return scores


def _outside_top_k(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Scores below the k-th highest; what equals it stays."""
    most = min(max(item.top_k or 1 for item in samplings), scores.shape[-1])
    places = torch.tensor([[min(item.top_k or 1, most) - 1] for item in samplings], device=scores.device)
    chosen = torch.tensor([[item.top_k is not None] for item in samplings], device=scores.device)
    return chosen & (scores < scores.topk(most).values.gather(1, places))


def _outside_top_p(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The least likely ids whose probabilities together are at most 1 - p, never the likeliest id.

    Of equal ones the higher ids go first; Transformers leaves that to the device's sort.
    """
    ordered, order = scores.flip(-1).sort(stable=True)
    mass = _weights(ordered.softmax(-1)).cumsum(-1).float()
    limits = [[-1.0 if item.top_p is None or item.top_p == 1 else 1 - item.top_p] for item in samplings]
    outside = mass <= torch.tensor(limits, dtype=torch.float32, device=scores.device) * _ONE
    outside[:, -1] = False
    return outside.scatter(1, order, outside).flip(-1)


def _outside_min_p(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Ids less likely than this share of the likeliest."""
    probabilities = scores.softmax(-1)
    shares = torch.tensor([[item.min_p or 0.0] for item in samplings], dtype=torch.float32, device=scores.device)
    return probabilities < shares * probabilities.amax(-1, keepdim=True)


def _weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as whole numbers: their sums are the same in whatever order a device adds them."""
    return (probabilities * _ONE).long()


def _sample(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """One id per row, int64 ``[rows]``: the first whose share of the distribution, in order of ids, ends behind the
    draw."""
    sums = _weights(filter_scores(scores, [row.sampling for row in rows]).softmax(-1)).cumsum(-1)
    draws = torch.tensor([[draw(row.seed, row.position)] for row in rows], device=scores.device)
    total, low = sums[:, -1:], 2**_BITS - 1
    target = (total >> _BITS) * draws + ((total & low) * draws >> _BITS)  # total * draws / 2^31, rounded down
    # Logits that are no numbers must not become an id beyond the vocabulary.
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)


def _penalise(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores of ids that a row has seen, divided by its repetition penalty, or times it where they are negative."""
    places: list[tuple[int, int]] = []
    penalties: list[float] = []
    for index, row in enumerate(rows):
        penalty = row.sampling.repetition_penalty
        if penalty is None or penalty == 1:
            continue
        if row.seen is None:
            raise ValueError("a repetition penalty needs the ids seen so far")
        seen = [(index, token) for token in set(row.seen) if token < logits.shape[-1]]
        places += seen
        penalties += [penalty] * len(seen)
    if not places:
        return logits
    at = torch.tensor(places, device=logits.device).unbind(1)
    penalty_at = torch.tensor(penalties, dtype=torch.float32, device=logits.device)
    before = logits[at]
    return logits.index_put(at, torch.where(before < 0, before * penalty_at, before / penalty_at))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[Row]) -> dict[int, TokenLogprobs]:
    """By row, where they are asked for. Of ids that are equally likely the lower comes first."""
    found: dict[int, TokenLogprobs] = {}
    counts = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
    for part in _parts(list(counts)):
        values = logits[part].log_softmax(-1)
        best = _ranked(values, min(max(counts[index] for index in part), values.shape[-1]))
        of_token = values.gather(1, tokens[part][:, None]).squeeze(1).tolist()
        tops = zip(best.tolist(), values.gather(1, best).tolist(), strict=True)
        for index, own, (ids, each) in zip(part, of_token, tops, strict=True):
            found[index] = TokenLogprobs(own, tuple(zip(ids, each, strict=True))[: counts[index]])
    return found


def _ranked(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the highest values, int64 ``[rows, count]``. ``topk`` alone leaves the order of equal values, which
    bfloat16 logits are full of, to the device and the batch."""
    bits = values.view(torch.int32)
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # whole numbers in the order of the float32 values
    keys = (ordered.long() << 32) - torch.arange(values.shape[-1], device=values.device)
    return keys.topk(count).indices


def _parts(indices: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(indices), _AT_ONCE):
        yield indices[at : at + _AT_ONCE]
