"""Compare measured tokens with the reference: where an answer departs from it, and whether rounding explains that.

Along the reference's own tokens, the hidden states are stored. Beyond them, one float32 prefill of prompt and answer
computes the reference's choice at every position (:class:`ReferenceRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import torch
from msgspec import structs

from panscan.core import Result
from panscan.core.lru import LruCache
from panscan.engine.filters import DRAWS, draws
from panscan.model.checkpoint import Loaded
from panscan.model.observation import ForcedTokens
from panscan.records.verdict_records import Departure, TokenCheck
from panscan.settings import Settings
from panscan.verdict.float32 import head_logits, warped_scores
from panscan.verdict.judgement import clear_margin

_PERTURBED = 32  # perturbed logits per sampled position; if all draw the same token, noise cannot change it
_ROWS = 64  # positions whose logits are in memory at once
_CACHED = 64  # answers whose hidden states stay in memory, a few megabytes each
_LEAST_DRAWN = 1e-9  # probability: a token that the filters exclude counts as one of this
_END = "the end"

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """One request of a reference.

    Args:
        request: request id.
        tokens: greedy tokens.
        positions: positions of image tokens in the prompt.
        answer: final hidden states before each token, float32 ``[tokens, hidden]``.
        image: final hidden states at the image positions, float32 ``[positions, hidden]``.
    """

    request: str
    tokens: list[int]
    positions: list[int]
    answer: torch.Tensor
    image: torch.Tensor

    def forced_tokens(self, steps: int) -> ForcedTokens:
        return ForcedTokens(self.tokens, self.positions, steps)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the tokens of one model under one cell's settings.

    Args:
        loaded: model, for its output matrix and tokenizer.
        settings: cell settings.
        noise: largest margin change of eager attention at the cell's precision, in nats.
    """

    loaded: Loaded
    settings: Settings
    noise: float

    @property
    def suppressed(self) -> list[int]:
        return list(self.loaded.model.generation_config.suppress_tokens or [])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, float32 ``[positions, vocabulary]``; suppressed tokens are ``-inf``."""
        return self._scores(hidden).cpu()

    def gaps(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return by how much each position prefers its most probable token to the given one, in nats.

        Args:
            hidden: final hidden states, float32 ``[positions, hidden]``.
            tokens: a token for each position.

        Returns:
            Margins, float32 ``[positions]`` on the CPU.
        """
        gaps = []
        for rows, ids in zip(torch.split(hidden, _ROWS), torch.split(torch.tensor(tokens), _ROWS), strict=True):
            scores = self._scores(rows)
            gaps.append(scores.amax(-1) - scores.gather(1, ids[:, None].to(scores.device))[:, 0])
        return torch.cat(gaps).cpu()

    def excess(self, hidden: torch.Tensor, tokens: Tokens) -> tuple[float, float]:
        """Return by how much drawn tokens are more probable than draws on average, and the variance of draws.

        Both are sums over the positions, of log-probabilities after the cell's filters, in nats.

        Args:
            hidden: final hidden states, float32 ``[positions, hidden]``.
            tokens: the token drawn at each position.
        """
        total = variance = 0.0
        for rows, ids in zip(torch.split(hidden, _ROWS), torch.split(torch.tensor(tokens), _ROWS), strict=True):
            p = warped_scores(self.logits(rows), self.settings.sampling).double().softmax(-1)
            value = p.clamp_min(_LEAST_DRAWN).log()
            mean = (p * value).sum(-1, keepdim=True)
            total += float((value.gather(1, ids[:, None]) - mean).sum())
            variance += float((p * (value - mean).square()).sum())
        return total, variance

    def impossible_token(self, tokens: Tokens) -> int | None:
        """Return the position of the first token that no answer can have, or that follows the end; None without one."""
        marks = () if self.settings.ignore_eos else self.loaded.eos_ids
        wrong = (
            position
            for position, token in enumerate(tokens)
            if token in self.suppressed or (position and tokens[position - 1] in marks)
        )
        return next(wrong, None)

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = head_logits(self.loaded.model, hidden)
        scores[:, [token for token in self.suppressed if token < scores.shape[-1]]] = float("-inf")
        return scores

    def departure(
        self, request: str, position: int, pair: tuple[int | None, int | None], hidden: torch.Tensor | None
    ) -> Departure:
        """Describe a token that differs from the expected one.

        Args:
            request: request id.
            position: position of the token in the answer.
            pair: measured and expected token; None stands for the end of the answer.
            hidden: final hidden state before the token, float32 ``[hidden]``; None if unknown.
        """
        measured, expected = pair
        margin, clear = None, None
        if measured is None or expected is None or measured in self.suppressed:
            clear = True
        elif hidden is not None:
            row = self.logits(hidden[None])[0]
            difference = float(row[expected] - row[measured])
            if isfinite(difference):  # otherwise the reference overflows, or suppresses one of the tokens
                margin, clear = difference, difference > clear_margin(self.noise)
        return Departure(request, position, measured, expected, self.text(measured), self.text(expected), margin, clear)

    def text(self, token: int | None) -> str:
        """Return a token's text in quotes, or the name of the end of the answer."""
        return _END if token is None else repr(self.loaded.reader.tokenizer.decode([token]))


