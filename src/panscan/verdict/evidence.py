"""Reported tokens and log-probabilities against local distributions, and the verdict on them. No tensors.

An endpoint reports the log-probabilities of a few tokens at each position. What is compared is therefore coarse: the
reported tokens, and one bucket for all others. By the data processing inequality, the divergence of coarse
distributions is a lower bound of the whole divergence; local distributions are made coarse in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from panscan.core.groups import grouped
from panscan.records.fields import FLOOR
from panscan.records.verdict_records import Divergence, Top1
from panscan.verdict.judgement import EXACT_RATIO, LEAST_REST, clear_margin, judge

VerdictWord = Literal["exact", "close", "different", "unknown"]

Distributions = NDArray[np.float32]
"""Natural log-probabilities ``[positions, vocabulary]``."""

_LEAST_PROBABILITY = 1e-12
"""Servers clamp the log-probability of impossible tokens (to -9999, for instance): less than this counts as this."""
_DOMINANT = 0.99
"""Of the candidates' probability: a token that has this share is the one that was reported."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BY_ID = re.compile(rb"token_id:([0-9]{1,9})")  # vLLM with --return-tokens-as-token-ids


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token as an endpoint reports it.

    Args:
        text: the ``token`` field.
        raw: the ``bytes`` field; None where it is missing.
        log_probability: natural logarithm, at most 0; None where it is missing or not a number.
    """

    text: str
    raw: bytes | None = None
    log_probability: float | None = None


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """One position of an answer: the chosen token, and the most probable ones, the chosen one often among them."""

    chosen: ReportedToken
    top: tuple[ReportedToken, ...] = ()


class TokenIndex:
    """The texts of a tokenizer's tokens, in both directions.

    Endpoints write a token as decoded text, as the tokenizer's piece (``▁total``, ``<0x0A>``) or as ``token_id:123``; a
    byte that is no character, as the replacement character; a special token, by its name.

    Args:
        tokenizer: a Gemma tokenizer of Transformers.
        vocabulary: number of token ids of the model; those without a token have no text.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self.eos_ids = tokenizer, vocabulary, eos_ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; of a special token, those of its name; empty for ids without a token."""
        return self._pieces[token][1] if 0 <= token < len(self._pieces) else b""

    def ids(self, text: str | bytes) -> list[int]:
        """Return every token id that an endpoint writes like this, ascending: a character may be a token and a byte."""
        written = text.encode("utf-8", "replace") if isinstance(text, str) else text
        by_id = _BY_ID.fullmatch(written)
        if by_id is not None and int(by_id[1]) < self._vocabulary:
            return [int(by_id[1])]
        return self._ids.get(written, [])

    def starting(self, text: bytes) -> list[int]:
        """Return the tokens, none of them special, whose bytes are the start of a text."""
        count = min(len(text), self._longest)
        return [
            token
            for size in range(1, count + 1)
            for token in self._ids.get(text[:size], ())
            if self.text(token) == text[:size]
        ]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    @cached_property
    def _pieces(self) -> list[tuple[str, bytes]]:
        """The pieces of the vocabulary, and their UTF-8 bytes."""
        count = min(self._vocabulary, len(self._tokenizer))
        pieces = [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(range(count))]
        return [
            (piece, bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(piece)) else piece.replace("▁", " ").encode())
            for piece in pieces
        ]

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        return grouped(
            (written, token)
            for token, (piece, text) in enumerate(self._pieces)
            for written in {text, piece.encode(), text.decode("utf-8", "replace").encode()} - {b""}
        )


@dataclass(slots=True)
class MappedAnswer:
    """An answer in token ids.

    Args:
        tokens: chosen token of each position; None where it has no certain id.
        reported: token ids and their log-probabilities, position by position.
        dropped: reported tokens without a certain id, which count among all others.
    """

    tokens: list[int | None]
    reported: list[dict[int, float]]
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, count: int) -> MappedAnswer:
        """Return the first positions."""
        return MappedAnswer(self.tokens[:count], self.reported[:count], self.dropped)


def candidate_ids(token: ReportedToken, index: TokenIndex) -> list[int]:
    """Return the token ids that a reported token may be; empty if there is none.

    A token without text is an end token: other special tokens are never among the most probable ones.
    """
    if not token.text and not token.raw:
        return sorted(index.eos_ids)
    return (index.ids(token.raw) if token.raw else []) or index.ids(token.text)


def forced_tokens(steps: Sequence[ReportedStep], index: TokenIndex) -> list[int]:
    """Return a first guess of the ids of an answer's tokens, up to the first that has none.

    Where several ids have the same text, the guess may be wrong: :func:`map_answer` decides by their probabilities.
    """
    ids_of_answer: list[int] = []
    for step in steps:
        ids = candidate_ids(step.chosen, index)
        if not ids:
            break
        ids_of_answer.append(ids[0])
    return ids_of_answer


def map_answer(steps: Sequence[ReportedStep], index: TokenIndex, reference: Distributions) -> MappedAnswer:
    """Return an answer in token ids.

    Args:
        steps: reported positions.
        index: the tokens of the tokenizer.
        reference: local distributions before each position, which decide between ids of the same text; positions
            behind the last one are left out.
    """
    mapped = MappedAnswer([], [])
    for step, row in zip(steps, reference, strict=False):
        probabilities = np.exp(row.astype(np.float64))
        ids = candidate_ids(step.chosen, index)
        chosen = _certain(ids, probabilities, ())
        values: dict[int, float] = {}
        if chosen is not None and step.chosen.log_probability is not None:
            values[chosen] = step.chosen.log_probability
        known = [(token.log_probability, token) for token in step.top if token.log_probability is not None]
        for value, token in sorted(known, key=itemgetter(0), reverse=True):
            if token == step.chosen and chosen in values:
                continue
            id = _certain(candidate_ids(token, index), probabilities, values)
            if id is None:
                mapped.dropped += 1
            else:
                values[id] = value
        mapped.tokens.append(chosen)
        mapped.reported.append(values)
    return mapped


def _certain(candidates: Sequence[int], probabilities: NDArray[np.float64], taken: Iterable[int]) -> int | None:
    """Return the one candidate that a reported token can be; None if there is none, or several are probable."""
    free = [id for id in candidates if id not in taken]
    if len(free) < 2:
        return free[0] if free else None
    shares = probabilities[free]
    best = int(shares.argmax())
    return free[best] if shares[best] >= _DOMINANT * shares.sum() > 0 else None


def coarse_kl(local: NDArray[np.float32], reported: dict[int, float]) -> float:
    """Return the Kullback-Leibler divergence in nats of the reported distribution from a local one.

    Args:
        local: natural log-probabilities ``[vocabulary]``.
        reported: natural log-probabilities by token id. All other tokens are one bucket.
    """
    p = np.exp(local.astype(np.float64))
    ids = np.fromiter(reported, dtype=np.int64)
    q = np.exp(np.fromiter(reported.values(), dtype=np.float64))
    outside = np.ones(len(p), dtype=bool)
    outside[ids] = False
    p_coarse = np.append(p[ids], p[outside].sum())
    q_coarse = np.append(np.maximum(q, _LEAST_PROBABILITY), max(1 - q.sum(), LEAST_REST))
    q_coarse /= q_coarse.sum()
    some = p_coarse > 0
    with np.errstate(divide="ignore"):
        terms = p_coarse[some] * (np.log(p_coarse[some]) - np.log(q_coarse[some]))
    return max(float(terms.sum()), 0.0)


@dataclass(frozen=True, slots=True)
class AnswerEvidence:
    """One answer against one local computation, position by position.

    Args:
        kl: coarse divergence of the reported distribution in nats; none where no log-probabilities were reported.
        regret: margin by which the computation prefers its own choice to the reported token, in nats; None where the
            token has no certain id.
        margin: difference by which it prefers its first choice to its second, in nats.
        deviations: coarse divergence of this computation from the one that it changes, in nats, where log-probabilities
            were reported; none for the reference.
    """

    kl: tuple[float, ...]
    regret: tuple[float | None, ...]
    margin: tuple[float, ...]
    deviations: tuple[float, ...] = ()


def compare_answer(answer: MappedAnswer, local: Distributions) -> AnswerEvidence:
    """Compare an answer with the distributions of a local computation along its own tokens.

    Args:
        answer: reported tokens.
        local: natural log-probabilities ``[positions, vocabulary]``.
    """
    kl: list[float] = []
    regret: list[float | None] = []
    margin: list[float] = []
    for token, reported, row in zip(answer.tokens, answer.reported, local, strict=True):
        if reported:
            kl.append(coarse_kl(row, reported))
        first, second = np.partition(row, -2)[:-3:-1].astype(np.float64)
        margin.append(float(first - second))
        regret.append(None if token is None else float(first - row[token]))
    return AnswerEvidence(tuple(kl), tuple(regret), tuple(margin))


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one local computation explains the reported answers.

    Args:
        kl: mean coarse divergence over all positions, nats; None without log-probabilities.
        kl_max: the largest.
        positions: compared.
        regret: mean regret, nats.
        clear: tokens that the computation prefers by more than the noise explains.
        agree: those of them that were reported.
        deviation: mean coarse divergence of this computation from the one that it changes, on the same positions,
            nats; None for the reference.
        prompts: prompts whose reported token count is known.
        prompts_agree: those of them with this computation's token count.
    """

    kl: float | None
    kl_max: float | None
    positions: int
    regret: float
    clear: int
    agree: int
    deviation: float | None = None
    prompts: int = 0
    prompts_agree: int = 0


