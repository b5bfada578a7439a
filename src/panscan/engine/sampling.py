"""Sampling as in Transformers' ``generate()``: biases, penalties, masks, tokens and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from panscan.core import TokenLogprobs
from panscan.core.groups import grouped
from panscan.engine.filters import PARAMETERS, Path, draws, heated, largest, parameters_of, sample
from panscan.engine.scheduling.batch import NO_TOKEN, SamplingRow
from panscan.engine.weights import in_blocks
from panscan.images.transfer import upload
from panscan.model.machine import GraphRecorder, Readback

_FEW = 128  # a ``top_k`` whose candidates take less memory than the scores: 0.4 MB per row of 1 MB
_MASKED_AT_ONCE = 128  # rows: a mask takes 1 MB when it is unpacked
_SAMPLED_AT_ONCE = 128  # rows: their scores take 134 MB
_AT_ONCE = 32  # rows of log-probabilities: each takes up to 10 MB
_MANY_AT_ONCE = 8  # rows with many candidates, which are rare: less than the scores of all rows
_SIZES = 8, 16, 32, 64, 128  # numbers of rows that are recorded, besides the maximum
_PATHS = Path(0, top_p=False), Path(0, top_p=True)
_CANDIDATES = Path(64, top_p=True)  # for any ``top_k`` up to Gemma 3's own
_TOP_LOGPROBS = 20  # the most that a request can ask for


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that a device is still computing.

    Args:
        tokens: int64 ``[rows]``, on the device; the next pass may read them without waiting.
        readback: copies the tokens, the highest scores and the inputs of log-probabilities to the host.
        counts: number of log-probabilities requested, by row, in the order of ``readback``'s rows.
    """

    tokens: torch.Tensor
    readback: Readback
    counts: dict[int, int]

    def wait(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait for the device; return the token of each row, and log-probabilities by row.

        The token of a row whose highest score is NaN or infinite is :data:`NO_TOKEN`.
        """
        tokens, best, *logprobs = (part.tolist() for part in self.readback.wait())
        tokens = [token if score < inf else NO_TOKEN for token, score in zip(tokens, best, strict=True)]
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
        self._recorded: _RecordedSteps | None = None
        self._at_once = _SAMPLED_AT_ONCE

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
        tokens = scores.argmax(-1)  # of NaN, if there is one
        best = scores.gather(1, tokens[:, None]).squeeze(1)
        for part in _parts(rows, self._at_once):
            if len(part) == len(rows):
                tokens = self._sample(scores, rows)
            else:
                at = _on_device_of(scores, part, np.int64)
                tokens.index_copy_(0, at, self._sample(scores.index_select(0, at), [rows[index] for index in part]))
        counts = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
        return PendingTokens(tokens, Readback.of(tokens, best, *self._logprobs(logits, tokens, counts)), counts)

    def record(self, recorder: GraphRecorder, vocabulary: int, rows: int) -> None:
        """Record the usual steps after scores are known: one by one, their launches take several times as long as they.

        Args:
            recorder: records them.
            vocabulary: ids of a row of logits.
            rows: the most at once; further ones are sampled after them.
        """
        self._recorded, self._at_once = _RecordedSteps(recorder, vocabulary, rows), rows

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

    def _sample(self, scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        samplings = [row.sampling for row in rows]
        drawn = draws([row.seed for row in rows], [row.position for row in rows])
        parameters, path = upload(parameters_of(samplings, drawn), scores.device), Path.of(samplings)
        tokens = None if self._recorded is None else self._recorded.sample(scores, parameters, path)
        return sample(heated(scores, parameters), parameters, path) if tokens is None else tokens

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, counts: dict[int, int]) -> list[torch.Tensor]:
        """Return log-probabilities of the rows that request them; equally likely ids are in ascending order.

        Returns:
            Log-probability of the chosen token ``[n]``, top ids ``[n, most]`` and their log-probabilities.
        """
        if not counts:
            return []
        compute = _logprobs if self._recorded is None else self._recorded.logprobs
        most = max(counts.values())
        parts = torch.split(_on_device_of(logits, [*counts], np.int64), min(self._at_once, _AT_ONCE))
        results = [compute(logits.index_select(0, part), tokens.index_select(0, part), most) for part in parts]
        return [*map(torch.cat, zip(*results, strict=True))]


class _RecordedSteps:
    """Steps of the sampler as CUDA graphs, for a few numbers of rows.

    Args:
        recorder: records them.
        vocabulary: ids of a row of scores.
        most: rows at once.
    """

    def __init__(self, recorder: GraphRecorder, vocabulary: int, most: int) -> None:
        device = recorder.device
        self._scores = torch.zeros(most, vocabulary, device=device)  # inputs of all graphs
        self._parameters = torch.ones(most, PARAMETERS, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.long, device=device)
        self._sizes = sorted({most, *(size for size in _SIZES if size < most)})
        self._paths = {
            (path, size): recorder.record(partial(sample, self._scores[:size], self._parameters[:size], path))
            for path in (*_PATHS, _CANDIDATES)
            for size in self._sizes
        }
        self._top = {
            size: recorder.record(partial(_logprobs, self._scores[:size], self._tokens[:size], _TOP_LOGPROBS))
            for size in self._sizes
            if size <= _AT_ONCE
        }

    def sample(self, scores: torch.Tensor, parameters: torch.Tensor, path: Path) -> torch.Tensor | None:
        """Return tokens as :func:`panscan.engine.filters.sample` does; None if the path is not recorded.

        Args:
            scores: before temperatures, float32 ``[rows, vocabulary]``.
            parameters: of the rows.
            path: steps to take.
        """
        if 0 < path.candidates <= _CANDIDATES.candidates:
            path = _CANDIDATES
        rows = len(scores)
        replay = self._paths.get((path, self._size(rows)))
        if replay is None:
            return None
        heated(scores, parameters, out=self._scores[:rows])
        self._parameters[:rows].copy_(parameters)
        return replay()[:rows].clone()

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
        """Return the log-probabilities of :func:`_logprobs`, of at most 32 rows."""
        rows = len(logits)
        self._scores[:rows].copy_(logits)
        self._tokens[:rows].copy_(tokens)
        chosen, ids, values = self._top[self._size(rows)]()
        return chosen[:rows].clone(), ids[:rows, :top].clone(), values[:rows, :top].clone()

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)


def _parts(rows: Sequence[SamplingRow], at_once: int) -> Iterator[list[int]]:
    """Yield indices of rows to sample at once: with ``top_k`` or without, and few if each takes much memory."""
    kinds = grouped(
        (None if row.sampling.top_k is None else row.sampling.top_k <= _FEW, index)
        for index, row in enumerate(rows)
        if not row.sampling.greedy
    )
    for few, indices in kinds.items():
        size = min(at_once, _MANY_AT_ONCE) if few is False else at_once
        for at in range(0, len(indices), size):
            yield indices[at : at + size]


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


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities of each row; equally likely ids are in ascending order.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        tokens: the chosen ones, int64 ``[rows]``.
        top: number of most probable ids.

    Returns:
        Log-probability of the chosen token ``[rows]``, top ids ``[rows, top]`` and their log-probabilities.
    """
    values = logits.log_softmax(-1)
    best = largest(values, top, in_blocks(values, float("-inf")).amax(-1))
    return values.gather(1, tokens[:, None]).squeeze(1), best.ids, best.values


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
        parts.append((ranks, *_logprobs(logits, tokens, top)))
    return Readback.of(*map(torch.cat, zip(*parts, strict=True)))


def read_scores(scores: Readback) -> list[TokenLogprobs]:
    """Wait for the results of :func:`score_tokens`, and return the log-probabilities of each row."""
    rows = zip(*(tensor.tolist() for tensor in scores.wait()), strict=True)
    return [TokenLogprobs(value, (*zip(ids, values, strict=True),), rank) for rank, value, ids, values in rows]


def _on_device_of(tensor: torch.Tensor, values: list[Any] | NDArray[Any], dtype: type[np.generic]) -> torch.Tensor:
    """Return values as a tensor on the device of another one; ``torch.tensor`` would wait for the device."""
    return upload(np.array(values, dtype=dtype), tensor.device)