def compared_with_reference(
    judge: Judge, expected: Mapping[str, ReferenceRequest], results: Sequence[Result], seed: int | None
) -> TokenCheck:
    """Compare measured answers with the reference up to its last token, and check how each answer ends.

    Args:
        judge: judge of the cell.
        expected: expected answers by request id.
        results: measured results; without an expected answer, only the end is checked.
        seed: sampler seed of this repeat; None for greedy cells.
    """
    total = sum((_wrong_end(judge, result) for result in results), TokenCheck.of())
    settings, note = judge.settings, ""
    if settings.penalised:
        note = "a penalty on repeated tokens changes the scores: only the distributions were compared"
    elif not settings.sampling.greedy and (settings.runner != "engine" or seed is None):
        note = f"runner {settings.runner} samples all requests from one stream: only the distributions were compared"
    for result in results:
        if result.id in expected and not note:
            answer = _within_context(judge, expected[result.id], result)
            if settings.sampling.greedy:
                total += _compared_choices(judge, result.id, answer, result.token_ids)
            else:
                total += _compared_draws(judge, result.id, answer, result.token_ids, seed or 0)
    return structs.replace(total, note=note)


def _wrong_end(judge: Judge, result: Result) -> TokenCheck:
    """Check that an answer with finish reason ``stop`` ends with an end token; cells have no stop strings."""
    tokens = result.token_ids
    marked = bool(tokens) and tokens[-1] in judge.loaded.eos_ids and not judge.settings.ignore_eos
    if result.error is not None or result.finish_reason != "stop" or marked:
        return TokenCheck.of()
    departure = judge.departure(result.id, len(tokens), (None, None), None)
    return TokenCheck.of(departed=1, equal=False, first=structs.replace(departure, found=_END, wanted="another token"))


def _departed(compared: int, departure: Departure) -> TokenCheck:
    return TokenCheck.of(1, compared, 1, equal=False, first=departure)


def _within_context(judge: Judge, expected: ReferenceRequest, result: Result) -> ReferenceRequest:
    """Shorten the expected answer if the end of the model's context cut off the measured one.

    ``generate()`` continues past that limit.
    """
    config = getattr(judge.loaded.model, "config", None)
    positions = inf if config is None else config.get_text_config().max_position_embeddings
    if result.finish_reason != "length" or result.prompt_tokens + len(result.token_ids) < positions:
        return expected
    return replace(expected, tokens=expected.tokens[: len(result.token_ids)])