def merged_fit(answers: Sequence[AnswerEvidence], clear_margin: float, prompts: Sequence[bool] = ()) -> Fit:
    """Return the fit over several answers.

    Args:
        answers: comparisons with the same computation.
        clear_margin: margin in nats above which rounding does not explain another token.
        prompts: whether each known prompt token count is this computation's.
    """
    kl = [value for answer in answers for value in answer.kl]
    deviations = [value for answer in answers for value in answer.deviations]
    pairs = (pair for answer in answers for pair in zip(answer.margin, answer.regret, strict=True))
    known = [(margin, regret) for margin, regret in pairs if regret is not None]
    regret = [value for _, value in known]
    clear = [value for margin, value in known if margin > clear_margin]
    return Fit(
        kl=fmean(kl) if kl else None,
        kl_max=max(kl) if kl else None,
        positions=sum(len(answer.margin) for answer in answers),
        regret=fmean(regret) if regret else 0.0,
        clear=len(clear),
        agree=sum(value == 0 for value in clear),
        deviation=fmean(deviations) if deviations else None,
        prompts=len(prompts),
        prompts_agree=sum(prompts),
    )


def local_divergences(answer: MappedAnswer, local: Distributions, other: Distributions) -> list[float]:
    """Return the coarse divergence from a local computation of another one that reports what the endpoint reported."""
    rows = zip(answer.reported, local, other, strict=True)
    return [coarse_kl(row, {id: float(seen[id]) for id in reported}) for reported, row, seen in rows if reported]


