"""Replay measured answers after the timing: one prefill of prompt and answer through the reference model's path.

The replay runs at the cell's precision, so it costs one batched prefill per answer, and stops when it has taken its
share of the measuring time. It only screens: answers with tokens that the model would not choose are computed again in
float32, and that decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from msgspec import structs

from panscan.core import now
from panscan.records.verdict_records import Departure, TokenCheck
from panscan.verdict.judgement import EXACT_RATIO, clear_margin
from panscan.verdict.reference import BATCH
from panscan.verdict.references import failure_text
from panscan.verdict.tokens import Judge, ReferenceRows

_MOST_CONFIRMED = 4  # suspicious answers that are computed in float32, most suspicious first
_LEAST_DRAWS, _SIGMAS = 64, 6.0  # positions of a test of drawn tokens, and its limit in standard deviations


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """An answer to replay.

    Args:
        request: request id.
        tokens: the answer.
        start: first position that was not compared with the reference's own tokens.
    """

    request: str
    tokens: tuple[int, ...]
    start: int


States = Callable[[Sequence[MeasuredAnswer]], list[torch.Tensor]]
"""From answers to the hidden states before each of their tokens, at the cell's precision; may raise."""


def replay(
    judge: Judge, answers: Sequence[MeasuredAnswer], states: States, rows: ReferenceRows, seconds: float
) -> TokenCheck:
    """Compare measured answers with the reference's distributions after the same tokens, as many as the time allows.

    Answers that extend furthest beyond the reference come first: at least one, then batches of them; the others follow
    in random order, so that those that were replayed are a sample.

    Args:
        judge: judge of the cell.
        answers: all measured answers.
        states: computes hidden states at the cell's precision.
        rows: hidden states of the reference.
        seconds: time that the replay may take.
    """
    started, done, greedy = now(), 0, judge.settings.sampling.greedy
    total = TokenCheck.of(sum(answer.start >= len(answer.tokens) for answer in answers), answers=len(answers))
    todo = _in_replay_order([answer for answer in answers if answer.start < len(answer.tokens)])
    impossible: list[MeasuredAnswer] = []
    gaps: list[tuple[float, MeasuredAnswer]] = []
    draws: list[tuple[float, float, MeasuredAnswer]] = []
    try:
        while done < len(todo):
            group = todo[done : done + (BATCH if done else 1)]
            if done and (now() - started) * (done + len(group)) / done > seconds:
                break
            readable = [answer for answer in group if judge.impossible_token(answer.tokens) is None]
            impossible += [answer for answer in group if answer not in readable]
            for answer, hidden in zip(readable, states(readable) if readable else (), strict=True):
                rest = hidden[answer.start :], answer.tokens[answer.start :]
                if greedy:
                    gaps.append((float(judge.gaps(*rest).max()), answer))
                else:
                    draws.append((*judge.excess(*rest), answer))
            total += TokenCheck.of(len(group), sum(len(answer.tokens) - answer.start for answer in group))
            done += len(group)
        total += _checked_choices(judge, rows, impossible, gaps) if greedy else _checked_draws(draws)
    except Exception as error:  # such as quantised weights, or too little memory
        note = f"tokens beyond the reference: {failure_text(error, 'computing the reference')}"
        total = structs.replace(total, note=note)
    return structs.replace(total, seconds=now() - started)


def _in_replay_order(answers: Sequence[MeasuredAnswer]) -> list[MeasuredAnswer]:
    shuffled = random.Random(0).sample(answers, len(answers))
    furthest = sorted(shuffled, key=lambda answer: answer.start - len(answer.tokens))[:BATCH]
    return [*furthest, *(answer for answer in shuffled if answer not in furthest)]


def _checked_choices(
    judge: Judge,
    rows: ReferenceRows,
    impossible: Sequence[MeasuredAnswer],
    gaps: Sequence[tuple[float, MeasuredAnswer]],
) -> TokenCheck:
    """Compute the most suspicious answers in float32: those with tokens that the model would not choose.

    Args:
        judge: judge of the cell.
        rows: hidden states of the reference.
        impossible: answers that no model gives.
        gaps: by how much the model prefers another token at most (:meth:`Judge.gaps`), and the answer.
    """
    # Rounding moves the margins of the model and of the cell: half of a clear margin is suspicious. NaN is, too.
    suspects = [pair for pair in gaps if not pair[0] <= clear_margin(judge.noise) / EXACT_RATIO]
    suspects.sort(key=lambda pair: -pair[0])
    chosen = [*impossible, *(answer for _, answer in suspects)][:_MOST_CONFIRMED]
    checks = [rows.check(judge, answer.request, answer.tokens, answer.start) for answer in chosen]
    return sum((structs.replace(check, requests=0, tokens=0) for check in checks), TokenCheck.of())


def _checked_draws(draws: Sequence[tuple[float, float, MeasuredAnswer]]) -> TokenCheck:
    """Compare the log-probabilities of all drawn tokens with those of draws from the model's distributions.

    The sum over many tokens shows an ignored temperature or filter, whatever the rounding at single positions.

    Args:
        draws: what :meth:`Judge.excess` says, and the answer.
    """
    total, variance = sum(excess for excess, _, _ in draws), sum(variance for _, variance, _ in draws)
    positions = sum(len(answer.tokens) - answer.start for _, _, answer in draws)
    if positions < _LEAST_DRAWS or abs(total) <= _SIGMAS * variance**0.5:
        return TokenCheck.of()
    *_, answer = max(draws, key=lambda row: row[0] if total > 0 else -row[0])
    deviation = f"tokens with log-probabilities {total / positions:+.2g} nats above the mean of draws"
    departure = Departure(
        answer.request, answer.start, None, None, deviation, "draws of the reference", None, clear=True
    )
    return TokenCheck.of(departed=len(draws), equal=False, first=departure)