def _compared_choices(judge: Judge, request: str, expected: ReferenceRequest, tokens: Tokens) -> TokenCheck:
    reference = expected.tokens[: judge.settings.max_new_tokens]
    ends = not judge.settings.ignore_eos and reference[-1] in judge.loaded.eos_ids
    position = first_difference(tokens, reference)
    if position is None and ends and len(tokens) > len(reference):
        position = len(reference)
    if position is None:
        return TokenCheck.of(1, len(reference))
    token = tokens[position] if position < len(tokens) else None
    wanted, hidden = (reference[position], expected.answer[position]) if position < len(reference) else (None, None)
    departure = judge.departure(request, position, (token, wanted), hidden)
    if departure.clear:
        return _departed(position + 1, departure)
    return TokenCheck.of(1, position + 1, equal=False)


def first_difference(a: Tokens, b: Tokens) -> int | None:
    """Return the first position at which two answers differ; None if ``a`` starts with ``b``."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((position for position, (x, y) in pairs if x != y), len(a) if len(a) < len(b) else None)


def _compared_draws(judge: Judge, request: str, expected: ReferenceRequest, tokens: Tokens, seed: int) -> TokenCheck:
    """Compare draws with those from the reference's distributions, as long as the answer follows its tokens.

    A draw counts only if logits perturbed by the noise draw the same token. Transformers' warpers filter the
    distributions, because the engine's sampler is what is tested.
    """
    generator = torch.Generator().manual_seed(0)
    sampling, compared = judge.settings.sampling, 0
    tokens = tokens[: len(expected.tokens)]
    targets = (draws([seed] * len(tokens), range(len(tokens))) / DRAWS).tolist()
    for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
        row = judge.logits(expected.answer[position][None])
        moves = (torch.rand(_PERTURBED, row.shape[-1], generator=generator) - 0.5) * clear_margin(judge.noise)
        versions = warped_scores(torch.cat([row, row + moves]), sampling).double().softmax(-1)
        drawn = (versions.cumsum(-1) <= target * versions.sum(-1, keepdim=True)).sum(-1).tolist()
        compared += 1
        if token not in drawn and len(set(drawn)) == 1:
            texts = judge.text(token), judge.text(drawn[0])
            return _departed(compared, Departure(request, position, token, drawn[0], *texts, None, clear=True))
        if token != expected.tokens[position]:
            break
    return TokenCheck.of(1, compared)


@dataclass(slots=True)
class ReferenceRows:
    """Final hidden states of the reference along any answer, with a cache.

    Args:
        compute: function from request id and tokens to the final hidden states before each token, float32
            ``[tokens, hidden]``; may raise.
    """

    compute: Callable[[str, Tokens], torch.Tensor]
    _known: LruCache[tuple[str, Tokens], torch.Tensor] = field(default_factory=lambda: LruCache(_CACHED))

    def along(self, request: str, tokens: Tokens) -> torch.Tensor:
        """Return the hidden states before each token of an answer, float32 ``[tokens, hidden]``."""
        return self._known.computed((request, tuple(tokens)), lambda: self.compute(request, tokens))

    def check(self, judge: Judge, request: str, tokens: Tokens, start: int) -> TokenCheck:
        """Compare an answer's tokens from position ``start`` on with the reference's choices after the same tokens."""
        compared = len(tokens) - start
        impossible = judge.impossible_token(tokens)
        if impossible is not None:
            return _departed(compared, judge.departure(request, impossible, (tokens[impossible], None), None))
        hidden = self.along(request, tokens)[start:]
        best = torch.cat([judge.logits(rows).argmax(-1) for rows in torch.split(hidden, 16)]).tolist()
        for position, pair in enumerate(zip(tokens[start:], best, strict=True), start):
            if pair[0] != pair[1]:
                departure = judge.departure(request, position, pair, hidden[position - start])
                if departure.clear:
                    return _departed(compared, departure)
        return TokenCheck.of(1, compared)