def moved_margin(reference: Distributions, noisy: Distributions) -> float:
    """Return the largest change of the margin between the reference's first and second choice, in nats."""
    best = np.argsort(reference, axis=-1)[:, :-3:-1]
    pairs = [
        np.take_along_axis(distributions.astype(np.float64), best, axis=-1) for distributions in (reference, noisy)
    ]
    margins = [pair[:, 0] - pair[:, 1] for pair in pairs]
    return float(np.abs(margins[1] - margins[0]).max()) if len(best) else 0.0


@dataclass(frozen=True, slots=True)
class NoiseLevel:
    """What rounding explains.

    Args:
        kl: mean coarse divergence of the reference in bfloat16 from the reference, nats; None without
            log-probabilities.
        margin: the largest change of a margin between its first and second choice, nats.
    """

    kl: float | None
    margin: float

    @property
    def clear_margin(self) -> float:
        """Margin in nats above which rounding does not explain another token."""
        return clear_margin(self.margin)

    def ratio(self, fit: Fit) -> float | None:
        """Return a divergence as a multiple of the noise; None without log-probabilities."""
        if fit.kl is None or self.kl is None:
            return None
        return max(fit.kl, FLOOR) / max(self.kl, FLOOR)

    def explains(self, fit: Fit) -> bool:
        """Return whether rounding explains the rest of the deviation, in distributions and in tokens.

        Without log-probabilities, at least one clear token is needed.
        """
        ratio = self.ratio(fit)
        if ratio is None:
            return fit.agree == fit.clear > 0
        return ratio <= EXACT_RATIO and fit.agree == fit.clear


def judge_fit(fit: Fit, noise: NoiseLevel) -> VerdictWord:
    """Return the verdict on a computation, from its divergence and its clear tokens.

    Tokens alone never show that an endpoint is exact, and clear tokens that disagree make it different at any
    divergence: an endpoint may report the right log-probabilities and choose other tokens.
    """
    if not fit.positions:
        return "unknown"
    if fit.kl is None or noise.kl is None or fit.kl_max is None:
        if not fit.clear:
            return "unknown"
        return "close" if fit.agree == fit.clear else "different"
    divergence = Divergence(fit.positions, fit.kl, fit.kl_max, noise.kl)
    return judge(divergence, None, Top1(fit.clear, fit.agree), equal_tokens=True, float32=False)
